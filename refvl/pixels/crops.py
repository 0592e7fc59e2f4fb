"""Step3-VL's images: one overview of the whole, and square crops that see the details.

    image (W, H)
       | pad          a thin strip becomes a square (black, image top left)
       | resize       sides above `max_side` scaled down           Pillow, bilinear
       +--> overview  image_size x image_size pixels, whatever the aspect ratio
       | canvas       resized so that whole windows fit            Pillow, bilinear
       +--> crops     the windows row by row, each crop_size x crop_size pixels
    patch rows (N, C*P*P)    of all crops in order, then of the overview; P patch_size, C channels
    CropLayout               rows x columns of crops

In the prompt the crops come first, each between two marks, with a newline mark after every row of crops but the last;
then the overview between two marks. Upstream: `ImagePatcher` and `Step3VisionProcessor` (vLLM).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from refvl.arguments import as_integer_rows
from refvl.checks import check_positive_ints, check_shape
from refvl.pixels.media import load_image
from refvl.pixels.settings import check_preprocessing, known_fields

MIN_SIDE, THIN_RATIO = 32, 4  # an image below this side and above this ratio is padded to a square
SQUARE_RATIO = 1.5  # a small image up to this ratio is seen well enough in the overview
SPARE_REMAINDER = 0.2  # of a window: a larger remainder gets a window of its own


@dataclass(frozen=True, slots=True)
class CropConfig:
    """How an image is cut. The defaults are the constants of the released model; sides are in pixels."""

    image_size: int = 728  # of the overview
    crop_size: int = 504
    patch_size: int = 14
    max_side: int = 3024
    max_crops: int = 128  # more are refused: a strip one pixel wide would be cut into thousands
    enable_crops: bool = True  # False: overviews only
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # OpenAI CLIP
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    understand_projector_stride: int = 2  # of the encoder's first convolution behind the tower

    def __post_init__(self):
        check_preprocessing(self)
        for name in ("image_size", "crop_size"):
            if (size := getattr(self, name)) % self.patch_size:
                raise ValueError(f"{name}: must be a multiple of patch_size={self.patch_size}, got {size}")

    @classmethod
    def from_hf(cls, config) -> "CropConfig":
        """From a model's config or its vision config, as an object or a dict.

        Released configs say `image_size` and `patch_size`; small ones may say `crop_size` and `max_side` as well.
        """
        values = config if isinstance(config, dict) else config.to_dict()
        return cls(**known_fields(cls, values | values.get("vision_config", {})))

    @property
    def image_tokens(self) -> int:
        """Tokens of an overview."""
        return count_square_tokens(self.image_size, self.patch_size, self.understand_projector_stride)

    @property
    def crop_tokens(self) -> int:
        """Tokens of a crop."""
        return count_square_tokens(self.crop_size, self.patch_size, self.understand_projector_stride)


def count_square_tokens(size: int, patch_size: int, stride: int) -> int:
    """Tokens that the encoder makes of a square of `size` pixels per side.

    Its two convolutions, 2 x 2 with `stride` and 3 x 3 with stride 2 and padding 1, leave fewer than there are patches.

    >>> count_square_tokens(728, 14, 2), count_square_tokens(504, 14, 2)
    (169, 81)
    """
    after_first = (size // patch_size - 2) // stride + 1
    return ((after_first - 1) // 2 + 1) ** 2


RELEASED = CropConfig()


class CropLayout(NamedTuple):
    """How many rows and columns of crops an image has; (0, 0) for none. The overview is always there."""

    rows: int
    columns: int

    @property
    def crops(self) -> int:
        return self.rows * self.columns

    @property
    def newlines(self) -> int:
        """Newline marks in the prompt: after each row of crops but the last."""
        return max(0, self.rows - 1)

    @property
    def newline_mask(self) -> tuple[bool, ...]:
        """Per crop, whether a newline mark follows it. Upstream: `patch_newline_mask`."""
        ends = (column == self.columns - 1 for _ in range(self.rows) for column in range(self.columns))
        return tuple(end and i < self.crops - 1 for i, end in enumerate(ends))


@dataclass(frozen=True, slots=True)
class CropPlan:
    """What becomes of an image, before a pixel is touched; sizes are (width, height) in pixels."""

    padded: tuple[int, int]
    resized: tuple[int, int]  # what the overview is made of
    window: int  # side of the windows on the canvas; 0 without crops
    canvas: tuple[int, int]  # the image the windows are cut from
    layout: CropLayout

    @property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """(left, top, right, bottom) of each window on the canvas, row by row; may reach beyond a low canvas."""
        side, (rows, columns) = self.window, self.layout
        return [(c * side, r * side, (c + 1) * side, (r + 1) * side) for r in range(rows) for c in range(columns)]


def as_crop_layouts(layouts, name: str = "layouts") -> list[CropLayout]:
    """Normalise (rows, columns) of crops, one pair per image; (0, 0) says none. A sequence or a tensor (images, 2).

    Raises TypeError for a wrong kind, ValueError for negative numbers or rows without columns.
    """
    pairs = as_integer_rows(layouts, "(rows, columns)", name, items="images", least=0)
    for i, pair in enumerate(pairs):
        if 0 in pair and any(pair):
            raise ValueError(f"{name}[{i}]: rows and columns are both positive, or both 0 without crops, got {pair}")
    return [CropLayout(*pair) for pair in pairs]


def count_prompt_tokens(layout: CropLayout, *, crop_tokens: int = 81, image_tokens: int = 169) -> int:
    """Tokens of an image in the prompt, marks included: every crop and the overview stand between two.

    >>> count_prompt_tokens(CropLayout(2, 2))
    504
    """
    return layout.crops * (crop_tokens + 2) + layout.newlines + image_tokens + 2


def plan_crops(width: int, height: int, config: CropConfig = RELEASED) -> CropPlan:
    """Where an image of width x height pixels is cut.

    Ratios are compared in floating point exactly as upstream compares them: 330 / 150 leaves a remainder just above
    0.2, so that one more window is cut than on paper, and prompts must agree with those the model was trained on.

    >>> plan_crops(1024, 768).layout
    CropLayout(rows=2, columns=2)
    """
    padded = _pad_thin(*check_positive_ints(width=width, height=height))
    resized = _limit(*padded, config.max_side)
    window = choose_window(*resized, config) if config.enable_crops else 0
    if not window:
        return CropPlan(padded, resized, 0, resized, CropLayout(0, 0))
    columns, rows = (_count_windows(side, window) for side in resized)
    # A side below the window keeps its length; the windows then reach beyond the canvas, which reads as black.
    width, height = resized
    canvas = width if width < window else columns * window, height if height < window else rows * window
    return CropPlan(padded, resized, window, canvas, CropLayout(rows, columns))


def choose_window(width: int, height: int, config: CropConfig = RELEASED) -> int:
    """The side of the crops' windows in pixels; 0 when the overview is enough.

    Below `image_size`: none, unless the image is elongated; then its short side. Above:
    `crop_size`, or the short side of a long strip if that is less. Upstream:
    `determine_window_size`.
    """
    long, short = max(width, height), min(width, height)
    if long < config.image_size:
        return short if long / short > SQUARE_RATIO else 0
    return min(short, config.crop_size) if long / short > THIN_RATIO else config.crop_size


def cut_crops(image, config: CropConfig = RELEASED) -> tuple[Image.Image, list[Image.Image], CropPlan]:
    """Anything `load_image` takes -> (the image for the overview, its crops row by row, the plan).

    Raises ValueError for an image so elongated that it would be cut into more than `config.max_crops`.
    """
    return _cut(load_image(image), config)


def _cut(image: Image.Image, config: CropConfig) -> tuple[Image.Image, list[Image.Image], CropPlan]:
    plan = plan_crops(*image.size, config)
    if plan.layout.crops > config.max_crops:
        raise ValueError(
            f"a picture of {image.width} x {image.height} pixels has {plan.layout.crops} crops, {plan.window} pixels "
            f"wide, max_crops of CropConfig is {config.max_crops}; crop the picture, or raise it"
        )
    image = _resize_padded(image, plan)
    canvas = image.resize(plan.canvas, Image.Resampling.BILINEAR)
    return image, [canvas.crop(box) for box in plan.boxes], plan


def _resize_padded(image: Image.Image, plan: CropPlan) -> Image.Image:
    """Padded to a square and resized, as upstream does it and to the bit, without building the square.

    A strip of 1 x 60,000 pixels would become 10 GB of black. Pillow resizes rows first and rounds, then columns.
    """
    if plan.padded == image.size:
        return image.resize(plan.resized, Image.Resampling.BILINEAR)
    (side, _), (size, _) = plan.padded, plan.resized
    if size == side:
        strip = image
    elif image.width > image.height:
        strip = image.resize((size, image.height), Image.Resampling.BILINEAR)
        strip = Image.fromarray(_shrink_rows(np.asarray(strip), side, size))
    else:
        strip = Image.fromarray(_shrink_rows(np.asarray(image.transpose(Image.Transpose.TRANSPOSE)), side, size))
        strip = strip.transpose(Image.Transpose.TRANSPOSE)
        strip = strip.resize((strip.width, size), Image.Resampling.BILINEAR)
    square = Image.new("RGB", plan.resized)
    square.paste(strip, (0, 0))
    return square


def _shrink_rows(rows: np.ndarray, side: int, size: int) -> np.ndarray:
    """(n, W, 3) uint8, above side - n black rows -> the first of `size` rows, all that are not black.

    Pillow's bilinear resize in one direction: a triangle around each new row's centre, as integers of 22 bits.
    """
    scale, shrunk = side / size, []
    for i in range(min(size, math.ceil(len(rows) / scale + 0.5))):
        centre = (i + 0.5) * scale
        first, end = max(0, int(centre - scale + 0.5)), min(side, int(centre + scale + 0.5))
        weights = np.clip(1 - np.abs((np.arange(first, end) - centre + 0.5) / scale), 0, None)
        weights /= weights.cumsum()[-1]  # summed in order, as Pillow does
        total = np.full(rows.shape[1:], 1 << 21, np.int32)
        for row, weight in zip(rows[first:], weights, strict=False):
            total += row * np.int32(0.5 + weight * (1 << 22))
        shrunk.append((total >> 22).astype(np.uint8))
    return np.stack(shrunk)


def prepare_pixels(image: Image.Image, side: int, config: CropConfig = RELEASED) -> Tensor:
    """An image -> (3, side, side) float32: to [0, 1], normalised, and only then resized.

    The order matters: this resize (bilinear with antialias) works on floats, which are neither
    rounded nor clamped to 8 bits.
    """
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (config.image_mean, config.image_std))
    pixels, size = ((pixels - mean) / std)[None], (side, side)
    return F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)[0]


def square_patch_rows(pixels: Tensor, patch_size: int) -> Tensor:
    """(B, C, S, S) -> (B * (S/P)^2, C*P*P): patches row by row; within one channel, patch row, patch column.

    What a convolution with kernel = stride = P sees. Pixels right and below of the last whole patch are left out, as it
    leaves them.
    """
    check_shape(pixels, ("B", "C", "S", "S"), "pixels")
    height, width = pixels.shape[2:]
    if height != width or height < patch_size:
        raise ValueError(f"pixels: expected squares of at least {patch_size} pixels, got {tuple(pixels.shape)}")
    return F.unfold(pixels, patch_size, stride=patch_size).transpose(1, 2).flatten(0, 1)


def patchify_crops(image, config: CropConfig = RELEASED) -> tuple[Tensor, CropLayout]:
    """Anything `load_image` takes -> (patch rows (N, C*P*P) float32 of all crops, then the overview; the layout)."""
    return rows_of_crops(load_image(image), config)


def rows_of_crops(image: Image.Image, config: CropConfig = RELEASED) -> tuple[Tensor, CropLayout]:
    """The same for an image that `load_image` has made."""
    image, crops, plan = _cut(image, config)
    stacks = [(crops, config.crop_size), ([image], config.image_size)]
    squares = [torch.stack([prepare_pixels(x, side, config) for x in stack]) for stack, side in stacks if stack]
    return torch.cat([square_patch_rows(stack, config.patch_size) for stack in squares]), plan.layout


def _pad_thin(width: int, height: int) -> tuple[int, int]:
    is_thin = min(width, height) < MIN_SIDE and max(width, height) > THIN_RATIO * min(width, height)
    return (max(width, height),) * 2 if is_thin else (width, height)


def _limit(width: int, height: int, max_side: int) -> tuple[int, int]:
    """Scaled down to `max_side`, truncated in floating point as upstream does: 3023 may come out, never 3025."""
    if max(width, height) <= max_side:
        return width, height
    scale = max_side / max(width, height)
    return max(1, int(width * scale)), max(1, int(height * scale))


def _count_windows(side: int, window: int) -> int:
    ratio = side / window
    return max(1, int(ratio) + (ratio - side // window > SPARE_REMAINDER)) if ratio >= 1 else 1
