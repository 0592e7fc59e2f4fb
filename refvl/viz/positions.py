"""Positions of tokens: the 2-D rotary angles of the tower, and the three axes of the prompt.

plot_rotary         cos of every rotary pair over the patches of an image
plot_positions      t, h, w along the prompt, with shaded media
plot_position_grid  t, h, w of an item's tokens, frame by frame
plot_mrope_axes     which axis rotates which rotary pair
plot_place_answers  which location the model names for each true location
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from refvl.checks import check_shape
from refvl.positions import MediaSpan, merge_block_coordinates, vision_rotary_cos_sin
from refvl.viz.style import AXIS_COLORS, TOKEN_COLORS, axes_or_new, centered, headed

_NAMES = {"t": "time", "h": "height", "w": "width"}
_LINE_WIDTHS = {"t": 5.5, "h": 3.2, "w": 1.5}  # if the axes agree, the thinner line is on top


def grid_of_axes(ax, rows: int, columns: int, figsize: tuple[float, float], label: str = "") -> np.ndarray:
    """Return (rows, columns) Axes: those given as `ax` (one Axes, or an array of as many),
    or those of a new figure.

    label: a description of the new figure, as alt text in place of the titles of many
    panels.
    """
    if ax is None:
        figure, axes = plt.subplots(rows, columns, figsize=figsize, layout="constrained", squeeze=False)
        figure.set_label(label)
        return axes
    given = np.asarray(ax, dtype=object)
    if given.size != rows * columns:
        raise ValueError(f"ax: expected {rows} x {columns} axes, got {given.size}")
    return given.reshape(rows, columns)


def strip_of_axes(ax, count: int, columns: int, size: tuple[float, float], *, margin: float = 0.0) -> np.ndarray:
    """Return `count` Axes in reading order: the given ones, or new ones, at most `columns` per row.

    size: the (width, height) of each new Axes in inches. margin: inches added to the figure's height.
    """
    if ax is not None:
        return grid_of_axes(ax, 1, count, (1, 1))[0]
    rows, columns = -(-count // columns), min(columns, count)
    axes = grid_of_axes(None, rows, columns, (columns * size[0], rows * size[1] + margin)).flatten()
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def axis_cmap(axis: str) -> LinearSegmentedColormap:
    """Return a colour map from white to the colour of one position axis: "t", "h" or "w"."""
    return LinearSegmentedColormap.from_list(axis, ["#ffffff", AXIS_COLORS[axis]])


def plot_rotary(
    grid_hw: tuple[int, int], *, head_dim: int = 24, spatial_merge_size: int = 2, theta: float = 10000.0, ax=None
) -> np.ndarray:
    """Draw cos of each rotary pair over an (h, w) grid of patches: rows rotate the h half,
    and columns rotate the w half.

    ax: an array of 2 x (head_dim / 4) Axes, or None. Returns that array: the h half, then
    the w half.
    """
    (h, w), planes = grid_hw, head_dim // 4
    options = {"spatial_merge_size": spatial_merge_size}
    cos, _ = vision_rotary_cos_sin([(1, h, w)], head_dim=head_dim, theta=theta, **options)
    rows, columns = merge_block_coordinates([(1, h, w)], **options).T.numpy()
    maps = np.zeros((2 * planes, h, w))
    maps[:, rows, columns] = cos.T.numpy()  # from merge-block order back to the image
    size = 1.5 * max(1.0, w / h)
    label = f"Cosine of {2 * planes} rotary pairs over {h} x {w} patches: half rotate with rows, half with columns."
    axes = grid_of_axes(ax, 2, planes, (planes * size + 1.2, 2 * size * h / w + 0.9), label)
    for k, (panel, values) in enumerate(zip(axes.flat, maps, strict=True)):
        half, frequency = "hw"[k // planes], theta ** -((k % planes) / planes)
        image = panel.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
        panel.set(xticks=[], yticks=[])
        panel.set_title(f"{half} half, {_frequency(frequency)} rad/patch", fontsize=9)
        panel.spines[:].set(color=AXIS_COLORS[half], linewidth=3)
    axes[0, 0].set_ylabel(f"{h} patch rows")
    axes[1, 0].set_xlabel(f"{w} patch columns")
    axes[0, 0].figure.colorbar(image, ax=axes, label="cos(angle)", shrink=0.9)
    return axes


def _frequency(value: float) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.0f}"


def plot_positions(
    positions_3L: Tensor,
    spans: Sequence[MediaSpan] = (),
    *,
    kinds: Sequence[str] | None = None,
    title: str = "positions along the prompt",
    ax: Axes | None = None,
) -> Axes:
    """Draw three lines t, h, w over the prompt's tokens, with shaded media. positions_3L: (3, L).

    kinds: "image" or "video" per span; by default a span of several frames is a video.
    Raises ValueError for any other shape.
    """
    check_shape(positions_3L, (3, "L"), "positions_3L")
    ax = axes_or_new(ax, figsize=(9, 4))
    kinds = [kind_of(span) for span in spans] if kinds is None else kinds
    for span, kind in zip(spans, kinds, strict=True):
        shade_tokens(ax, span.offset, span.offset + span.num_tokens, kind)
    for axis, line in zip("thw", positions_3L, strict=True):
        ax.plot(line.numpy(), color=AXIS_COLORS[axis], lw=_LINE_WIDTHS[axis], label=axis, drawstyle="steps-mid")
    ax.set(title=title, xlabel="prompt token", ylabel="position", xlim=(-0.5, positions_3L.shape[1] - 0.5))
    ax.grid(alpha=0.25)
    _legend(ax, kinds)
    return ax


def shade_tokens(ax: Axes, start: float, stop: float, kind: str) -> None:
    """Shade prompt tokens [start, stop) in the colour of their kind."""
    ax.axvspan(start - 0.5, stop - 0.5, color=TOKEN_COLORS[kind], alpha=0.22, lw=0)


def kind_of(span: MediaSpan) -> str:
    """Return the kind of a span: several frames are a video, anything else is an image."""
    return "video" if span.t > 1 else "image"


def _legend(ax: Axes, kinds: Sequence[str]) -> None:
    handles: list[Artist] = [
        Line2D([], [], color=AXIS_COLORS[a], lw=_LINE_WIDTHS[a], label=f"{a}: {_NAMES[a]}") for a in "thw"
    ]
    handles += [Patch(color=TOKEN_COLORS[kind], alpha=0.22, label=kind) for kind in dict.fromkeys(kinds)]
    ax.legend(handles=handles, loc="upper left", fontsize=9, framealpha=0.9)


def plot_position_grid(positions_3L: Tensor, span: MediaSpan, *, max_frames: int = 6, ax=None) -> np.ndarray:
    """Draw t, h and w of every token of an item, one column per frame,
    for the first `max_frames` frames.

    positions_3L: (3, L) of the whole prompt. ax: an array of 3 x frames Axes, or None. Returns that
    array. Raises ValueError for any other shape of positions.
    """
    check_shape(positions_3L, (3, "L"), "positions_3L")
    grid = positions_3L[:, span.offset : span.offset + span.num_tokens].reshape(3, span.t, span.h, span.w).numpy()
    frames = min(span.t, max_frames)
    cell = min(0.32, 8.5 / (frames * span.w))  # inches per token
    size = (frames * span.w * cell + 0.9, 3 * (span.h * cell + 0.22) + 0.3)
    label = f"Time, height and width of {span.h} x {span.w} tokens, in {frames} of {span.t} steps of the grid."
    axes = grid_of_axes(ax, 3, frames, size, label)
    low, high = int(grid.min()), int(grid.max())
    for row, axis in enumerate("thw"):
        for frame in range(frames):
            panel, values = axes[row, frame], grid[row, frame]
            panel.imshow(values, cmap=axis_cmap(axis), vmin=low - 0.15 * (high - low) - 1, vmax=high)
            panel.set(xticks=[], yticks=[])
            if cell >= 0.25:
                _write_values(panel, values)
        axes[row, 0].set_ylabel(_NAMES[axis], bbox={"facecolor": AXIS_COLORS[axis], "alpha": 0.5, "edgecolor": "none"})
    for frame in range(frames):
        axes[0, frame].set_title(f"grid step {frame}" if span.t > 1 else "image", fontsize=9)
    return axes


def _write_values(ax: Axes, values: np.ndarray) -> None:
    for (row, column), value in np.ndenumerate(values):
        centered(ax, column, row, str(value), fontsize=7, color="#1c1c1c")


def plot_mrope_axes(layouts: Mapping[str, Tensor], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw one strip per model, with the axis that rotates each rotary pair, fastest pair first.

    layouts: name -> (pairs,) of 0, 1, 2, as in `mrope_axis_of_pairs`.
    """
    ax = axes_or_new(ax, figsize=(10, 0.55 * len(layouts) + 1.3))
    for row, axes in enumerate(layouts.values()):
        colors = [AXIS_COLORS["thw"[axis]] for axis in axes.tolist()]
        ax.barh([row] * len(colors), 1, 0.7, range(len(colors)), color=colors, edgecolor="white", linewidth=0.8)
    ax.set_yticks(range(len(layouts)), layouts)
    ax.invert_yaxis()
    ax.set(xlabel="rotary pair, the fastest first", xlim=(0, max(map(len, layouts.values()))))
    ax.set_title(title, loc="left", fontsize=11)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    handles = [Patch(color=AXIS_COLORS[axis], label=f"{axis}: {_NAMES[axis]}") for axis in "thw"]
    ax.legend(handles=handles, loc="upper right", fontsize=9)
    return ax


def plot_place_answers(
    truths: Sequence[str], answers: Sequence[str], places: Sequence[str], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw how often each true location (row) gets each answer (column);
    the last column counts all other answers.

    Correct answers are on the diagonal. places: the locations' names in order.
    """
    ax = axes_or_new(ax, figsize=(4.6, 4.2))
    names = [*places, "other"]
    counts = np.zeros((len(places), len(names)), dtype=int)
    for truth, answer in zip(truths, answers, strict=True):
        counts[names.index(truth), names.index(answer) if answer in places else -1] += 1
    right = sum(counts[i, i] for i in range(len(places)))
    ax.imshow(counts / counts.sum(axis=1, keepdims=True).clip(1), cmap="Greys", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if count > 0.5 * counts[row].sum() else "black"
            centered(ax, column, row, str(count), fontsize=8, color=color)
    ax.set(yticks=range(len(places)), xlabel="answer", ylabel="true place")
    ax.set_yticks(range(len(places)), places, fontsize=8)
    ax.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    ax.set_title(headed(title, f"{right} of {len(truths)} correct"), fontsize=10)
    return ax
