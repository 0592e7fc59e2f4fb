"""Windows: the tokens of each window, their order, and the pairs that attend to each other."""

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from torch import Tensor

from refvl.checks import check_shape
from refvl.pixels.patches import PatchConfig
from refvl.positions import get_window_index, invert_permutation
from refvl.viz.patches import draw_grid, show_resized, write_numbers
from refvl.viz.style import PRUNED, SEQUENCE_CMAP, SEQUENCE_RANGES, axes_or_new, centered


def plot_windows(
    image, config: PatchConfig, *, window_size: int = 112, numbers: str = "windows", ax: Axes | None = None
) -> Axes:
    """Draw the resized image with its windows in the order of the sequence.

    image: anything `load_image` accepts. window_size: pixels. numbers: "windows" numbers the
    windows; "tokens" writes into each merged token its index in window order, if the token is large
    enough. Raises ValueError if `numbers` has any other value.
    """
    if numbers not in ("windows", "tokens"):
        raise ValueError(f"numbers: expected 'windows' or 'tokens', got {numbers!r}")
    ax, grid = show_resized(image, config, ax)
    index_M, cu_seqlens = get_window_index(
        [grid], window_size=window_size, patch_size=config.patch_size, spatial_merge_size=config.merge_size
    )
    shape = (grid[1] // config.merge_size, grid[2] // config.merge_size)
    window_M = segment_numbers(cu_seqlens // config.merge_size**2)[invert_permutation(index_M)]
    colors = sequence_colors(len(cu_seqlens) - 1)
    extent = (0, shape[1] * config.factor, shape[0] * config.factor, 0)
    ax.imshow(colors[window_M].reshape(*shape, 3), extent=extent, alpha=0.45, interpolation="nearest")
    draw_grid(ax, shape, config.factor, color="white", linewidth=0.4, alpha=0.7)
    centers = _outline_windows(ax, window_M.view(shape), config.factor)
    if numbers == "windows":
        for window, (x, y) in enumerate(centers):
            centered(ax, x, y, str(window), size=10, color="white", weight="bold")
    else:
        places = [divmod(token, shape[1]) for token in index_M.tolist()]
        write_numbers(ax, dict(enumerate(places)), config.factor)
    what = "order of the windows" if numbers == "windows" else "index after sorting"
    ax.set_xlabel(f"{len(centers)} windows of at most {window_size} px; numbers: {what}")
    return ax


def segment_numbers(cu_seqlens: Tensor) -> Tensor:
    """Return the index of each token's segment, from (segments + 1,) cumulative lengths."""
    return torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff().long().cpu())


def sequence_colors(count: int) -> np.ndarray:
    """Return (count, 3) colours from first to last."""
    return plt.get_cmap(SEQUENCE_CMAP)(np.linspace(*SEQUENCE_RANGES["light"], max(count, 1)))[:, :3]


def _outline_windows(ax: Axes, window_HW: Tensor, step: int) -> list[tuple[float, float]]:
    """Frame every window; return their centres in pixels."""
    centers = []
    for window in range(int(window_HW.max()) + 1):
        rows, columns = (window_HW == window).nonzero(as_tuple=True)
        edges = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        x, y, right, bottom = (int(edge) * step for edge in edges)
        ax.add_patch(Rectangle((x, y), right - x, bottom - y, fill=False, edgecolor="white", linewidth=2))
        centers.append(((x + right) / 2, (y + bottom) / 2))
    return centers


def plot_window_permutation(
    window_index: Tensor, cu_window_seqlens: Tensor, *, spatial_merge_size: int = 2, ax: Axes | None = None
) -> Axes:
    """Draw row-major order above window order, with a line for each of up to about 50 merged tokens.

    window_index (M,), cu_window_seqlens (W + 1,) in patches: the result of `get_window_index`. The
    cumulative lengths are written at the borders between windows. Raises ValueError for an index of
    any other shape.
    """
    check_shape(window_index, ("M",), "window_index")
    count, block = len(window_index), spatial_merge_size**2
    ax = axes_or_new(ax, figsize=(min(14, 0.3 * count + 2), 2.8))
    in_window_order = sequence_colors(len(cu_window_seqlens) - 1)[segment_numbers(cu_window_seqlens // block)]
    for place, (token, color) in enumerate(zip(window_index.tolist(), in_window_order, strict=True)):
        for x, y in ((token, 1), (place, 0)):
            ax.add_patch(Rectangle((x - 0.5, y - 0.13), 1, 0.26, facecolor=color, edgecolor="white"))
            centered(ax, x, y, str(token), size=7, color="white")
    arrows = [[(token, 0.87), (place, 0.13)] for place, token in enumerate(window_index.tolist())]
    ax.add_collection(LineCollection(arrows, colors=in_window_order, linewidth=1.2))
    borders = cu_window_seqlens / block - 0.5
    ax.vlines(borders, -0.25, 0.25, color="black", linewidth=1.5)
    ax.set_xticks(borders, [str(n) for n in cu_window_seqlens.tolist()])
    ax.set_yticks([1, 0], ["reading order", "window order"])
    ax.set(xlim=(-1, count), ylim=(-0.3, 1.2), xlabel="cu_window_seqlens (patches)")
    ax.set_title(f"{count} merged tokens, {len(cu_window_seqlens) - 1} windows: x[window_index]")
    ax.spines[:].set_visible(False)
    return ax


def plot_attention_segments(
    cu_seqlens: Tensor, token_order: Tensor | None = None, *, name: str = "token", ax: Axes | None = None
) -> Axes:
    """Draw which tokens attend to which: coloured if two tokens share a segment,
    grey if they do not.

    cu_seqlens: (segments + 1,) cumulative lengths in tokens. token_order: the permutation of the
    segments (`window_index`), to draw the mask in row-major order; None draws it in the order of
    the segments. Raises ValueError for cu_seqlens of a different shape.
    """
    check_shape(cu_seqlens, ("segments + 1",), "cu_seqlens")
    segment = segment_numbers(cu_seqlens)
    segment = segment if token_order is None else segment[invert_permutation(token_order)]
    sees = (segment[:, None] == segment[None, :]).numpy()
    colors = np.where(sees[..., None], sequence_colors(len(cu_seqlens) - 1)[segment][:, None], to_rgb(PRUNED))
    ax = axes_or_new(ax, figsize=(4.2, 4.4))
    ax.imshow(colors, interpolation="nearest")
    order = "segment order" if token_order is None else "reading order"
    ax.set(xlabel=f"{name} attended to ({order})", ylabel=f"{name} that attends")
    count = len(cu_seqlens) - 1
    ax.set_title(f"{count} segment{'s' * (count > 1)}, {sees.sum():,} of {sees.size:,} pairs ({sees.mean():.0%})")
    return ax
