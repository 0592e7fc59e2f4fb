"""Pixels to patch rows: the border between an image and the encoder.

    image (H, W)  or  frames (T, H, W, 3) uint8
       | resize       sides to multiples of P * m, area into [min_pixels, max_pixels]
    pixels (T, C, h*P, w*P) uint8
       | patch_rows   pad T to a multiple of Tp by repeating the last frame, then cut
    levels (N, C*Tp*P*P) uint8, grid (t, h, w)    N = t * h * w rows in merge-block order
       | normalize    to [0, 1], then (x - mean) / std per channel; on a GPU after the rows have travelled there
    patches (N, C*Tp*P*P) float32

P patch_size, Tp temporal_patch_size, m merge_size, N patches, C channels. A grid counts patches.

Images follow the Pillow backend of transformers (`Qwen2VLImageProcessorPil`) bit for bit, videos its torchvision
backend (`Qwen2VLVideoProcessor`), which is the only one there is; torchvision itself is not needed. The two backends
round differently, so an image and a video of the same frame give slightly different values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from refvl.arguments import as_grids
from refvl.checks import Grid, check_positive_int, check_positive_ints, check_shape
from refvl.pixels import settings
from refvl.pixels.media import Video, as_frames, load_image

MAX_ASPECT_RATIO = 200


class Normalization(Protocol):
    """What `level_table` reads of a config, per RGB channel."""

    @property
    def image_mean(self) -> tuple[float, ...]: ...

    @property
    def image_std(self) -> tuple[float, ...]: ...

    @property
    def rescale_factor(self) -> float: ...


@dataclass(frozen=True, slots=True)
class PatchConfig:
    """How pixels become patch rows. The defaults are those of an image in transformers; `for_video` has a video's.

    Pixel budgets are areas, per image or frame. `cap_pixels_per_frame` bounds the sum over a video as well: each
    frame gets an even share of 90 % of `max_video_tokens` tokens' worth of pixels, so that a long video cannot outgrow
    the context. Released checkpoints come with the image budget of 16,384 tokens for every frame; the cap is what the
    reference implementation (qwen-vl-utils) does and is on for videos, while transformers (5.17 to 5.23) leaves it off
    unless asked.
    """

    VIDEO_DEFAULTS: ClassVar[dict[str, Any]] = {  # a smaller budget per frame, and the cap on the whole
        "min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28, "cap_pixels_per_frame": True,
    }  # fmt: skip

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # OpenAI CLIP
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128_000
    fps: float = 2.0  # how densely a video is sampled, see refvl.pixels.media
    min_frames: int = 4
    max_frames: int = 768

    def __post_init__(self):
        settings.check_preprocessing(self)
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels: must not exceed max_pixels={self.max_pixels}, got {self.min_pixels}")

    @classmethod
    def for_video(cls, **changes) -> Self:
        """The defaults of a video, as far as they are others."""
        return cls(**(cls.VIDEO_DEFAULTS | changes))

    from_dict = classmethod(settings.from_dict)
    from_folder = classmethod(settings.from_folder)

    @property
    def factor(self) -> int:
        """Sides of the resized image are multiples of this: one merged token is factor x factor pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        """Values in one patch row: C * Tp * P * P."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def max_image_tokens(self) -> int:
        """An image takes no more, unless it is so thin that its short side is one token already."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    def fit(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """The (height, width) that an image, or each of `num_frames` frames, is resized to: `smart_resize`."""
        return fit_budget(height, width, self.factor, self.min_pixels, self.frame_budget(num_frames))

    def frame_floor(self, num_frames: int) -> int:
        """The smallest area one frame may have."""
        return self.min_pixels

    def frame_budget(self, num_frames: int) -> int:
        """The largest area one frame may have in a video of `num_frames` (before padding)."""
        if not self.cap_pixels_per_frame:
            return self.max_pixels
        clip_budget = int(self.max_video_tokens * self.factor**2 * 0.9)
        share = clip_budget * self.temporal_patch_size // num_frames
        return max(min(self.max_pixels, share), int(self.min_pixels * 1.05))


def smart_resize(
    height: int, width: int, *, factor: int = 28, min_pixels: int = 56 * 56, max_pixels: int = 28 * 28 * 1280
) -> tuple[int, int]:
    """The (height, width) to resize to: multiples of `factor`, area within the budget, ratio as near as that allows.

    An image too large is rounded down, one too small rounded up, so that the budget holds; a thin one may stay above
    max_pixels, because no side goes below `factor`. Raises ValueError for an aspect ratio above 200.

    >>> smart_resize(427, 640)
    (420, 644)
    """
    height, width = check_positive_ints(height=height, width=width)
    return fit_budget(height, width, factor, min_pixels, max_pixels)


def fit_budget(
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    counted_frames: int = 1,
    given: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Sides rounded to `factor`, then changed when `counted_frames` of them leave the budget that is for `frames`.

    given: the (height, width) that the user knows, where these are others. Raises ValueError for thin pictures.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        height, width = given or (height, width)
        raise ValueError(
            f"the aspect ratio may be at most {MAX_ASPECT_RATIO}, got {max(height, width) / min(height, width):.1f}: "
            f"{width} x {height} pixels (width x height)"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if counted_frames * new_height * new_width > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted_frames * new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def plan_grid(height: int, width: int, config: PatchConfig, num_frames: int = 1) -> Grid:
    """The grid (t, h, w) in patches of an image or a video of this size, without touching a pixel."""
    num_frames = check_positive_int(num_frames, "num_frames")
    new_height, new_width = config.fit(height, width, num_frames)
    t = math.ceil(num_frames / config.temporal_patch_size)
    return t, new_height // config.patch_size, new_width // config.patch_size


def count_tokens(height: int, width: int, config: PatchConfig, num_frames: int = 1) -> int:
    """How many tokens of the language model an image or a video of this size takes, start and end marks not counted."""
    return math.prod(merged_grid(plan_grid(height, width, config, num_frames), config.merge_size))


def merged_grid(grid: Grid, merge_size: int) -> Grid:
    """(t, h, w) in tokens of the language model, each of merge_size x merge_size patches of the `grid`."""
    t, h, w = grid
    return t, h // merge_size, w // merge_size


def patchify_image(image, config: PatchConfig) -> tuple[Tensor, Grid]:
    """Anything `load_image` takes -> (patches (N, C*Tp*P*P) float32, (1, h, w)).

    Raises ValueError for an aspect ratio above 200.
    """
    levels, grid = levels_of_image(load_image(image), config)
    return levels.normalize(), grid


def levels_of_image(image: Image.Image, config: PatchConfig) -> tuple["Levels", Grid]:
    """The same before it is normalised, for an image that `load_image` has made."""
    pixels_HWC = torch.from_numpy(np.array(resize_image(image, config)))  # uint8
    rows, grid = cut_rows(pixels_HWC.permute(2, 0, 1)[None], config, Tp=1)  # a still picture is cut once, not Tp times
    return Levels(rows, level_table(config), config.temporal_patch_size), grid


def patchify_video(frames, config: PatchConfig) -> tuple[Tensor, Grid]:
    """Sampled frames, (T, H, W, 3) uint8 or anything `as_frames` takes -> (patches (N, C*Tp*P*P) float32, (t, h, w)).

    Raises ValueError for no frames and for an aspect ratio above 200.
    """
    levels, grid = levels_of_frames(as_frames(frames), config)
    return levels.normalize(), grid


def levels_of_frames(frames: np.ndarray, config: PatchConfig, num_frames: int | None = None) -> tuple["Levels", Grid]:
    """The same before it is normalised, for frames that `as_frames` has made.

    num_frames: of the whole video, where `frames` are some of it: their size depends on how many there are.
    """
    pixels_TCHW = resize_frames(frames, config, num_frames)
    Tp = config.temporal_patch_size
    rows, grid = cut_rows(pixels_TCHW, config, Tp=1 if len(pixels_TCHW) == 1 else Tp)
    return Levels(rows, level_table(config, fused=True), Tp), grid


def resize_image(image: Image.Image, config: PatchConfig) -> Image.Image:
    """Bicubic in Pillow, on 8 bits."""
    height, width = config.fit(image.height, image.width)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def resize_frames(frames: np.ndarray, config: PatchConfig, num_frames: int | None = None) -> Tensor:
    """(T, H, W, 3) uint8 -> (T, 3, H', W') uint8, bicubic with antialias in torch; it must stay 8 bits to be exact."""
    given, height, width, _ = frames.shape
    size = config.fit(height, width, num_frames or given)
    pixels = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)))
    return F.interpolate(pixels, size=size, mode="bicubic", antialias=True, align_corners=False)


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Patch rows before they are normalised: 8 bits a value, and of a still picture one frame for all Tp.

    A channel has 256 levels. What each becomes is computed once and then looked up: on a CPU in a third of the time
    and without copies in float64, on a GPU once these bytes, a quarter of float32's or an eighth, have travelled there.
    """

    values: Tensor  # (N, C, 1 or Tp, P*P) uint8
    table: Tensor  # (C, 256) float32: what a level becomes
    frames: int = 1  # Tp

    def __len__(self) -> int:
        """N."""
        return len(self.values)

    def normalize(self) -> Tensor:
        """(N, C*Tp*P*P) float32."""
        N, C, _, values = self.values.shape
        rows = np.empty((N, C, self.frames, values), np.float32)
        for channel, of_level in enumerate(self.table.numpy()):  # "clip": no index is checked
            rows[:, channel] = of_level.take(self.values[:, channel].numpy(), mode="clip")
        return torch.from_numpy(rows).flatten(1)


