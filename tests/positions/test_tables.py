"""Position tables: against vLLM's golden samples, transformers, and a loop over the sixteen neighbours."""

from itertools import product
from math import cos, sin
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_differ
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionEmbeddings
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from refvl.positions import interpolate_position_table, merge_block_coordinates, sincos_1d, sincos_2d
from refvl.positions.tables import resize_position_table, sincos, sincos_frequencies

FOLDER = Path(__file__).parents[1] / "golden"


def random_table(side, width=3, seed=0):
    return torch.randn(side * side, width, generator=torch.Generator().manual_seed(seed))


def coordinates(table):
    """How large what is rounded is: a place is as large as a side, and the 16 weights change by up to 8 per place."""
    return 8 * len(table) ** 0.5 * float(table.abs().max())


@st.composite
def tables_and_grids(draw, most=5):
    merge, extent = draw(st.integers(1, 3)), st.integers(1, most)
    grids = draw(st.lists(st.tuples(st.integers(1, 3), extent, extent), min_size=1, max_size=3))
    table = random_table(draw(st.integers(1, 6)), seed=draw(st.integers(0, 99)))
    return table, [(t, h * merge, w * merge) for t, h, w in grids], merge


# --- oracles ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(tables_and_grids())
def test_equals_transformers(problem):
    """Oracle: `Glm4vVisionEmbeddings` on embeddings of zero, which wants every frame as an item of its own."""
    table, grids, merge = problem
    side = int(len(table) ** 0.5)
    theirs = Glm4vVisionEmbeddings(SimpleNamespace(hidden_size=3, image_size=14 * side, patch_size=14))
    theirs.position_embedding.weight = torch.nn.Parameter(table)
    frames = torch.tensor([(1, h, w) for t, h, w in grids for _ in range(t)])
    row, column = merge_block_coordinates(grids, spatial_merge_size=merge).T
    with torch.no_grad():
        want = theirs(torch.zeros(len(row), 3), frames.prod(dim=1), frames, row, column)
    got = interpolate_position_table(table, grids, spatial_merge_size=merge)
    assert_agree(got, want, 2, scale=coordinates(table))


@settings(max_examples=25)
@given(tables_and_grids())
def test_corners_on_corners_equal_transformers(problem):
    """Oracle: `get_vision_interpolation_indices_and_weights` (Qwen3-VL), the four neighbours by hand."""
    table, grids, merge = problem
    index_N4, weight_N4 = get_vision_interpolation_indices_and_weights(
        torch.tensor(grids), num_grid_per_side=round(len(table) ** 0.5), mode="bilinear", align_corners=True,
        spatial_merge_size=merge,
    )  # fmt: skip
    want = (table[index_N4] * weight_N4[..., None]).sum(1)
    got = interpolate_position_table(table, grids, spatial_merge_size=merge, mode="bilinear", align_corners=True)
    assert_agree(got, want, 2, scale=coordinates(table))


# --- properties -------------------------------------------------------------------------------------------------------


def test_nearest_reads_one_place():
    """Oracle: the place below each centre, in integers."""
    side, h, w = 5, 4, 14
    table = random_table(side)
    row, column = merge_block_coordinates([(1, h, w)]).T
    place = (2 * row + 1) * side // (2 * h) * side + (2 * column + 1) * side // (2 * w)
    got = interpolate_position_table(table, [(1, h, w)], mode="nearest")
    assert torch.equal(got, table[place])
    assert_differ(got, interpolate_position_table(table, [(1, h, w)]), 4)


def test_half_precision_is_sampled_in_float32():
    table = random_table(6).bfloat16()
    got = interpolate_position_table(table, [(1, 4, 10)])
    assert torch.equal(got, interpolate_position_table(table.float(), [(1, 4, 10)]).bfloat16())


def test_no_items_no_positions():
    assert interpolate_position_table(random_table(4), []).shape == (0, 3)


# --- sines and cosines ------------------------------------------------------------------------------------------------

RESAMPLERS = np.load(FOLDER / "minicpmv_modules.npz")


