"""2-D rotary positions for the vision tower, in merge-block order.

A head of K dimensions has K/2 rotary pairs: the patch's row rotates the first K/4, and its
column rotates the other K/4. Each pair spans a plane. Patch rows, rotary angles and position
tables share one order: by frame, block row and block column, then the m x m patches of the
merge block. The merger can therefore fold a merge block with a plain reshape.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import Grid, as_grids, check_positive, check_positive_int


def merge_block_coordinates(grid_thw, *, spatial_merge_size: int = 2) -> Tensor:
    """Return the (row, column) of every patch, (N, 2) int64, item by item and frame by frame, in merge-block order."""
    return block_positions(as_grids(grid_thw, spatial_merge_size=spatial_merge_size), spatial_merge_size)


def block_positions(grids: Sequence[Grid], m: int) -> Tensor:
    """Do the work of `merge_block_coordinates`, for grids that are already checked."""
    coordinates = [np.empty((0, 2), np.int64)]
    for t, h, w in grids:
        blocks = np.empty((h // m, w // m, m, m, 2), np.int64)
        blocks[..., 0] = np.arange(h).reshape(-1, 1, m, 1)
        blocks[..., 1] = np.arange(w).reshape(1, -1, 1, m)
        coordinates += [blocks.reshape(-1, 2)] * t
    return torch.from_numpy(np.concatenate(coordinates))


def vision_rotary_cos_sin(
    grid_thw, *, head_dim: int, spatial_merge_size: int = 2, theta: float = 10000.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (N, head_dim // 2) float32, in merge-block order: h half, then w half.

    head_dim must be a multiple of 4; theta must be finite and above 0. Upstream:
    `rotary_pos_emb_thw`; transformers repeats each half once more, to head_dim columns, before
    it applies them. Raises ValueError if head_dim is not divisible by 4.
    """
    if check_positive_int(head_dim, "head_dim") % 4:
        raise ValueError(f"head_dim: must be a multiple of 4 (h and w use head_dim / 4 angles each), got {head_dim}")
    frequencies = rotary_frequencies(int(head_dim), theta=check_positive(theta, "theta"))
    grids = as_grids(grid_thw, spatial_merge_size=spatial_merge_size)
    return rotary_cos_sin(block_positions(grids, int(spatial_merge_size)), frequencies)


def rotary_frequencies(head_dim: int, *, theta: float = 10000.0, device: torch.device | None = None) -> Tensor:
    """Return the rotation per patch of each rotary pair, in radians, (K/4,) float32.

    Rows and columns use the same values.
    """
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    return 1.0 / theta**exponents


def rotary_cos_sin(positions_N2: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (N, K/2) float32, of (N, 2) rows and columns times (K/4,) frequencies."""
    angles = (positions_N2[..., None] * frequencies).flatten(1)  # (N, 2, K/4) -> (N, K/2)
    return angles.cos(), angles.sin()


def apply_rotary(x_NHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (N, H, K) by (N, K/2) angles in rotate-half form; computed in float32, returned in the dtype of x."""
    return rotate(x_NHK, *rotary_factors(cos, sin))


def rotary_factors(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of `rotate`, (N, 1, K) each, once for all blocks: cos twice, and -sin followed by sin."""
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


def rotate(x_NHK: Tensor, cos_N1K: Tensor, sin_N1K: Tensor) -> Tensor:
    """Rotate by `rotary_factors` like `apply_rotary`: x times cos, plus x with its halves swapped times sin."""
    if x_NHK.is_cuda and x_NHK.ndim == 3 and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return rotate_by_offsets(x_NHK, cos_N1K, sin_N1K)
    swapped_NHK = torch.cat(x_NHK.chunk(2, dim=-1)[::-1], dim=-1)
    return torch.addcmul(x_NHK * cos_N1K, swapped_NHK, sin_N1K).to(x_NHK.dtype)


def rotate_by_offsets(x_NHK: Tensor, cos_N1K: Tensor, sin_N1K: Tensor) -> Tensor:
    """Rotate like `rotate`, in two kernels instead of four: swapped halves are read in place.

    To swap the halves a and b of each head, a view would need a negative stride. Instead, two views
    start half a head early ("-" is memory around the heads; results there are never read):

        x, in the order of memory:          (-, a0) (b0, a1) (b1, a2) (b2, -)
        results, with strides K and 3K/2:   (-, b0) (a0, b1) (a1, b2) (a2, -)

    Above each result is its partner in x. If less than half a head surrounds x, x is copied.
    """
    N, H, K = x_NHK.shape
    end = x_NHK.storage_offset() + (N - 1) * x_NHK.stride(0) + H * K
    spare = min(x_NHK.storage_offset(), x_NHK.untyped_storage().nbytes() // x_NHK.itemsize - end)
    if spare < K // 2 or x_NHK.stride()[1:] != (K, 1):
        x_NHK = F.pad(x_NHK, (0, 0, 1, 1))[:, 1:-1]
    products = x_NHK.new_empty(N, H + 2, K, dtype=torch.promote_types(x_NHK.dtype, cos_N1K.dtype))
    out = torch.empty_like(products, dtype=x_NHK.dtype)
    torch.mul(x_NHK, cos_N1K, out=products[:, 1:-1])
    own = (N, H + 1, 2, K // 2), (products.stride(0), K, K // 2 * 3, 1)
    partners = x_NHK.as_strided(own[0], (x_NHK.stride(0), K, K // 2, 1), x_NHK.storage_offset() - K // 2)
    torch.addcmul(products.as_strided(*own), partners, sin_N1K.unflatten(-1, (2, -1)), out=out.as_strided(*own))
    return out[:, 1:-1]
