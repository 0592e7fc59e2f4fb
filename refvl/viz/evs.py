"""Figures of EVS: the kept video tokens, how much tokens changed, and the accuracy.

plot_keep_mask         frames of a video, with the pruned tokens covered
plot_keep_masks        the same for several rules, one above the other
plot_dissimilarity     how much each token changed since the previous frame
plot_pruned_positions  the full layout of a prompt above the layout of the kept tokens
plot_accuracy_curve    accuracy against the pruning rate
"""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from torch import Tensor

from refvl.checks import Grid, check_shape
from refvl.positions import MediaSpan, restrict_positions
from refvl.viz.positions import grid_of_axes, kind_of, plot_positions, shade_tokens, strip_of_axes
from refvl.viz.style import HIGHLIGHT, KEPT, PRUNED, SEQUENCE_CMAP, UNUSED, axes_or_new, headed

_COVER = 0.86  # opacity of the cover over a pruned token


def plot_keep_mask(frames: np.ndarray, keep_M: Tensor, merged_thw: Grid, *, title: str = "", ax=None) -> np.ndarray:
    """Draw the frames of a video with pruned tokens covered and kept tokens outlined,
    one image per grid step.

    frames: (T, H, W, 3) uint8; the first frame of each grid step is shown. keep_M: (t*h*w,) bool.
    ax: an array of t Axes, or None. Returns the t Axes as a flat array.
    Raises ValueError for a mask of any other shape.
    """
    t, h, w = merged_thw
    check_shape(keep_M, (t * h * w,), "keep_M")
    keep = keep_M.reshape(t, h, w).cpu().numpy()
    axes = _strip(ax, t, _ratio(frames, merged_thw) * h / w)
    for i, panel in enumerate(axes):
        _show_frame(panel, frames, i, merged_thw)
        cover = np.where(keep[i][..., None], to_rgba(KEPT, 0.0), to_rgba(PRUNED, _COVER))
        panel.imshow(cover, extent=(0, w, h, 0), aspect=_ratio(frames, merged_thw), interpolation="nearest")
        _outline(panel, keep[i])
        panel.set_title(f"step {i}: {keep[i].sum()} of {h * w} kept", fontsize=9)
    report = headed(title, f"{int(keep.sum())} of {keep.size} tokens kept")
    axes[0].figure.suptitle(report, fontsize=11)
    return axes


def plot_keep_masks(frames: np.ndarray, masks: dict[str, Tensor], merged_thw: Grid, *, ax=None) -> np.ndarray:
    """Draw one row of frames per pruning rule.

    masks: {name: (t*h*w,) bool}. Returns the (rules, t) Axes.
    """
    t, h, w = merged_thw
    width = min(1.6, 12 / t)
    height = width * _ratio(frames, merged_thw) * h / w + 0.3
    counts = ", ".join(f"{name} {int(keep_M.sum())}" for name, keep_M in masks.items())
    label = f"Tokens that each rule keeps, out of {t * h * w} in {t} frames of a video: {counts}."
    axes = grid_of_axes(ax, len(masks), t, (t * width, len(masks) * height + 0.3), label)
    for row, (name, keep_M) in zip(axes, masks.items(), strict=True):
        plot_keep_mask(frames, keep_M, merged_thw, ax=row)
        row[0].set_ylabel(name)
        for panel, kept in zip(row, keep_M.view(t, -1).sum(1).tolist(), strict=True):
            panel.set_title(f"{kept} of {h * w}", fontsize=8)
    axes[0, 0].figure.suptitle("")
    return axes


def _strip(ax, count: int, height_to_width: float) -> np.ndarray:
    """Return `count` Axes, at most five per row, for images of this ratio."""
    columns = min(5, count)
    width = min(2.2, 11 / columns)
    return strip_of_axes(ax, count, columns, (width, width * height_to_width + 0.3), margin=0.35)


def _ratio(frames: np.ndarray, merged_thw: Grid) -> float:
    """Return the ratio of a token's height to its width, in pixels of the frames."""
    _, h, w = merged_thw
    return (frames.shape[1] / h) / (frames.shape[2] / w)


