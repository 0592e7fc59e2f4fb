"""Figures of positions and pruning. Oracle: the functions of `refvl.positions` whose results they show."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from closeness import assert_agree
from matplotlib.colors import to_rgba

from refvl import viz
from refvl.positions import (
    MediaSpan,
    compute_dissimilarity,
    compute_retention_mask,
    get_mrope_input_positions,
    mrope_axis_of_pairs,
    restrict_positions,
    vision_rotary_cos_sin,
)
from refvl.viz.style import AXIS_COLORS, TOKEN_COLORS

THW = (3, 2, 4)  # merged
IMAGE, CLIP = MediaSpan(2, 1, 2, 3), MediaSpan(10, *THW, t_factor=2.0)
POSITIONS, DELTA = get_mrope_input_positions(40, [IMAGE, CLIP])
FRAMES = np.random.default_rng(0).integers(0, 255, (6, 56, 112, 3), dtype=np.uint8)
EMBEDS = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
MASK = compute_retention_mask(EMBEDS, THW, 1, 0.5)
KEEP = torch.ones(40, dtype=torch.bool)
KEEP[10:34] = MASK
PLACES = ["left", "right"]
AXES = mrope_axis_of_pairs((4, 2, 2), interleaved=True)


def new_axes(rows: int, columns: int) -> np.ndarray:
    return plt.subplots(rows, columns, squeeze=False)[1]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def image(ax, index: int = 0) -> np.ndarray:
    return np.asarray(ax.images[index].get_array())


def test_strips_have_the_colour_of_each_pair_s_axis():
    ax = viz.plot_mrope_axes({"interleaved": AXES, "all t": AXES * 0})
    colors = [to_rgba(bar.get_facecolor()) for bar in ax.patches]
    assert colors == [to_rgba(AXIS_COLORS["thw"[axis]]) for axis in [*AXES.tolist(), *[0] * 8]]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["interleaved", "all t"]


def test_lines_are_the_positions_in_the_colours_of_their_axes():
    """Oracle: the positions themselves; the shading covers exactly the media's tokens."""
    ax = viz.plot_positions(POSITIONS, [IMAGE, CLIP])
    assert [line.get_ydata().tolist() for line in ax.lines] == POSITIONS.tolist()
    assert [line.get_color() for line in ax.lines] == [AXIS_COLORS[axis] for axis in "thw"]
    shades = [(patch.get_x(), patch.get_width(), patch.get_facecolor()[:3]) for patch in ax.patches]
    assert shades == [
        (1.5, 6, to_rgba(TOKEN_COLORS["image"])[:3]),
        (9.5, 24, to_rgba(TOKEN_COLORS["video"])[:3]),
    ]
    assert [text.get_text() for text in ax.get_legend().get_texts()][3:] == ["image", "video"]


def test_rotary_maps_turn_with_rows_above_and_columns_below():
    """Oracle: `vision_rotary_cos_sin` without merge blocks, which is in reading order."""
    axes = viz.plot_rotary((4, 6), head_dim=12)
    cos, _ = vision_rotary_cos_sin([(1, 4, 6)], head_dim=12, spatial_merge_size=1)
    for ax, want in zip(axes.flat, cos.T.reshape(6, 4, 6), strict=True):
        assert_agree(torch.tensor(image(ax), dtype=torch.float32), want, 4)
    assert (np.ptp(image(axes[0, 0]), axis=1) == 0).all() and (np.ptp(image(axes[1, 0]), axis=0) == 0).all()


def test_position_grid_writes_every_position():
    axes = viz.plot_position_grid(POSITIONS, CLIP)
    written = [[int(t) for t in texts(ax)] for ax in axes.flat]
    assert written == POSITIONS[:, 10:34].reshape(9, 8).tolist()


def test_place_answers_count_pairs_and_put_the_rest_aside():
    ax = viz.plot_place_answers(["left", "left", "right", "left"], ["left", "right", "red", "left"], PLACES, title="x")
    assert texts(ax) == ["2", "1", "1"]
    assert [(t.get_position()[1], t.get_position()[0]) for t in ax.texts] == [(0, 0), (0, 1), (1, 2)]
    assert ax.get_title() == "x: 2 of 4 correct"


def test_keep_mask_covers_what_is_pruned():
    """Oracle: `compute_retention_mask`; of each grid step the first frame is shown."""
    axes = viz.plot_keep_mask(FRAMES, MASK, THW, title="q = 0.5")
    for i, ax in enumerate(axes):
        assert np.array_equal(image(ax, 0), FRAMES[2 * i])
        assert np.array_equal(image(ax, 1)[..., 3] == 0, MASK.reshape(THW)[i].numpy())
        assert ax.get_title() == f"step {i}: {int(MASK.reshape(THW)[i].sum())} of 8 kept"
    assert axes[0].figure.get_suptitle() == "q = 0.5: 12 of 24 tokens kept"


