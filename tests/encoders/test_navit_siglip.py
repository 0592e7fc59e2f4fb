"""The SigLIP tower for slices of any shape: equal to transformers' towers on the same weights, and to vLLM's."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_differ
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from refvl.encoders import NaVitSiglip, NaVitSiglipConfig
from refvl.encoders.navit_siglip import place_in_table

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "minicpmv_modules.json").read_text())["idefics"]
ARRAYS = np.load(FOLDER / "minicpmv_modules.npz")
TINY = NaVitSiglipConfig.tiny()  # a table of 7 x 7 places
SIZES = [(4, 5), (7, 7), (13, 2), (1, 1), (4, 5)]


def array(name):
    return torch.from_numpy(ARRAYS[name].astype(np.float32))


def golden_tower(**kwargs):
    tower = NaVitSiglip.from_config(GOLDEN["config"], **kwargs)
    names = [name for name in ARRAYS.files if name.startswith("idefics/sd/")]
    tower.load_weights((name.removeprefix("idefics/sd/"), array(name)) for name in names)
    return tower.eval()


def random_strips(sizes, config=TINY, seed=0):
    longest = max(h * w for h, w in sizes)
    shape = (len(sizes), config.num_channels, config.patch_size, config.patch_size * longest)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def picture(strip, h, w, patch=14):
    """(C, P, L) strip -> the (C, h * P, w * P) picture it was cut from: patches row by row."""
    rows = strip[..., : h * w * patch].unflatten(-1, (h, w, patch))  # (C, P, h, w, P)
    return rows.permute(0, 2, 1, 3, 4).flatten(3, 4).flatten(1, 2)


def randomised(tower, std=0.12):
    """Normal weights, biases and norms too, so that each of them counts."""
    torch.manual_seed(0)
    for name, parameter in tower.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=std)
    return tower.eval()


def same_weights(theirs, config, **kwargs):
    with torch.device("meta"):
        tower = NaVitSiglip.from_config(config, **kwargs)
    tower.to_empty(device="cpu").load_weights(theirs.state_dict().items())
    return tower.eval()


@pytest.fixture(scope="module")
def idefics2():
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionConfig, Idefics2VisionTransformer

    return randomised(Idefics2VisionTransformer(Idefics2VisionConfig(**asdict(TINY))))


@pytest.fixture(scope="module")
def ours(idefics2):
    return same_weights(idefics2, TINY)


# --- equal to upstream ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v26_one", "v25_batch"])
@torch.no_grad()
def test_golden(name):
    """Oracle: vLLM 0.33.0 `Idefics2VisionTransformer`, with and without tgt_sizes (2.6 and 2.5)."""
    [case] = [case for case in GOLDEN["cases"] if case["name"] == name]
    sizes, x = case["tgt_sizes"], array(f"idefics/{name}/x")
    seen = None if case["tgt_sizes_passed"] else [(1, h * w) for h, w in sizes]
    tower, want = golden_tower(), array(f"idefics/{name}/y")
    got = tower(x, torch.tensor(sizes), seen)
    assert got.shape == want.shape
    for b, (h, w) in enumerate(sizes):
        assert_agree(got[b, : h * w], want[b, : h * w], tower)
        assert torch.equal(tower.plan([sizes[b]], seen and [seen[b]]).positions, golden_ids(name)[b, : h * w])
        assert not got[b, h * w :].any()


def golden_ids(name):
    return torch.from_numpy(ARRAYS[f"idefics/{name}/position_ids"])


@torch.no_grad()
def test_equals_idefics2_of_transformers(ours, idefics2):
    """Oracle: `Idefics2VisionTransformer`, pictures of many shapes padded to one square."""
    strips = random_strips(SIZES)
    side = max(max(size) for size in SIZES)
    pictures, mask = torch.zeros(len(SIZES), 3, 14 * side, 14 * side), torch.zeros(len(SIZES), side, side).bool()
    for b, (h, w) in enumerate(SIZES):
        pictures[b, :, : h * 14, : w * 14], mask[b, :h, :w] = picture(strips[b], h, w), True
    want = idefics2(pictures, patch_attention_mask=mask).last_hidden_state
    got = ours(strips, SIZES)
    for b, (h, w) in enumerate(SIZES):
        assert_agree(got[b, : h * w], want[b, mask[b].flatten()], ours)
    assert want.std() > 0.3


@torch.no_grad()
def test_the_last_layer_can_be_dropped(idefics2):
    """Oracle: the golden tower with its last layer taken away; its weights may be in the checkpoint or not."""
    whole, dropped = golden_tower(), golden_tower(drop_last_layer=True)
    strips = random_strips(SIZES)
    assert_differ(whole(strips, SIZES), dropped(strips, SIZES), whole)
    whole.encoder.layers = whole.encoder.layers[:-1]
    assert torch.equal(whole(strips, SIZES), dropped(strips, SIZES))
    again = NaVitSiglip.from_config(GOLDEN["config"], drop_last_layer=True)
    again.load_weights(dropped.state_dict().items())
    assert torch.equal(again(strips, SIZES), dropped(strips, SIZES))


# --- places -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1200), st.sampled_from([7, 10, 14, 27, 32, 70]))
def test_integers_equal_the_buckets_of_fractions(length, side):
    """Oracle: vLLM's formula, each fraction rounded once to float32. Multiples of 1 / length would miss some bounds."""
    want = torch.bucketize(torch.arange(length) / length, torch.arange(1, side) / side, right=True)
    assert torch.equal(place_in_table(1, length, side), want)
    assert torch.equal(place_in_table(length, 1, side), want * side)


@torch.no_grad()
def test_no_slices(ours):
    assert ours(torch.zeros(0, 3, 14, 28), []).shape == (0, 2, 48)


@pytest.mark.parametrize(
    ("shape", "sizes", "seen", "message"),
    [
        ((1, 3, 14, 280), [(4, 6)], None, r"tgt_sizes: expected at most 20 .*, got \[24\]"),
        ((1, 3, 14, 281), [(4, 5)], None, "pixel_values: expected a width of whole patches of 14 px"),
        ((1, 3, 14, 280), [(4, 5)], [(1, 19)], "position_sizes: expected as many patches per slice"),
    ],
)
def test_bad_input_is_named(ours, shape, sizes, seen, message):
    with pytest.raises(ValueError, match=message):
        ours(torch.zeros(shape), sizes, seen)
