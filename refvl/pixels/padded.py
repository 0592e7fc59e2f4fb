"""Kimi K2.5's pixels: large images are scaled down, small ones keep their size, and black fills incomplete tokens.

    image (H, W)  or  frames (T, H, W, 3) uint8
       | resize    only down, to any size within a maximum of patches in total and per side     torch, bicubic
       | pad       black right and below, to multiples of P * m
       | cut_rows  as in `refvl.pixels.patches`
    levels (N, 3, 1, P*P) uint8, grid (t, h, w)    t counts frames, each of which is cut separately

Upstream: `Kimi_K25ImageProcessor` and `Kimi_K25VideoProcessor` (transformers 5.23), which need torchvision.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F

from refvl.checks import Grid
from refvl.pixels import settings
from refvl.pixels.patches import Levels, PatchConfig, cut_rows, level_table


@dataclass(frozen=True, slots=True)
class PaddedPatchConfig(PatchConfig):
    """The rule that turns pixels into patch rows; `max_pixels` is `max_patches` in the files times the area of a patch.

    Each row contains one frame. In the encoder, `chunk_frames` frames share their tokens, so the processor, not this
    class, counts a video's tokens.
    """

    VIDEO_DEFAULTS: ClassVar[dict[str, Any]] = {"max_pixels": 4096 * 14**2}

    temporal_patch_size: int = 1
    min_pixels: int = 1
    max_pixels: int = 16384 * 14**2
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    max_side: int = 512  # in patches; `size.max_height` in the files
    chunk_frames: int = 4  # `temporal_patch_size` in the files

    def __post_init__(self):
        PatchConfig.__post_init__(self)
        if self.min_pixels != 1:
            raise ValueError(f"min_pixels: expected 1, because images are never enlarged, got {self.min_pixels}")

    @classmethod
    def from_dict(cls, values: dict, kind: str = "image") -> Self:
        """Read the contents of a preprocessor file (see `settings.from_dict`)."""
        own: dict[str, Any] = {"temporal_patch_size": None}
        if (patches := values.get("max_patches")) is not None:
            own["max_pixels"] = patches * values.get("patch_size", 14) ** 2
        if isinstance(size := values.get("size"), dict):
            own |= {"max_side": size.get("max_height"), "size": None}
        return settings.from_dict(cls, values | own | {"chunk_frames": values.get("temporal_patch_size")}, kind)

    @property
    def max_image_tokens(self) -> int:
        """The largest token count of an image: scaling may exceed the budget by a patch, and padding fills a token."""
        side = self.patch_size * min(math.sqrt(self.max_pixels) / self.patch_size + 1, self.max_side)
        return math.ceil(side / self.factor) ** 2

    def inner_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which an image or a frame is scaled. Upstream: `navit_resize`."""
        P, longest = self.patch_size, self.max_side * self.patch_size
        patches = max(1, height // P) * max(1, width // P)
        scale = min(1.0, math.sqrt(self.max_pixels // P**2 / patches), longest / height, longest / width)
        return tuple(min(max(1, int(side * scale)), longest) for side in (height, width))  # type: ignore[return-value]

    def target_size(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """Return the size after padding."""
        height, width = self.inner_size(height, width)
        return math.ceil(height / self.factor) * self.factor, math.ceil(width / self.factor) * self.factor

    def frame_budget(self, num_frames: int) -> int:
        """Return the largest area of a frame, before padding."""
        return self.max_pixels


def padded_levels(frames_THW3: np.ndarray, config: PaddedPatchConfig) -> tuple[Levels, Grid]:
    """Scale, pad and cut the frames of a video, or an image as a single frame; rows are normalised later."""
    pixels_TCHW = torch.from_numpy(np.ascontiguousarray(frames_THW3.transpose(0, 3, 1, 2)))
    size = pixels_TCHW.shape[2:]
    inner, outer = config.inner_size(*size), config.target_size(*size)
    if inner != size:
        pixels_TCHW = F.interpolate(pixels_TCHW, size=inner, mode="bicubic", antialias=True, align_corners=False)
    pixels_TCHW = F.pad(pixels_TCHW, (0, outer[1] - inner[1], 0, outer[0] - inner[0]))
    rows, grid = cut_rows(pixels_TCHW, config, Tp=1)
    return Levels(rows, level_table(config, fused=True)), grid
