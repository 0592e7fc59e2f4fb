"""data/configs: the released shapes of MiniCPM-V.

Oracles: transformers' text models, and published counts.
"""

import json
from functools import cache

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

import refvl
from refvl.families import read_config
from refvl.paths import DATA

CONFIGS = DATA / "configs"
VERSIONS = {  # name -> version, text model
    "MiniCPM-V-2": ("2.0", GraniteForCausalLM),
    "MiniCPM-Llama3-V-2_5": ("2.5", LlamaForCausalLM),
    "MiniCPM-V-2_6": ("2.6", Qwen2ForCausalLM),
    "MiniCPM-V-4": ("4.0", LlamaForCausalLM),
    "MiniCPM-V-4_5": ("4.5", Qwen3ForCausalLM),
}
# What public reports count, and to which decimal place: 2.6 to the last parameter, the others rounded as the hub does
TOTALS = {
    "MiniCPM-V-2": (3.43e9, -7),
    "MiniCPM-Llama3-V-2_5": (8.54e9, -7),
    "MiniCPM-V-2_6": (8_099_175_152, 0),
    "MiniCPM-V-4": (4.06e9, -7),
    "MiniCPM-V-4_5": (8.70e9, -7),
}
names = pytest.mark.parametrize("name", VERSIONS)


def read(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


@cache
def build(name: str):
    return refvl.load(CONFIGS / f"{name}.json", weights="random", device="meta", dtype="bfloat16")


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


@names
def test_the_whole_model_has_the_reported_number_of_parameters(name):
    """Oracle: public counts; the README's table states ours."""
    vlm = build(name)
    total, place = TOTALS[name]
    encoder, text = count(vlm.encoder), count(vlm.language_model)
    assert round(encoder + text, place) == total
    [row] = [row for row in (CONFIGS / "README.md").read_text().splitlines() if row.startswith(f"| {name}.json |")]
    assert row.endswith(f"| {encoder + text:,} | {encoder:,} |")


@names
def test_the_text_model_is_transformers(name):
    """Oracle: the class that the release names: parameter names, with `llm.` before them in the
    files, and shapes."""
    version, cls = VERSIONS[name]
    config = read_config(read(name))
    with torch.device("meta"):
        expected = cls(config.get_text_config())
    ours = build(name).language_model
    assert type(ours.model) is type(expected.model), version
    shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (ours, expected)]
    assert shapes[0] == shapes[1]


@pytest.mark.skipif("minicpmv4_7" not in CONFIG_MAPPING, reason="this transformers has no MiniCPM-V 4.7")
@pytest.mark.parametrize(
    ("name", "total"), [("MiniCPM-V-4_6", 1_300_428_016), ("MiniCPM-V-4.7-35B-A3B", 35_212_875_824)]
)
def test_folded_versions_have_the_reported_number_of_parameters(name, total):
    """Oracles: the totals in public listings of the releases, and transformers' models of the same
    configs.

    The vocabulary of 4.7 is inferred: one token more or less changes the total by two rows of the
    text model.
    """
    vlm = build(name)
    encoder, text = count(vlm.encoder), count(vlm.language_model)
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(CONFIGS / f"{name}.json"))
    assert encoder + text == count(theirs) == total
    [row] = [r for r in (CONFIGS / "README.md").read_text().splitlines() if r.startswith(f"| {name}.json |")]
    assert row.endswith(f"| {encoder + text:,} | {encoder:,} |")
