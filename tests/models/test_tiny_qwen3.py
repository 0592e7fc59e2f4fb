"""The small Qwen3-VL, which is told the time before each frame, and reads features from three depths of its tower.

It is measured here on scenes 100,000 and following of the split "test", as the other small models are.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_differ
from safetensors.torch import load_file

import refvl
from data.training import evaluate_tiny, scenes
from data.training.tiny_family import find_family
from data.training.tiny_model import PromptBuilder, TinyModel

FAMILY = find_family("qwen3_vl")
FOLDER, WEIGHTS = FAMILY.folder, FAMILY.folder / "model.safetensors"
FIRST = 100_000
BAR = 0.95


@pytest.fixture(scope="module")
def model():
    return refvl.load(FOLDER, device="cpu", progress=False)


@pytest.fixture(scope="module")
def builder():
    tokenizer = FAMILY.train_tokenizer()
    return PromptBuilder(FAMILY, tokenizer, FAMILY.config(tokenizer))


def transformers_model(dtype: torch.dtype):
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(FOLDER, dtype=dtype).eval()


# ----------------------------------------------------------------------------------------- the checkpoint


def test_checkpoint_is_small_in_bfloat16_under_the_released_names():
    """Oracle: the naming of Qwen3-VL's release, as transformers writes it."""
    weights = load_file(WEIGHTS)
    assert WEIGHTS.stat().st_size < 8e6
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert {".".join(name.split(".")[:2]) for name in weights} == {
        "model.visual", "model.language_model", "lm_head.weight",
    }  # fmt: skip
    assert weights["model.visual.patch_embed.proj.weight"].shape == (96, 3, 2, 16, 16)
    assert weights["model.visual.pos_embed.weight"].shape == (64, 96)
    assert weights["model.visual.deepstack_merger_list.1.norm.weight"].shape == (384,)
    assert weights["model.visual.merger.norm.weight"].shape == (96,)


def test_transformers_loads_it_and_nothing_is_missing():
    from transformers import Qwen3VLForConditionalGeneration

    loaded, info = Qwen3VLForConditionalGeneration.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.config.vision_config.deepstack_visual_indexes == [1, 2]


def test_chat_template(model):
    """Oracle: Qwen3-VL's format, written out: no system prompt of its own."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "image"}, {"type": "video"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    assert model.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nOne <|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ids_equal_transformers_generate(dtype):
    """Oracle: transformers' whole model on the pixels and the prompt that refvl made."""
    model, oracle = refvl.load(FOLDER, device="cpu", dtype=dtype, progress=False), transformers_model(dtype)
    for kind in ("place", "motion", "change"):
        for request in evaluate_tiny.requests_for(kind, 4, first=FIRST):
            trace = model.trace(**request.arguments, max_new_tokens=8)
            [medium], ids = trace.patches, trace.full_ids
            types = (ids == model.token_ids["image"]).int() + 2 * (ids == model.token_ids["video"]).int()
            pixels, grid = ("pixel_values", "image_grid_thw")
            if medium.merged.kind == "video":
                pixels, grid = ("pixel_values_videos", "video_grid_thw")
            theirs = oracle.generate(
                input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], mm_token_type_ids=types[None],
                max_new_tokens=8, do_sample=False, **{pixels: medium.pixel_values, grid: torch.tensor([medium.layout])},
            )  # fmt: skip
            assert theirs[0, len(ids) :].tolist() == trace.token_ids


