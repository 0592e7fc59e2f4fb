"""Windows: the merged tokens that attend to each other in a windowed block.

A window is a square of merged tokens inside one frame. The encoder sorts its tokens by window once,
before the first block. Then every window is a contiguous segment of the sequence, and a varlen
kernel needs only cumulative lengths. The inverse permutation, applied after the merger, restores
the row-major order.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from refvl.checks import MAX_PATCHES, Grid, as_grids, check_positive_int


def get_window_index(
    grid_thw, *, window_size: int = 112, patch_size: int = 14, spatial_merge_size: int = 2
) -> tuple[Tensor, Tensor]:
    """Return the order of all items' merged tokens by window, and the windows' cumulative lengths.

    grid_thw: (t, h, w) per item, in patches; a ragged last row or column of patches produces no
    token (floor division). window_size, patch_size: in pixels. Returns `window_index` (M,) int64,
    such that `x[window_index]` is in window order, and `cu_window_seqlens` (W + 1,) int32:
    cumulative window lengths **in patches**, with a leading 0 and no empty windows. Upstream:
    `Qwen2_5_VisionTransformer.get_window_index_thw` pads each frame to whole windows (an exact
    multiple gains an empty window), then drops the padding. Sorting, as here, needs no padding.

    Raises ValueError if a size is below 1.

    >>> get_window_index([(1, 4, 12)])[0].tolist()     # 2 x 6 merged tokens, windows of 4 x 4
    [0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11]
    """
    merge = check_positive_int(spatial_merge_size, "spatial_merge_size")
    side = check_positive_int(window_size, "window_size") // merge // check_positive_int(patch_size, "patch_size")
    if side < 1:
        token = patch_size * merge
        raise ValueError(f"window_size: must fit at least one merged token of {token} px, got {window_size}")
    return window_order(as_grids(grid_thw), merge, min(side, MAX_PATCHES))  # no grid is larger than MAX_PATCHES


def window_order(grids: Sequence[Grid], merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the result of `get_window_index` for checked grids. side: the side of a window, in merged tokens."""
    indices = [np.empty(0, np.int64)]
    lengths = [np.zeros(1, np.int64)]
    offset = 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge  # in merged tokens
        frame, row, column = np.ogrid[:t, :rows, :columns]
        window = (frame * -(-rows // side) + row // side) * -(-columns // side) + column // side  # per token
        window_M = window.ravel()
        indices.append(window_M.argsort(kind="stable") + offset)
        lengths.append(np.bincount(window_M) * merge**2)
        offset += len(window_M)
    cu_window_seqlens = np.concatenate(lengths).cumsum().astype(np.int32)
    return torch.from_numpy(np.concatenate(indices)), torch.from_numpy(cu_window_seqlens)


def max_window_count(max_tokens: int, max_frames: int, side: int) -> int:
    """Return the largest number of windows for `max_tokens` merged tokens in at most `max_frames` frames.

    A frame of n tokens has at most ceil(n / side) windows; a strip one token high reaches this
    maximum. Rounding to whole windows wastes at most side - 1 tokens per frame. side: the side
    of a window, in merged tokens.
    """
    frames = min(max_frames, max_tokens)
    return min(max_tokens, (max_tokens + frames * (side - 1)) // side)


def invert_permutation(permutation: Tensor) -> Tensor:
    """Return `inverse`, (M,) int64, such that `x[permutation][inverse] == x`."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse
