"""Figures of images, videos and prompts. Oracle: the functions of refvl whose results they show."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from closeness import assert_agree
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex, to_rgb
from PIL import Image
from reading import corners, image, lines, texts, ticks

from refvl import viz
from refvl.pixels.by_hand import patchify_image
from refvl.pixels.crops import CropConfig, count_prompt_tokens, plan_crops
from refvl.pixels.patches import PatchConfig, plan_grid
from refvl.pixels.slices import SliceConfig, plan_slices
from refvl.positions import (
    CanvasMarks,
    MediaSpan,
    canvas_positions,
    compute_retention_mask,
    get_mrope_input_positions,
    get_window_index,
    interpolate_position_table,
    invert_permutation,
    merge_block_coordinates,
    restrict_positions,
    vision_rotary_cos_sin,
)
from refvl.positions.timestamps import VARIANTS, sample_video_frames
from refvl.study.boxes import from_picture, to_picture
from refvl.viz.step3_vl import RATIOS
from refvl.viz.style import HIGHLIGHT, PRUNED, TOKEN_COLORS

CONFIG = PatchConfig()
NOISE = np.random.default_rng(0).integers(0, 255, (84, 140, 3), dtype=np.uint8)
PICTURE, GRID = Image.fromarray(NOISE), (1, 6, 10)
WIDE = Image.new("RGB", (280, 196), "teal")  # grid (1, 14, 20): windows of 112 px leave ragged edges
INDEX, BORDERS = get_window_index([(1, 14, 20)])
CROPS = CropConfig(image_size=84, crop_size=56, max_side=336)
THW = (3, 2, 4)  # merged
IMAGE, CLIP = MediaSpan(2, 1, 2, 3), MediaSpan(10, *THW, t_factor=2.0)
POSITIONS, _ = get_mrope_input_positions(40, [IMAGE, CLIP])
FRAMES = np.random.default_rng(0).integers(0, 255, (6, 56, 112, 3), dtype=np.uint8)
EMBEDS = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
MASK = compute_retention_mask(EMBEDS, THW, 1, 0.5)
KEEP = torch.cat([torch.ones(10), MASK, torch.ones(6)]).bool()


def boxes(ax) -> list[tuple]:
    return [(patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()) for patch in ax.patches]


def test_patch_numbers_stand_in_their_patches(ax):
    """The grid lines are those between 6 x 10 patches and 3 x 5 blocks."""
    viz.plot_patches(PICTURE, CONFIG, highlight=(0, 7), ax=ax)
    places = [[y // 14, x // 14] for x, y in (text.get_position() for text in ax.texts)]
    assert texts(ax) == [str(i) for i in range(60)]
    assert places == merge_block_coordinates([GRID]).tolist()
    between = [c for c in ax.collections if isinstance(c, LineCollection)]
    assert [len(c.get_segments()) for c in between] == [5 + 9, 2 + 4]
    assert [patch.get_xy() for patch in ax.patches] == [(0, 0), (2 * 28, 1 * 28)]
    assert "60 patches, 15 merged tokens" in ax.get_title()


@pytest.mark.parametrize("count", [4, 100])
def test_patch_rows_show_the_values_and_name_the_patches(ax, count):
    rows, grid = patchify_image(PICTURE, CONFIG)
    viz.plot_patch_rows(rows, grid, CONFIG, count=count, ax=ax)
    np.testing.assert_array_equal(image(ax), rows[: min(count, 60)])
    assert ticks(ax)[:3] == ["row 0: patch (0, 0)", "row 1: patch (0, 1)", "row 2: patch (1, 0)"]
    thumbnails = [artist.offsetbox.get_data() for artist in ax.artists]
    assert len(thumbnails) == min(count, 60)
    np.testing.assert_array_equal(thumbnails[2], NOISE[14:28, :14])  # the image is not resized


def test_windows_are_framed_and_their_tokens_numbered_in_order(ax):
    """280 x 196 px hold 10 x 7 merged tokens, windows of 4 x 4 tokens: 3 columns, 2 rows."""
    viz.plot_windows(WIDE, CONFIG, ax=ax)
    assert texts(ax) == [str(i) for i in range(6)]
    assert boxes(ax)[:3] == [(0, 0, 112, 112), (112, 0, 112, 112), (224, 0, 56, 112)]
    tokens = viz.plot_windows(WIDE, CONFIG, numbers="tokens").texts
    assert [text.get_text() for text in tokens] == [str(place) for place in range(70)]
    places = [text.get_position() for text in tokens]
    assert [int(y // 28) * 10 + int(x // 28) for x, y in places] == INDEX.tolist()


def test_permutation_arrows_lead_from_token_to_place(ax):
    viz.plot_window_permutation(INDEX, BORDERS, ax=ax)
    [arrows] = [c for c in ax.collections if len(c.get_segments()) == 70]
    ends = [(int(start[0]), int(stop[0])) for start, stop in arrows.get_segments()]
    assert [place for _, place in sorted(ends)] == invert_permutation(INDEX).tolist()
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(n) for n in BORDERS.tolist()]


def test_attention_mask_in_window_order_is_block_diagonal_and_permutes(ax):
    """Oracle: the block-diagonal matrix, and its permutation. Pairs that do not attend are grey."""
    lengths = (BORDERS // 4).diff().tolist()
    wanted = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool().numpy()
    viz.plot_attention_segments(BORDERS // 4, ax=ax)
    other = viz.plot_attention_segments(BORDERS // 4, INDEX)
    assert ((image(ax) == to_rgb(PRUNED)).all(-1) == ~wanted).all()
    permuted = image(other)[np.ix_(INDEX, INDEX)]
    assert ((permuted == to_rgb(PRUNED)).all(-1) == ~wanted).all()
    assert f"{len(lengths)} segments, {wanted.sum():,} of 4,900 pairs" in ax.get_title()


def test_resizing_is_explored_under_every_budget():
    """Oracle: the grids of `plan_grid`, which grow with the budget. Windows are not shown."""
    explorer = viz.explore_resize(WIDE, CONFIG, max_tokens=128)
    budgets = [viz.patches.with_token_budget(CONFIG, tokens) for tokens in range(4, 129)]
    grids = {explorer.row(i)["grid"] for i in range(len(explorer.states))}
    assert grids == {plan_grid(196, 280, config)[1:] for config in budgets}
    assert "window" not in explorer.describe()


def test_a_cell_is_as_dark_as_it_is_ignored():
    """The largest cell keeps its colours, and each share is written into its cell."""
    weights = torch.tensor([[0.5, 0.25, 0.0], [0.125, 0.125, 0.0]])
    ax = viz.plot_attention(PICTURE, weights, patch=(0, 2), segments_HW=[[0, 0, 1], [0, 0, 1]], title="a title")
    veil = image(ax, 1)
    assert np.allclose(veil[..., 3] / veil[..., 3].max(), 1 - weights / 0.5) and not veil[..., :3].any()
    assert texts(ax) == ["50%", "25%", "0%", "12%", "12%", "0%"]
    assert ax.patches[0].get_xy() == (2, 0) and len(ax.collections[0].get_segments()) == 2


def test_boxes_and_points_lie_where_they_are(ax):
    given = [[10, 20, 30, 60], [50, 40, 20, 10]]
    drawn = viz.plot_boxes(PICTURE, given, ["a", "b"], points=[[5, 6]], title="two", ax=ax)
    assert drawn is ax and [corners(patch) for patch in ax.patches] == given
    assert texts(ax) == ["a", "b"] and ax.texts[1].xy == (20, 10)
    assert lines(ax) == [[[5, 6]]] and image(ax).shape == (84, 140, 3)


@pytest.mark.parametrize(("family", "right"), [("Qwen2.5-VL", 2), ("Qwen3-VL", 0)])
def test_readings_show_how_far_a_wrong_convention_is_off(family, right):
    """Oracle: `to_picture` for the correct one; for the others its own sum."""
    box, sizes = (700, 1300, 950, 1700), {"picture": (1080, 1920), "resized": (728, 1316)}
    ax = viz.plot_box_readings(box, family=family, **sizes)
    said = from_picture([box], family=family, **sizes).round()
    assert ax.get_title() == f"{family} writes {said[0].int().tolist()}"
    _, thing, *readings = ax.patches
    assert corners(thing) == [*box]
    [want] = to_picture(said, family=family, **sizes).tolist()
    assert corners(readings[right]) == pytest.approx(want)
    picture = torch.tensor(sizes["picture"] * 2)
    for space, patch in zip(((1000, 1000), *sizes.values()), readings, strict=True):
        want = said[0] * picture / torch.tensor(space * 2)
        off = (want - torch.tensor(box)).view(2, 2).mean(0).norm()
        assert corners(patch) == pytest.approx(want.tolist(), rel=1e-6)  # float32
        assert patch.get_label().endswith(f": {off:.0f} px off")


def test_table_panels_show_what_each_patch_reads():
    """Oracle: the same table read in reading order."""
    table = torch.randn(36, 5, generator=torch.Generator().manual_seed(0))
    [[dots, *panels]] = viz.plot_position_table(table, [(PICTURE, (4, 6))], channel=3)
    for panel, mode in zip(panels, ("bicubic", "nearest"), strict=True):
        sizes = {"spatial_merge_size": 1, "mode": mode}
        want = interpolate_position_table(table[:, [3]], [(1, 4, 6)], **sizes)
        shown = torch.tensor(image(panel)).float()
        assert_agree(shown, want.view(4, 6), 2, scale=8 * 6)  # as in test_tables
    centres = dots.collections[0].get_offsets()
    assert centres[0].tolist() == [140 / 12, 84 / 8] and len(centres) == 24


@pytest.mark.parametrize(("duration", "fps"), [(0.1, 30), (2.6, 25), (400, 24)])
def test_timelines_show_the_frames_and_seconds_of_the_sampler(duration, fps):
    ax = viz.plot_timelines(duration, fps)
    total = max(1, round(duration * fps))
    written, drawn = iter(texts(ax)), iter(ax.collections)
    for variant in VARIANTS:
        sample = sample_video_frames(variant, fps=fps, total_num_frames=total, duration=duration)
        times = [*next(drawn).get_positions(), *next(drawn).get_positions()]
        np.testing.assert_array_equal(sorted(times), sorted(i / fps for i in sample.indices))
        shown = sample.timestamps[:: -(-len(sample.timestamps) // 16)]
        assert [next(written) for _ in shown] == [str(second) for second in shown]
        assert next(written).endswith(f"{len(sample.timestamps)} steps")
    assert f"{total:,} frames" in ticks(ax)


def test_clip_prompt_has_a_box_per_token_and_fades_what_is_pruned():
    """By hand: two steps of two tokens, `[ v v ] 0` and `[ v v ] 1 0`, the last step pruned."""
    ids = [9, 8, 1, 3, 3, 2, 10, 1, 3, 3, 2, 11, 10, 7, 9]
    spans = [MediaSpan(3, 1, 1, 2), MediaSpan(8, 1, 1, 2)]
    keep = torch.arange(len(ids)) // 2 != 4
    trace = SimpleNamespace(full_ids=torch.tensor(ids), keep=keep, spans=spans)
    processor = SimpleNamespace(
        config=SimpleNamespace(video_end_token_id=7), tokenizer=SimpleNamespace(decode=lambda found: str(found[0] - 10))
    )
    ax = viz.plot_clip_prompt(trace, processor, title="q = 0.5")
    assert texts(ax) == ["[", "", "", "]", "0", "[", "", "", "]", "1", "0"]
    colors = [to_hex(box.get_facecolor()) for box in ax.patches]
    text, video = TOKEN_COLORS["text"], TOKEN_COLORS["video"]
    assert colors[:5] == [text, video, video, text, HIGHLIGHT]
    assert colors[5:] == [text, PRUNED, PRUNED, text, HIGHLIGHT, HIGHLIGHT]
    assert ax.get_title() == "q = 0.5: 2 of 4 video tokens kept"


def test_slices_are_drawn_where_the_picture_is_cut():
    """Slices are numbered row by row after the overview, which is 0."""
    config = SliceConfig(scale_resolution=56, max_slice_nums=6)
    left, right = viz.plot_slices(PICTURE.resize((190, 80)), config, query_num=9)
    width, height = plan_slices(190, 80, config).cell
    assert boxes(left) == [(c * width, r * height, width, height) for r in (0, 1) for c in (0, 1, 2)]
    assert texts(left) == ["1", "2", "3", "4", "5", "6"] and texts(right) == ["0"]
    assert left.get_title().endswith("3 x 2 slices of 70 x 42 px = 5 x 3 patches")
    assert right.get_xlabel() == "(1 + 6) x 9 = 63 tokens of the image"


def test_heat_maps_are_the_rows_of_the_weights_on_one_scale():
    weights = torch.rand(5, 6)
    axes = viz.plot_query_attention(PICTURE, weights, (2, 3), columns=2, title="all")
    assert axes.shape == (3, 2) and not axes[2, 1].get_visible()
    for query, panel in enumerate(axes.flat[:5]):
        np.testing.assert_array_equal(image(panel, 1), weights[query].view(2, 3))
        assert panel.images[1].get_clim() == (0, float(weights.max())) and panel.get_title() == f"query {query}"


def test_the_canvas_shows_every_token_and_mark_at_its_position():
    """A prompt of 3 x 2 slices of 2 x 3 tokens. Oracle: the positions given, and pixels of the image."""
    config = SliceConfig(scale_resolution=140, patch_size=14, multiple=4, max_slice_nums=6)
    picture = PICTURE.resize((420, 280))
    ids, spans = [], []
    for k, (h, w) in enumerate(plan_slices(420, 280, config).tgt_sizes):
        ids.append(3 if k else 1)
        spans.append(MediaSpan(len(ids), 1, h // 4, w // 4))
        ids += [0] * spans[-1].num_tokens
        ids.append(4 if k else 2)
        ids += [5] * (k == 3)
    positions = canvas_positions(torch.tensor(ids), spans, CanvasMarks(1, 2, 3, 4, 5))
    _, _, canvas = viz.plot_canvas(picture, config, positions, spans)
    of_slices = torch.cat([s.offset + torch.arange(s.num_tokens) for s in spans[1:]])
    places = positions[[2, 1]][:, of_slices].T.tolist()
    centres = [[x - 0.5, x + 0.5, y + 0.5, y - 0.5] for x, y in places]
    assert [tile.get_extent() for tile in canvas.images] == centres
    high, wide = 280 // (2 * spans[1].h), 420 // (3 * spans[1].w)
    for (x, y), tile in zip(places, canvas.images, strict=True):
        box = (x * wide, y * high, x * wide + wide, y * high + high)
        np.testing.assert_array_equal(tile.get_array(), picture.crop(box))
    marks, overview = lines(canvas)
    assert overview == positions[[2, 1]][:, 1 : 1 + spans[0].num_tokens].T.tolist()
    assert marks == [positions[[2, 1], i].tolist() for i, id_ in enumerate(ids) if id_]
    with pytest.raises(ValueError, match=r"^image: expected an image that is cut into slices, got 84 x"):
        viz.plot_canvas(picture.resize((84, 84)), config, positions, spans)


def test_crops_are_drawn_where_the_picture_is_cut():
    """Oracle: `plan_crops`; numbers in reading order, a mark after the first row."""
    picture = PICTURE.resize((160, 110))
    left, right = viz.plot_crops(picture, CROPS, crop_tokens=1, image_tokens=4)
    assert [tuple(corners(window)) for window in left.patches] == list(plan_crops(160, 110, CROPS).boxes)
    assert texts(left) == ["0", "1", "2", "3", "4", "5"] and lines(left) == [[[168, 28]]]
    assert right.get_xlabel() == "6 x (1 + 2) + 1 newline + (4 + 2) = 25 tokens in the prompt"


def test_tokens_by_size_are_those_of_the_plans(ax):
    tokens = {"crop_tokens": CROPS.crop_tokens, "image_tokens": CROPS.image_tokens}
    viz.plot_crop_tokens(CROPS, ax=ax)
    for line, (width, height) in zip(ax.lines, RATIOS, strict=False):
        for side, count in line.get_xydata()[::40]:
            layout = plan_crops(int(side), max(1, int(side) * height // width), CROPS).layout
            assert count == count_prompt_tokens(layout, **tokens)


def test_rotary_maps_turn_with_rows_above_and_columns_below():
    """Oracle: `vision_rotary_cos_sin` without merge blocks, which is in reading order."""
    axes = viz.plot_rotary((4, 6), head_dim=12)
    cos, _ = vision_rotary_cos_sin([(1, 4, 6)], head_dim=12, spatial_merge_size=1)
    for ax, want in zip(axes.flat, cos.T.reshape(6, 4, 6), strict=True):
        assert_agree(torch.tensor(image(ax)).float(), want, 4)


def test_lines_and_cells_are_the_positions():
    """The shading covers exactly the media's tokens."""
    ax = viz.plot_positions(POSITIONS, [IMAGE, CLIP])
    assert [line.get_ydata().tolist() for line in ax.lines] == POSITIONS.tolist()
    assert [(patch.get_x(), patch.get_width()) for patch in ax.patches] == [(1.5, 6), (9.5, 24)]
    cells = [[int(text) for text in texts(panel)] for panel in viz.plot_position_grid(POSITIONS, CLIP).flat]
    assert cells == POSITIONS[:, 10:34].reshape(9, 8).tolist()


