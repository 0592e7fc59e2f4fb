"""What GLM alone does from folder to text. Oracles: vLLM's golden placeholders, transformers' own wording of a frame.

That ids equal those of transformers is in `test_grid_generate.py`.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_factory import make_glm_checkpoint
from prompts import PHOTOS, inputs_of
from random_models import load
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor as HFGlm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor as HFGlm46VProcessor

from refvl.merge import FramewiseMedia, MediaTokens, find_media_spans
from refvl.paths import DATA
from refvl.pixels.media import load_video
from refvl.pixels.patch_configs import Glm4vPatchConfig, smart_resize_video
from refvl.positions import MediaSpan
from refvl.positions.timestamps import sample_video_frames
from refvl.processors.glm4v import Glm4vProcessor, Glm46VProcessor, GlmgaProcessor

CLIP = DATA / "clips" / "bigbuckbunny.mp4"
MOVING = np.random.default_rng(0).integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)
STILL = np.repeat(MOVING[:1], 6, axis=0)
KINDS = {
    "4.1V": ("glm4v", "Glm4vProcessor"),
    "4.6V-Flash": ("glm4v", "Glm46VProcessor"),
    "4.5V": ("glm4v_moe", "Glm4vProcessor"),
    "4.6V": ("glm4v_moe", "Glm46VProcessor"),
    "glm46v": ("glm46v", "Glm46VProcessor"),
    "GA": ("glmga", "Glm46VProcessor"),
    "OCR": ("glm_ocr", "Glm46VProcessor"),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def folder(request, tmp_path_factory):
    return make_glm_checkpoint(tmp_path_factory.mktemp("glm"), *request.param)


@pytest.fixture(scope="module")
def vlm(folder):
    return load(folder)


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    return make_glm_checkpoint(tmp_path_factory.mktemp("dense"), *KINDS["4.1V"])


@pytest.fixture(scope="module")
def dense(dense_folder):
    return load(dense_folder)


def test_a_clip_is_one_span_per_frame(vlm):
    trace = vlm.trace("What moves?", videos=[CLIP], max_new_tokens=1)
    [(t, h, w)] = trace.layouts
    assert len(trace.spans) == t > 2
    begin, end = vlm.config.image_start_token_id, vlm.config.image_end_token_id
    frame_token = vlm.token_ids[vlm.processor.frame_kind]
    for span in trace.spans:
        assert (span.t, span.h, span.w, span.t_factor) == (1, h // 2, w // 2, 1.0)
        around = trace.full_ids[span.offset - 1 : span.offset + span.num_tokens + 1].tolist()
        assert around == [begin, *[frame_token] * span.num_tokens, end]


def test_a_picture_and_a_clip_in_one_prompt(vlm):
    """transformers cannot take both (it counts one token for both kinds): the clip alone is the oracle of its part."""
    both = vlm.trace("What is it?", images=PHOTOS[:1], videos=[MOVING], max_new_tokens=2)
    image, *frames = both.spans
    assert len(frames) == 3 and image.num_tokens == both.patches[0].media_tokens.num_tokens
    for span, rows in zip(frames, both.embeds[1].split(frames[0].num_tokens), strict=True):
        assert torch.equal(both.inputs_embeds[span.offset :][: span.num_tokens], rows)
    inputs = inputs_of(vlm, both)
    assert vlm.generate(**inputs, max_new_tokens=2)[0, len(both.full_ids) :].tolist() == both.token_ids


def test_a_frame_may_lose_its_tokens_but_not_its_second(dense):
    """Six equal frames, three steps: only the first step survives; written out, what the language model reads."""
    trace = dense.trace("go", videos=[STILL], max_new_tokens=1, pruning_rate=0.7)
    tokens = trace.spans[0].num_tokens
    assert trace.keep_masks[0].tolist() == [True] * tokens + [False] * (2 * tokens)
    read = dense.processor.tokenizer.decode(trace.input_ids)
    first, empty = (
        "<|begin_of_image|>" + "<|video|>" * tokens + "<|end_of_image|>",
        "<|begin_of_image|><|end_of_image|>",
    )
    assert f"<|begin_of_video|>{first}0{empty}1{empty}2<|end_of_video|>" in read


class CharacterTokenizer:
    """The golden data's: encode(s) = [1000 + ord(c) for c in s]."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [1000 + ord(c) for c in text]


def golden_cases():
    golden = json.loads((DATA.parent / "tests" / "golden" / "glm_video.json").read_text())["placeholder"]
    return [(golden["token_ids"], case) for case in golden["cases"]]