@dataclass(frozen=True, eq=False)
class Patches:
    """One medium, patchified: what the encoder reads, and where it came from."""

    source: Image.Image | Video
    rows: Levels | Tensor  # of N patches; a tensor where pixels are normalised before they are cut
    layout: Any  # how the rows lie, for the encoder's plan: (t, h, w) in patches for Qwen and GLM
    merged: Any  # a `MergedMedia`: how the language model sees it

    @cached_property
    def pixel_values(self) -> Tensor:
        """(N, C*Tp*P*P) float32."""
        return self.rows if isinstance(self.rows, Tensor) else self.rows.normalize()


def level_table(config: Normalization, *, fused: bool = False) -> Tensor:
    """(C, 256) float32: (x * rescale_factor - mean) / std of each level x of a channel.

    The two backends agree to about 1e-6 only, so both orders of rounding are here: the Pillow backend rescales in
    float64 first; `fused` folds the rescaling into mean and std, as the torchvision backend does.
    """
    mean, std = (torch.tensor(x, dtype=torch.float32).view(-1, 1) for x in (config.image_mean, config.image_std))
    levels = torch.arange(256)
    if fused:
        return (levels.float() - mean * (1 / config.rescale_factor)) / (std * (1 / config.rescale_factor))
    return ((levels.double() * config.rescale_factor).float() - mean) / std


