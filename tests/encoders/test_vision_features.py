"""Selecting a tower's features. Oracle: vLLM's golden outputs, and transformers' towers and LLaVA."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_differ
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from refvl.encoders import resolve_visual_encoder_outputs

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN, ARRAYS = json.loads((FOLDER / "vision_utils.json").read_text()), np.load(FOLDER / "vision_utils.npz")
CASES = [case for case in GOLDEN["resolve"] if case["last_hs_proc"] is None]  # later releases also take a function
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"image_size": 28, "patch_size": 7}


def array(name):
    return torch.from_numpy(ARRAYS[name])


def post_norm():
    norm = nn.LayerNorm(6)
    norm.load_state_dict({"weight": array("ln_weight"), "bias": array("ln_bias")})
    return norm


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
@torch.no_grad()
def test_equals_golden_data(case):
    """Oracle: the seed page's function; `class` drops the axis of tokens."""
    count = case["num_hidden_states"]
    got = resolve_visual_encoder_outputs(
        [array(f"hs{i}") for i in range(count)] if count else array(case["single_input"]),
        post_norm() if case["post_norm"] else None,
        select_layers=case["select_layers"],
        max_possible_layers=case["max_possible_layers"],
        feature_select_strategy=case["strategy"],
    )
    assert list(got.shape) == case["seed_shape"]
    assert_agree(got, array(f"{case['name']}/seed"), got.shape[-1])


@pytest.fixture(scope="module")
def siglip():
    torch.manual_seed(0)
    return SiglipVisionModel(SiglipVisionConfig(**SIZES, vision_use_head=False)).eval()


@torch.no_grad()
def test_the_last_layer_equals_siglip_s_output(siglip):
    """Oracle: `SiglipVisionModel.last_hidden_state`, which is normed, from its hidden states, which are not."""
    out = siglip(torch.randn(2, 3, 28, 28), output_hidden_states=True)
    norm = siglip.post_layernorm if hasattr(siglip, "post_layernorm") else siglip.vision_model.post_layernorm
    assert len(out.hidden_states) == 5
    ours = resolve_visual_encoder_outputs(out.hidden_states, norm, select_layers=[-1], max_possible_layers=4)
    assert torch.equal(ours, out.last_hidden_state)
    assert_differ(ours, out.hidden_states[-1], norm.normalized_shape[0])


def test_a_callable_is_its_own_strategy():
    states = torch.arange(24.0).view(1, 4, 6)
    picked = resolve_visual_encoder_outputs(states, None, feature_select_strategy=lambda x: x[:, ::2])
    assert torch.equal(picked, states[:, [0, 2]])


def test_the_true_last_index_gets_no_norm():
    """Upstream's rule, kept: of a tower of four, [4] is its output without, [-1] with the norm."""
    states = [torch.randn(1, 2, 6) for _ in range(5)]
    plain, normed = (
        resolve_visual_encoder_outputs(states, post_norm(), select_layers=[layer], max_possible_layers=4)
        for layer in (4, -1)
    )
    assert torch.equal(plain, states[4]) and torch.equal(normed, post_norm()(states[4]))


@pytest.mark.parametrize(
    ("outputs", "options", "message"),
    [
        (torch.ones(1, 2, 6), {"feature_select_strategy": "foo"}, "feature_select_strategy: expected one of .*'foo'"),
        ([torch.ones(1, 2, 6)] * 3, {"select_layers": [3], "max_possible_layers": 4}, "2 loaded layers .* got layer 3"),
        ([torch.ones(1, 2, 6)] * 3, {"select_layers": [-6], "max_possible_layers": 4}, "whole tower has 4.*layer -6"),
        (torch.ones(2, 6), {}, r"encoder_outputs: expected 3 dimensions \(B, N, D\)"),
    ],
)
def test_mistakes_are_named(outputs, options, message):
    with pytest.raises(ValueError, match=message):
        resolve_visual_encoder_outputs(outputs, None, **options)
