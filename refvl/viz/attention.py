"""Figures of attention: in the language model, over an image's tokens, and in the tower,
over patches.

plot_attention   an image whose cells are darker the less attention they get
plot_states      a map of patch states, in the colours of a projection
project_colors   the projection from states to colours
"""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from torch import Tensor

from refvl.checks import check_shape
from refvl.viz.style import HIGHLIGHT, centered, image_axes

_COMMON = 0.98  # values above this quantile, and below 1 minus it, are clipped
# the opacity of the veil over a cell without attention; a coloured heat map would hide the image
_OPACITY = 0.7


def plot_attention(
    picture, weights_HW: Tensor, *, patch: tuple[int, int] | None = None, segments_HW=None, title: str = "", ax=None
) -> Axes:
    """Draw an image under a veil that is thinner where attention is higher;
    in a small grid, the percentages are also written.

    picture: a PIL image or (height, width, 3) array. weights_HW: (rows, columns), a share per cell.
    patch: the (row, column) of the attending patch, to frame it. segments_HW: a number per cell,
    (rows, columns); a line separates different numbers. Raises ValueError unless weights are a matrix.
    """
    rows, columns = check_shape(weights_HW, ("rows", "columns"), "weights_HW").shape
    weights = weights_HW.float().numpy(force=True)
    ax = image_axes(ax, title, figsize=(4.2, 4.2 * rows / columns + 0.6))
    ax.imshow(picture, extent=(0, columns, rows, 0))
    veil = np.zeros((rows, columns, 4))
    veil[..., 3] = _OPACITY * (1 - weights / max(weights.max(), 1e-9))
    ax.imshow(veil, extent=(0, columns, rows, 0), interpolation="nearest")
    if max(rows, columns) <= 8:
        for (row, column), weight in np.ndenumerate(weights):
            centered(ax, column + 0.5, row + 0.5, f"{weight:.0%}", fontsize=9,
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1})  # fmt: skip
    _mark(ax, segments_HW, patch)
    return ax


def plot_states(
    colors_HW3, *, segments_HW=None, patch: tuple[int, int] | None = None, title: str = "", ax=None
) -> Axes:
    """Draw one colour per patch, (rows, columns, 3) uint8. segments_HW and patch
    are those of `plot_attention`.
    """
    rows, columns, _ = np.shape(colors_HW3)
    ax = image_axes(ax, title, figsize=(3, 3 * rows / columns + 0.5))
    ax.imshow(colors_HW3, extent=(0, columns, rows, 0), interpolation="nearest")
    _mark(ax, segments_HW, patch)
    return ax


def project_colors(states: list[Tensor]) -> list[np.ndarray]:
    """Project states (..., E) to colours (..., 3) uint8, in which
    red, green and blue are the first three principal components.
    """
    all_NE = torch.cat([state.flatten(0, -2) for state in states]).double()
    mean = all_NE.mean(0)
    directions = torch.linalg.eigh((all_NE - mean).T @ (all_NE - mean)).eigenvectors[:, -3:].flip(1)  # (E, 3)
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * largest.sign()  # choose the sign that makes the largest entry positive
    low, high = torch.quantile((all_NE - mean) @ directions, mean.new_tensor([1 - _COMMON, _COMMON]), dim=0)
    return [
        (((state.double() - mean) @ directions - low) / (high - low).clamp(min=1e-9)).clamp(0, 1).mul(255).round()
        .to(torch.uint8).numpy(force=True)
        for state in states
    ]  # fmt: skip


def _mark(ax: Axes, segments_HW, patch: tuple[int, int] | None) -> None:
    """Draw lines between segments, and frame a patch."""
    if segments_HW is not None:
        ax.add_collection(LineCollection(borders(segments_HW), colors="white", linewidths=2.5), autolim=False)
    if patch is not None:
        ax.add_patch(Rectangle(patch[::-1], 1, 1, fill=False, edgecolor=HIGHLIGHT, linewidth=3))


def borders(segments_HW) -> list[list[tuple[int, int]]]:
    """Return lines ((x, y), (x, y)) between neighbouring cells of different segments."""
    segments = np.asarray(segments_HW)
    below = [[(x, y + 1), (x + 1, y + 1)] for y, x in np.argwhere(np.diff(segments, axis=0))]
    return below + [[(x + 1, y), (x + 1, y + 1)] for y, x in np.argwhere(np.diff(segments, axis=1))]
