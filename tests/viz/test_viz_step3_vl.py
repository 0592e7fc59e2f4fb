"""Figures of Step3-VL. Oracle: the plans, prompts and batches that they show."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from PIL import Image

from refvl import viz
from refvl.graphs import Batch
from refvl.pixels.crops import CropConfig, CropLayout, count_prompt_tokens, plan_crops
from refvl.viz.style import HIGHLIGHT, TOKEN_COLORS
from refvl.viz.windows import sequence_colors

TINY = CropConfig(image_size=84, crop_size=56, max_side=336)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (110, 160, 3), dtype=np.uint8))  # 2 x 3 windows
TOKENS = [{"local": 30, "global": 20}, {"local": 0, "global": 20}, {"local": 90, "global": 20}]
BATCHES = [
    Batch((0,), 40, "local", 30),
    Batch((2,), None, "local", 90),
    Batch((0, 1, 2), 80, "global", 60),
]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def filled(ax) -> list[Rectangle]:
    """Bars that are neither padding nor an outline."""
    return [bar for bar in ax.patches if bar.get_facecolor()[3] and not bar.get_hatch()]


def spans(bars) -> list[tuple[float, float]]:
    return [(bar.get_x(), bar.get_width()) for bar in bars]


def test_windows_are_drawn_where_the_picture_is_cut():
    """Oracle: `plan_crops`; numbers in reading order, a mark behind the first row."""
    left, right = viz.plot_crops(PICTURE, TINY, crop_tokens=1, image_tokens=4)
    plan = plan_crops(160, 110, TINY)
    corners = [(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()) for bar in left.patches]
    assert corners == [(l, t, r - l, b - t) for l, t, r, b in plan.boxes]
    assert texts(left) == ["0", "1", "2", "3", "4", "5"]
    [mark] = left.lines
    assert mark.get_xydata().tolist() == [[168, 28]] and to_rgb(mark.get_color()) == to_rgb(HIGHLIGHT)
    assert left.get_title() == "160 x 110 px, canvas 168 x 112 px\n2 x 3 windows of 56 px"
    assert right.get_title().startswith("overview: 84 x 84 px")
    assert right.get_xlabel() == "6 x (1 + 2) + 1 newline + (4 + 2) = 25 tokens in the prompt"


@pytest.mark.parametrize("layout", [CropLayout(2, 3), CropLayout(3, 1), CropLayout(0, 0)])
def test_the_prompt_is_as_long_as_its_tokens(layout, ax):
    """Oracle: `count_prompt_tokens`: bars and marks add up, crops in order, overview last."""
    viz.plot_crop_prompt(layout, crop_tokens=9, image_tokens=25, ax=ax)
    total = count_prompt_tokens(layout, crop_tokens=9, image_tokens=25)
    assert sum(width for _, width in spans(ax.patches)) + len(ax.lines) == total == ax.get_xlim()[1]
    assert len(ax.lines) == layout.newlines
    assert texts(ax) == [*map(str, range(layout.crops)), "overview"]
    assert spans(ax.patches)[-1] == (total - 27, 27)
    assert ax.patches[-1].get_facecolor()[:3] == to_rgb(TOKEN_COLORS["image"])
    assert ax.get_title().endswith(f"= {total} tokens in the prompt")


def test_tokens_by_size_are_those_of_the_plans(ax):
    """Oracle: `plan_crops` at every point that is drawn."""
    viz.plot_crop_tokens(TINY, ratios=[(1, 1), (2, 1)], max_side=400, crop_tokens=1, image_tokens=4, ax=ax)
    for line, (width, height) in zip(ax.lines, [(1, 1), (2, 1)], strict=False):
        assert line.get_label() == f"{width} : {height}"
        for side, count in line.get_xydata()[::40]:
            layout = plan_crops(int(side), max(1, int(side) * height // width), TINY).layout
            assert count == count_prompt_tokens(layout, crop_tokens=1, image_tokens=4)
    assert [line.get_xdata()[0] for line in ax.lines[2:]] == [84, 336]


def test_replays_stand_one_after_another_in_the_lane_of_their_path(ax):
    """Oracle: by hand. 40 computed for 30, 90 eagerly, then 80 for 60."""
    viz.plot_path_timeline(TOKENS, BATCHES, title="three pictures", ax=ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["local", "global"]
    places = [(bar.get_x(), bar.get_width(), round(bar.get_y() + 0.35)) for bar in filled(ax)]
    assert places == [(0, 30, 0), (40, 90, 0), (130, 20, 1), (150, 20, 1), (170, 20, 1)]
    assert spans(bar for bar in ax.patches if bar.get_hatch()) == [(30, 10), (190, 20)]
    outlines = [bar for bar in ax.patches if not bar.get_facecolor()[3]]
    assert [(*span, bar.get_linestyle()) for span, bar in zip(spans(outlines), outlines, strict=True)] == [
        (0, 40, "-"), (40, 90, "--"), (130, 80, "-"),
    ]  # fmt: skip
    assert texts(ax) == ["0", "2", "0", "1", "2"]
    np.testing.assert_array_equal([bar.get_facecolor()[:3] for bar in filled(ax)], sequence_colors(3)[[0, 2, 0, 1, 2]])
    assert ax.get_title() == "three pictures: 2 replays with 120 tokens, 25% padding, 1 eager"
