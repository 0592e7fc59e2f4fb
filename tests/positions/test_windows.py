"""Window order: against vLLM's golden data and transformers."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refvl.positions import get_window_index, invert_permutation

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "window_index.json").read_text())["cases"]


@st.composite
def window_problems(draw):
    """(grids, side in merged tokens, merge size, patch size, window size in pixels), ragged grids included."""
    side, merge, patch = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.sampled_from([14, 16]))
    extent = st.integers(1, 4 * side * merge + 1)
    grids = draw(st.lists(st.tuples(st.integers(1, 3), extent, extent), min_size=1, max_size=3))
    return grids, side, merge, patch, side * merge * patch + draw(st.integers(0, merge * patch - 1))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['grid_thw']}-{c['window_size']}-{c['spatial_merge_size']}")
def test_golden(case):
    """Oracle: vLLM 0.33.0, whose lengths lack the leading 0; its empty windows repeat a length and must vanish."""
    sizes = {name: case[name] for name in ("window_size", "patch_size", "spatial_merge_size")}
    window_index, cu_window_seqlens = get_window_index([case["grid_thw"]], **sizes)
    assert window_index.tolist() == case["window_index"]
    assert cu_window_seqlens.tolist() == list(dict.fromkeys([0, *case["cu_window_seqlens"]]))
    assert (window_index.dtype, cu_window_seqlens.dtype) == (torch.int64, torch.int32)


@settings(max_examples=50, deadline=None)
@given(window_problems())
def test_a_permutation_and_its_inverse(problem):
    """x[window_index][inverse] == x, and lengths rise strictly from 0 to the number of patches that make tokens."""
    grids, _, merge, patch, window_size = problem
    window_index, cu_window_seqlens = get_window_index(
        grids, window_size=window_size, patch_size=patch, spatial_merge_size=merge
    )
    x = torch.randn(sum(t * (h // merge) * (w // merge) for t, h, w in grids), 2)
    assert torch.equal(x[window_index][invert_permutation(window_index)], x)
    assert cu_window_seqlens[0] == 0
    assert cu_window_seqlens[-1] == len(x) * merge**2
    assert (cu_window_seqlens.diff() > 0).all()


@settings(max_examples=50, deadline=None)
@given(window_problems())
def test_equals_transformers(problem):
    """Oracle: `transformers.vision_utils.get_vision_window_index`."""
    oracle = pytest.importorskip("transformers.vision_utils").get_vision_window_index
    grids, _, merge, patch, window_size = problem
    want = oracle(torch.tensor(grids), spatial_merge_size=merge, window_size=window_size, patch_size=patch)
    got = get_window_index(grids, window_size=window_size, patch_size=patch, spatial_merge_size=merge)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_items_no_windows():
    window_index, cu_window_seqlens = get_window_index([])
    assert (window_index.tolist(), cu_window_seqlens.tolist()) == ([], [0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"window_size": 27}, "window_size: must fit at least one merged token of 28 px, got 27"),
        ({"patch_size": -14}, "patch_size: must be at least 1, got -14"),
    ],
)
def test_bad_sizes_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        get_window_index([(1, 4, 4)], **sizes)
