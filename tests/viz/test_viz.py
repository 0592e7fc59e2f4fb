"""Figures of patches, windows and timings. Oracle: the functions whose results they show."""

import io

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from PIL import Image

from refvl import viz
from refvl.pixels.by_hand import patchify_image
from refvl.pixels.patches import PatchConfig, plan_grid
from refvl.positions import get_window_index, invert_permutation, merge_block_coordinates
from refvl.study.report import Trace

CONFIG = PatchConfig()
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (84, 140, 3), dtype=np.uint8))  # grid (1, 6, 10)
GRID = (1, 6, 10)
WIDE = Image.new("RGB", (280, 196), "teal")  # grid (1, 14, 20): windows of 112 px leave ragged edges
WINDOWS = get_window_index([(1, 14, 20)])


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def rectangles(ax) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def test_patch_numbers_stand_in_their_patches(ax):
    """Oracle: `merge_block_coordinates`, and the grid lines between 6 x 10 patches and 3 x 5 blocks."""
    viz.plot_patches(PICTURE, CONFIG, highlight=(0, 7), ax=ax)
    assert texts(ax) == [str(i) for i in range(60)]
    places = [(text.get_position()[1] // 14, text.get_position()[0] // 14) for text in ax.texts]
    assert places == [tuple(place) for place in merge_block_coordinates([GRID]).tolist()]
    lines = [len(c.get_segments()) for c in ax.collections if isinstance(c, LineCollection)]
    assert lines == [5 + 9, 2 + 4]
    assert [patch.get_xy() for patch in rectangles(ax)] == [(0, 0), (2 * 28, 1 * 28)]
    assert "140 x 84 px" in ax.get_title() and "60 patches, 15 merged tokens" in ax.get_title()


@pytest.mark.parametrize("count", [4, 100])
def test_patch_rows_show_the_values_and_name_the_patches(ax, count):
    rows, grid = patchify_image(PICTURE, CONFIG)
    viz.plot_patch_rows(rows, grid, CONFIG, count=count, ax=ax)
    shown = min(count, 60)
    np.testing.assert_array_equal(ax.images[0].get_array(), rows[:shown])
    assert [label.get_text() for label in ax.get_yticklabels()][:3] == [
        "row 0: patch (0, 0)", "row 1: patch (0, 1)", "row 2: patch (1, 0)",
    ]  # fmt: skip
    thumbnails = [artist.offsetbox.get_data() for artist in ax.artists]
    assert len(thumbnails) == shown
    np.testing.assert_array_equal(thumbnails[2], np.asarray(PICTURE)[14:28, :14])  # the picture is not resized


def test_windows_are_framed_and_numbered_in_order(ax):
    """280 x 196 px hold 10 x 7 merged tokens, windows of 4 x 4 tokens: 3 columns, 2 rows."""
    viz.plot_windows(WIDE, CONFIG, ax=ax)
    assert texts(ax) == [str(i) for i in range(6)]
    frames = [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in rectangles(ax)]
    assert frames[:3] == [(0, 0, 112, 112), (112, 0, 112, 112), (224, 0, 56, 112)]
    assert frames[5] == (224, 112, 56, 84)
    assert "6 windows of at most 112 px" in ax.get_xlabel()


def test_order_numbers_of_tokens_are_those_of_get_window_index(ax):
    viz.plot_windows(WIDE, CONFIG, numbers="tokens", ax=ax)
    token_at = [int(t.get_position()[1] // 28) * 10 + int(t.get_position()[0] // 28) for t in ax.texts]
    assert texts(ax) == [str(place) for place in range(70)]
    assert token_at == WINDOWS[0].tolist()


def test_permutation_arrows_lead_from_token_to_place(ax):
    index, cu_seqlens = WINDOWS
    viz.plot_window_permutation(index, cu_seqlens, ax=ax)
    [arrows] = [c for c in ax.collections if len(c.get_segments()) == 70]
    ends = [(int(start[0]), int(stop[0])) for start, stop in arrows.get_segments()]
    assert [place for _, place in sorted(ends)] == invert_permutation(index).tolist()
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(n) for n in cu_seqlens.tolist()]
    assert ax.get_xticks().tolist() == [n / 4 - 0.5 for n in cu_seqlens.tolist()]


def is_grey(ax) -> np.ndarray:
    """(M, M) bool: where the drawn mask says "does not see"."""
    return (ax.images[0].get_array() == to_rgb(viz.style.PRUNED)).all(-1)


def test_attention_mask_in_window_order_is_block_diagonal_and_permutes(ax):
    """The same pairs in both orders; oracle: the permuted block-diagonal matrix."""
    index, cu_seqlens = WINDOWS
    lengths = (cu_seqlens // 4).diff().tolist()
    wanted = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    viz.plot_attention_segments(cu_seqlens // 4, ax=ax)
    assert (is_grey(ax) == ~wanted.numpy()).all()
    assert f"{len(lengths)} segments, {int(wanted.sum()):,} of 4,900 pairs" in ax.get_title()
    other = viz.plot_attention_segments(cu_seqlens // 4, index)
    assert (is_grey(other)[np.ix_(index, index)] == ~wanted.numpy()).all()
    assert other.get_title() == ax.get_title()
    plt.close(other.figure)


def test_stage_bars_are_milliseconds_with_shapes(ax):
    trace = Trace(seconds={"decode media": 0.002, "encode": 0.5, "decode tokens": 0.25}, token_ids=[1, 2, 3])
    trace.embeds = [torch.zeros(9, 128)]
    viz.plot_stage_timings(trace, ax=ax)
    assert [bar.get_width() for bar in rectangles(ax)] == [2, 500, 250]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["decode media", "encode", "decode tokens"]
    shapes = [made for _, made, _ in trace.rows()]
    assert shapes[1] == "(9, 128)"
    assert texts(ax) == [f"{ms} ms   {made}" for ms, made in zip(("2.0", "500.0", "250.0"), shapes, strict=True)]
    assert "752 ms in all, 502 ms to the first token" in ax.get_title()


def test_resizing_is_explored_under_every_budget():
    """Oracle: the grids of `plan_grid`, which grow with the budget. Windows, which come later, are not shown."""
    explorer = viz.explore_resize(WIDE, CONFIG, max_tokens=128)
    grids = {explorer.row(i)["grid"] for i in range(len(explorer.states))}
    budgets = [viz.patches.with_token_budget(CONFIG, tokens) for tokens in range(4, 129)]
    assert grids == {plan_grid(196, 280, config)[1:] for config in budgets}
    assert [control["name"] for control in explorer.controls] == ["photo", "budget"]
    assert "window" not in explorer.describe() and len(explorer.figure().axes) == 1


@pytest.mark.thorough
def test_inline_figures_have_the_lighter_format_and_twice_the_pixels_that_they_take():
    """A photograph as JPEG, a drawing as PNG; where that would be too heavy, as many pixels. Oracle: Pillow."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8))
    photo = viz.plot_patches(noise, CONFIG, numbers=False).figure
    drawing = viz.plot_attention_segments(torch.tensor([0, 4, 9])).figure
    for figure, kind in ((photo, "image/jpeg"), (drawing, "image/png")):
        for heavy, times in ((10**9, 2), (0, 1)):
            data, metadata = viz.style.as_output(figure, heavy=heavy)
            picture = Image.open(io.BytesIO(data[kind]))
            assert picture.get_format_mimetype() == kind and list(data) == list(metadata) == [kind]
            assert picture.width // times == metadata[kind]["width"] > 100
    plt.close("all")


def test_a_figure_is_described_by_its_titles_axes_and_legends():
    """Each said once, in order; a label says it better; no more than a few lines."""
    figure, (left, right, bare) = plt.subplots(1, 3)
    figure.suptitle("two\nfamilies")
    left.plot([1, 2], label="GLM")
    left.legend()
    left.set(title="an image", xlabel="side, px", ylabel="tokens")
    figure.colorbar(right.imshow([[0, 1]]), label="error")
    right.set_title("where", loc="left")
    bare.set_title("where", loc="left")
    said = "two families; an image: tokens over side, px (GLM); where; colours: error"
    assert viz.style.describe_figure(figure) == said
    left.set_title("long " * 100)
    assert len(viz.style.describe_figure(figure)) <= 320
    figure.set_label("GLM makes fewer tokens.")
    assert viz.style.describe_figure(figure) == "GLM makes fewer tokens."
    assert viz.style.describe_figure(plt.figure()) == ""
    plt.close("all")


@pytest.mark.thorough
def test_a_cell_gives_its_figures_alt_text():
    """As metadata of the output, in a real kernel, for a drawing and a photograph."""
    nbclient = pytest.importorskip("nbclient")
    from nbformat.v4 import new_code_cell, new_notebook

    setup = "import matplotlib.pyplot as plt, numpy as np\nfrom refvl import viz\nviz.style.notebook_figures()"
    noise = "np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)"
    drawing, photo = "plt.plot([1, 2])\nplt.title('A line')", f"plt.imshow({noise})\nplt.title('A photo');"
    notebook = new_notebook(cells=[new_code_cell(source) for source in (setup, drawing, photo)])
    nbclient.NotebookClient(notebook, timeout=300).execute()
    shown = [output.metadata for cell in notebook.cells for output in cell.outputs if "metadata" in output]
    [drawn], [taken] = (metadata.items() for metadata in shown if metadata)
    assert (drawn[0], drawn[1]["alt"]) == ("image/png", "A line")
    assert (taken[0], taken[1]["alt"]) == ("image/jpeg", "A photo")
