"""A picture, from disk or memory, to plain RGB: `load_image(path | PIL image | array | tensor)`.

Decoding is Pillow's; what is ours is what it leaves open: which way up a picture is, what stands behind a transparent
pixel, how 16 bits become 8 (`refvl.pixels.levels`), and how much is decoded at all (`MediaLimits`).
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile

from refvl.checks import blame, check_positive_ints, printable
from refvl.pixels import refusals
from refvl.pixels.levels import as_uint8, channels_last, grey_levels

_NEVER_DECODED = {"EPS", "MPEG"}  # drawn by Ghostscript, another program; Pillow only tells the size
_TO_UPRIGHT = {  # by how the camera was held, as EXIF counts; 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """How much is decoded at most, checked before memory is taken for it; a limit that is in the way can be raised.

    Pillow has a limit of its own, `PIL.Image.MAX_IMAGE_PIXELS`: it warns above 89 million pixels and refuses twice as
    many, so beyond that both have to be raised.
    """

    max_image_pixels: int = 2**26  # width x height of a file's picture or frame: 8192 x 8192, 201 MB as RGB
    max_video_bytes: int = 2**31  # of the frames of a clip that are kept, 3 bytes per pixel

    def __post_init__(self):
        check_positive_ints(max_image_pixels=self.max_image_pixels, max_video_bytes=self.max_video_bytes)

    def check_pixels(self, width: int, height: int, what: str) -> None:
        """Raise ValueError for a picture or a frame with more than max_image_pixels."""
        if width * height > self.max_image_pixels:
            raise ValueError(
                f"{what} has {width} x {height} = {width * height:,} pixels, max_image_pixels is "
                f"{self.max_image_pixels:,}; raise it with limits=MediaLimits(max_image_pixels=...)"
            )

    def check_frames(self, frames: int, width: int, height: int, what: str) -> None:
        """Raise ValueError where so many frames need more than max_video_bytes."""
        if (needed := frames * width * height * 3) > self.max_video_bytes:
            raise ValueError(
                f"{what}: {frames} frames of {width} x {height} pixels need {needed:,} bytes, max_video_bytes is "
                f"{self.max_video_bytes:,}; take fewer frames, or raise it with limits=MediaLimits(max_video_bytes=...)"
            )


LIMITS = MediaLimits()


def load_image(source, *, limits: MediaLimits = LIMITS) -> Image.Image:
    """One picture as a PIL image of mode RGB; `.info["source"]` says which file it came from.

    source: a path; a PIL image; an array (H, W), (H, W, 1 | 3 | 4) or a tensor, which may also be (1 | 3 | 4, H, W),
    of uint8, uint16, or floats in [0, 1]. limits: of what is read from a file; arrays are as large as they are.

    The EXIF rotation is applied; an EXIF block that cannot be read is ignored, as other tools do. Transparent pixels
    are blended onto white, as transformers 5.23 does; 5.17 drops the alpha channel, which shows whatever colour the
    file has where nothing was meant to be seen. Of an animation the first frame is taken.

    16-bit grey is scaled to 8 bits (Pillow alone would clip it to white). Pillow's mode "I" does not say how many bits
    its integers have: those of a PNG or PPM file are 16, others are taken for 8 bits where none is above 255, and for
    16 up to 65535. Mode "F" holds floats in [0, 1].

    Raises FileNotFoundError for a missing file, TypeError for another kind of source, ValueError for a URL, a file that
    is truncated, larger than `limits` or not an image, levels outside those ranges, an array of another shape, dtype or
    range, an empty picture, and one of a single pixel.
    """
    if isinstance(source, (str, Path)):
        path, name = regular_file(source, "image")
        with open_image(path, name, limits) as image:
            return to_rgb(image, name, name, limits)
    name = f"the {type(source).__name__}"
    if isinstance(source, Image.Image):
        origin = source.info.get("source") or getattr(source, "filename", "")
        return to_rgb(source, name, printable(origin), limits)
    if not isinstance(source, (np.ndarray, torch.Tensor)):
        kinds = "a path, a PIL image, a numpy array or a torch tensor"
        raise TypeError(f"image: expected {kinds}, got {type(source).__name__}")
    return to_rgb(Image.fromarray(as_uint8(channels_last(source), "image")), name, "", limits)


@cache
def readable_formats() -> tuple[str, ...]:
    """Names of Pillow's formats that decode here and now, in the order in which it tries them."""
    Image.init()
    readers = {name: Image.OPEN[name][0] for name in Image.ID if name in Image.OPEN and name not in _NEVER_DECODED}
    stub = ImageFile.StubImageFile
    return tuple(
        name for name, reader in readers.items() if not (isinstance(reader, type) and issubclass(reader, stub))
    )


def open_image(source: Path | IO[bytes], name: str, limits: MediaLimits) -> Image.Image:
    """A file or its bytes as a picture that is not decoded yet; ValueError, naming it, where Pillow cannot read it."""
    try:
        return Image.open(source, formats=readable_formats())
    except Exception as error:  # a plugin may raise anything
        raise refusals.not_a_picture(name, error, limits.max_image_pixels) from error


def to_rgb(image: Image.Image, name: str, origin: str, limits: MediaLimits) -> Image.Image:
    """An opened picture, upright and RGB. name: for messages; origin: the file it came from, "" for none."""
    check_size(image.width, image.height, f"image: {name}")
    if isinstance(image, ImageFile.ImageFile):  # others are decoded already
        limits.check_pixels(image.width, image.height, f"image: {name}")
    with blame(f"image: {name} is truncated or damaged"):
        image.load()
    rotation = None
    with suppress(Exception):  # an EXIF block that is damaged in any way; the pixels are there
        rotation = _TO_UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    if image.mode.startswith("I") or image.mode == "F":  # more than 8 bits of grey
        image = Image.fromarray(as_uint8(grey_levels(image, name), f"image: {name}"))
    with blame(f"image: {name} cannot be turned into RGB"):
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert("RGB")
    image = image if rotation is None else image.transpose(rotation)
    image.info = {"source": origin} if origin else {}  # without EXIF: once is enough
    return image


def regular_file(source: str | Path, kind: str) -> tuple[Path, str]:
    """The path of an ordinary file, and its name for messages: a pipe would block when opened, a device never end."""
    name = printable(source)
    if not os.path.isfile(source) or refusals.URL.match(str(source)):
        raise refusals.not_a_file(source, name, kind)
    return Path(source), name


def check_size(width: int, height: int, what: str) -> None:
    if width * height <= 1:
        raise ValueError(f"{what} is {width} x {height} pixels; there must be at least two to see anything")


def image_suffixes() -> frozenset[str]:
    """Suffixes, such as ".png", of the files that `load_image` reads.

    Those of Pillow's formats that have a reader, without stubs (BUFR, GRIB, HDF5, WMF), which need a handler that
    somebody else installs, EPS, which is drawn by another program, and MPEG, of which Pillow only tells the size.
    """
    return frozenset(suffix for suffix, format in Image.registered_extensions().items() if format in readable_formats())
