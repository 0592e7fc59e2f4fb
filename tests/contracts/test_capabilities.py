"""What each family can do (`Family.can`): every yes gives the answer of the plain run, every no is refused by name.

Oracle: the greedy ids of one plain run of the same request. Two forwards that round in other orders
may only differ where the best two tokens are nearer than rounding, which they are in none of these.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import RANDOM, WITHOUT_VIDEOS, integers, random_folder, random_model, rows

import refvl
from refvl.families import CAPABILITIES, FAMILIES
from refvl.pipeline import Request
from refvl.serving import adapters

ROOT = Path(__file__).resolve().parents[2]
PHOTO = np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8)
FRAMES = np.random.default_rng(2).integers(0, 256, (6, 60, 90, 3), dtype=np.uint8)
QUESTION = {"prompt": "What is it? What is it?", "images": [PHOTO], "max_new_tokens": 5}


@cache
def plain_run(name: str) -> Any:
    """The trace that the others are compared with."""
    return random_model(name).trace(**QUESTION)


def load(name: str, **options) -> refvl.VLM:
    vlm = refvl.load(random_folder(name), device="cpu", progress=False, **options)
    vlm.language_model.generation_config.eos_token_id = None  # answers as long as asked
    return vlm


def ids_with(name: str, **options) -> list[int]:
    return random_model(name).trace(**QUESTION, **options).token_ids


def chunks(name):
    assert ids_with(name, prefill_chunk=9) == plain_run(name).token_ids


def chunked_beams(name):
    assert ids_with(name, prefill_chunk=9, num_beams=2) == ids_with(name, num_beams=2)


def static_cache(name):
    assert ids_with(name, cache_implementation="static") == plain_run(name).token_ids


def attentions(name):
    """By number of layer: each of the layers that attend sums to 1 over its keys."""
    vlm, trace = random_model(name), random_model(name).trace(**QUESTION, attentions=True)
    assert trace.token_ids == plain_run(name).token_ids
    kinds = getattr(vlm.language_model.config, "layer_types", None) or ["full"] * len(trace.attentions)
    assert len(kinds) == vlm.language_model.config.num_hidden_layers
    for weights, kind in zip(trace.attentions, kinds, strict=True):
        assert (weights is None) == (kind == "linear_attention")
        if weights is not None:
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))


def pruning(name):
    """What the language model reads is what it reads in the plain run, rows and
    positions, at the tokens kept."""
    vlm = random_model(name)
    plain, pruned = (vlm.read(Request("What?", videos=[FRAMES], pruning_rate=q)) for q in (0.0, 0.6))
    assert len(plain.input_ids) > len(pruned.input_ids) == int(pruned.keep.sum())
    torch.testing.assert_close(pruned.inputs_embeds, plain.inputs_embeds[pruned.keep])
    assert torch.equal(pruned.positions, plain.positions[:, pruned.keep])


def graphs(name):
    media = {} if name in WITHOUT_VIDEOS else {"videos": [FRAMES]}
    vlm, asked = load(name, graphs={"max_budget": 64}), QUESTION | media
    expected = random_model(name).trace(**asked).token_ids
    assert vlm.trace(**asked).token_ids == expected and vlm.graphs.stats().hits


def embeds(name):
    plain = plain_run(name)
    given = {"image_embeds": plain.embeds, "image_grid_thw": plain.layouts, "max_new_tokens": 5}
    ids = random_model(name).generate(plain.full_ids[None], **given)
    assert ids[0, len(plain.full_ids) :].tolist() == plain.token_ids


def lora(name):
    """An adapter beside the weights answers as it does merged into them, and not as the plain model."""
    peft, vlm = pytest.importorskip("peft"), load(name)
    layers = adapters.layers(vlm, "tower", "language_model")
    attached = adapters.attach(vlm, peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
    beside = vlm.trace(**QUESTION).token_ids
    attached.merge_adapter()
    assert vlm.trace(**QUESTION).token_ids == beside != plain_run(name).token_ids


def quantised(name):
    """Oracle: a plain model with the matrices that the packed ones stand for."""
    packed = load(name, quantization_config=integers(8, group=8))
    plain = load(name)
    rounded = 0
    for theirs, ours in zip(packed.language_model.modules(), plain.language_model.modules(), strict=True):
        if hasattr(getattr(theirs, "weight", None), "dequantize") and type(theirs.weight.data) is not torch.Tensor:
            ours.weight.data, rounded = theirs.weight.dequantize().to(ours.weight), rounded + 1
    assert rounded and packed.trace(**QUESTION).token_ids == plain.trace(**QUESTION).token_ids


PROOFS: dict[str, Callable] = {
    "chunks": chunks, "chunked_beams": chunked_beams, "static_cache": static_cache, "attentions": attentions,
    "pruning": pruning, "graphs": graphs, "embeds": embeds, "adapters": lora, "quantised": quantised,
}  # fmt: skip
ASKED: dict[str, Callable] = {  # how each is asked for, in a call that must not get as far as the media
    "chunks": lambda vlm: vlm.chat("", images=["none.png"], prefill_chunk=8),
    "chunked_beams": lambda vlm: vlm.trace("", images=["none.png"], prefill_chunk=8, num_beams=2),
    "static_cache": lambda vlm: vlm.chat("", images=["none.png"], cache_implementation="static"),
    "attentions": lambda vlm: vlm.trace("", images=["none.png"], attentions=True),
    "pruning": lambda vlm: vlm.chat("", images=["none.png"], pruning_rate=0.5),
    "graphs": lambda vlm: refvl.load(vlm.config.to_dict(), weights="random", graphs=True),
    "embeds": lambda vlm: vlm.generate(torch.tensor([[5, 6]]), image_embeds=[], image_grid_thw=[]),
    "adapters": lambda vlm: adapters.attach(vlm, pytest.importorskip("peft").LoraConfig()),
    "quantised": lambda vlm: load(RANDOM[0], quantization_config={"quant_method": "torchao"}),
}


def test_the_readme_says_what_each_release_cannot():
    """Its rows are model types; oracle: `FAMILIES`."""
    readme = (ROOT / "README.md").read_text()
    _, *rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .+ \| (.+) \|$", readme, re.M)
    named, cannot = {}, defaultdict(set)
    for kinds, said in rows:
        arguments = set(re.findall(r"`(\w+)`", said))
        for kind in re.findall(r"`(\w+)`", kinds):
            named[kind] = arguments
    for family in FAMILIES:
        for kind in family.model_types:
            cannot[kind] |= {CAPABILITIES[capability] for capability in family.cannot}
    assert named == cannot


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", RANDOM)
def test_a_yes_is_the_plain_answer_and_a_no_is_refused(name, capability, monkeypatch):
    vlm = random_model(name)
    assert vlm.family is rows()[name]
    if vlm.family.can[capability]:
        monkeypatch.setattr(vlm.language_model.generation_config, "eos_token_id", None)
        PROOFS[capability](name)
    else:
        message = re.escape(f"{CAPABILITIES[capability]}: not supported by {vlm.family.name}, ")
        with pytest.raises(ValueError, match=message):
            ASKED[capability](vlm)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_row_that_says_no_is_enough(capability, monkeypatch):
    """Every capability has a check at the border, also where no family says no today."""
    vlm = random_model(RANDOM[0])
    refused = replace(vlm.family, cannot={capability: "for a test"})
    rows = [refused if family is vlm.family else family for family in FAMILIES]
    monkeypatch.setattr(refvl.families, "FAMILIES", rows)
    with pytest.raises(ValueError, match=f"^{CAPABILITIES[capability]}: not supported .* for a test$"):
        ASKED[capability](vlm)
