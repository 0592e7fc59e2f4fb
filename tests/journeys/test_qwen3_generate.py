"""What Qwen3-VL and Qwen3.5 alone do from folder to text. Oracles: transformers in bfloat16, its frame sampling, its
own wording of a video. That ids equal those of transformers in float32 is in `test_grid_generate.py`.

transformers 5.17 to 5.23 keeps the marks that a chat template writes around a video; 4.57 and vLLM let the frames' own
take their place, as here. Prompts go to transformers as ids, so that only the test of the wording sees a difference.
"""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_factory import glm_transformers_model, make_qwen3_checkpoint, qwen3_config
from prompts import CONTENTS, PHOTOS, image_part, inputs_of, text_part
from random_models import load
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as HFQwen3VLProcessor

import refvl
from refvl.paths import DATA
from refvl.pixels.by_hand import smart_resize
from refvl.pixels.patch_configs import Qwen3VLPatchConfig, smart_resize_video
from refvl.processors.qwen3_vl import even_indices

CLIP = DATA / "clips" / "bigbuckbunny.mp4"
MOVING = np.random.default_rng(0).integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)
NEW_TOKENS = 12
MEDIA = {
    "a clip": [{"type": "video", "video": str(CLIP)}, text_part("What moves?")],
    "frames in memory and a picture": [
        text_part("See"), {"type": "video", "video": MOVING}, image_part(PHOTOS[1]), text_part("What moves?"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    return make_qwen3_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3_vl")


@pytest.fixture(scope="module")
def dense(dense_folder):
    return load(dense_folder)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])  # experts are chosen, which no bound holds
@torch.inference_mode()
def test_bfloat16_is_as_exact_as_transformers(model_type, tmp_path):
    """Oracle: transformers in bfloat16; both lie as far from float32 as rounding takes them, on one draw each."""
    folder = make_qwen3_checkpoint(tmp_path, model_type)
    content = [{"role": "user", "content": MEDIA["frames in memory and a picture"]}]
    half, theirs = load(folder, dtype="bfloat16"), glm_transformers_model(folder, torch.bfloat16)
    oracle = glm_transformers_model(folder)
    trace = half.trace(content, max_new_tokens=1)
    inputs = inputs_of(half, trace)
    deeper = {"deepstack_embeds": trace.deepstack[None]} if trace.deepstack.shape[1] else {}
    ours = half.language_model(
        inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None],
        attention_mask=inputs["attention_mask"], **deeper,
    ).logits[0, -1]  # fmt: skip
    logits, exact = theirs(**inputs).logits[0, -1], oracle(**inputs).logits[0, -1]
    assert ours.dtype == logits.dtype == torch.bfloat16 and int(ours.argmax()) == trace.token_ids[0]
    error, allowed = ((x.float() - exact).norm() for x in (ours, logits))
    assert error <= 2 * allowed <= exact.norm() / 2, (error, allowed, exact.norm())


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe"])
@torch.inference_mode()
def test_bfloat16_ids_equal_transformers_but_for_ties(model_type, tmp_path):
    """Oracle: transformers' `generate` in bfloat16. Where a token differs, the two were nearer than rounding.

    Rounding is how far transformers' own logits lie from float32 behind the same tokens. All experts take part: where
    some are chosen, a tie between two of them changes more than rounding does.
    """
    folder = make_qwen3_checkpoint(tmp_path, model_type)
    config = json.loads((folder / "config.json").read_text())
    if "num_experts" in config["text_config"]:
        config["text_config"]["num_experts_per_tok"] = config["text_config"]["num_experts"]
        (folder / "config.json").write_text(json.dumps(config))
    half, theirs = load(folder, dtype="bfloat16"), glm_transformers_model(folder, torch.bfloat16)
    oracle = glm_transformers_model(folder)
    same = 0
    for content in (CONTENTS | MEDIA).values():
        trace = half.trace([{"role": "user", "content": content}], max_new_tokens=NEW_TOKENS)
        inputs, length = inputs_of(half, trace), len(trace.full_ids)
        output = theirs.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        ids = output.sequences[0, length:].tolist()
        differing = (k for k, (a, b) in enumerate(zip(trace.token_ids, ids, strict=False)) if a != b)
        if (step := next(differing, None)) is None:
            same += trace.token_ids == ids
            continue
        said = torch.tensor([ids[:step]], dtype=torch.int64)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], said], 1)
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, step))
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        logits, exact = output.logits[step][0].float(), oracle(**inputs).logits[0, -1].float()
        rounding = (logits - exact).abs().max()
        assert rounding < exact.abs().max() / 2 and logits[ids[step]] - logits[trace.token_ids[step]] <= 2 * rounding
    assert same >= 2, "most prompts end in the same ids"