def _show_frame(ax: Axes, frames: np.ndarray, step: int, merged_thw: Grid) -> None:
    """Draw the first frame of a grid step, in token coordinates;
    the last step may have fewer frames than the others.
    """
    t, h, w = merged_thw
    per_step = -(-len(frames) // t)
    ax.imshow(frames[min(step * per_step, len(frames) - 1)], extent=(0, w, h, 0), aspect=_ratio(frames, merged_thw))
    ax.set(xticks=[], yticks=[])


def _outline(ax: Axes, keep_hw: np.ndarray) -> None:
    """Draw a line around the kept tokens, at every side shared with a pruned token or with the
    edge.
    """
    padded = np.pad(keep_hw, 1).astype(int)
    for row, column in np.argwhere(np.diff(padded, axis=0)[:, 1:-1]):
        ax.plot([column, column + 1], [row, row], color=KEPT, lw=1.6, clip_on=False)
    for row, column in np.argwhere(np.diff(padded, axis=1)[1:-1]):
        ax.plot([column, column], [row, row + 1], color=KEPT, lw=1.6, clip_on=False)


def plot_dissimilarity(dissimilarity_TN: Tensor, merged_thw: Grid, *, title: str = "", ax=None) -> np.ndarray:
    """Draw one map per grid step, which shows how much each token differs from the token in the
    same cell one step earlier. Step 0 has no map.

    dissimilarity_TN: (t, h*w). ax: an array of t Axes, or None. Returns the t Axes as a flat array.
    Raises ValueError for any other shape.
    """
    t, h, w = merged_thw
    maps = check_shape(dissimilarity_TN, (t, h * w), "dissimilarity_TN").reshape(t, h, w).cpu().numpy()
    axes = _strip(ax, t, h / w)
    high = float(maps[1:].max()) if t > 1 else 1.0
    axes[0].imshow(np.ones((h, w)), cmap="Greys", vmin=0, vmax=8)
    axes[0].text((w - 1) / 2, (h - 1) / 2, "always\nkept", ha="center", va="center", fontsize=9)
    for panel, values in zip(axes[1:], maps[1:], strict=True):
        image = panel.imshow(values, cmap=SEQUENCE_CMAP, vmin=0, vmax=high)
    for i, panel in enumerate(axes):
        panel.set(xticks=[], yticks=[])
        panel.set_title(f"step {i}", fontsize=9)
    if t > 1:
        axes[0].figure.colorbar(image, ax=list(axes), shrink=0.8, pad=0.01)
    axes[0].figure.suptitle(title or "dissimilarity to the previous frame", fontsize=11)
    return axes


def plot_pruned_positions(
    positions_3L: Tensor, keep_L: Tensor, spans: Sequence[MediaSpan], *, q: float | None = None, ax=None
) -> np.ndarray:
    """Draw the full position layout of a prompt and, below it, the layout of the kept tokens,
    which keep their positions.

    positions_3L: (3, L) and keep_L: (L,) of the unpruned prompt. ax: an array of 2 Axes, or
    None. Returns both Axes.
    """
    axes = grid_of_axes(ax, 2, 1, (9, 5.6)).flatten()
    pruned_3K, delta = restrict_positions(positions_3L, keep_L)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), keep_L.cumsum(0)]).tolist()  # kept tokens before each token
    plot_positions(positions_3L, spans, title=f"full layout: {len(keep_L)} tokens; hatched: dropped", ax=axes[0])
    for index in (~keep_L).nonzero().flatten().tolist():
        axes[0].axvspan(index - 0.5, index + 0.5, **UNUSED)
    rate = "" if q is None else f" at q = {q:g}"
    title = f"kept{rate}: {pruned_3K.shape[1]} tokens at their original positions, delta {delta}"
    plot_positions(pruned_3K, title=title, ax=axes[1])
    for span in spans:
        shade_tokens(axes[1], before[span.offset], before[span.offset + span.num_tokens], kind_of(span))
    axes[1].get_legend().remove()
    for panel in axes:
        panel.set_xlim(-0.5, len(keep_L) - 0.5)
    return axes


def plot_accuracy_curve(
    accuracy: dict[str, dict[float, float]], *, title: str = "accuracy", ax: Axes | None = None
) -> Axes:
    """Plot accuracy against the pruning rate, one line per name.

    accuracy: {name: {q: fraction}}.
    """
    ax = axes_or_new(ax, figsize=(7, 3.8))
    for i, (name, curve) in enumerate(accuracy.items()):
        percent = [100 * v for v in curve.values()]
        color = (KEPT, HIGHLIGHT, "dimgrey")[i % 3]
        ax.plot(list(curve), percent, color=color, lw=2, marker="o", label=name)
    ax.set(title=title, xlabel="pruning rate q", ylabel="accuracy (%)", ylim=(0, 104))
    ax.grid(alpha=0.25)
    ax.legend(loc="lower left", fontsize=9)
    return ax
