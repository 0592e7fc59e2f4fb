"""Step3-VL's images: an overview of the whole image, and square crops that show the details.

    image (W, H)
       | pad          a small, thin image becomes a square (black, image top left)
       | resize       sides above `max_side` scaled down           Pillow, bilinear
       +--> overview  image_size x image_size pixels, whatever the aspect ratio
       | canvas       resized so that whole windows fit            Pillow, bilinear
       +--> crops     the windows row by row, each crop_size x crop_size pixels
    patch rows (N, C*P*P)    of all crops in order, then of the overview; P patch_size, C channels
    CropLayout               rows x columns of crops

In the prompt, the crops come first, each between two special tokens, and a newline token
follows every row of crops except the last. The overview follows, also between two special
tokens. Upstream: `ImagePatcher` and `Step3VisionProcessor` (vLLM).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from refvl.checks import as_integer_rows
from refvl.pixels.images import resize
from refvl.pixels.patches import check_aspect_ratio, check_preprocessing, known_fields

# an image with a side below MIN_SIDE and an aspect ratio above THIN_RATIO is padded to a square
MIN_SIDE, THIN_RATIO = 32, 4
SQUARE_RATIO = 1.5  # up to this ratio, a small image needs only the overview
SPARE_REMAINDER = 0.2  # a remainder above this fraction of a window gets a separate window


@dataclass(frozen=True, slots=True)
class CropConfig:
    """The rule for cutting an image. The defaults are the constants of the released model; sides are in pixels."""

    image_size: int = 728  # the side of the overview in pixels
    crop_size: int = 504
    patch_size: int = 14
    max_side: int = 3024
    enable_crops: bool = True  # False: only overviews
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # OpenAI CLIP
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    understand_projector_stride: int = 2  # the stride of the encoder's first convolution after the tower

    def __post_init__(self):
        check_preprocessing(self)
        for name in ("image_size", "crop_size"):
            if (size := getattr(self, name)) % self.patch_size:
                raise ValueError(f"{name}: must be a multiple of patch_size={self.patch_size}, got {size}")

    @classmethod
    def from_hf(cls, config) -> "CropConfig":
        """Read the sizes from a model's config or its vision config, given as an object or a dict.

        Released configs set `image_size` and `patch_size`; small configs may also set
        `crop_size` and `max_side`.
        """
        values = config if isinstance(config, dict) else config.to_dict()
        return cls(**known_fields(cls, values | values.get("vision_config", {})))

    @property
    def image_tokens(self) -> int:
        """The number of tokens of an overview."""
        return count_square_tokens(self.image_size, self.patch_size, self.understand_projector_stride)

    @property
    def crop_tokens(self) -> int:
        """The number of tokens of a crop."""
        return count_square_tokens(self.crop_size, self.patch_size, self.understand_projector_stride)


def count_square_tokens(size: int, patch_size: int, stride: int) -> int:
    """Count the tokens that the encoder returns for a square of `size` pixels per side.

    The encoder's two convolutions (2 x 2 with `stride`; 3 x 3 with stride 2 and padding 1) reduce
    the number of tokens below the number of patches.

    >>> count_square_tokens(728, 14, 2), count_square_tokens(504, 14, 2)
    (169, 81)
    """
    after_first = (size // patch_size - 2) // stride + 1
    return ((after_first - 1) // 2 + 1) ** 2


RELEASED = CropConfig()


class CropLayout(NamedTuple):
    """The numbers of rows and columns of an image's crops, or (0, 0) if there are no crops.

    Every image also has an overview.
    """

    rows: int
    columns: int

    @property
    def crops(self) -> int:
        return self.rows * self.columns

    @property
    def newlines(self) -> int:
        """The number of newline tokens in the prompt: one after each row of crops except the last."""
        return max(0, self.rows - 1)

    @property
    def newline_mask(self) -> tuple[bool, ...]:
        """A flag for each crop: whether a newline token follows the crop. Upstream: `patch_newline_mask`."""
        return tuple((i + 1) % self.columns == 0 and i + 1 < self.crops for i in range(self.crops))


@dataclass(frozen=True, slots=True)
class CropPlan:
    """The sizes of an image's overview and crops, computed before pixels are processed.

    Sizes are (width, height) in pixels.
    """

    padded: tuple[int, int]
    resized: tuple[int, int]  # the size of the image that becomes the overview
    window: int  # the side of the windows on the canvas; 0 if there are no crops
    canvas: tuple[int, int]  # the size of the image that the windows are cut from
    layout: CropLayout

    @property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """The (left, top, right, bottom) of each window on the canvas, row by row.

        A window may extend beyond a canvas that is smaller on one side.
        """
        side, (rows, columns) = self.window, self.layout
        return [(c * side, r * side, (c + 1) * side, (r + 1) * side) for r in range(rows) for c in range(columns)]


def as_crop_layouts(layouts, name: str = "layouts") -> list[CropLayout]:
    """Return the (rows, columns) of each image's crops as `CropLayout`s; (0, 0) means no crops.

    layouts: a sequence of pairs, or a tensor (images, 2).

    Raises TypeError for a wrong type, and ValueError for negative numbers or if only one of
    rows and columns is 0.
    """
    pairs = as_integer_rows(layouts, "(rows, columns)", name, items="images", least=0)
    for i, pair in enumerate(pairs):
        if 0 in pair and any(pair):
            raise ValueError(f"{name}[{i}]: expected rows and columns above 0, or (0, 0) without crops, got {pair}")
    return [CropLayout(*pair) for pair in pairs]


def count_prompt_tokens(layout: CropLayout, *, crop_tokens: int = 81, image_tokens: int = 169) -> int:
    """Count an image's tokens in the prompt, with newlines and a special token on each side of every crop and overview.

    >>> count_prompt_tokens(CropLayout(2, 2))
    504
    """
    return layout.crops * (crop_tokens + 2) + layout.newlines + image_tokens + 2


def plan_crops(width: int, height: int, config: CropConfig = RELEASED) -> CropPlan:
    """Plan how an image of width x height pixels is cut. Sizes are truncated in floating point, as they are upstream.

    Raises ValueError for an aspect ratio above 200: such an image would become a huge square,
    or hundreds of crops.

    >>> plan_crops(1024, 768).layout
    CropLayout(rows=2, columns=2)
    """
    check_aspect_ratio(height, width)
    long, short = max(width, height), min(width, height)
    is_thin = short < MIN_SIDE and long > THIN_RATIO * short
    padded = (long, long) if is_thin else (width, height)

    scale = min(1.0, config.max_side / long)  # with max_side=3024, 4236 px become 3023
    width, height = (max(1, int(side * scale)) for side in padded)
    resized = (width, height)

    window = choose_window(width, height, config) if config.enable_crops else 0
    if not window:
        return CropPlan(padded, resized, 0, resized, CropLayout(0, 0))
    layout = CropLayout(rows=count_windows(height, window), columns=count_windows(width, window))
    # A side shorter than the window keeps its length; the windows then extend beyond the canvas, where they are black.
    canvas = (layout.columns * min(width, window), layout.rows * min(height, window))
    return CropPlan(padded, resized, window, canvas, layout)


def choose_window(width: int, height: int, config: CropConfig = RELEASED) -> int:
    """Return the side of the crops' windows in pixels; 0 if only the overview is needed.

    An image up to `image_size` has no crops unless it is elongated; then the side is the image's
    short side. For a larger image, the side is `crop_size`, or the short side of a long
    strip if that is shorter. Upstream: `determine_window_size`.
    """
    long, short = max(width, height), min(width, height)
    if long <= config.image_size:  # later versions of vLLM have <
        return short if long / short > SQUARE_RATIO else 0
    return min(short, config.crop_size) if long / short > THIN_RATIO else config.crop_size


def count_windows(side: int, window: int) -> int:
    """Count the windows along a side: all whole windows, plus one for a large remainder, but at least one.

    The remainder is compared in floating point, as in upstream: 330 / 150 leaves slightly more
    than 0.2, so there is one window more than in exact arithmetic. The prompts then agree with
    those of the training data.
    """
    whole = side // window
    remainder = side / window - whole
    return max(1, whole + (remainder > SPARE_REMAINDER))


def cut_crops(image: Image.Image, config: CropConfig = RELEASED) -> tuple[Image.Image, list[Image.Image], CropPlan]:
    """Return (image for the overview, crops row by row, plan) for an image that came from `load_image`."""
    plan = plan_crops(*image.size, config)
    square = Image.new("RGB", plan.padded)
    square.paste(image)
    overview = resize(square, plan.resized[1], plan.resized[0], Image.Resampling.BILINEAR)
    canvas = resize(overview, plan.canvas[1], plan.canvas[0], Image.Resampling.BILINEAR)
    return overview, [canvas.crop(box) for box in plan.boxes], plan


def prepare_pixels(image: Image.Image, side: int, config: CropConfig = RELEASED) -> Tensor:
    """Return an image as (3, side, side) float32: scaled to [0, 1], normalised, then resized.

    The order matters, because this resize (bilinear with antialiasing) works on floats, which are
    neither rounded nor clamped to 8 bits.
    """
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (config.image_mean, config.image_std))
    pixels, size = ((pixels - mean) / std)[None], (side, side)
    return F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)[0]


def patchify_crops(image: Image.Image, config: CropConfig = RELEASED) -> tuple[Tensor, CropLayout]:
    """Return (patch rows, layout) of an image that came from `load_image`.

    The rows, (N, C*P*P) float32, are those of all crops, then of the overview.
    """
    overview, crops, plan = cut_crops(image, config)
    squares = [prepare_pixels(crop, config.crop_size, config) for crop in crops]
    squares.append(prepare_pixels(overview, config.image_size, config))
    rows = [square_patch_rows(square_CSS[None], config.patch_size) for square_CSS in squares]
    return torch.cat(rows), plan.layout


def square_patch_rows(pixels: Tensor, patch_size: int) -> Tensor:
    """Cut squares (B, C, S, S) into (B * (S/P)^2, C*P*P): row-major patches, each in the order channel, row, column.

    These are the inputs of a convolution with kernel = stride = P. Like such a convolution,
    this function drops pixels to the right of and below the last whole patch.
    """
    return F.unfold(pixels, patch_size, stride=patch_size).transpose(1, 2).flatten(0, 1)
