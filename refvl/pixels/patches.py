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
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from refvl.checks import Grid, as_grids, blame, check_positive_int, check_positive_ints, check_shape, read_json
from refvl.pixels.media import as_frames, load_image

MAX_ASPECT_RATIO = 200


class Normalization(Protocol):
    """What `level_table` reads of a config, per RGB channel."""

    @property
    def image_mean(self) -> tuple[float, ...]: ...

    @property
    def image_std(self) -> tuple[float, ...]: ...

    @property
    def rescale_factor(self) -> float: ...


def check_preprocessing(config) -> None:
    """Raise TypeError or ValueError unless integer fields are positive and there is one mean and std per channel."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is int:
            check_positive_int(value, field.name)
        elif field.name in ("image_mean", "image_std") and (not isinstance(value, Sequence) or len(value) != 3):
            raise ValueError(f"{field.name}: expected one value per RGB channel, got {value!r}")


def known_fields(config_class, values: dict) -> dict:
    """The entries of `values` that are fields of `config_class` and not None; lists, as JSON has them, as tuples."""
    known = {f.name: values[f.name] for f in fields(config_class) if values.get(f.name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}


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
        check_preprocessing(self)
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels: must not exceed max_pixels={self.max_pixels}, got {self.min_pixels}")

    @classmethod
    def for_video(cls, **changes) -> Self:
        """The defaults of a video, as far as they are others."""
        return cls(**(cls.VIDEO_DEFAULTS | changes))

    @classmethod
    def from_dict(cls, values: dict, kind: str = "image") -> Self:
        """From the contents of a preprocessor file; unknown keys are ignored, missing ones take the default of `kind`.

        The pixel budget may be `min_pixels` and `max_pixels`, at the top or inside `size`, or the areas that `size`
        calls `shortest_edge` and `longest_edge`. Raises ValueError for a preprocessing this library does not have.
        """
        _check_supported(values)
        size = values.get("size") or {}
        if not isinstance(size, dict):
            raise ValueError(f"size: expected an object such as {{'longest_edge': ...}}, got {size!r}")
        known = known_fields(cls, values)
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            found = [v for v in (values.get(name), size.get(edge), size.get(name)) if v is not None]
            known |= {name: found[0]} if found else {}
        return cls.for_video(**known) if kind == "video" else cls(**known)

    @classmethod
    def from_folder(cls, folder, kind: str = "image") -> Self:
        """From a checkpoint folder; kind is "image" or "video".

        The first that is there counts, as in transformers: the section `image_processor` / `video_processor` of
        processor_config.json, then for a video video_preprocessor_config.json, then preprocessor_config.json.
        Raises FileNotFoundError when there is none, ValueError when one cannot be read.
        """
        if kind not in ("image", "video"):
            raise ValueError(f'kind: expected "image" or "video", got {kind!r}')
        names = ["processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"]
        if kind == "image":
            del names[1]
        for path in (Path(folder) / name for name in names):
            values = read_json(path) if path.is_file() else None
            if values is not None and path.name == "processor_config.json":
                values = values.get(f"{kind}_processor")
            if values is not None:
                with blame(path):
                    return cls.from_dict(values, kind)
        raise FileNotFoundError(f"folder: {folder} has no {kind} settings (looked for {', '.join(names)})")

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
        budget = self.frame_budget(num_frames)
        return smart_resize(height, width, factor=self.factor, min_pixels=self.min_pixels, max_pixels=budget)

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


@dataclass(frozen=True, slots=True)
class Glm4vPatchConfig(PatchConfig):
    """GLM's: budgets are areas over all frames, an image counting as `temporal_patch_size` of them."""

    VIDEO_DEFAULTS: ClassVar[dict[str, Any]] = {"max_pixels": 28 * 28 * 2 * 30000}  # larger: it is for all frames

    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 15000
    max_frames: int = 640
    max_duration: float = 300.0  # seconds, beyond which GLM-4.1V spreads its frames

    @property
    def max_image_tokens(self) -> int:
        """`temporal_patch_size` times fewer than the area holds, as an image counts that often."""
        return self.max_pixels // (self.temporal_patch_size * (self.patch_size * self.merge_size) ** 2)

    def fit(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """`smart_resize_video` of the frames as they are padded."""
        return smart_resize_video(
            self.padded(num_frames), height, width, temporal_factor=self.temporal_patch_size,
            factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels,
        )  # fmt: skip

    def frame_floor(self, num_frames: int) -> int:
        """The smallest area of each frame; for one frame, of an image."""
        return math.ceil(self.min_pixels / self.padded(num_frames))

    def frame_budget(self, num_frames: int) -> int:
        """The largest area of each frame; for one frame, of an image."""
        return self.max_pixels // self.padded(num_frames)

    def padded(self, num_frames: int) -> int:
        """Frames in whole steps of the grid."""
        return math.ceil(num_frames / self.temporal_patch_size) * self.temporal_patch_size


@dataclass(frozen=True, slots=True)
class GlmgaPatchConfig(Glm4vPatchConfig):
    """GLM-GA's: sides can be required to be multiples of several merged tokens."""

    VIDEO_DEFAULTS: ClassVar[dict[str, Any]] = {"max_pixels": 28 * 28 * 2 * 55790}  # almost twice that of other GLMs

    patch_expand_factor: int = 1

    @property
    def factor(self) -> int:
        """Sides of the resized image are multiples of this."""
        return self.patch_size * self.merge_size * self.patch_expand_factor


@dataclass(frozen=True, slots=True)
class Qwen3VLPatchConfig(PatchConfig):
    """Qwen3-VL's images; the pixel budget is the released files', as transformers has no default of its own."""

    patch_size: int = 16
    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    max_video_tokens: int = 768

    @classmethod
    def for_video(cls, **changes) -> "Qwen3VLVideoPatchConfig":
        """A video's sizes follow another rule, see there."""
        return Qwen3VLVideoPatchConfig(**changes)


@dataclass(frozen=True, slots=True)
class Qwen3VLVideoPatchConfig(Qwen3VLPatchConfig):
    """Qwen3-VL's videos: budgets are areas over all frames; the defaults are those of `Qwen3VLVideoProcessor`.

    With `cap_pixels_per_frame`, off unless the file says otherwise, `max_video_tokens` is the most for one frame.
    """

    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 768 * 32 * 32

    def fit(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """`smart_resize_video`; a single frame counts as it is padded, as a step of the grid."""
        frames = max(num_frames, self.temporal_patch_size)
        return smart_resize_video(
            frames, height, width, temporal_factor=self.temporal_patch_size, factor=self.factor,
            min_pixels=self.min_pixels, max_pixels=self.frame_budget(frames) * frames
            if self.cap_pixels_per_frame else self.max_pixels,
        )  # fmt: skip

    def frame_floor(self, num_frames: int) -> int:
        """The smallest area of each frame."""
        return math.ceil(self.min_pixels / num_frames)

    def frame_budget(self, num_frames: int) -> int:
        """The largest area one frame may have in a video of `num_frames`."""
        if not self.cap_pixels_per_frame:
            return self.max_pixels // num_frames
        share = min(self.max_video_tokens * self.factor**2, self.max_pixels // num_frames)
        return max(share, int(self.min_pixels * 1.05))


def _check_supported(values: dict) -> None:
    for name, wanted in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("resample", 3)):
        if values.get(name, wanted) not in (wanted, None):
            raise ValueError(f"{name}: this preprocessing always has {name}={wanted!r}, got {values[name]!r}")


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
    _check_aspect_ratio(height, width, (height, width))
    return _fit_budget(height, width, factor, min_pixels, max_pixels)


def smart_resize_video(
    num_frames: int,
    height: int,
    width: int,
    *,
    temporal_factor: int = 2,
    factor: int = 28,
    min_pixels: int = 112 * 112,
    max_pixels: int = 28 * 28 * 2 * 6144,
) -> tuple[int, int]:
    """GLM's `smart_resize`: the budgets count the pixels of all frames, and tiny images are enlarged first.

    num_frames: of the video; an image counts as `temporal_factor` frames. temporal_factor: frames per step of the grid,
    of which the budgets count whole ones. Raises ValueError for fewer frames than that, and for an aspect ratio above
    200. Upstream: `smart_resize` of GLM-4.1V (transformers).

    >>> smart_resize_video(2, 480, 640), smart_resize_video(600, 480, 640)
    ((476, 644), (84, 140))
    """
    num_frames, height, width, temporal_factor = check_positive_ints(
        num_frames=num_frames, height=height, width=width, temporal_factor=temporal_factor
    )
    if num_frames < temporal_factor:
        raise ValueError(f"num_frames: must be at least temporal_factor={temporal_factor}, got {num_frames}")
    given = height, width
    if min(height, width) < factor:
        enlarge = max(factor / height, factor / width)
        height, width = int(height * enlarge), int(width * enlarge)
    _check_aspect_ratio(height, width, given)
    whole_steps = round(num_frames / temporal_factor) * temporal_factor
    return _fit_budget(height, width, factor, min_pixels, max_pixels, num_frames, whole_steps)


def _check_aspect_ratio(height: int, width: int, given: tuple[int, int]) -> None:
    """given: the (height, width) that the user knows, for the message."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(
            f"the aspect ratio may be at most {MAX_ASPECT_RATIO}, got {max(given) / min(given):.1f}: "
            f"{given[1]} x {given[0]} pixels (width x height)"
        )


def _fit_budget(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, counted_frames: int = 1
) -> tuple[int, int]:
    """Sides rounded to `factor`, then changed when `counted_frames` of them leave the budget that is for `frames`."""
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
    pixels = torch.from_numpy(np.array(resize_image(image, config))).permute(2, 0, 1)[None]  # (1, C, H, W) uint8
    return _cut_levels(pixels, config)


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
    return _cut_levels(resize_frames(frames, config, num_frames), config, fused=True)


def _cut_levels(pixels: Tensor, config: PatchConfig, *, fused: bool = False) -> tuple["Levels", Grid]:
    """(T, C, H, W) uint8; a still picture is cut once, not Tp times."""
    Tp = config.temporal_patch_size
    rows, grid = patch_rows(pixels, replace(config, temporal_patch_size=1) if len(pixels) == 1 else config)
    return Levels(rows.unflatten(1, (3, -1, config.patch_size**2)), level_table(config, fused=fused), Tp), grid


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
    m, P, Tp = config.merge_size, config.patch_size, config.temporal_patch_size
    T, C, H, W = pixels.shape
    if T == 0 or H % config.factor or W % config.factor or not H * W:
        needs = f"needs frames, and sides in multiples of {config.factor}"
        raise ValueError(f"pixels: {needs}, got {tuple(pixels.shape)}")
    if T == 1:  # without a copy
        pixels = pixels.expand(Tp, -1, -1, -1)
    elif T % Tp:
        pixels = torch.cat([pixels, pixels[-1:].expand(-T % Tp, -1, -1, -1)])
    t, h, w = len(pixels) // Tp, H // P, W // P
    blocks = pixels.view(t, Tp, C, h // m, m, P, w // m, m, P)
    #                    0  1   2  3       4  5  6       7  8
    # ->                 t, block row, block col, row, col, C, Tp, P, P
    rows = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, config.patch_values)
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
