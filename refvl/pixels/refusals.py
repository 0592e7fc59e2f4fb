"""Errors for files and sizes that are rejected; these functions run only after a check has failed."""

import os
import re
import stat
from pathlib import Path

from PIL import Image

from refvl.printing import printable

URL = re.compile(r"data:|[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # Path turns :// into :/
PLAIN = re.compile(r"[ -~]{,240}")  # `printable` does not change these names


def not_a_file(source: str | Path, kind: str) -> Exception:
    """Return the error for a path that is not a regular file: a pipe would block, and a device may never end."""
    name = printable(source)
    if URL.match(str(source)):
        return ValueError(f"{kind}: expected a path, got the URL {name}; download the file and pass its path")
    try:
        mode = os.stat(source).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return FileNotFoundError(f"{kind}: no such file: {name}")
    except (OSError, ValueError) as error:  # the path is too long, not permitted, or contains a NUL byte
        return ValueError(f"{kind}: {name} cannot be opened ({getattr(error, 'strerror', error)})")
    what = "folder" if stat.S_ISDIR(mode) else "pipe or device"
    return ValueError(f"{kind}: expected a file, got the {what} {name}")


def not_a_picture(name: str, error: Exception, max_image_pixels: int) -> ValueError:
    """Return the error for a file that Pillow cannot open."""
    if isinstance(error, Image.DecompressionBombError):
        return ValueError(
            f"image: {name} has more pixels than max_image_pixels={max_image_pixels:,} and PIL.Image."
            f"MAX_IMAGE_PIXELS allow ({error}); raise both, the first with limits=MediaLimits(max_image_pixels=...)"
        )
    reason = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({printable(error)})"
    return ValueError(f"image: {name} is not an image that Pillow can read{reason}")


def caused(what: str, error: Exception) -> ValueError:
    """Return the error for an exception in a decoder or a converter. what: the file and the step that failed."""
    return ValueError(f"{what}: {printable(error) or type(error).__name__}")


def nothing_to_see(what: str, width: int, height: int) -> ValueError:
    """Return the error for an empty image or for an image of a single pixel."""
    return ValueError(f"{what} is {width} x {height} pixels; expected at least two pixels")


def too_many_pixels(what: str, width: int, height: int, limit: int) -> ValueError:
    """Return the error for an image or a frame with more pixels than `limit`, which is max_image_pixels."""
    return ValueError(
        f"{what} has {width} x {height} = {width * height:,} pixels, but max_image_pixels is "
        f"{limit:,}; raise it with limits=MediaLimits(max_image_pixels=...)"
    )


def too_many_frames(what: str, shape: tuple[int, ...], limit: int) -> ValueError:
    """Return the error for frames, of shape (T, H, W, 3), with more bytes than `limit`, which is max_video_bytes."""
    frames, height, width, _ = shape
    return ValueError(
        f"{what}: {frames} frames of {width} x {height} pixels need {frames * width * height * 3:,} bytes, but "
        f"max_video_bytes is {limit:,}; use fewer frames, or raise it with limits=MediaLimits(max_video_bytes=...)"
    )


def unequal_frames(what: str, first: tuple[int, ...], other: tuple[int, ...]) -> ValueError:
    """Return the error for frames that cannot be stacked; first, other: two shapes (H, W, 3) that differ."""
    sizes = f"{first[1]} x {first[0]} and {other[1]} x {other[0]}"
    return ValueError(f"{what}: expected frames of one size, got {sizes} pixels (width x height)")


def too_thin(width: int, height: int, limit: int) -> ValueError:
    """Return the error for an aspect ratio above `limit`."""
    ratio = max(height, width) / min(height, width)
    return ValueError(
        f"width, height: expected an aspect ratio of at most {limit}, got {ratio:.1f} for {width} x {height} pixels"
    )
