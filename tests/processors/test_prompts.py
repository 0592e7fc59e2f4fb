"""Oracles: transformers' chat template and tokenizer, and counts written out by hand."""

import pytest
from checkpoint_factory import make_checkpoint
from PIL import Image
from transformers import AutoTokenizer

import refvl
from refvl.merge import MediaTokens
from refvl.paths import DATA

CLIP = DATA / "clips" / "bigbuckbunny.mp4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def vlm(folder):
    return refvl.load(folder, device="cpu", progress=False)


def test_ids_are_the_template_with_placeholders_repeated(vlm, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = vlm.processor.messages("What is it?", [Image.new("RGB", (90, 90))])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 6))["input_ids"]
    assert vlm.processor.tokenize(messages, [MediaTokens("image", (1, 2, 3))]) == expected


def test_second_per_grid_reaches_the_positions(vlm):
    trace = vlm.trace("go", videos=[CLIP], max_new_tokens=1)
    (video,), (span,) = trace.media, trace.spans
    assert span.t_factor == pytest.approx(2 / video.fps * vlm.config.vision_config.tokens_per_second)
    first_of_last_frame = span.offset + (span.t - 1) * span.h * span.w
    assert trace.positions[0, first_of_last_frame] == span.offset + int((span.t - 1) * span.t_factor)
