"""Qwen3-VL and Qwen3.5 from folder to text. Oracles: transformers' `generate` and `get_rope_index` on the same
checkpoint, its image processor, its frame sampling, and its own wording of a video.

transformers 5.17 to 5.23 keeps the marks that a chat template writes around a video; 4.57 and vLLM let the frames' own
take their place, as here. Prompts go to transformers as ids, so that only the test of the wording sees a difference.
"""

import json
import re
from types import SimpleNamespace

import numpy as np
import prompts
import pytest
import torch
from checkpoint_factory import glm_transformers_model, make_qwen3_checkpoint, qwen3_config
from prompts import image_part, text_part
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as HFQwen3VLProcessor

import refvl
from refvl.paths import DATA
from refvl.pixels.by_hand import smart_resize
from refvl.pixels.media import load_image
from refvl.pixels.patch_configs import Qwen3VLPatchConfig, smart_resize_video
from refvl.processors.qwen3_vl import even_indices

PHOTOS = [DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea", "rocket")]
CLIP = DATA / "clips" / "bigbuckbunny.mp4"
MOVING = np.random.default_rng(0).integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)
NEW_TOKENS = 12
KINDS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def load(folder, **options):
    return refvl.load(folder, device="cpu", progress=False, **options)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make_qwen3_checkpoint(tmp_path_factory.mktemp("qwen3"), request.param)


