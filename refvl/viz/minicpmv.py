"""MiniCPM-V: how an image is sliced, what each query attends to,
and the cost of a video if frames are packed.

plot_slices           the image with its slices, and the overview next to it
plot_query_attention  heat maps over a slice: how much each query attends to each patch
plot_frame_tokens     tokens of a video against its number of frames, one line per model
plot_canvas           the slices of an image, the folds of a slice, and the tokens on MiniCPM-V 4.7's canvas
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from refvl.checks import check_shape
from refvl.pixels.media import load_image
from refvl.pixels.slices import SliceConfig, SlicePlan, plan_slices
from refvl.positions import MediaSpan
from refvl.viz.positions import grid_of_axes
from refvl.viz.style import HIGHLIGHT, SEQUENCE_CMAP, STAGE_COLORS, TOKEN_COLORS, axes_or_new, centered, image_axes

_PREVIEW = 480  # pixels per side, enough for a figure
_HEAT = {"cmap": SEQUENCE_CMAP, "alpha": 0.6, "interpolation": "nearest"}
_NUMBER = {"boxstyle": "circle,pad=0.2", "facecolor": "black", "alpha": 0.55, "linewidth": 0}


def plot_slices(image, config: SliceConfig, *, query_num: int = 64, ax=None) -> np.ndarray:
    """Draw the image with its slices (left), numbered in prompt order, and the overview,
    number 0 (right).

    image: anything `load_image` accepts. query_num: the tokens of the overview and of each slice.
    ax: two Axes, or None. Returns both Axes.
    """
    picture = load_image(image)
    plan = plan_slices(picture.width, picture.height, config)
    left, right = grid_of_axes(ax, 1, 2, (9.6, 3.6))[0]
    _draw_cuts(left, picture, plan)
    width, height = plan.overview
    (h, w), slices = plan.tgt_sizes[0], len(plan.tgt_sizes) - 1
    image_axes(right, f"overview: {width} x {height} px = {w} x {h} patches\n{query_num} tokens")
    right.imshow(preview(picture, picture.size), extent=(0, width, height, 0))
    number_piece(right, width / 2, height / 2, 0)
    right.set_xlabel(f"(1 + {slices}) x {query_num} = {(1 + slices) * query_num} tokens of the image")
    return np.array([left, right])


def _draw_cuts(ax: Axes, image, plan: SlicePlan) -> None:
    """Draw the image at the total size of its slices, with a frame per slice."""
    size, title = f"{image.width} x {image.height} px", "no slices: the overview shows the whole image"
    (columns, rows), (width, height) = plan.grid or (1, 1), plan.cell or image.size
    if plan.grid:
        title = f"{columns} x {rows} slices of {width} x {height} px = "
        title += f"{width // plan.patch_size} x {height // plan.patch_size} patches"
    image_axes(ax, f"{size}\n{title}")
    ax.imshow(preview(image, image.size), extent=(0, columns * width, rows * height, 0))
    for i in range(columns * rows if plan.grid else 0):
        x, y = i % columns * width, i // columns * height
        ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="white", linewidth=1.8))
        number_piece(ax, x + width / 2, y + height / 2, i + 1)
    ax.set(xlim=(0, columns * width), ylim=(rows * height, 0))


def preview(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image to the ratio of `size` (width, height),
    at most `_PREVIEW` pixels per side.
    """
    scale = min(1.0, _PREVIEW / max(size))
    return image.resize([max(1, round(side * scale)) for side in size])


def number_piece(ax: Axes, x: float, y: float, number: int) -> None:
    """Write the number of a slice or crop in a dark circle around (x, y)."""
    centered(ax, x, y, str(number), size=11, color="white", weight="bold", bbox=_NUMBER)


