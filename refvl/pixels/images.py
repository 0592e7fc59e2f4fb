"""Convert an image from disk or memory to plain RGB: `load_image(path | PIL image | array | tensor)`.

Pillow decodes. This file makes the choices that Pillow leaves open: the orientation, the background of transparent
pixels, the conversion of 16 bits to 8 (`refvl.pixels.levels`), and the limits on decoding (`MediaLimits`).
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile

from refvl.checks import check_positive_ints
from refvl.pixels import refusals
from refvl.pixels.formats import readable_formats
from refvl.pixels.levels import as_uint8, channels_last, grey_levels
from refvl.printing import printable

_TO_UPRIGHT = {  # the EXIF orientation (how the camera was held; 1 is upright) -> the operation
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits on decoding, checked before memory is allocated; you can raise each limit.

    Pillow has its own limit, `PIL.Image.MAX_IMAGE_PIXELS`: it warns above 89 million pixels and raises an error above
    twice as many. To go beyond that, raise both limits.
    """

    max_image_pixels: int = 2**26  # width x height of an image or frame in a file: 8192 x 8192 takes 201 MB as RGB
    max_video_bytes: int = 2**31  # the bytes of the frames kept from a video, 3 per pixel

    def __post_init__(self):
        check_positive_ints(max_image_pixels=self.max_image_pixels, max_video_bytes=self.max_video_bytes)


LIMITS = MediaLimits()


def load_image(source, *, limits: MediaLimits = LIMITS) -> Image.Image:
    """Return one image as a PIL image in RGB mode; its `.info["source"]` names the file it came from.

    source: a path; a PIL image; an array (H, W), (H, W, 1 | 3 | 4) or a tensor, which may also be (1 | 3 | 4, H, W),
    of uint8, uint16, or floats in [0, 1]. limits: limits on reading from a file; arrays have no limit.

    The EXIF rotation is applied; an unreadable EXIF block is ignored, as in other tools. Transparent pixels
    are blended onto white, as transformers 5.23 does; 5.17 drops the alpha channel and shows the colours stored in
    transparent pixels. An animation is read as its first frame.

    16-bit grey is scaled to 8 bits (Pillow alone would turn most of it white). Pillow's mode "I" does not record how
    many bits its integers have. In a PNG or PPM file, they have 16 bits. In other files, they are read as 8-bit values
    if none is above 255, and as 16-bit values if none is above 65535. Mode "F" contains floats in [0, 1].

    Raises FileNotFoundError for a missing file and TypeError for any other type of source. Raises ValueError for a URL,
    and for a file that is truncated, larger than `limits`, or not an image. Also raises ValueError for levels outside
    these ranges, for an array with a different shape, dtype or range, and for images that are empty or have a single
    pixel.
    """
    if not isinstance(source, (str, Path)):
        return _image_in_memory(source, limits)
    name = str(source)
    if not os.path.isfile(source) or refusals.URL.match(name):
        raise refusals.not_a_file(source, "image")
    if not refusals.PLAIN.fullmatch(name):
        name = printable(name)
    with open_image(Path(source), name, limits) as image:
        return to_rgb(image, name, name, limits)


def open_image(source: Path | IO[bytes], name: str, limits: MediaLimits) -> Image.Image:
    """Open a file or its bytes as an image, not yet decoded. name: the file, for the error if Pillow cannot read it."""
    try:
        return Image.open(source, formats=readable_formats())
    except Exception as error:  # plugins may raise errors of any kind
        raise refusals.not_a_picture(name, error, limits.max_image_pixels) from error


def to_rgb(image: Image.Image, name: str, origin: str, limits: MediaLimits) -> Image.Image:
    """Decode an opened image, upright and RGB.

    name: the name in messages; origin: the file it came from, or "" if there is none.
    """
    pixels = image.width * image.height
    if pixels <= 1:
        raise refusals.nothing_to_see(f"image: {name}", image.width, image.height)
    if isinstance(image, ImageFile.ImageFile) and pixels > limits.max_image_pixels:  # only files are limited
        raise refusals.too_many_pixels(f"image: {name}", image.width, image.height, limits.max_image_pixels)
    try:
        image.load()
    except Exception as error:
        raise refusals.caused(f"image: {name} is truncated or damaged", error) from error

    rotation = None
    with suppress(Exception):  # the EXIF block may be damaged in any way; the pixels are intact
        rotation = _TO_UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    if image.mode.startswith("I") or image.mode == "F":  # grey with more than 8 bits
        image = Image.fromarray(as_uint8(grey_levels(image, name), f"image: {name}"))
    try:
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert("RGB")
    except Exception as error:
        raise refusals.caused(f"image: {name} cannot be converted to RGB", error) from error
    if rotation is not None:
        image = image.transpose(rotation)
    image.info = {"source": origin} if origin else {}  # the EXIF block is dropped, so nothing rotates the image again
    return image


def _image_in_memory(source, limits: MediaLimits) -> Image.Image:
    """Convert a PIL image, an array or a tensor to RGB."""
    name = f"the {type(source).__name__}"
    if isinstance(source, Image.Image):
        origin = source.info.get("source") or getattr(source, "filename", "")
        return to_rgb(source, name, printable(origin), limits)
    if not isinstance(source, (np.ndarray, torch.Tensor)):
        kinds = "a path, a PIL image, a numpy array or a torch tensor"
        raise TypeError(f"image: expected {kinds}, got {type(source).__name__}")
    return to_rgb(Image.fromarray(as_uint8(channels_last(source), "image")), name, "", limits)