@pytest.mark.parametrize(("ids", "case"), golden_cases())
def test_placeholders_equal_golden(ids, case):
    config = SimpleNamespace(
        image_token_id=ids["image_token"], video_token_id=ids["video_token"],
        **{f"{name}_token_id": ids[name] for name in ("image_start", "image_end", "video_start", "video_end")},
        vision_config=SimpleNamespace(spatial_merge_size=case["merge_size"]),
    )  # fmt: skip
    classes = {"glm4v": Glm4vProcessor, "glm46v": Glm46VProcessor, "glmga": GlmgaProcessor}
    processor = classes[case["processor"]](config, CharacterTokenizer())
    meta = dict(case["metadata"])
    sample = sample_video_frames(
        processor.variant, total_num_frames=meta.pop("total_num_frames"), target_fps=2, **meta
    )  # fmt: skip
    _, h, w = case["grid_thw"]  # whose t upstream does not read: one frame per timestamp
    medium = FramewiseMedia(
        "video", (len(sample.timestamps), h // 2, w // 2), timestamps=tuple(sample.timestamps)
    )  # fmt: skip
    ours = [ids["video_start"], *processor.expand(ids["video_token"], medium), ids["video_end"]]
    if case["v033"] == [ids["video_start"], ids["video_end"]]:  # upstream sees nothing of clips under half a second
        assert ours.count(ids["image_start"]) == 1
        return
    assert ours == case["seed_with_ga_True"]
    theirs = torch.tensor(case["v033"])
    merged = [FramewiseMedia("video", medium.thw)]
    for prompt in (torch.tensor(ours), theirs):  # both ways to fill a frame lead to the same spans
        spans = find_media_spans(processor.placeholders(prompt), merged, processor.token_ids)
        assert [s.offset for s in spans] == [i + 1 for i, token in enumerate(ours) if token == ids["image_start"]]


@pytest.mark.parametrize(
    ("kind", "hf"), [("4.1V", HFGlm4vProcessor), ("4.6V-Flash", HFGlm46VProcessor)], ids=["4.1V", "4.6V"]
)
def test_prompt_ids_equal_transformers_text_then_tokenizer(tmp_path, kind, hf):
    """transformers writes the frames as text and tokenizes the whole; whole seconds, where all releases agree."""
    folder = make_glm_checkpoint(tmp_path, *KINDS[kind])
    processor, tokenizer = load(folder).processor, AutoTokenizer.from_pretrained(folder)
    messages = processor.messages("What moves?", [PHOTOS[0]], [MOVING])
    media = [MediaTokens("image", (1, 2, 3)), FramewiseMedia("video", (3, 1, 2), timestamps=(0, 7, 12))]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    frame = SimpleNamespace(image_token=f"<|{processor.frame_kind}|>")
    frames = "".join(hf.replace_frame_token_id(frame, float(second), 2) for second in (0, 7, 12))
    text = text.replace("<|image|>", "<|image|>" * 6).replace("<|video|>", frames)
    assert processor.tokenize(messages, media) == tokenizer(text)["input_ids"]


def test_the_folder_chooses_sampler_and_words(vlm, folder):
    names = json.loads((folder / "preprocessor_config.json").read_text())
    own = {"glmga": "GlmgaProcessor"}  # whose files name the class of GLM-4.6V
    assert type(vlm.processor).__name__ == own.get(vlm.config.model_type, names["processor_class"])
    trace = vlm.trace("go", videos=[CLIP], max_new_tokens=1)
    sample = sample_video_frames(vlm.processor.variant, fps=25, total_num_frames=132, duration=132 / 25)
    assert trace.media[0].indices == tuple(dict.fromkeys(sample.indices))
    assert trace.patches[0].media_tokens.timestamps == tuple(sample.timestamps)
    assert trace.layouts[0][0] == len(sample.timestamps) == len(sample.indices) // 2


def test_pixels_are_those_of_the_sample(dense):
    """An odd clip ends in its last frame twice, given as frames and as a `Video` alike."""
    pixels = [
        p.pixel_values
        for video in (MOVING[:5], load_video(MOVING[:5]), MOVING[[0, 1, 2, 3, 4, 4]])
        for p in dense.processor.patchify([load_video(video)])
    ]
    assert all(torch.equal(p, pixels[0]) for p in pixels)


def test_a_frame_given_twice_is_looked_at_once(dense):
    """By hand: frames 0 0 1 1 2 2 of a clip at 2 a second are 0 1 2 2, at seconds 0 and 1."""
    video = load_video(MOVING)
    twice = replace(video, frames=MOVING[[0, 0, 1, 1, 2, 2]], indices=(0, 0, 1, 1, 2, 2))
    once = replace(video, frames=MOVING[[0, 1, 2, 2]], indices=(0, 1, 2, 2))
    ours, theirs = dense.processor.patchify([twice, once])
    assert torch.equal(ours.pixel_values, theirs.pixel_values)
    assert ours.media_tokens == theirs.media_tokens and ours.media_tokens.timestamps == (0, 1)
    assert ours.media_tokens.thw[0] == 2


@pytest.mark.parametrize("frames", [1, 3, 5, 9, 31])
def test_an_odd_clip_is_planned_as_it_is_padded(frames):
    config = Glm4vPatchConfig.for_video(max_pixels=200_000)
    sizes = [(height, width) for height in range(60, 400, 37) for width in range(60, 400, 41)]
    ours = [config.target_size(*size, frames) for size in sizes]
    budgets = {"min_pixels": 112 * 112, "max_pixels": 200_000}
    assert ours == [smart_resize_video(frames + 1, *size, **budgets) for size in sizes]


def test_budgets_are_of_all_frames(vlm):
    """By hand: 10 frames of 90 x 90 px are the budget of a clip, two of 112 x 112 that of a picture."""
    media = vlm.processor.decode(vlm.processor.messages("", [PHOTOS[0]], [MOVING]))
    for patches, area in zip(vlm.processor.patchify(media), (2 * 112**2, 10 * 90**2), strict=True):
        t, h, w = patches.layout
        assert 2 * t * h * w * 14**2 <= area < 2 * t * (h + 2) * (w + 2) * 14**2


@pytest.mark.parametrize(
    ("kind", "layer"), [("4.5V", 46), ("4.5V", 92), ("OCR", 16)], ids=["MoE 46", "MoE 92", "OCR 16"]
)
def test_layers_that_predict_more_tokens_are_left_out_and_only_they(tmp_path, kind, layer):
    folder = make_glm_checkpoint(tmp_path, *KINDS[kind])
    expected = load(folder).trace("Hi", max_new_tokens=4).token_ids
    weights, name = load_file(folder / "model.safetensors"), "model.language_model.layers.{}.input_layernorm.weight"
    extra = {name.format(layer): torch.ones(96), f"model.language_model.layers.{layer}.eh_proj.weight": torch.ones(2)}
    save_file(weights | extra, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).trace("Hi", max_new_tokens=4).token_ids == expected
    save_file(weights | {name.format(layer + 1): torch.ones(96)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"unexpected \(1\).*layers\.{layer + 1}\.input_layernorm"):
        load(folder)


def test_message_options(dense, tmp_path):
    def frames(vlm, **options):
        content = [{"type": "video", "video": str(CLIP), **options}]
        return len(vlm.processor.decode([{"role": "user", "content": content}])[0].frames)

    assert frames(dense) == 10 and frames(dense, fps=1) == 5 and frames(dense, num_frames=6) == 6
    flash = load(make_glm_checkpoint(tmp_path, *KINDS["4.6V-Flash"]))
    assert frames(flash) == 31 and frames(flash, max_frames=8) == 8
    with pytest.raises(
        ValueError, match=r"prompt: expected max_frames, or num_frames alone, for a video, got \['fps'\]"
    ):
        frames(flash, fps=1)


def clip_inputs(vlm):
    inputs = inputs_of(vlm, vlm.trace("go", videos=[MOVING], max_new_tokens=1))
    return {name: inputs[name] for name in ("input_ids", "pixel_values_videos", "video_grid_thw")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"video_grid_thw": None}, "pixel_values_videos, video_grid_thw: expected both or neither"),
        (lambda i: {"video_grid_thw": i["video_grid_thw"] + torch.tensor([[0, 1, 0]])}, "multiples of spatial_merge"),
        (
            lambda i: {"video_grid_thw": i["video_grid_thw"] * torch.tensor([[2, 1, 1]])},
            "pixel_values_videos: dimension",
        ),
        (lambda i: {"input_ids": i["input_ids"][:, :5]}, r"placeholders for 0 video\(s\)|expected placeholders"),
        (
            lambda i: {"input_ids": i["input_ids"].repeat(2, 1)},
            "expected only placeholders of the given videos, got .* more",
        ),
        (lambda i: {"pruning_rate": 1.0}, "pruning_rate"),
    ],
)
def test_generate_refuses_what_does_not_fit(dense, change, message):
    inputs = clip_inputs(dense)
    with pytest.raises(ValueError, match=message):
        dense.generate(**(inputs | change(inputs)))


def test_a_frame_with_too_few_tokens_is_refused(dense):
    """One token moved from the second frame to the first: the count is right, the frames are not."""
    inputs = clip_inputs(dense)
    ids = inputs["input_ids"][0].tolist()
    first = ids.index(dense.token_ids["image"])
    second = next(i for i in range(first, len(ids)) if ids[i] == dense.config.image_start_token_id) + 1
    moved = [*ids[:first], ids[first], *ids[first:second], *ids[second + 1 :]]
    with pytest.raises(ValueError, match="consecutive placeholders of video 0, got a gap"):
        dense.generate(**(inputs | {"input_ids": torch.tensor([moved])}))


def test_frames_of_a_clip_are_runs_in_the_order_of_the_media():
    media = [FramewiseMedia("video", (2, 1, 2)), MediaTokens("image", (1, 1, 1))]
    ids = torch.tensor([5, 8, 8, 6, 8, 8, 7, 5])
    assert find_media_spans(ids, media, {"image": 7, "video": 8}) == [
        MediaSpan(1, 1, 1, 2), MediaSpan(4, 1, 1, 2), MediaSpan(6, 1, 1, 1),
    ]  # fmt: skip