def plot_query_attention(
    image,
    weights_QL: Tensor,
    tgt_size: tuple[int, int],
    *,
    queries: Sequence[int] | None = None,
    columns: int | None = None,
    title: str = "",
    ax=None,
) -> np.ndarray:
    """Draw one heat map per query over its slice: a brighter patch gets more of the query's
    attention.

    image: the slice, anything `load_image` accepts, of any size. weights_QL: (Q, L), a row per
    query, with L = h * w patches in row-major order. All maps share a scale from 0 to the largest
    weight shown. queries: the queries to show, by default all. columns: maps per row,
    by default all. ax: an array of as many Axes as the maps need, or None. Returns that array.
    Raises ValueError for weights of any other shape.
    """
    (h, w), image = tgt_size, load_image(image)
    check_shape(weights_QL, ("queries", h * w), "weights_QL")
    queries = list(range(len(weights_QL)) if queries is None else queries)
    columns = columns or len(queries)
    rows = -(-len(queries) // columns)
    width, height = image.size
    axes = grid_of_axes(ax, rows, columns, (1.9 * columns + 0.9, 1.9 * rows * height / width + 0.3 * rows + 0.5))
    maps = weights_QL.detach().float().cpu()[queries].reshape(-1, h, w).numpy()
    for panel, query, heat in zip(axes.flat, queries, maps, strict=False):
        image_axes(panel, f"query {query}").imshow(image, extent=(0, w, h, 0))
        drawn = panel.imshow(heat, extent=(0, w, h, 0), vmin=0, vmax=float(maps.max()), **_HEAT)
    for panel in axes.flat[len(queries) :]:
        panel.set_visible(False)
    figure = axes.flat[0].figure
    if ax is None:
        figure.colorbar(drawn, ax=axes, label="share of the attention", shrink=0.8)
        figure.suptitle(title)
    return axes


def plot_frame_tokens(
    frames: Sequence[int], tokens: Mapping[str, Sequence[int]], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Plot a video's tokens against the number of sampled frames, one line per model,
    on log-log axes.
    """
    ax = axes_or_new(ax, figsize=(6.2, 3.8))
    for place, ((name, counts), color) in enumerate(zip(tokens.items(), STAGE_COLORS, strict=False)):
        width = max(6 - 2 * place, 1.5)  # if two lines coincide, the thinner line is on top
        ax.plot(frames, counts, "o-", ms=width + 2, lw=width, color=color, label=name)
    ax.set(xscale="log", yscale="log", xlabel="frames", ylabel="tokens", title=title)
    ax.set_xticks(frames, [str(n) for n in frames])
    ax.minorticks_off()
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8)
    return ax


def plot_canvas(image, config: SliceConfig, positions_3L: Tensor, spans: Sequence[MediaSpan], *, ax=None) -> np.ndarray:
    """Plot three panels: the slices of an image, the two folds of a slice, and the canvas.

    image: anything `load_image` accepts, cut by `config`. positions_3L: the positions of its
    prompt, (3, L). spans: the spans of its overview and slices. Squares mark separators, and
    circles mark the overview. ax: three Axes, or None. Returns the three Axes. Raises
    ValueError if the image has no slices.
    """
    picture = load_image(image)
    plan = plan_slices(picture.width, picture.height, config)
    if plan.grid is None:
        raise ValueError(f"image: expected an image that is cut into slices, got {picture.width} x {picture.height} px")
    left, middle, right = grid_of_axes(ax, 1, 3, (10.5, 3.6))[0]
    (columns, rows), (h, w) = plan.grid, plan.tgt_sizes[-1]
    _draw_cuts(left, picture, plan)
    _draw_folds(middle, h, w)
    _draw_canvas(right, picture, positions_3L, spans, columns, rows)
    for panel in (left, middle, right):
        panel.title.set_size(9)
    return np.array([left, middle, right])


def _draw_folds(ax: Axes, h: int, w: int) -> None:
    """Draw a slice of h x w patches, coloured by 2 x 2 window,
    then after the first and after the second fold.
    """
    image_axes(ax, f"each slice: {h} x {w} patches,\nfolded twice, {h // 4 * (w // 4)} token{'s' * (h * w > 16)}")
    left = 0.0
    for side, said in ((1, "windows of 2 x 2"), (2, "folded"), (4, "merged")):
        rows, columns = h // side, w // side
        for i in range(rows * columns):
            row, column = divmod(i, columns)
            window = (row * side // 2) + (column * side // 2) * (h // 2)
            color = STAGE_COLORS[window % 4] if side < 4 else TOKEN_COLORS["image"]
            y, x = (h - rows) / 2 + row, left + column
            ax.add_patch(Rectangle((x, y), 0.94, 0.94, facecolor=color, linewidth=0))
        ax.text(left + columns / 2, h + 0.3, said, ha="center", va="top", size=8)
        left += columns + 2.4
    ax.set(xlim=(-1, left - 1.4), ylim=(h + 1.2, -0.4))
    ax.axis("off")


def _draw_canvas(ax: Axes, picture, positions_3L: Tensor, spans: Sequence[MediaSpan], columns: int, rows: int) -> None:
    """Draw each part of the image at the position of its token."""
    first, last = spans[0].offset - 1, spans[-1].offset + spans[-1].num_tokens
    h, w = positions_3L[1].tolist(), positions_3L[2].tolist()
    width, height = picture.width / columns, picture.height / rows
    media = {i for span in spans for i in range(span.offset, span.offset + span.num_tokens)}
    for k, span in enumerate(spans[1:]):
        for i in range(span.num_tokens):
            row, column = divmod(i, span.w)
            x, y = (k % columns + column / span.w) * width, (k // columns + row / span.h) * height
            part = picture.crop((round(x), round(y), round(x + width / span.w), round(y + height / span.h)))
            at_h, at_w = h[span.offset + i], w[span.offset + i]
            ax.imshow(part, extent=(at_w - 0.5, at_w + 0.5, at_h + 0.5, at_h - 0.5))
            corner, color = (at_w - 0.5, at_h - 0.5), TOKEN_COLORS["image"]
            ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=color, linewidth=1.5))
            if i == 0:
                ax.text(at_w - 0.4, at_h - 0.4, str(k + 1), size=8, va="top", bbox=_NUMBER, color="white")
    overview = range(spans[0].offset, spans[0].offset + spans[0].num_tokens)
    marks = [i for i in range(first, last + 1) if i not in media]
    ax.plot([w[i] for i in marks], [h[i] for i in marks], "s", ms=4, color=TOKEN_COLORS["text"], label="separators")
    x, y = [w[i] for i in overview], [h[i] for i in overview]
    ax.plot(x, y, "o", ms=13, mfc="none", mec=HIGHLIGHT, mew=2, label="overview", zorder=3)
    ax.set(aspect="equal", title="positions on the canvas", xlabel="w", ylabel="h")
    ax.set_xlim(min(w[first:]) - 1, max(w[first : last + 1]) + 1)
    ax.set_ylim(max(h[first : last + 1]) + 1, min(h[first:]) - 1)
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
