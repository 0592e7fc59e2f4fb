"""Position tables: a vector per place of a fixed grid, learned at one size and sampled at every other.

The grid of an image is laid over the table, edge to edge, and each patch reads the table where its centre falls.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.positions.rotary import merge_block_coordinates
from refvl.schema import as_grids, check_shape

MODES = ("bicubic", "bilinear", "nearest")


def interpolate_position_table(
    table: Tensor, grid_thw, *, spatial_merge_size: int = 2, mode: str = "bicubic"
) -> Tensor:
    """(N, D): the position vector of every patch, in merge-block order, for grids of any size and aspect ratio.

    table: (S * S, D), row by row. grid_thw: (t, h, w) per item, in patches; every frame of an item reads the same
    places. mode: the model is "bicubic", the others are for comparison. Sampled in float32 on the table's device,
    returned in its dtype. A grid of the table's own size gets the table itself (in merge-block order).
    Raises ValueError when the table is not square. Upstream: `Glm4vVisionEmbeddings` (GLM-4.1V).

    >>> interpolate_position_table(torch.arange(4.0)[:, None], [(1, 2, 2)]).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    side = math.isqrt(len(check_shape(table, ("positions", "D"), "table")))
    if side == 0 or side**2 != len(table):
        raise ValueError(f"table: expected the S * S positions of a square, got {len(table)}")
    table_1DSS = table.float().view(side, side, -1).permute(2, 0, 1)[None]
    pieces = [table[:0]]
    for t, h, w in as_grids(grid_thw, spatial_merge_size=spatial_merge_size):
        place_N2 = _place_on_table(h, w, spatial_merge_size).to(table.device)
        sampled_1DN1 = F.grid_sample(
            table_1DSS, place_N2[None, :, None], mode=mode, padding_mode="border", align_corners=False
        )
        pieces.append(sampled_1DN1[0, :, :, 0].T.to(table.dtype).repeat(t, 1))
    return torch.cat(pieces)


def _place_on_table(h: int, w: int, spatial_merge_size: int) -> Tensor:
    """(h * w, 2) float32: where the centre of each patch falls, (column, row), -1 and 1 being the table's edges."""
    row_column = merge_block_coordinates([(1, h, w)], spatial_merge_size=spatial_merge_size)
    return (((row_column + 0.5) / torch.tensor([h, w])) * 2 - 1).flip(-1)
