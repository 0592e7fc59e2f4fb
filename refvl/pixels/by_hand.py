"""The steps of `refvl.pixels.patches` for your own images, arrays and sizes, with every argument checked.

    patchify_image, patchify_video    image or frames -> normalised patch rows and their grid
    patch_rows, unpatchify            pixels -> rows in merge-block order, and back
    smart_resize, count_tokens        sizes alone, without touching a pixel

The steps themselves trust their arguments, but `plan_grid` checks the aspect ratio.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refvl.checks import Grid, as_grids, check_positive_ints, check_shape
from refvl.pixels.media import as_frames, load_image
from refvl.pixels.patches import PatchConfig, cut_rows, fit_budget, levels_of_frames, levels_of_image, plan_grid


def smart_resize(
    height: int, width: int, *, factor: int = 28, min_pixels: int = 56 * 56, max_pixels: int = 28 * 28 * 1280
) -> tuple[int, int]:
    """Return the resized (height, width): multiples of `factor` within the pixel budget, at nearly the same ratio.

    Sides are rounded down if the image is too large, and up if it is too small for the budget.
    A thin image may exceed max_pixels, because no side may be smaller than `factor`. Raises
    ValueError for an aspect ratio above 200.

    >>> smart_resize(427, 640)
    (420, 644)
    """
    height, width = check_positive_ints(height=height, width=width)
    return fit_budget(height, width, factor, min_pixels, max_pixels)


def count_tokens(height: int, width: int, config: PatchConfig, num_frames: int = 1) -> int:
    """Return the number of language-model tokens of an image or a video of this size, without
    special tokens.
    """
    height, width, num_frames = check_positive_ints(height=height, width=width, num_frames=num_frames)
    return math.prod(plan_grid(height, width, config, num_frames)) // config.merge_size**2


def patchify_image(image, config: PatchConfig) -> tuple[Tensor, Grid]:
    """Turn an image that `load_image` accepts into (patches (N, C*Tp*P*P) float32, (1, h, w)).

    Raises ValueError for an aspect ratio above 200.
    """
    levels, grid = levels_of_image(load_image(image), config)
    return levels.normalize(), grid


def patchify_video(frames, config: PatchConfig) -> tuple[Tensor, Grid]:
    """Turn sampled frames, (T, H, W, 3) uint8 or as in `as_frames`, into (patches (N, C*Tp*P*P) float32, (t, h, w)).

    Raises ValueError if there are no frames, or for an aspect ratio above 200.
    """
    levels, grid = levels_of_frames(as_frames(frames), config)
    return levels.normalize(), grid


def patch_rows(pixels: Tensor, config: PatchConfig) -> tuple[Tensor, Grid]:
    """Cut pixels (T, C, H, W) into (patches (N, C*Tp*P*P), (t, h, w)), with rows in the order of `cut_rows`.

    Raises ValueError if H or W is not a multiple of P * m.
    """
    check_shape(pixels, ("T", 3, "H", "W"), "pixels")
    T, _, H, W = pixels.shape
    if T == 0 or H % config.factor or W % config.factor or not H * W:
        needs = f"expected at least one frame, and sides that are multiples of {config.factor}"
        raise ValueError(f"pixels: {needs}, got shape {tuple(pixels.shape)}")
    rows, grid = cut_rows(pixels, config, config.temporal_patch_size)
    return rows.flatten(1), grid


def unpatchify(patches: Tensor, grid: Sequence[int], config: PatchConfig) -> np.ndarray:
    """Turn the rows of one item, (N, C*Tp*P*P), back into its resized image or frames, (t*Tp, H, W, 3) uint8.

    Undoes `patch_rows` and `Levels.normalize`, exactly for float32 rows; padding frames are kept.
    """
    m, P, Tp = config.merge_size, config.patch_size, config.temporal_patch_size
    [(t, h, w)] = as_grids([grid], spatial_merge_size=m, name="grid")
    check_shape(patches, (t * h * w, config.patch_values), "patches")
    blocks = patches.detach().float().cpu().reshape(t, h // m, w // m, m, m, 3, Tp, P, P)
    return denormalize(blocks.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * Tp, h * P, w * P, 3), config)


def denormalize(pixels: Tensor, config: Any) -> np.ndarray:
    """Undo the normalisation of `level_table`: (..., C) float32 -> uint8."""
    mean, std = torch.tensor(config.image_mean), torch.tensor(config.image_std)
    return ((pixels * std + mean) / config.rescale_factor).round().clamp(0, 255).to(torch.uint8).numpy()
