"""Convert an image from disk or memory to plain RGB: `load_image(path | PIL image | array | tensor)`.

Pillow decodes images. This file makes the choices that Pillow leaves open: the orientation, the
background of transparent pixels, the conversion of 16-bit and float values to 8 bits, and the
limits on decoding (`MediaLimits`).
"""

import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile

from refvl.paths import data

_TO_UPRIGHT = {  # EXIF orientation (how the camera was held; 1: upright) -> the operation that corrects it
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits on decoding, checked before memory is allocated; you can raise each limit.

    Pillow has a separate limit, `PIL.Image.MAX_IMAGE_PIXELS`. Pillow warns above 89 million
    pixels and raises an error above twice as many; to go beyond that, raise both limits.
    """

    max_image_pixels: int = 2**26  # the limit for one image or frame in a file; 8192 x 8192 RGB pixels take 201 MB
    max_video_bytes: int = 2**31  # the limit for all frames sampled from a video, at 3 bytes per pixel


LIMITS = MediaLimits()


def load_image(source, *, limits: MediaLimits = LIMITS) -> Image.Image:
    """Return an image as a PIL image in RGB mode; the result's `.info["source"]` names the source file.

    source: a path, or the name of a shipped image; a PIL image; an array or a tensor (H, W), (H, W,
    1 | 3 | 4) or (1 | 3 | 4, H, W) of uint8, uint16, integers in [0, 255], floats in [0, 1], or
    booleans (True is white). limits: the limits for files; images in memory are not limited.

    The EXIF rotation is applied; an unreadable EXIF block is ignored, as in other tools.
    Transparent pixels are blended onto white, as in transformers 5.23; version 5.17 drops the
    alpha channel and shows the colours stored in transparent pixels. Only the first frame of an
    animation is read.

    16-bit grey is scaled to 8 bits (Pillow alone would turn most of it white). Pillow's mode
    "I" does not record the number of bits. In a PNG or PPM file, grey levels in this mode have
    16 bits; in other files, they are read as 8-bit values if none is above 255, and as 16-bit
    values otherwise. Mode "F" contains floats in [0, 1].

    Raises FileNotFoundError for a path that is not a file, and TypeError for an unsupported
    type of source. Raises ValueError, with the name of the file and the reason, for a file that
    Pillow cannot decode. Also raises ValueError for an image that is empty or exceeds `limits`,
    and for an array of an unsupported shape, dtype or range.
    """
    origin = ""
    if is_path := isinstance(source, (str, os.PathLike)):
        # a path that is not a file must be a shipped image's name; URLs, folders and blocking pipes are refused
        source = source if os.path.isfile(source) else data(source, kind="image")
        origin = os.fspath(source)
    elif isinstance(source, Image.Image):
        origin = str(source.info.get("source") or getattr(source, "filename", ""))
    elif not isinstance(source, (np.ndarray, torch.Tensor)):
        raise TypeError(f"image: expected a path, a PIL image, an array or a tensor, got {type(source).__name__}")
    try:
        if not is_path and not isinstance(source, Image.Image):
            source = Image.fromarray(as_uint8(channels_last(source)))
        with Image.open(source) if is_path else nullcontext(source) as opened:
            image = to_rgb(opened, limits)
    except Exception as error:  # Pillow's decoders may raise errors of any kind
        raise ValueError(f"image: {origin or type(source).__name__} cannot be read: {error}") from error
    image.info = {"source": origin} if origin else {}  # the EXIF block is dropped, so nothing rotates the image again
    return image


def to_rgb(image: Image.Image, limits: MediaLimits = LIMITS) -> Image.Image:
    """Decode an opened image into upright RGB. Raises ValueError if the image is empty or exceeds `limits`."""
    if image.format == "EPS":
        raise ValueError("an EPS file is a program, which Pillow would run in Ghostscript; convert it")
    pixels = image.width * image.height
    largest = limits.max_image_pixels if isinstance(image, ImageFile.ImageFile) else pixels  # only files are limited
    if not 0 < pixels <= largest:
        most = f"max_image_pixels={limits.max_image_pixels:,}; raise it with limits=MediaLimits(max_image_pixels=...)"
        raise ValueError(f"it has {image.width} x {image.height} pixels; a file may have 1 to {most}")
    if "RGB;16B" in str(getattr(image, "tile", "")) and "transparency" in image.info:
        image = image.copy()  # Pillow keeps 8 bits of each pixel, but 16 of the transparent colour
        image.info["transparency"] = tuple(level >> 8 for level in image.info["transparency"])
    rotation = None
    with suppress(Exception):  # a damaged EXIF block may raise any error, but the pixels are intact
        rotation = _TO_UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    if image.mode.startswith("I") or image.mode == "F":  # grey with more than 8 bits
        image = Image.fromarray(as_uint8(grey_levels(image)))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("RGB")
    return image.transpose(rotation) if rotation is not None else image


def resize(image: Image.Image, height: int, width: int, resampling=Image.Resampling.BICUBIC) -> Image.Image:
    """Resize an 8-bit image with Pillow: first the width, then the height.

    Pillow rounds and clips to 8 bits between the two passes, so the order of the passes changes
    the result. Pillow 13.0 runs the vertical pass first if the height shrinks by more than
    twice as many pixels as the width. Up to version 12, Pillow runs the horizontal pass first,
    as torchvision does, so the released models were trained on that order. Two calls with one
    pass each keep this order under any version.
    """
    across = image.resize((width, image.height), resampling)
    return across.resize((width, height), resampling)


def channels_last(source: np.ndarray | torch.Tensor) -> np.ndarray:
    """Return an array (H, W) or (H, W, 3 | 4) for a tensor or array whose channels may come first.

    If both the first and the last dimension could be the channels, the first is taken for a
    tensor, and the last for an array.
    """
    array: Any = source
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu()
        array = (source.double() if source.is_floating_point() else source).numpy()
    are_channels = [size in (1, 3, 4) for size in array.shape]
    if array.ndim == 3 and are_channels[0] and (array is not source or not are_channels[2]):
        array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        allowed = "(H, W), (H, W, 1 | 3 | 4) or (1 | 3 | 4, H, W)"
        raise ValueError(f"expected an array of shape {allowed}, got {tuple(source.shape)}")
    return array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def grey_levels(image: Image.Image) -> np.ndarray:
    """Return an image's grey levels, in mode "I" as 8-bit or 16-bit values (see `load_image`), otherwise as they are.

    The grey level that a PNG file marks as transparent becomes white.
    """
    levels = np.asarray(image)
    if (transparent := image.info.get("transparency")) is not None:
        levels = np.where(levels == transparent, 65535, levels).astype(levels.dtype)
    if image.mode != "I":
        return levels
    is_wide = levels.max() > 255 or image.format in ("PNG", "PPM")
    return levels.astype(np.uint16 if is_wide else np.uint8)


def as_uint8(array: np.ndarray) -> np.ndarray:
    """Convert to uint8: keep integers in [0, 255], divide uint16 by 257, or multiply floats and booleans by 255.

    Results are rounded. Floats must be in [0, 1].
    """
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if array.dtype.kind in "iu" and 0 <= array.min() <= array.max() <= 255:
        return array.astype(np.uint8)
    if array.dtype.kind not in "fb" or not ((array >= 0) & (array <= 1)).all():  # NaN is not in [0, 1] either
        raise ValueError(f"expected integers in [0, 255], uint16, or floats in [0, 1] (scale them), got {array.dtype}")
    return (array.astype(np.float64) * 255).round().astype(np.uint8)
