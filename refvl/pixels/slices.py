"""MiniCPM-V's images: an overview, and slices of a larger copy, each near the size that the tower was trained on.

    image (W, H)
       | slice_grid       how many columns and rows; None if the overview is enough
       | plan_slices      sizes of the overview and the slices, multiples of P
       | slice_image      bicubic in Pillow: [overview, slice 1, slice 2, ...], slices row by row
       | patchify_slices  cut into patches, [0, 255] -> (x / 255 - mean) / std
    patch rows (N, 3*P*P), tgt_sizes [(h, w), ...]     N patches of all slices, h x w of them in each

P patch_size. Sizes in pixels are (width, height), as in Pillow and the checkpoints' own
preprocessing; tgt_sizes count patches and are (height, width). A slice keeps the aspect ratio of
its part of the image, so it is rarely a square, but its area stays near scale_resolution ** 2.

The checkpoints' code arranges each slice as a strip, (3, P, L * P) for L patches. Here each
patch is a row, so that the rows of slices can be concatenated. Paper: LLaVA-UHD, arXiv
2403.11703. Upstream: `MiniCPMVImageProcessor` (2.0 to 4.5) rounds sides to whole patches;
transformers' `MiniCPMV4_6ImageProcessorPil` rounds them to four patches (`multiple`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from refvl.checks import blame, check_shape, read_json
from refvl.pixels.by_hand import denormalize
from refvl.pixels.images import resize
from refvl.pixels.patches import Levels, check_preprocessing, known_fields, level_table

Size = tuple[int, int]
NO_TIME = -1  # the temporal id of an image's slice


@dataclass(frozen=True, slots=True)
class SliceConfig:
    """The rule for slicing images. The defaults are the same in all released versions."""

    max_slice_nums: int = 9
    scale_resolution: int = 448  # the side, in pixels, of a square with the area of a slice
    patch_size: int = 14
    # sides are multiples of this number of patches, which is 2 or 4 if patches are merged
    multiple: int = 1
    max_aspect_ratio: int = 10_000  # beyond it, rounding up to one patch allows any area
    use_image_id: bool = False
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255

    def __post_init__(self):
        check_preprocessing(self)

    @classmethod
    def from_dict(cls, values: dict) -> "SliceConfig":
        """Read the contents of preprocessor_config.json or config.json; unknown keys are ignored.

        Raises ValueError if slicing is switched off, because an image of any size would then
        reach the tower.
        """
        if not values.get("slice_mode", True):
            raise ValueError("slice_mode: expected True, the only supported value, got False")
        theirs = {"image_mean": values.get("norm_mean"), "image_std": values.get("norm_std")}
        return cls(**known_fields(cls, values | {name: value for name, value in theirs.items() if value is not None}))

    @classmethod
    def from_folder(cls, folder: Path, defaults: dict) -> "SliceConfig":
        """Read preprocessor_config.json, with `defaults` for missing settings; version 2.0 has no such file."""
        file = Path(folder) / "preprocessor_config.json"
        values = read_json(file) if file.is_file() else {}
        with blame(file):
            return cls.from_dict(defaults | {name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True, repr=False)
class SliceGroup:
    """A group of slices that are encoded together: the (h, w) of each slice in patches, and its time in the video.

    temporal_ids: one id per slice, which is -1 for a slice of an image; None if all ids are -1.
    An item's layout is a tuple of groups in the order of the item's rows.
    """

    slices: tuple[Size, ...]
    temporal_ids: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        """Return a short form, because tables and messages show many groups."""
        return f"SliceGroup({self.slices}" + ("" if self.temporal_ids is None else f", {self.temporal_ids}") + ")"


SliceLayout = tuple[SliceGroup, ...]


def count_sets(layout: SliceLayout) -> int:
    """Count the sets of query tokens: slices with times share one set per group; other slices have one set each."""
    return sum(len(g.slices) if max(g.temporal_ids or [NO_TIME]) == NO_TIME else 1 for g in layout)


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The sizes of an image's overview and slices, computed before pixels are processed."""

    overview: Size  # pixels, (width, height)
    grid: Size | None  # (columns, rows); None if the overview is enough
    cell: Size | None  # the size of each slice in pixels
    patch_size: int
    layout: SliceLayout  # the overview, then every slice, each as a separate group

    @property
    def tgt_sizes(self) -> list[Size]:
        """The (height, width), in patches, of the overview, then of every slice."""
        return [group.slices[0] for group in self.layout]


