"""Step3-VL from folder to text. Oracles: an independent run written here - prompt text by hand, squares of pixels
through the encoder one by one, the text model without cache on the whole sequence at every step - and vLLM's golden
prompts.

Encoder, text model and crops have their own oracles in their own test files.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_factory import make_step3_checkpoint, step3_tokenizer
from closeness import assert_agree
from PIL import Image
from random_models import load
from transformers import AutoTokenizer

from refvl.language.step3_config import Step3VLConfig
from refvl.paths import DATA
from refvl.pixels.crops import CropLayout, cut_crops, prepare_pixels
from refvl.processors.step3_vl import MARKS, Step3VLProcessor
from refvl.study.costs import describe_layout

PHOTOS = [DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea")]
SMALL = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 70, 3), dtype=np.uint8))  # no crops
STRIP = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 80, 3), dtype=np.uint8))  # two, of 40 px
SQUARE = Image.fromarray(np.random.default_rng(2).integers(0, 256, (112, 112, 3), dtype=np.uint8))  # 2 x 2
GOLDEN = json.loads((DATA.parent / "tests" / "golden" / "step3_vl.json").read_text())
NEW_TOKENS = 10
WRITTEN = {  # pictures as they stand in a prompt: 1 token for a crop, 4 for an overview
    "SMALL": "<im_start>" + "<im_patch>" * 4 + "<im_end>",
    "STRIP": "<patch_start><im_patch><patch_end>" * 2 + "<im_start>" + "<im_patch>" * 4 + "<im_end>",
    "SQUARE": ("<patch_start><im_patch><patch_end>" * 2 + "<patch_newline>" + "<patch_start><im_patch><patch_end>" * 2)
    + "<im_start>" + "<im_patch>" * 4 + "<im_end>",
}  # fmt: skip
PICTURES = {"SMALL": SMALL, "STRIP": STRIP, "SQUARE": SQUARE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_step3_checkpoint(tmp_path_factory.mktemp("step3"))


@pytest.fixture(scope="module")
def vlm(folder):
    return load(folder)


@torch.inference_mode()
def independent_ids(vlm, question: str, names: list[str]) -> list[int]:
    """Greedy ids by the slow way: `question` names the pictures where they stand, as {SMALL}."""
    tokenizer, text_model = step3_tokenizer(), vlm.language_model.model
    prompt = f"<|begin_of_sentence|><|BOT|>user\n{question.format(**WRITTEN)}<|EOT|><|BOT|>assistant\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    rows = []
    for name in names:
        overview, crops, _ = cut_crops(PICTURES[name], vlm.processor.image_config)
        squares = [prepare_pixels(crop, 56) for crop in crops] + [prepare_pixels(overview, 84)]
        rows += [vlm.encoder(square[None])[0] for square in squares]
    embeds = text_model.embed_tokens(torch.tensor(ids))
    is_picture = torch.tensor(ids) == tokenizer.token_to_id("<im_patch>")
    if rows:
        embeds[is_picture] = torch.cat(rows)
    assert int(is_picture.sum()) == sum(map(len, rows))
    new = []
    while len(new) < NEW_TOKENS and (not new or new[-1] != vlm.config.text_config.eos_token_id):
        last = text_model(inputs_embeds=embeds[None]).last_hidden_state[0, -1]
        new.append(int((vlm.language_model.lm_head.weight @ last).argmax()))
        embeds = torch.cat([embeds, text_model.embed_tokens(torch.tensor(new[-1:]))])
    return new


def content(question: str) -> list[dict]:
    """The same question as a message: {SMALL} becomes a picture."""
    return [
        {"type": "image", "image": PICTURES[piece[1:-1]]} if piece[0] == "{" else {"type": "text", "text": piece}
        for piece in re.split(r"(\{\w+\})", question)
        if piece
    ]


QUESTIONS = {
    "text only": "Where is the circle?",
    "no crops": "{SMALL}What is it?",
    "two crops in a row": "{STRIP}What is it?",
    "four crops": "{SQUARE}What is it?",
    "several": "{SMALL}{SQUARE}{STRIP}What are they?",
    "between text": "First{SQUARE}then{SMALL}which is red?",
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_ids_equal_an_independent_run(vlm, question):
    trace = vlm.trace([{"role": "user", "content": content(question)}], max_new_tokens=NEW_TOKENS)
    expected = independent_ids(vlm, question, re.findall(r"\{(\w+)\}", question))
    assert trace.token_ids == expected
    assert len(set(expected)) > 3, "the oracle must be able to disagree"
    assert trace.positions.tolist() == [list(range(len(trace.input_ids)))] * 3 and trace.delta == 0
    assert "".join(vlm.chat([{"role": "user", "content": content(question)}], max_new_tokens=NEW_TOKENS, stream=True)) \
        == trace.text  # fmt: skip


def test_a_wrong_crop_changes_the_answer(vlm):
    """The oracle above would see two crops exchanged."""
    halves = SQUARE.copy()
    halves.paste(SQUARE.crop((0, 0, 56, 112)), (56, 0))
    halves.paste(SQUARE.crop((56, 0, 112, 112)), (0, 0))
    answers = {str(vlm.trace("What is it?", images=[i], max_new_tokens=NEW_TOKENS).token_ids) for i in (SQUARE, halves)}
    assert len(answers) == 2


@pytest.mark.parametrize("case", GOLDEN["patcher"], ids=lambda c: f"{c['width']}x{c['height']}")
def test_prompt_lengths_equal_golden(case):
    """Oracle: vLLM's counts for the released sizes, crops, newlines and marks included."""
    processor = Step3VLProcessor(Step3VLConfig())
    assert (processor.image_tokens, processor.crop_tokens) == (169, 81)
    image = Image.new("RGB", (case["width"], case["height"]))
    layout = processor.layout_of(image)
    medium = processor.media_tokens("image", layout)
    assert layout.crops == case["num_patches"] and medium.num_tokens == 169 + 81 * layout.crops
    processor.__dict__["mark_ids"] = {mark: 10 + i for i, mark in enumerate(MARKS)}
    ids = processor.expand(1, medium)
    assert len(ids) == case["num_tokens"] and ids.count(1) == medium.num_tokens
    assert ids.count(12) == case["num_newlines"]
    line = describe_layout(processor, image, layout, medium.num_tokens)
    assert f"{layout.rows} x {layout.columns} crops of 504 px" in line or not layout.crops