def test_sincos_1d_golden():
    """Oracle: vLLM 0.33.0 `get_1d_sincos_pos_embed_from_temporal_size`."""
    want = torch.from_numpy(RESAMPLERS["r45/temporal_table_first8"])
    assert_agree(sincos_1d(64, 8), want, 4, scale=8.0)


@given(st.integers(1, 6).map(lambda n: 4 * n), st.integers(1, 9), st.integers(1, 230))
def test_sincos_2d_equals_a_loop(embed_dim, height, width):
    """Oracle: each value from its formula in float64: column first, sines first, frequencies 10000^(-i / (D / 4))."""
    table, quarter = sincos_2d(embed_dim, (height, width)), embed_dim // 4
    assert table.shape == (height, width, embed_dim)
    frequencies = [10000.0 ** (-i / quarter) for i in range(quarter)]
    corners = list(product((0, height - 1), (0, width - 1)))
    want = [[f(place * w) for place in (x, y) for f in (sin, cos) for w in frequencies] for y, x in corners]
    got = torch.stack([table[corner] for corner in corners])
    assert_agree(got, torch.tensor(want, dtype=torch.float64), 4, scale=max(height, width))  # the size of an angle


def test_an_hour_of_tenths_of_seconds_is_rounded_as_upstream_rounds():
    """Oracle: the formula step by step in numpy's float32; in float64 the last angles differ by hundredths."""
    omega = np.arange(1792, dtype=np.float32)
    omega /= 3584 / 2.0
    angle = np.einsum("m,d->md", np.array([35999.0], dtype=np.float32), 1.0 / 10000**omega)
    want = torch.from_numpy(np.concatenate([np.sin(angle), np.cos(angle)], axis=1))
    got = sincos(torch.tensor([35999]), sincos_frequencies(3584))
    assert_agree(got, want, 16)
    exact = 35999 * 10000.0 ** -(np.arange(1792) / 1792)
    assert np.abs(np.sin(exact) - got[0, :1792].numpy()).max() > 1e-3


# --- resized as a picture ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("antialias", [False, True])
def test_a_resized_table_lies_over_the_grid_edge_to_edge(antialias):
    """Its own size is itself, a constant stays one, and a flipped or transposed table gives such a result."""

    def resized(table_SSD, size):
        flat = resize_position_table(table_SSD.flatten(0, 1), size, antialias=antialias)
        return flat.view(*size, -1)

    flat = random_table(5)
    assert resize_position_table(flat, (5, 5), antialias=antialias) is flat
    constant = torch.full((5, 5, 2), 3.0)
    assert_agree(resized(constant, (3, 11)), torch.full((3, 11, 2), 3.0), 2, scale=8 * 5 * 3)
    table, scale = flat.view(5, 5, -1), coordinates(flat)
    want = resized(table, (3, 8))
    assert_agree(resized(table.flip(1), (3, 8)).flip(1), want, 2, scale=scale)
    lying = resized(table.transpose(0, 1), (8, 3))
    assert_agree(lying.transpose(0, 1), want, 2, scale=scale)


def test_antialias_matters_where_sides_shrink():
    table = random_table(12)
    sharp, smooth = (resize_position_table(table, (3, 4), antialias=a) for a in (False, True))
    assert smooth.std() < 0.7 * sharp.std()
    half = resize_position_table(table.bfloat16(), (3, 4), antialias=True)
    assert torch.equal(half, resize_position_table(table.bfloat16().float(), (3, 4), antialias=True).bfloat16())


# --- errors ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interpolate_position_table(torch.zeros(12, 3), [(1, 2, 2)]), "a square number .* got 12"),
        (lambda: interpolate_position_table(torch.zeros(4, 3), [(1, 2, 3)]), "must be multiples of spatial"),
        (lambda: interpolate_position_table(torch.zeros(4, 3), [], mode="cubic"), "mode: .* got 'cubic'"),
        (lambda: sincos_1d(7, 3), "embed_dim: must be a multiple of 2, got 7"),
        (lambda: sincos_1d(8, 0), "length: must be at least 1, got 0"),
        (lambda: sincos_2d(6, (3, 3)), "embed_dim: must be a multiple of 4, got 6"),
        (lambda: sincos_2d(8, (0, 3)), r"size: every extent must be at least 1, got \(0, 3\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