def plan_slices(width: int, height: int, config: SliceConfig) -> SlicePlan:
    """Return the sizes of the overview and the slices of an image of width x height pixels.

    The overview and every slice are scaled to an area of about scale_resolution ** 2, so a
    small image is enlarged. Raises ValueError for an aspect ratio above
    `config.max_aspect_ratio`. Upstream: `find_best_resize`, `get_refine_size`.
    """
    grid = slice_grid(width, height, config)
    if max(width, height) > config.max_aspect_ratio * min(width, height):
        allowed = f"at most {config.max_aspect_ratio:,} (max_aspect_ratio of SliceConfig)"
        raise ValueError(f"width, height: expected an aspect ratio of {allowed}, got {width} x {height} pixels")
    overview = fit_area(width, height, config)
    sizes, cell = [overview], None
    if grid is not None:
        columns, rows = grid
        cell = fit_area(max(round(width / columns), 1), max(round(height / rows), 1), config)
        sizes += [cell] * (columns * rows)
    P = config.patch_size
    layout = tuple(SliceGroup(((h // P, w // P),)) for w, h in sizes)
    return SlicePlan(overview, grid, cell, P, layout)


def slice_grid(width: int, height: int, config: SliceConfig) -> Size | None:
    """Return the (columns, rows) into which an image is cut, or None if the overview is enough.

    The number of slices is the image's area divided by scale_resolution squared, rounded up,
    and at most max_slice_nums. One slice more or one fewer is chosen if that fits the aspect
    ratio better. Upstream: `get_sliced_grid`.

    >>> slice_grid(1920, 1080, SliceConfig()), slice_grid(448, 448, SliceConfig())
    ((4, 2), None)
    """
    wanted = min(math.ceil(width * height / config.scale_resolution**2), config.max_slice_nums)
    if wanted <= 1:
        return None
    log_ratio = math.log(width / height)
    numbers = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= config.max_slice_nums]
    grids = [(columns, n // columns) for n in numbers for columns in range(1, n + 1) if n % columns == 0]
    return min(grids, key=lambda grid: abs(log_ratio - math.log(grid[0] / grid[1])))  # ties go to the first grid


def fit_area(width: int, height: int, config: SliceConfig) -> Size:
    """Return (width, height) of the same ratio and of area scale_resolution ** 2, rounded to `multiple` patches."""
    new_height = int(config.scale_resolution / math.sqrt(width / height))
    new_width = int(new_height * (width / height))
    P = config.patch_size * config.multiple
    return max(round(new_width / P), 1) * P, max(round(new_height / P), 1) * P


def slice_image(image: Image.Image, config: SliceConfig) -> list[Image.Image]:
    """Cut an image from `load_image` into [overview, slices row by row]; raise the errors of `plan_slices`."""
    plan = plan_slices(*image.size, config)
    overview = resize(image, *reversed(plan.overview))
    if plan.grid is None or plan.cell is None:
        return [overview]
    columns, rows = plan.grid
    width, height = plan.cell
    enlarged = resize(image, rows * height, columns * width)
    corners = [(column * width, row * height) for row in range(rows) for column in range(columns)]
    return [overview, *(enlarged.crop((left, top, left + width, top + height)) for left, top in corners)]


def patchify_slices(image: Image.Image, config: SliceConfig) -> tuple[Tensor, list[Size]]:
    """Return (patch rows, tgt_sizes) of an image that came from `load_image`.

    The rows, (N, 3*P*P) float32, are those of all slices in order.
    """
    return levels_of_slices([image], config).normalize(), plan_slices(*image.size, config).tgt_sizes


def levels_of_slices(images: Iterable[Image.Image], config: SliceConfig) -> Levels:
    """Return the unnormalised patch rows of images from `load_image`, image after image."""
    rows = list[Tensor]()
    for image in images:
        for part in slice_image(image, config):
            pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1)
            rows.append(slice_rows(pixels, config.patch_size))
    return Levels(torch.cat(rows).unflatten(1, (3, 1, -1)), level_table(config))


def slice_rows(pixels: Tensor, patch_size: int) -> Tensor:
    """Cut (3, H, W) into (H/P * W/P, 3*P*P): one row per patch, in row-major order; within a row: channel, row, column.

    H and W must be multiples of P.
    """
    P = patch_size
    blocks = pixels.unflatten(2, (-1, P)).unflatten(1, (-1, P))  # (3, h, P, w, P)
    return blocks.permute(1, 3, 0, 2, 4).reshape(-1, 3 * P * P)


def image_of_rows(rows: Tensor, tgt_size: Sequence[int], config: SliceConfig) -> np.ndarray:
    """Turn the rows (h*w, 3*P*P) of one slice back into its image, (H, W, 3) uint8."""
    (h, w), P = tgt_size, config.patch_size
    check_shape(rows, (h * w, 3 * P * P), "rows")
    [pixels] = F.fold(rows.detach().float().cpu().T[None], (h * P, w * P), P, stride=P)
    return denormalize(pixels.permute(1, 2, 0), config)