# ----------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("sort", ["picture", *FAMILY.clips])
def test_training_sees_the_rows_and_the_prompt_that_the_pipeline_makes(model, builder, sort):
    """Oracle: a trace of the public path, which is held against transformers.

    Training resizes pictures as the processor resizes videos: a level of 255 is the most that the two ways differ by.
    """
    scene = scenes.draw_sort(sort, "test", 1)
    pixels, is_picture = scenes.render(scene), sort == "picture"
    pixels = torch.from_numpy(pixels[None] if is_picture else pixels)[None]
    [question] = scenes.draw_questions(scene, ["color"], np.random.default_rng(0))
    trace = model.trace(question.text, **evaluate_tiny.media_of(scene), max_new_tokens=1)
    rows, layouts = FAMILY.patchify(pixels)
    assert layouts == trace.layouts
    level = 1 / (255 * 0.5)
    assert float((rows - trace.patches[0].pixel_values).abs().max()) <= level * (1.01 if is_picture else 0.01)

    batch = builder.batch(pixels, [[question]], seconds=None if is_picture else [scene.seconds or scenes.SECONDS])
    length = len(trace.full_ids)
    assert batch.ids_BL[0, :length].tolist() == trace.full_ids.tolist()
    assert torch.equal(batch.positions_3L[:, :length], trace.full_positions)
    assert batch.spans == trace.spans
    times = FAMILY.time_columns(batch.spans) if not is_picture else []
    assert set(trace.full_ids[times].tolist()) <= {model.config.vision_end_token_id}


def test_questions_in_one_row_are_answered_as_if_asked_alone(model, builder):
    """Oracle: the public path, one question per prompt, deeper features too: the logits of the first answer token."""
    ours = TinyModel(FAMILY, builder.config)
    names = dict(ours.named_parameters())
    with torch.no_grad():
        for name, tensor in load_file(WEIGHTS).items():
            name = name.replace("model.visual", "visual").replace("model.language_model", "model")
            names[name].copy_(tensor.reshape(names[name].shape))
    scene = scenes.draw_change("test", 2)
    questions = scenes.draw_questions(scene, ["change", "changer", "becomes"], np.random.default_rng(0))
    batch = builder.batch(scenes.render(scene)[None], [questions], seconds=[scene.seconds])
    with torch.no_grad():
        logits = ours(batch)[0]
    for i, question in enumerate(questions):
        trace = model.trace(question.text, **evaluate_tiny.media_of(scene), max_new_tokens=1)
        alone = model.language_model(
            inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None], logits_to_keep=1,
            deepstack_embeds=trace.deepstack[None],
        ).logits[0, 0]  # fmt: skip
        first = int((batch.question_of_target == i).nonzero()[0])
        assert_agree(logits[first], alone, ours)


# ----------------------------------------------------------------------------------------------- answers


def test_the_second_is_read_from_the_text(model):
    """The same frames, told other seconds, now and then with a digit more: the answer is the new second."""
    requests = [request.arguments for request in evaluate_tiny.requests_for("change", 30, first=FIRST)]
    drawn = [scenes.draw_change("test", FIRST + index) for index in range(30)]
    told = [replace(scene, seconds=tuple(s + 1 for s in scene.seconds)) for scene in drawn]
    after = model.chat_batch(
        [r | {"videos": [evaluate_tiny.sampled_clip(s)]} for r, s in zip(requests, told, strict=True)], max_new_tokens=8
    )
    right = [answer == str(scene.seconds[scene.step]) for answer, scene in zip(after, told, strict=True)]
    assert sum(right) >= BAR * len(requests)


def test_the_second_holds_when_half_of_the_clip_is_pruned(model):
    """EVS drops wide rows of frames, never the seconds."""
    asked = evaluate_tiny.evaluate(model, "change", 60, q=0.5, first=FIRST)
    assert evaluate_tiny.share(asked) >= BAR


def test_deeper_features_reach_the_logits(model):
    """With zeros in their place they differ by more than rounding; nothing is said of the answers (notebook 12)."""
    [request] = evaluate_tiny.requests_for("color", 1, first=FIRST)
    trace = model.trace(**request.arguments, max_new_tokens=1)
    with torch.inference_mode():
        logits = [
            model.language_model(
                inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None], deepstack_embeds=deeper
            ).logits
            for deeper in (trace.deepstack[None], torch.zeros_like(trace.deepstack)[None])
        ]
    assert_differ(*logits, model.language_model)
