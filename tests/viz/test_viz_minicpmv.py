"""Figures of MiniCPM-V's slices, queries and packed frames. Oracle: the plans and numbers that they show."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from refvl import viz
from refvl.pixels.slices import SliceConfig, plan_slices
from refvl.positions import CanvasMarks, MediaSpan, canvas_positions
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


def test_the_canvas_shows_every_token_and_mark_at_its_position():
    """A prompt of 3 x 2 slices of 2 x 3 tokens. Oracle: the positions given, and pixels of the image."""
    config = SliceConfig(scale_resolution=140, patch_size=14, multiple=4, max_slice_nums=6)
    picture = PICTURE.resize((420, 280))
    plan = plan_slices(420, 280, config)
    ids, spans = [], []
    for k, (h, w) in enumerate((h // 4, w // 4) for h, w in plan.tgt_sizes):
        ids.append(3 if k else 1)
        spans.append(MediaSpan(len(ids), 1, h, w))
        ids += [0] * (h * w) + [4 if k else 2] + [5] * (k == 3)
    positions = canvas_positions(torch.tensor(ids), spans, CanvasMarks(1, 2, 3, 4, 5))
    left, middle, right = viz.plot_canvas(picture, config, positions, spans)
    assert texts(left) == [str(i + 1) for i in range(6)]
    (h, w), (high, wide) = plan.tgt_sizes[-1], (spans[1].h, spans[1].w)
    assert len(middle.patches) == h * w + h * w // 4 + h * w // 16 and texts(middle)[1:] == ["folded", "merged"]
    places = [
        (column, row) for span in spans[1:] for row, column in positions[1:, span.offset :][:, : high * wide].T.tolist()
    ]
    assert [image.get_extent() for image in right.images] == [[x - 0.5, x + 0.5, y + 0.5, y - 0.5] for x, y in places]
    whole = np.asarray(picture).reshape(2 * high, 280 // (2 * high), 3 * wide, 420 // (3 * wide), 3)
    for (x, y), image in zip(places, right.images, strict=True):
        np.testing.assert_array_equal(image.get_array(), whole[y, :, x])
    marks, overview = (np.stack(line.get_data(), 1).astype(int).tolist() for line in right.lines)
    assert overview == positions[[2, 1]][:, 1 : 1 + spans[0].num_tokens].T.tolist()
    assert marks == [positions[[2, 1], i].tolist() for i, id_ in enumerate(ids) if id_]
    with pytest.raises(ValueError, match=r"^image: expected one that is cut into slices, got 84 x 84 px$"):
        viz.plot_canvas(picture.resize((84, 84)), config, positions, spans)
