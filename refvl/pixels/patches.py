"""Pixels to patch rows: the border between an image and the encoder.

    image (H, W)  or  frames (T, H, W, 3) uint8
       | resize       sides to multiples of P * m, area into [min_pixels, max_pixels]
    pixels (T, C, h*P, w*P) uint8
       | cut_rows     pad T to a multiple of Tp by repeating the last frame, then cut
    levels (N, C, 1 or Tp, P*P) uint8, grid (t, h, w)    N = t * h * w rows in merge-block order
       | normalize    to [0, 1], then (x - mean) / std per channel; on a GPU after the rows have been copied there
    patches (N, C*Tp*P*P) float32

P patch_size, Tp temporal_patch_size, m merge_size, N patches, C channels. Grids are in patches.

Images match the Pillow backend of transformers (`Qwen2VLImageProcessorPil`) bit for bit under
Pillow 12; under Pillow 13.0, that backend resizes some images in a different order
(`refvl.pixels.images.resize`). If torchvision is installed, transformers uses its torchvision
backend; `replace(config, resize="torchvision")` gives the same pixels. Videos match the
torchvision backend (`Qwen2VLVideoProcessor`), because transformers has no other backend for
videos. refvl does not need torchvision itself. The two backends round differently, so the
values of an image and of a video with the same frame differ slightly.

`refvl.pixels.by_hand` offers the same steps for your own images and arrays, and checks arguments.
"""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from refvl.checks import (
    Grid,
    blame,
    check_names,
    check_number,
    check_positive,
    check_positive_int,
    check_positive_ints,
    read_json,
)
from refvl.pixels.images import resize
from refvl.pixels.media import Video

MAX_ASPECT_RATIO = 200
RESIZERS = {"pillow": f"Pillow {PIL.__version__}", "torchvision": f"torch {torch.__version__}"}
SIZES = ("min_pixels", "max_pixels")  # the pixel budget, in a file or a message part
RESIZED = ("resized_height", "resized_width")  # in a message part