def test_dissimilarity_maps_share_a_scale_and_the_first_has_none():
    dissimilarity = compute_dissimilarity(EMBEDS, 3)
    axes = viz.plot_dissimilarity(dissimilarity, THW, title="embeddings")
    assert texts(axes[0]) == ["always\nkept"]
    for i in (1, 2):
        np.testing.assert_array_equal(image(axes[i]).ravel(), dissimilarity[i])
        assert axes[i].images[0].get_clim() == (0, float(dissimilarity[1:].max()))
    assert axes[0].figure.get_suptitle() == "embeddings"


def test_pruned_positions_are_those_of_the_survivors():
    """Oracle: `restrict_positions`; the lower layout is shorter and its clip shrinks to what is kept."""
    full, pruned = viz.plot_pruned_positions(POSITIONS, KEEP, [IMAGE, CLIP], q=0.5)
    want, delta = restrict_positions(POSITIONS, KEEP)
    assert [line.get_ydata().tolist() for line in full.lines] == POSITIONS.tolist()
    assert [line.get_ydata().tolist() for line in pruned.lines] == want.tolist()
    assert [(patch.get_x(), patch.get_width()) for patch in pruned.patches] == [(1.5, 6), (9.5, 12)]
    assert len(full.patches) == 2 + 12
    assert pruned.get_title() == f"kept at q = 0.5: 28 tokens at their original positions, delta {delta}"
    assert full.get_xlim() == pruned.get_xlim()


def test_accuracy_curve_is_in_percent_and_time_relative():
    """Rates of the two may differ; time is relative to the smallest rate, wherever it stands."""
    accuracy = {"motion": {0.0: 1.0, 0.5: 0.75}, "color": {0.0: 0.5, 0.5: 0.25}}
    ax = viz.plot_accuracy_curve(accuracy, {"first token": {0.9: 3.0, 0.0: 4.0}})
    assert [list(line.get_ydata()) for line in ax.lines] == [[100, 75], [50, 25]]
    right = ax.figure.axes[-1]
    assert right is not ax
    assert right.lines[0].get_xydata().tolist() == [[0.9, 0.75], [0.0, 1.0]]
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["motion", "color", "first token (right)"]


def test_positions_are_explored_from_where_the_caller_says():
    """Two frames per second are one second per grid step; frames of four tokens are the nearest to five."""
    pytest.importorskip("anywidget")
    explorer = viz.explore_positions(second_per_grid=0.5, side=5)
    assert (explorer.options["rate"], explorer.options["clip"]) == (4, "4 : 3")
    assert explorer.row(explorer.index)["positions"].shape[0] == 3


def test_the_keep_mask_explorer_needs_no_model():
    """Oracle: `compute_retention_mask` at every rate; of rates that keep the same tokens the smallest is offered."""
    pytest.importorskip("anywidget")
    explorer = viz.explore_keep_mask(FRAMES, EMBEDS, THW, q=0.5)
    assert explorer.options == {"q": 0.5}
    kept = [int(compute_retention_mask(EMBEDS, THW, 1, q / 20).sum()) for q in range(20)]
    rates = [q / 20 for q in range(20) if kept.index(kept[q]) == q]
    assert explorer.states == [(q,) for q in rates] and len(rates) > 5
    for index, (q,) in enumerate(explorer.states):
        row = explorer.row(index)
        assert torch.equal(row["keep"], compute_retention_mask(EMBEDS, THW, 1, q))
        assert row["positions"].shape == (3, row["tokens"]) and row["tokens"] == int(row["keep"].sum())
        explorer.index = index
        assert f"keeps {row['tokens']} of the video's {len(EMBEDS)} tokens" in explorer.describe()
    with pytest.raises(ValueError, match="model: this explorer has no model to ask; use viz.explore_evs"):
        explorer.ask({"again": ("Why?", FRAMES)})


def test_rules_stand_one_above_the_other():
    """Oracle: the masks; each panel says how many of its tokens stay."""
    masks = {"EVS": MASK, "none": torch.ones(24, dtype=torch.bool)}
    axes = viz.plot_keep_masks(FRAMES, masks, THW, ax=new_axes(2, 3))
    assert axes.shape == (2, 3) and [row[0].get_ylabel() for row in axes] == list(masks)
    for row, mask in zip(axes, masks.values(), strict=True):
        assert [ax.get_title() for ax in row] == [f"{n} of 8" for n in mask.view(3, 8).sum(1).tolist()]
        assert all(np.array_equal(image(ax, 1)[..., 3] == 0, m) for ax, m in zip(row, mask.reshape(THW), strict=True))