def test_keep_masks_cover_what_is_pruned():
    """The first frame of each grid step is shown. Several rules stand one above the other."""
    axes = viz.plot_keep_mask(FRAMES, MASK, THW, title="q = 0.5")
    several = viz.plot_keep_masks(FRAMES, {"EVS": MASK, "none": MASK | True}, THW)
    assert [row[0].get_ylabel() for row in several] == ["EVS", "none"]
    for i, mask in enumerate(MASK.reshape(THW)):
        assert np.array_equal(image(axes[i], 0), FRAMES[2 * i])
        assert np.array_equal(image(axes[i], 1)[..., 3] == 0, mask)
        assert np.array_equal(image(several[0][i], 1), image(axes[i], 1))
        assert axes[i].get_title() == f"step {i}: {mask.sum()} of 8 kept"
    assert axes[0].figure.get_suptitle() == "q = 0.5: 12 of 24 tokens kept"


def test_pruned_positions_are_those_of_the_survivors():
    """Oracle: `restrict_positions`; the lower layout is shorter and its video shrinks to what is kept."""
    full, pruned = viz.plot_pruned_positions(POSITIONS, KEEP, [IMAGE, CLIP], q=0.5)
    want, delta = restrict_positions(POSITIONS, KEEP)
    assert [line.get_ydata().tolist() for line in full.lines] == POSITIONS.tolist()
    assert [line.get_ydata().tolist() for line in pruned.lines] == want.tolist()
    assert [(box.get_x(), box.get_width()) for box in pruned.patches] == [(1.5, 6), (9.5, 12)]
    assert pruned.get_title().endswith(f"28 tokens at their original positions, delta {delta}")


def test_the_keep_mask_explorer_needs_no_model():
    """Of rates that keep the same tokens the smallest is offered. Oracle: `compute_retention_mask`."""
    explorer = viz.explore_keep_mask(FRAMES, EMBEDS, THW, q=0.5)
    masks = [compute_retention_mask(EMBEDS, THW, 1, q / 20) for q in range(20)]
    kept = [int(mask.sum()) for mask in masks]
    assert explorer.states == [(q / 20,) for q in range(20) if kept.index(kept[q]) == q]
    for index, (q,) in enumerate(explorer.states):
        assert torch.equal(explorer.row(index)["keep"], masks[round(q * 20)])
    with pytest.raises(ValueError, match="model: this explorer has no model to ask"):
        explorer.ask({"again": ("Why?", FRAMES)})