def denormalize(pixels: Tensor, config: Normalization) -> np.ndarray:
    """(..., C) float32 -> uint8: undoes the normalisation."""
    mean, std = torch.tensor(config.image_mean), torch.tensor(config.image_std)
    return ((pixels * std + mean) / config.rescale_factor).round().clamp(0, 255).to(torch.uint8).numpy()


def patch_rows(pixels: Tensor, config: PatchConfig) -> tuple[Tensor, Grid]:
    """(T, C, H, W) -> (patches (N, C*Tp*P*P), (t, h, w)), rows in merge-block order.

    For each t, block row and block column come the m * m patches of the block; within a row
    channel, time, patch row, patch column. T is padded to a multiple of Tp by repeating the last
    frame (so a still image is repeated Tp times).
    Raises ValueError when H or W is no multiple of P * m.
    """
    check_shape(pixels, ("T", 3, "H", "W"), "pixels")
    T, _, H, W = pixels.shape
    if T == 0 or H % config.factor or W % config.factor or not H * W:
        needs = f"needs frames, and sides in multiples of {config.factor}"
        raise ValueError(f"pixels: {needs}, got {tuple(pixels.shape)}")
    rows, grid = cut_rows(pixels, config, config.temporal_patch_size)
    return rows.flatten(1), grid


def cut_rows(pixels: Tensor, config: PatchConfig, Tp: int) -> tuple[Tensor, Grid]:
    """`patch_rows`, (N, C, Tp, P*P), of frames whose sides are multiples of P * m."""
    m, P = config.merge_size, config.patch_size
    T, C, H, W = pixels.shape
    if T == 1:  # without a copy
        pixels = pixels.expand(Tp, -1, -1, -1)
    elif T % Tp:
        pixels = torch.cat([pixels, pixels[-1:].expand(-T % Tp, -1, -1, -1)])
    t, h, w = len(pixels) // Tp, H // P, W // P
    blocks = pixels.view(t, Tp, C, h // m, m, P, w // m, m, P)
    #                    0  1   2  3       4  5  6       7  8
    # ->                 t, block row, block col, row, col, C, Tp, P, P
    rows = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, C, Tp, P * P)
    return rows, (t, h, w)


def unpatchify(patches: Tensor, grid: Sequence[int], config: PatchConfig) -> np.ndarray:
    """(N, C*Tp*P*P) rows of one item -> (t*Tp, H, W, 3) uint8: the resized image back, to look at.

    Undoes `patch_rows` and `Levels.normalize`, exactly for float32 rows; padding frames stay.
    """
    m, P, Tp = config.merge_size, config.patch_size, config.temporal_patch_size
    [(t, h, w)] = as_grids([grid], spatial_merge_size=m, name="grid")
    check_shape(patches, (t * h * w, config.patch_values), "patches")
    blocks = patches.detach().float().cpu().reshape(t, h // m, w // m, m, m, 3, Tp, P, P)
    return denormalize(blocks.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * Tp, h * P, w * P, 3), config)
