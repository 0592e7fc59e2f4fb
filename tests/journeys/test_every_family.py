"""What holds of every family from folder to text, by one line in `tests/random_models.py`.

Oracle: `trace`, which each family's own file holds against transformers, its formulas or its golden
prompts.
"""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from random_models import MAKERS, WITHOUT_VIDEOS, load, make, random_folder, random_model
from safetensors.torch import load_file, save_file

import refvl
from refvl.study.costs import describe, plan_media

RANDOM = np.random.default_rng(0)
LARGE = Image.fromarray(RANDOM.integers(0, 256, (112, 112, 3), dtype=np.uint8))  # sliced, cut into crops
SMALL = Image.fromarray(RANDOM.integers(0, 256, (60, 70, 3), dtype=np.uint8))
WIDE = Image.fromarray(RANDOM.integers(0, 256, (40, 120, 3), dtype=np.uint8))
MOVING = RANDOM.integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)
NEW_TOKENS = 8
REQUESTS = [
    {"prompt": "What is it?", "images": [LARGE]},
    {"prompt": "Hi"},
    {"prompt": "And which of these?", "images": [SMALL, WIDE, LARGE]},
]
each_family = pytest.mark.parametrize("name", MAKERS)


def media_of(name: str) -> dict:
    return {"images": [LARGE, SMALL]} | ({} if name in WITHOUT_VIDEOS else {"videos": [MOVING]})


@each_family
def test_batches_and_streams_are_single_answers(name):
    """Left padding: prompts of different lengths, with and without images."""
    vlm = random_model(name)
    alone = [vlm.chat(**request, max_new_tokens=NEW_TOKENS) for request in REQUESTS]
    assert vlm.chat_batch(REQUESTS, max_new_tokens=NEW_TOKENS) == alone
    assert len(set(alone)) == 3
    for request, answer in zip(REQUESTS, alone, strict=True):
        pieces = vlm.chat(**request, max_new_tokens=NEW_TOKENS, stream=True)
        assert not isinstance(pieces, str) and "".join(pieces) == answer
    assert vlm.chat_batch([]) == []


def tensors_of(name: str) -> tuple[dict, list[int]]:
    """Arguments of `generate` for two images, and the ids of the answer by `trace`."""
    trace = random_model(name).trace("What is it?", images=[LARGE, SMALL], max_new_tokens=NEW_TOKENS)
    rows = torch.cat([p.pixel_values for p in trace.patches])
    return {"input_ids": trace.full_ids[None], "pixel_values": rows, "image_grid_thw": trace.layouts}, trace.token_ids


@each_family
def test_generate_takes_tensors(name):
    """Rows and layouts of all images, placeholders in the prompt, as `trace` makes them."""
    inputs, expected = tensors_of(name)
    out = random_model(name).generate(**inputs, max_new_tokens=NEW_TOKENS)
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == expected


REFUSED = {
    "no layouts": (lambda i: {"image_grid_thw": None}, "pixel_values, image_grid_thw: expected both or neither"),
    "no placeholders": (lambda i: {"input_ids": i["input_ids"][:, :2]}, "expected placeholders for all media"),
    "twice as many": (
        lambda i: {"input_ids": i["input_ids"].repeat(2, 1)},
        "input_ids: expected placeholders only for the given images, got .* too many",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
@each_family
def test_what_does_not_fit_is_refused(name, change, message):
    inputs, _ = tensors_of(name)
    with pytest.raises(ValueError, match=message):
        random_model(name).generate(**(inputs | change(inputs)))


@each_family
def test_a_config_alone_plans_what_a_run_encodes(name):
    """Oracle: the layouts, tokens and embeddings of the run."""
    vlm = random_model(name)
    media = vlm.processor.decode(vlm.processor.messages("", **media_of(name)))
    plans, patches = [plan_media(vlm, m) for m in media], vlm.processor.patchify(media)
    assert [p.layout for p in plans] == [p.layout for p in patches]
    assert [p.tokens for p in plans] == [len(rows) for rows in vlm.encode(**media_of(name))]

    config = json.loads((random_folder(name) / "config.json").read_text())
    planned = refvl.load(config, weights="random", device="meta")
    assert planned.family is vlm.family and "memory needed" in describe(planned, media)
    with pytest.raises(ValueError, match="device: a model on 'meta' can plan, but not run"):
        planned.chat("What?")
    with pytest.raises(ValueError, match="has no tokenizer; load a checkpoint folder"):
        planned.processor.tokenize([], [])


@pytest.mark.thorough
@each_family
def test_every_weight_is_needed_and_none_is_unknown(name, tmp_path):
    """One dropped in each half, one added to each, one of another shape: all named."""
    folder = make(name, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    tower = next(key for key in weights if re.search(r"^(model\.)?(visual|vpm|vision_\w+)\..*(norm|ln_).*weight", key))
    text = next(key for key in weights if re.search(r"(^|\.)norm\.weight$", key) and not key.startswith(("vis", "vpm")))

    def refused(changed, message):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(folder)

    for key in (tower, text):
        extra = key.split(".")[0] + ".extra.weight"
        refused({n: t for n, t in weights.items() if n != key}, r"missing \(1\): .*(norm|ln_).*weight")
        refused(weights | {extra: torch.ones(2)}, r"unexpected \(1\): .*extra")
        refused(weights | {key: torch.ones(7)}, r"(misshapen|mismatched) \(1\).*(norm|ln_).*weight")


@each_family
def test_half_precision_runs(name):
    vlm = load(random_folder(name), dtype="bfloat16")
    assert vlm.encoder.dtype == vlm.language_model.dtype == torch.bfloat16
    [rows] = vlm.encode([SMALL])
    assert rows.dtype == torch.bfloat16 and rows.isfinite().all()
    assert vlm.trace("What is it?", images=[SMALL], max_new_tokens=2).token_ids
