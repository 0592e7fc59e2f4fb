"""Position tables: learned at one size and sampled at others, or computed by a formula for any size.

A learned table has one vector per cell of a fixed grid. The grid of an image is laid over the
table, edge to edge or corner to corner, and each patch samples the table at its own centre.
Sines and cosines (`sincos_1d`, `sincos_2d`) need no table at all.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import Grid, as_grids, as_integers, check_positive_int
from refvl.positions.rotary import block_positions

MODES = ("bicubic", "bilinear", "nearest")


def interpolate_position_table(
    table: Tensor, grid_thw, *, spatial_merge_size: int = 2, mode: str = "bicubic", align_corners: bool = False
) -> Tensor:
    """Return the position vector of every patch, (N, D) in merge-block order, for grids of any size and aspect ratio.

    table: (S * S, D), in row-major order. grid_thw: (t, h, w) per item, in patches; all frames
    of an item get the same vectors. mode: GLM uses "bicubic"; Qwen3-VL uses "bilinear".
    align_corners: True puts the first and last patch of a side on the first and last cell of
    the table (Qwen3-VL). False lays the grid over the table edge to edge (GLM). Values are
    sampled in float32 on the table's device and returned in the table's dtype. A grid of the
    table's own size gets the unchanged table, in merge-block order. Raises ValueError if the
    table is not square, and TypeError if it does not contain floating-point numbers. Upstream:
    `Glm4vVisionEmbeddings` (GLM-4.1V), `fast_pos_embed_interpolate` (Qwen3-VL).

    >>> interpolate_position_table(torch.arange(4.0)[:, None], [(1, 2, 2)]).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    _square_side(table)
    grids = as_grids(grid_thw, spatial_merge_size=spatial_merge_size)
    return sample_position_table(table, grids, spatial_merge_size, mode=mode, align_corners=align_corners)


def sample_position_table(table: Tensor, grids: Sequence[Grid], m: int, *, mode: str, align_corners: bool) -> Tensor:
    """Return the vectors of `interpolate_position_table` for a checked table and checked grids. m: the merge size."""
    side = math.isqrt(len(table))
    table_1DSS = table.float().view(side, side, -1).permute(2, 0, 1)[None]
    pieces = [table[:0]]
    for t, h, w in grids:
        place = _place_on_table(h, w, m, align_corners)[None, :, None]
        place = place.pin_memory() if table.is_cuda else place  # large copies from unpinned memory make the host wait
        place = place.to(table.device, non_blocking=True)
        sampled_1DN1 = F.grid_sample(table_1DSS, place, mode=mode, padding_mode="border", align_corners=align_corners)
        pieces += [sampled_1DN1[0, :, :, 0].T.to(table.dtype)] * t
    return torch.cat(pieces)


def _place_on_table(h: int, w: int, m: int, align_corners: bool) -> Tensor:
    """Return each patch's location (column, row) on the table, (h * w, 2) float32, in the units of `F.grid_sample`.

    -1 and 1 are the table's edges, or its first and last cells with `align_corners`.
    """
    row_column = block_positions([(1, h, w)], m).numpy().astype(np.float32)
    first, sides = (0, (max(h - 1, 1), max(w - 1, 1))) if align_corners else (0.5, (h, w))
    place = (row_column + first) / np.array(sides, np.float32) * 2 - 1
    return torch.from_numpy(place[:, ::-1].copy())


def sincos_frequencies(embed_dim: int) -> Tensor:
    """Return 10000^(-i / (embed_dim / 2)), (embed_dim / 2,) float32, rounded after each step as in training.

    One hour into a video, an error of one bit in a frequency rotates a token by a thousandth of
    a radian, so float64, which rounds differently, is not used.
    """
    if embed_dim % 2 or embed_dim < 1:
        raise ValueError(f"embed_dim: must be a multiple of 2, got {embed_dim}")
    exponent = np.arange(embed_dim // 2, dtype=np.float32) / np.float32(embed_dim / 2)
    return torch.from_numpy(np.float32(1) / np.float32(10000) ** exponent)


def sincos(position: Tensor, frequencies: Tensor) -> Tensor:
    """Return the sines of all angles, followed by their cosines, (..., 2 * F) float32.

    position: (...), frequencies: (F,).
    """
    angle = position.float()[..., None] * frequencies
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def sincos_1d(embed_dim: int, length: int) -> Tensor:
    """Return the vectors for positions 0 to length - 1, (length, embed_dim) float32. Upstream: time in `Resampler4_5`.

    Raises ValueError for a length below 1.

    >>> sincos_1d(4, 2).tolist()[0]
    [0.0, 0.0, 1.0, 1.0]
    """
    length, embed_dim = check_positive_int(length, "length"), check_positive_int(embed_dim, "embed_dim")
    return sincos(torch.arange(length), sincos_frequencies(embed_dim))


def sincos_2d(embed_dim: int, size: tuple[int, int]) -> Tensor:
    """Return (height, width, embed_dim) float32: the first half encodes the column of a cell, the second half the row.

    Positions count from 0 and are not scaled, so a small grid's table is a corner of a large
    grid's table. Raises ValueError unless embed_dim is a multiple of 4 and both sides are
    positive. Upstream: `get_2d_sincos_pos_embed`.
    """
    if check_positive_int(embed_dim, "embed_dim") % 4:
        raise ValueError(f"embed_dim: must be a multiple of 4, got {embed_dim}")
    height, width = as_integers(size, "(height, width)", "size")
    column = sincos_1d(embed_dim // 2, width)
    row = sincos_1d(embed_dim // 2, height)
    return torch.cat([column.expand(height, -1, -1), row[:, None].expand(-1, width, -1)], dim=-1)


def resize_position_table(table: Tensor, size: Sequence[int], *, antialias: bool, mode: str = "bicubic") -> Tensor:
    """Resize a square position table, (S * S, D) in row-major order, to (height * width, D), as if it were an image.

    Values are computed in float32 and returned in the table's dtype; a table that already has
    the new size is returned unchanged. Upstream: timm's `resample_abs_pos_embed`
    (antialias=True), `get_abs_pos` of MiniCPM-V 2.0 (antialias=False), and Perception Encoder's
    table in Step3-VL-10B (mode="bilinear").
    """
    side = _square_side(table)
    if tuple(size) == (side, side):
        return table
    table_1DSS = table.float().view(side, side, -1).permute(2, 0, 1)[None]
    resized_1DHW = F.interpolate(table_1DSS, size=tuple(size), mode=mode, align_corners=False, antialias=antialias)
    return resized_1DHW[0].flatten(1).T.to(table.dtype)


def _square_side(table: Tensor) -> int:
    side = math.isqrt(len(table))
    if side == 0 or side**2 != len(table):
        raise ValueError(f"table: expected a square number of positions, got {len(table)}")
    return side