@pytest.fixture(scope="module")
def vlm(folder):
    return load(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    return glm_transformers_model(folder)


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    return make_qwen3_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3_vl")


@pytest.fixture(scope="module")
def dense(dense_folder):
    return load(dense_folder)


def hf_inputs(vlm, trace) -> dict:
    """The prompt and pixels of a trace as transformers' model takes them."""
    ids = trace.full_ids
    types = (ids == vlm.token_ids["image"]).int() + 2 * (ids == vlm.token_ids["video"]).int()
    return prompts.hf_inputs(trace, ids, types)


CONTENTS = {
    "text only": [text_part("Where is the circle?")],
    "one image": [image_part(PHOTOS[0]), text_part("What is it?")],
    "images between text": [
        text_part("First"), image_part(PHOTOS[2]), text_part("then"), image_part(PHOTOS[1]), text_part("which is red?"),
    ],
    "a clip": [{"type": "video", "video": str(CLIP)}, text_part("What moves?")],
    "frames in memory and a picture": [
        text_part("See"), {"type": "video", "video": MOVING}, image_part(PHOTOS[1]), text_part("What moves?"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_ids_and_positions_equal_transformers(vlm, oracle, content):
    trace = vlm.trace([{"role": "user", "content": content}], max_new_tokens=NEW_TOKENS)
    inputs = hf_inputs(vlm, trace)
    theirs = oracle.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert trace.token_ids == theirs[0, len(trace.full_ids) :].tolist()
    assert len(set(trace.token_ids)) > 3, "the oracle must be able to disagree"
    assert torch.equal(vlm.generate(**inputs, max_new_tokens=NEW_TOKENS), theirs)
    grids = {name: inputs[name] for name in inputs if name.endswith("grid_thw")}
    positions, delta = oracle.model.get_rope_index(
        input_ids=inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], **grids
    )
    assert torch.equal(trace.full_positions, positions[:, 0]) and trace.delta == int(delta)


def test_left_padded_batch_equals_transformers_and_single_prompts(vlm, oracle):
    names = ("one image", "text only", "images between text")
    traces = [vlm.trace([{"role": "user", "content": CONTENTS[n]}], max_new_tokens=NEW_TOKENS) for n in names]
    rows = [hf_inputs(vlm, trace) for trace in traces]
    length = max(len(trace.full_ids) for trace in traces)
    inputs = {
        name: torch.cat([torch.nn.functional.pad(row[name], (length - row[name].shape[1], 0)) for row in rows])
        for name in ("input_ids", "mm_token_type_ids", "attention_mask")
    }
    for name in ("pixel_values", "image_grid_thw"):
        inputs[name] = torch.cat([row[name] for row in rows if name in row])
    theirs = oracle.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(vlm.generate(**inputs, max_new_tokens=NEW_TOKENS), theirs)
    assert theirs[:, length:].tolist() == [trace.token_ids for trace in traces]


@pytest.mark.parametrize("folder", ["qwen3_vl", "qwen3_5"], indirect=True)  # experts are chosen, which no bound holds
@torch.inference_mode()
def test_bfloat16_is_as_exact_as_transformers(folder, oracle):
    """Oracle: transformers in bfloat16; both lie as far from float32 as rounding takes them, on one draw each."""
    content = [{"role": "user", "content": CONTENTS["frames in memory and a picture"]}]
    half, theirs = load(folder, dtype="bfloat16"), glm_transformers_model(folder, torch.bfloat16)
    trace = half.trace(content, max_new_tokens=1)
    inputs = hf_inputs(half, trace)
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
    for content in CONTENTS.values():
        trace = half.trace([{"role": "user", "content": content}], max_new_tokens=NEW_TOKENS)
        inputs, length = hf_inputs(half, trace), len(trace.full_ids)
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


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_evs_restricts_the_layout_and_keeps_every_second(vlm, oracle, rate):
    """Definition: the full run restricted to what is kept, deeper features too."""
    full = vlm.trace("What moves?", videos=[CLIP], max_new_tokens=1)
    pruned = vlm.trace("What moves?", videos=[CLIP], max_new_tokens=NEW_TOKENS, pruning_rate=rate)
    (mask,) = pruned.keep_masks
    dropped = int((~mask).sum())
    assert dropped > 0 and len(pruned.input_ids) == len(full.input_ids) - dropped
    assert torch.equal(pruned.positions, full.positions[:, pruned.keep])
    assert torch.equal(pruned.inputs_embeds, full.inputs_embeds[pruned.keep])
    assert torch.equal(pruned.deepstack, full.deepstack[pruned.keep])
    assert pruned.delta == full.delta + dropped
    assert pruned.keep[full.full_ids != vlm.token_ids["video"]].all()
    given = vlm.generate(
        full.full_ids[None], video_embeds=full.embeds, video_grid_thw=full.layouts, pruning_rate=rate,
        max_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    assert given[0, len(full.full_ids) :].tolist() == pruned.token_ids


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
    with pytest.raises(ValueError, match="a video is sampled by fps, min_frames, max_frames, or num_frames alone"):
        frames(num_frames=6, fps=1)
    with pytest.raises(ValueError, match="num_frames: the clip has 132 frames, got 200"):
        frames(num_frames=200)


# -------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda p: p.stem)
def test_pictures_equal_transformers_pillow_processor(dense_folder, dense, photo):
    theirs = Qwen2VLImageProcessorPil.from_pretrained(dense_folder)(images=[load_image(photo)], return_tensors="pt")
    [ours] = dense.processor.patchify([load_image(photo)])
    assert theirs["image_grid_thw"].tolist() == [list(ours.layout)]
    assert torch.equal(ours.pixel_values, theirs["pixel_values"])


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
        assert picture.fit(height, width) == smart_resize(height, width, **images)
        assert clip.fit(height, width, frames) == smart_resize_video(
            counted, height, width, max_pixels=200_000, **budgets
        )
        assert capped.fit(height, width, frames) == smart_resize_video(
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
        ({"deepstack_visual_indexes": [1, 9]}, "deepstack_visual_indexes: must be different blocks, 0 to 3, got"),
        ({"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes: must be different blocks"),
        ({"num_position_embeddings": 50}, "num_position_embeddings: must be a square, got 50"),
    ],
)
def test_sizes_that_make_no_tower_are_named(tmp_path, change, message):
    config = qwen3_config("qwen3_vl")
    config["vision_config"] |= change
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        refvl.load(file, weights="random", device="meta")
