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
from transformers import AutoTokenizer
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor as HFGlm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor as HFGlm46VProcessor

from refvl.merge import FramewiseMedia, MediaTokens
from refvl.paths import DATA
from refvl.pixels.media import load_video
from refvl.positions.timestamps import sample_video_frames

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


def test_budgets_are_of_all_frames(vlm):
    """By hand: 10 frames of 90 x 90 px are the budget of a clip, two of 112 x 112 that of a picture."""
    media = vlm.processor.decode(vlm.processor.messages("", [PHOTOS[0]], [MOVING]))
    for patches, area in zip(vlm.processor.patchify(media), (2 * 112**2, 10 * 90**2), strict=True):
        t, h, w = patches.layout
        assert 2 * t * h * w * 14**2 <= area < 2 * t * (h + 2) * (w + 2) * 14**2
