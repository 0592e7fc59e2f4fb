"""The SigLIP tower for slices of any shape: equal to transformers' towers on the same weights, and to vLLM's."""

from dataclasses import asdict
from platform import machine

import pytest
import torch
from closeness import assert_agree, assert_differ
from towers import golden, randomize

from refvl.encoders import NaVitSiglip, NaVitSiglipConfig, navit_siglip
from refvl.encoders.navit_siglip import place_in_table

GOLDEN, ARRAYS = golden("minicpmv_modules")
GOLDEN = GOLDEN["idefics"]
TINY = NaVitSiglipConfig.tiny()  # a table of 7 x 7 places
SIZES = [(4, 5), (7, 7), (13, 2), (1, 1), (4, 5)]


def golden_tower(**kwargs):
    tower = NaVitSiglip.from_config(GOLDEN["config"], **kwargs)
    prefix = "idefics/sd/"
    tower.load_weights((name.removeprefix(prefix), x) for name, x in ARRAYS.items() if name.startswith(prefix))
    return tower.eval()


def random_strips(sizes, config=TINY, seed=0):
    longest = max(h * w for h, w in sizes)
    shape = (len(sizes), config.num_channels, config.patch_size, config.patch_size * longest)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def picture(strip, h, w, patch=14):
    """(C, P, L) strip -> the (C, h * P, w * P) picture it was cut from: patches row by row."""
    rows = strip[..., : h * w * patch].unflatten(-1, (h, w, patch))  # (C, P, h, w, P)
    return rows.permute(0, 2, 1, 3, 4).flatten(3, 4).flatten(1, 2)


def same_weights(theirs, config, **kwargs):
    with torch.device("meta"):
        tower = NaVitSiglip.from_config(config, **kwargs)
    tower.to_empty(device="cpu").load_weights(theirs.state_dict().items())
    return tower.eval()


@pytest.fixture(scope="module")
def idefics2():
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionConfig, Idefics2VisionTransformer

    return randomize(Idefics2VisionTransformer(Idefics2VisionConfig(**asdict(TINY))), 0.12)


@pytest.fixture(scope="module")
def ours(idefics2):
    return same_weights(idefics2, TINY)


# --- equal to upstream ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v26_one", "v25_batch"])
@torch.no_grad()
def test_golden(name, monkeypatch):
    """Oracle: vLLM 0.33.0 `Idefics2VisionTransformer`, with and without tgt_sizes (2.6 and 2.5).

    vLLM divides exactly, `r / h`; the released code multiplies by a rounded 1 / h (docs/differences.md)."""
    monkeypatch.setattr(navit_siglip, "place_in_table", exact_places)
    [case] = [case for case in GOLDEN["cases"] if case["name"] == name]
    sizes = case["tgt_sizes"]
    x, want, positions = (ARRAYS[f"idefics/{name}/{part}"] for part in ("x", "y", "position_ids"))
    seen = None if case["tgt_sizes_passed"] else [(1, h * w) for h, w in sizes]
    tower = golden_tower()
    got = tower(x, torch.tensor(sizes), seen)
    assert got.shape == want.shape
    for b, (h, w) in enumerate(sizes):
        assert_agree(got[b, : h * w], want[b, : h * w], tower)
        assert torch.equal(tower.plan([sizes[b]], seen and [seen[b]]).positions, positions[b, : h * w])
        assert not got[b, h * w :].any()


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


def exact_places(h: int, w: int, side: int):
    rows, columns = (torch.arange(n) * side // n for n in (h, w))
    return (rows[:, None] * side + columns).flatten()


def moved(n: int) -> dict[int, int]:
    """Rows of a slice of n rows that do not use the row of a table of 70 that exact fractions give."""
    rows, exact = (places(n, 1, 70) // 70 for places in (place_in_table, exact_places))
    return {i: int(rows[i]) for i in range(n) if rows[i] != exact[i]}


@torch.no_grad()
@pytest.mark.parametrize(("h", "w"), [(25, 41), (50, 20), (18, 55), (32, 32)])
def test_fractions_round_as_in_transformers(h, w):
    """Oracle: the entries that Idefics2 of transformers looks up in a released table of 70 x 70."""
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionConfig, Idefics2VisionEmbeddings

    theirs = Idefics2VisionEmbeddings(Idefics2VisionConfig(hidden_size=1, image_size=980, patch_size=14))
    theirs.position_embedding.weight.copy_(torch.arange(4900.0)[:, None])
    theirs.patch_embedding.weight.zero_()
    theirs.patch_embedding.bias.zero_()
    want = theirs(torch.zeros(1, 3, 14 * h, 14 * w), torch.ones(1, h, w).bool())[0, :, 0]
    assert torch.equal(place_in_table(h, w, 70), want.long())
    assert (moved(h) or moved(w)) if (h, w) != (32, 32) else not moved(32)


@pytest.mark.skipif(machine() not in ("x86_64", "AMD64"), reason="torch.arange adds in vectors of another width")
def test_sides_where_transformers_differs_from_the_release():
    """Oracle: the release's `arange(0, 1 - 1e-6, 1 / n)` by hand; transformers multiplies, and moves 28, not 42."""
    assert moved(49) == {7: 9, 14: 19, 35: 49, 42: 59} and moved(58) == {29: 34}


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