@dataclass(frozen=True, slots=True)
class PatchConfig:
    """The rule that turns pixels into patch rows.

    The defaults are transformers' defaults for images; `for_video` uses the defaults for videos.

    Pixel budgets limit the area of an image or of one frame. `cap_pixels_per_frame` also limits
    the total area of a video. Each frame then gets an equal share of the area of 90 % of
    `max_video_tokens` tokens, so that a long video fits into the context. Released checkpoints
    allow every frame the budget of an image, 16,384 tokens. The reference implementation
    (qwen-vl-utils) applies the cap to every video, transformers (5.17 to 5.23) only on request.
    """

    VIDEO_DEFAULTS: ClassVar[dict[str, Any]] = {  # a smaller budget per frame, plus a limit on the whole video
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
    fps: float = 2.0  # the number of frames sampled per second of a video (see refvl.pixels.media)
    min_frames: int = 4
    max_frames: int = 768
    # "pillow", or "torchvision" to prepare images as transformers does if torchvision is installed
    resize: str = "pillow"

    def __post_init__(self):
        check_preprocessing(self)
        check_names([self.resize], list(RESIZERS), "resize", ValueError)
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels: must not exceed max_pixels={self.max_pixels}, got {self.min_pixels}")

    @classmethod
    def for_video(cls, **changes) -> Self:
        """Return the config for videos: the defaults for videos, overridden by `changes`."""
        return cls(**(cls.VIDEO_DEFAULTS | changes))

    @classmethod
    def from_dict(cls, values: dict, kind: str = "image") -> Self:
        """Read a preprocessor file's contents; ignore unknown keys, and use the defaults of `kind` for missing ones.

        The pixel budget may be given as `min_pixels` and `max_pixels`, at the top level or
        inside `size`, or as the areas that `size` calls `shortest_edge` and `longest_edge`.
        Raises ValueError for unsupported settings.
        """
        for name, wanted in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("resample", 3)):
            if values.get(name, wanted) not in (wanted, None):
                raise ValueError(f"{name}: expected {wanted!r}, the only supported value, got {values[name]!r}")
        size, known = values.get("size") or {}, known_fields(cls, values, (*SIZES, "shortest_edge", "longest_edge"))
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            found = [v for v in (values.get(name), size.get(edge), size.get(name)) if v is not None]
            known |= {name: found[0]} if found else {}
        return cls.for_video(**known) if kind == "video" else cls(**known)

    @classmethod
    def from_folder(cls, folder, kind: str = "image") -> Self:
        """Read the settings in a checkpoint folder; kind is "image" or "video".

        As in transformers, the first source that exists is used: the section `image_processor`
        or `video_processor` of processor_config.json, then (for a video)
        video_preprocessor_config.json, then preprocessor_config.json. Raises FileNotFoundError
        if no source exists, and ValueError if the source cannot be read.
        """
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
        """The side of one merged token in pixels, which divides both sides of a resized image."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        """The number of values in one patch row: C * Tp * P * P."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def max_image_tokens(self) -> int:
        """The largest token count of an image, except for images so thin that the short side is one token."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    def target_size(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """Return the (height, width) to which an image, or each of `num_frames` frames, is resized.

        Raises ValueError for an aspect ratio above 200.
        """
        return fit_budget(height, width, self.factor, self.min_pixels, self.frame_budget(num_frames))

    def frame_floor(self, num_frames: int) -> int:
        """Return the smallest allowed area of a frame."""
        return self.min_pixels

    def frame_budget(self, num_frames: int) -> int:
        """Return the largest allowed area of a frame in a video of `num_frames` (before padding)."""
        if not self.cap_pixels_per_frame:
            return self.max_pixels
        clip_budget = int(self.max_video_tokens * self.factor**2 * 0.9)
        share = clip_budget * self.temporal_patch_size // num_frames
        return max(min(self.max_pixels, share), int(self.min_pixels * 1.05))


def check_preprocessing(config) -> None:
    """Raise TypeError or ValueError unless sizes and divisors are positive and each channel has a mean and a std."""
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.type is int:
            check_positive_int(value, setting.name)
        elif setting.name == "rescale_factor":
            check_positive(value, setting.name)
        elif setting.name in ("image_mean", "image_std"):
            if len(value) != 3:
                raise ValueError(f"{setting.name}: expected one value per RGB channel, got {value!r}")
            check = check_positive if setting.name == "image_std" else check_number
            for number in value:
                check(number, setting.name)


def known_fields(config_class, values: dict, sizes: tuple[str, ...] = ()) -> dict:
    """Return the entries of `values` that are fields of `config_class` and not None; lists become tuples.

    Raises ValueError if `size` has a key that is not in `sizes`, because the meaning of `size`
    is then unknown.
    """
    if not {*(values.get("size") or ())} <= {*sizes}:
        raise ValueError(f"size: expected {list(sizes) or 'no such setting'}, got {values['size']!r}")
    known = {f.name: values[f.name] for f in fields(config_class) if values.get(f.name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}


def fit_budget(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return sides rounded to multiples of `factor`; if their area is outside the budget, scale the sides first.

    Scaled sides are rounded down for large images and up for small ones. A thin image may
    exceed max_pixels, because no side may be smaller than `factor`. Raises ValueError for an
    aspect ratio above 200. Upstream: `smart_resize`.
    """
    check_aspect_ratio(height, width)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def check_aspect_ratio(height: int, width: int) -> None:
    """Raise ValueError for an aspect ratio above 200."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        sizes = f"{width} x {height} pixels"
        raise ValueError(f"width, height: expected an aspect ratio of at most {MAX_ASPECT_RATIO}, got {sizes}")


def plan_grid(height: int, width: int, config: PatchConfig, num_frames: int = 1) -> Grid:
    """Return the grid (t, h, w) in patches of an image or a video of this size, without touching a pixel."""
    new_height, new_width = config.target_size(height, width, num_frames)
    t = math.ceil(num_frames / config.temporal_patch_size)
    return t, new_height // config.patch_size, new_width // config.patch_size


def levels_of_image(image: Image.Image, config: PatchConfig) -> tuple["Levels", Grid]:
    """Resize an image from `load_image` and cut it into rows, which are normalised later."""
    if config.resize == "torchvision":
        return levels_of_frames(np.array(image)[None], config)
    resized = resize(image, *config.target_size(image.height, image.width))
    pixels_HWC = torch.from_numpy(np.array(resized))  # uint8
    rows, grid = cut_rows(pixels_HWC.permute(2, 0, 1)[None], config, Tp=1)  # a still image is cut once, not Tp times
    return Levels(rows, level_table(config), config.temporal_patch_size), grid


def levels_of_frames(frames: np.ndarray, config: PatchConfig, num_frames: int | None = None) -> tuple["Levels", Grid]:
    """Resize frames from `as_frames` and cut them into rows, which are normalised later.

    num_frames: the number of frames in the whole video, which determines the frame size;
    required if `frames` is only a part.
    """
    given, height, width, _ = frames.shape
    pixels_TCHW = resize_frames(frames, config.target_size(height, width, num_frames or given))
    Tp = config.temporal_patch_size
    rows, grid = cut_rows(pixels_TCHW, config, Tp=1 if len(pixels_TCHW) == 1 else Tp)
    return Levels(rows, level_table(config, fused=True), Tp), grid


def resize_frames(frames: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Resize frames (T, H, W, 3) uint8 to (T, 3, *size) uint8 with torch's antialiased bicubic kernel for uint8."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)))
    return F.interpolate(pixels, size=size, mode="bicubic", antialias=True, align_corners=False)


def fit(medium: Any, config: Any, sizes: dict) -> Any:
    """Resize an image or a Video to the size that its message requests; the checkpoint's rule is applied afterwards.

    sizes: `min_pixels` and `max_pixels` of the image, or of each frame; or both sides of
    `RESIZED`, which are rounded to whole tokens. If no sides are given, a video also has the
    budget of `PatchConfig.for_video`. Upstream: `fetch_image`, `fetch_video` (qwen-vl-utils).
    """
    if not isinstance(config, PatchConfig):
        raise ValueError(f"{', '.join(sizes)}: this model cuts images into slices; resize the image before you pass it")
    is_video, token = isinstance(medium, Video), config.factor**2
    height, width = medium.frames.shape[1:3] if is_video else medium.size[::-1]
    if asked := sizes.keys() & {*RESIZED}:
        (height, width), sizes = check_positive_ints(**{name: sizes.get(name) for name in RESIZED}), {}
    is_capped = is_video and not asked
    least, most = (128 * token, 768 * token) if is_capped else (4 * token, 16_384 * token)
    limits = {"min_pixels": least} | sizes | {"max_pixels": min(most, sizes.get("max_pixels", most))}
    rule = PatchConfig(patch_size=config.factor, merge_size=1, cap_pixels_per_frame=is_capped, **limits)
    if not is_video:
        return resize(medium, *rule.target_size(height, width))
    frames = resize_frames(medium.frames, rule.target_size(height, width, len(medium.frames)))
    return replace(medium, frames=frames.permute(0, 2, 3, 1).numpy())


def cut_rows(pixels: Tensor, config: PatchConfig, Tp: int) -> tuple[Tensor, Grid]:
    """Cut pixels (T, C, H, W) into (rows (N, C, Tp, P*P), (t, h, w)), with rows in merge-block order.

    Within each t, the merge blocks, and the m * m patches of each block, are in row-major
    order. The order within a row is channel, time, row, column. T is padded to a multiple of Tp
    by repeating the last frame. H and W must be multiples of P * m.
    """
    m, P = config.merge_size, config.patch_size
    T, C, H, W = pixels.shape
    if T == 1:  # repeating one frame needs no copy
        pixels = pixels.expand(Tp, -1, -1, -1)
    elif T % Tp:
        pixels = torch.cat([pixels, pixels[-1:].expand(-T % Tp, -1, -1, -1)])
    t, h, w = len(pixels) // Tp, H // P, W // P
    blocks = pixels.view(t, Tp, C, h // m, m, P, w // m, m, P)
    #                    0  1   2  3       4  5  6       7  8
    # ->                 t, block row, block col, row, col, C, Tp, P, P
    rows = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, C, Tp, P * P)
    return rows, (t, h, w)


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Patch rows before normalisation: one byte per value; a still image has one frame instead of Tp.

    Why a table? A byte has only 256 levels, but a one-megapixel image has three million values.
    So `level_table` normalises each level of a channel once, and `normalize` looks up every
    value. The result is bit-identical to that of transformers, which computes every value. On a
    CPU, the lookup takes a third of the time of that computation and needs no copies in
    float64. A GPU receives the bytes and looks up the values itself, so the copy is a quarter
    the size of the float32 rows. For a still image, the copy is an eighth, because the GPU
    repeats the single frame Tp = 2 times.
    """

    values: Tensor = field(repr=False)  # (N, C, 1 or Tp, P*P) uint8
    table: Tensor = field(repr=False)  # (C, 256) float32: the normalised value of each level
    frames: int = 1  # Tp, the frames per patch row

    def __len__(self) -> int:
        """Return the number of patch rows."""
        return len(self.values)

    def normalize(self) -> Tensor:
        """Return the normalised patch rows, (N, C*Tp*P*P) float32."""
        N, C, _, values = self.values.shape
        rows = np.empty((N, C, self.frames, values), np.float32)
        for channel, of_level in enumerate(self.table.numpy()):  # "clip" skips the check of each index
            rows[:, channel] = of_level.take(self.values[:, channel].numpy(), mode="clip")
        return torch.from_numpy(rows).flatten(1)