def test_without_deeper_features_the_ids_differ(dense):
    """The oracles above could not tell, if nothing came of them."""
    trace = dense.trace("What is it?", images=PHOTOS[:1], max_new_tokens=NEW_TOKENS)
    main, deeper = dense.encoder.split(trace.embeds[0])
    assert deeper.shape == (2, *main.shape)
    rows = torch.cat([main, torch.zeros_like(deeper).transpose(0, 1).flatten(1)], dim=1)
    ids = dense.generate(
        trace.full_ids[None], image_embeds=[rows], image_grid_thw=trace.layouts, max_new_tokens=NEW_TOKENS
    )
    assert ids[0, len(trace.full_ids) :].tolist() != trace.token_ids


# ------------------------------------------------------------------------------------------------- prompts


def theirs_of(processor, folder, video, grid) -> str:
    """A video in transformers' words."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    writer = HFQwen3VLProcessor.__new__(HFQwen3VLProcessor)
    writer.video_processor, writer.tokenizer = sizes, tokenizer
    writer.video_token, writer.vision_start_token = "<|video_pad|>", "<|vision_start|>"
    writer.vision_end_token = "<|vision_end|>"
    metadata = SimpleNamespace(fps=video.source_fps, frames_indices=list(video.indices))
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    return writer.replace_video_token(inputs, 0)


@pytest.mark.parametrize("frames", [MOVING, MOVING[:5], MOVING[:1], CLIP], ids=["six", "odd", "one", "file"])
def test_prompt_ids_equal_transformers_text_then_tokenizer(dense, dense_folder, frames):
    """Oracle: their `replace_video_token`, in place of the template's three tokens."""
    messages = dense.processor.messages("What moves?", [PHOTOS[0]], [frames])
    patches = dense.processor.patchify(dense.processor.decode(messages))
    tokenizer = AutoTokenizer.from_pretrained(dense_folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    video = theirs_of(dense.processor, dense_folder, patches[1].source, patches[1].layout)
    text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", video)
    text = text.replace("<|image_pad|>", "<|image_pad|>" * patches[0].media_tokens.num_tokens)
    assert dense.processor.tokenize(messages, [p.media_tokens for p in patches]) == tokenizer(text)["input_ids"]
    assert len(re.findall(r"<\d+\.\d seconds><\|vision_start\|>", text)) == patches[1].layout[0]


def test_a_user_who_types_marks_gets_text(dense):
    """Marks around a video are those of the template alone."""
    typed = "<|vision_start|><|video_pad|><|vision_end|>"
    ids = dense.processor.tokenize(dense.processor.messages(f"a {typed} b"), [])
    assert dense.token_ids["video"] not in ids and typed in dense.processor.text(ids)


@pytest.mark.parametrize(("total", "fps"), [(132, 25.0), (7, 30.0), (1, 25.0), (3, 2.0), (9000, 29.97), (61, 24.0)])
def test_frames_are_those_of_transformers(total, fps):
    """Oracle: `Qwen3VLVideoProcessor.sample_frames`, called on a stand-in, because its class needs torchvision."""
    source = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl").Qwen3VLVideoProcessor
    stand_in = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps)
    for options in ({}, {"fps": 1.0}, {"num_frames": min(total, 6)}):
        theirs = source.sample_frames(stand_in, metadata, **options).tolist()
        assert even_indices(total, fps, **options) == theirs