@pytest.mark.parametrize("case", GOLDEN["repl"], ids=lambda c: str(c["num_patches"]))
def test_marks_equal_golden(case):
    """Oracle: vLLM's ids of a picture; the golden data have 5 tokens for an overview and 3 for a crop."""
    processor = Step3VLProcessor(Step3VLConfig())
    processor.image_tokens, processor.crop_tokens = GOLDEN["repl_feature_sizes"]
    processor.__dict__["mark_ids"] = GOLDEN["repl_token_map"]
    rows = sum(case["mask"]) + 1 if case["num_patches"] else 0
    layout = CropLayout(rows, case["num_patches"] // rows if rows else 0)
    medium = processor.media_tokens("image", layout)
    assert processor.expand(GOLDEN["repl_token_map"]["<im_patch>"], medium) * case["num_images"] == case["ids"]


def test_encode_gives_crops_then_overview(vlm):
    embeds = vlm.encode([SQUARE, SMALL])
    assert [tuple(e.shape) for e in embeds] == [(8, 96), (4, 96)]
    overview, crops, _ = cut_crops(SQUARE, vlm.processor.image_config)
    for i, crop in enumerate(crops):
        assert_agree(embeds[0][i : i + 1], vlm.encoder(prepare_pixels(crop, 56)[None])[0], vlm.encoder)
    assert_agree(embeds[0][4:], vlm.encoder(prepare_pixels(overview, 84)[None])[0], vlm.encoder)


NAMINGS = {
    "released": lambda name: name,
    "transformers": lambda name: name if name.startswith("lm_head")
    else "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else f"model.{name}",
    "vLLM": lambda name: f"language_model.{name}" if name.startswith(("model.", "lm_head.")) else name,
}  # fmt: skip


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS.keys())
def test_every_naming_of_the_weights_loads(vlm, tmp_path, naming):
    again = load(make_step3_checkpoint(tmp_path, naming=naming))
    for part, theirs in ((again.encoder, vlm.encoder), (again.language_model, vlm.language_model)):
        weights = part.state_dict()
        assert weights.keys() == theirs.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.state_dict().items())


def test_the_sentence_begins_once(vlm, tmp_path):
    """The template writes the begin of sentence, and so does the tokenizer; a template without it leaves it to it."""
    begin = vlm.config.text_config.bos_token_id
    assert AutoTokenizer.from_pretrained(vlm.language_model.name_or_path)("Hi")["input_ids"][0] == begin
    assert vlm.trace("Hi", max_new_tokens=1).full_ids.tolist().count(begin) == 1
    folder = make_step3_checkpoint(tmp_path)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("{{- bos_token -}}", ""))
    expected = vlm.trace("Hi", max_new_tokens=1).full_ids
    assert torch.equal(load(folder).trace("Hi", max_new_tokens=1).full_ids, expected)


def test_without_crops_only_the_overview_is_left(folder):
    vlm = load(folder)
    vlm.processor.image_config = replace(vlm.processor.image_config, enable_crops=False)
    trace = vlm.trace("What is it?", images=[SQUARE], max_new_tokens=1)
    assert trace.layouts == [(0, 0)] and WRITTEN["SMALL"] in vlm.processor.tokenizer.decode(trace.full_ids)