def level_table(config: Any, *, fused: bool = False) -> Tensor:
    """Return (C, 256) float32: (x * rescale_factor - mean) / std for each level x of each channel.

    config: an object with image_mean, image_std and rescale_factor, such as a `PatchConfig` or
    a `SliceConfig`.

    The two backends of transformers agree only to about 1e-6, so this function offers both
    orders of rounding. The Pillow backend rescales in float64 first; `fused` folds the
    rescaling into mean and std, as the torchvision backend does.
    """
    mean, std = (torch.tensor(x, dtype=torch.float32).view(-1, 1) for x in (config.image_mean, config.image_std))
    levels = torch.arange(256)
    if fused:
        return (levels.float() - mean * (1 / config.rescale_factor)) / (std * (1 / config.rescale_factor))
    return ((levels.double() * config.rescale_factor).float() - mean) / std


@dataclass(frozen=True, eq=False)
class Patches:
    """The patch rows of one media item, together with the item and its layout."""

    source: Image.Image | Video = field(repr=False)
    rows: Levels | Tensor = field(repr=False)  # N patch rows; a tensor if the pixels are normalised before cutting
    # the arrangement of the rows, for the encoder's plan: (t, h, w) in patches for Qwen and GLM
    layout: Any
    media_tokens: Any  # a `MediaTokens`: the extents of the item as the language model sees them

    @cached_property
    def pixel_values(self) -> Tensor:
        """The normalised patch rows, (N, C*Tp*P*P) float32."""
        return self.rows if isinstance(self.rows, Tensor) else self.rows.normalize()