def test_message_options(dense):
    def frames(**options):
        content = [{"type": "video", "video": str(CLIP), **options}]
        return len(dense.processor.decode([{"role": "user", "content": content}])[0].frames)

    assert (frames(), frames(fps=1), frames(num_frames=6), frames(max_frames=4)) == (10, 5, 6, 4)
    with pytest.raises(ValueError, match="expected fps, min_frames, max_frames, or num_frames alone, for a video"):
        frames(num_frames=6, fps=1)
    with pytest.raises(ValueError, match="num_frames: expected at most 132, the number of frames available, got 200"):
        frames(num_frames=200)


# -------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("frames", [1, 2, 5, 8, 31])
def test_sizes_follow_the_budget_of_each_kind(frames):
    """By hand: an image has one budget, a clip one for all of its frames; capped, each frame at most its share."""
    picture, clip = Qwen3VLPatchConfig(max_pixels=200_000), Qwen3VLPatchConfig.for_video(max_pixels=200_000)
    capped = Qwen3VLPatchConfig.for_video(max_pixels=200_000, cap_pixels_per_frame=True, max_video_tokens=4)
    counted, budgets = max(frames, 2), {"factor": 32, "min_pixels": 128 * 32 * 32}
    share = max(min(4 * 32 * 32, 200_000 // counted), int(128 * 32 * 32 * 1.05))
    assert (clip.frame_floor(counted), clip.frame_budget(counted)) == (-(-128 * 32 * 32 // counted), 200_000 // counted)
    for height, width in ((height, width) for height in range(60, 400, 97) for width in range(60, 400, 41)):
        images = {"factor": 32, "min_pixels": 65536, "max_pixels": 200_000}
        assert picture.target_size(height, width) == smart_resize(height, width, **images)
        assert clip.target_size(height, width, frames) == smart_resize_video(
            counted, height, width, max_pixels=200_000, **budgets
        )
        assert capped.target_size(height, width, frames) == smart_resize_video(
            counted, height, width, max_pixels=share * counted, **budgets
        )


# ------------------------------------------------------------------------------------------------- weights


def test_experts_as_they_are_released(tmp_path):
    """In the released files of Qwen3-VL's MoE the experts' matrices lie transposed: (experts, in, out)."""
    folder = make_qwen3_checkpoint(tmp_path, "qwen3_vl_moe")
    expected = load(folder).trace("Hi", max_new_tokens=4).token_ids
    weights = load_file(folder / "model.safetensors")
    turned = {n: w.transpose(1, 2).contiguous() if ".experts." in n else w for n, w in weights.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).trace("Hi", max_new_tokens=4).token_ids == expected
    wrong = {n: w[:, 1:].contiguous() if "experts.down" in n else w for n, w in weights.items()}
    save_file(wrong, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"mismatched \(3\).*experts\.down_proj"):
        load(folder)


def test_the_layer_that_predicts_more_tokens_is_left_out(tmp_path):
    folder = make_qwen3_checkpoint(tmp_path, "qwen3_5")
    expected = load(folder).trace("Hi", max_new_tokens=4).token_ids
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).trace("Hi", max_new_tokens=4).token_ids == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"deepstack_visual_indexes": [1, 9]},
            "deepstack_visual_indexes: expected distinct block indices from 0 to 3, got",
        ),
        ({"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes: expected distinct block indices"),
        ({"num_position_embeddings": 50}, "num_position_embeddings: must be a square number, got 50"),
    ],
)
def test_sizes_that_make_no_tower_are_named(tmp_path, change, message):
    config = qwen3_config("qwen3_vl")
    config["vision_config"] |= change
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        refvl.load(file, weights="random", device="meta")
