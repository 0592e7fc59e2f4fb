"""Figures of MiniCPM-V's slices, queries and packed frames. Oracle: the plans and numbers that they show."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from refvl import viz
from refvl.pixels.slices import SliceConfig, plan_slices
from refvl.viz.style import STAGE_COLORS

TINY = SliceConfig(scale_resolution=56, max_slice_nums=6)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 190, 3), dtype=np.uint8))
WEIGHTS = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_slices_are_drawn_where_the_picture_is_cut():
    """Oracle: `plan_slices`; slices are numbered row by row behind the overview, which is 0."""
    given = plt.subplots(1, 2)[1]
    left, right = viz.plot_slices(PICTURE, TINY, query_num=9, ax=given)
    assert [left, right] == list(given)
    plan = plan_slices(190, 80, TINY)
    (columns, rows), (width, height) = plan.grid, plan.cell
    corners = [(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()) for bar in left.patches]
    assert corners == [(c * width, r * height, width, height) for r in range(rows) for c in range(columns)]
    assert texts(left) == [str(i + 1) for i in range(columns * rows)] and texts(right) == ["0"]
    assert (left.get_xlim(), left.get_ylim()) == ((0, columns * width), (rows * height, 0))
    assert left.get_title() == "190 x 80 px\n3 x 2 slices of 70 x 42 px = 5 x 3 patches"
    assert right.get_title() == "overview: 84 x 42 px = 6 x 3 patches\n9 tokens"
    assert right.get_xlabel() == "(1 + 6) x 9 = 63 tokens of the image"


def test_heat_maps_are_the_rows_of_the_weights_on_one_scale():
    axes = viz.plot_query_attention(PICTURE, WEIGHTS, (2, 3), columns=2, title="all")
    assert axes.shape == (3, 2) and not axes[2, 1].get_visible()
    for query, panel in enumerate(axes.flat[:5]):
        picture, heat = panel.images
        np.testing.assert_array_equal(heat.get_array(), WEIGHTS[query].view(2, 3))
        assert heat.get_clim() == (0, float(WEIGHTS.max())) and heat.get_extent() == picture.get_extent()
        assert panel.get_title() == f"query {query}"


@pytest.mark.parametrize(
    ("draw", "scale"), [(viz.plot_frame_tokens, 1), (viz.plot_time_shift, 100)], ids=["tokens", "shift"]
)
def test_lines_are_the_numbers_given(draw, scale):
    lines = {"one": [3, 4, 5], "two": [6, 7, 8]}
    ax = draw([1, 10, 100], lines, title="x")
    assert [line.get_ydata().tolist() if scale == 1 else list(line.get_ydata()) for line in ax.lines] == [
        [scale * y for y in numbers] for numbers in lines.values()
    ]
    assert [line.get_label() for line in ax.lines] == list(lines) and ax.get_title() == "x"
    assert [to_rgb(line.get_color()) for line in ax.lines] == list(map(to_rgb, STAGE_COLORS[:2]))
    given = plt.subplots()[1]
    assert draw([1, 10], {"one": [3, 4]}, ax=given) is given
