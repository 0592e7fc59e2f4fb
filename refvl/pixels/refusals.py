"""What is wrong with a file that cannot be read, in words: asked only once something is."""

import os
import re
import stat
from pathlib import Path

from PIL import Image

from refvl.checks import printable

URL = re.compile(r"data:|[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # Path turns :// into :/


def not_a_file(source: str | Path, name: str, kind: str) -> Exception:
    """The error for a path that is no ordinary file."""
    if URL.match(str(source)):
        return ValueError(f"{kind}: URLs are not read; download the file and give its path, got {name}")
    try:
        mode = os.stat(source).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return FileNotFoundError(f"{kind}: no such file: {name}")
    except (OSError, ValueError) as error:  # too long, not allowed, with a zero byte
        return ValueError(f"{kind}: {name} cannot be opened ({getattr(error, 'strerror', error)})")
    what = "folder" if stat.S_ISDIR(mode) else "pipe or device"
    return ValueError(f"{kind}: expected a file, got the {what} {name}")


def not_a_picture(name: str, error: Exception, max_image_pixels: int) -> ValueError:
    """The error for a file that Pillow cannot open."""
    if isinstance(error, Image.DecompressionBombError):
        return ValueError(
            f"image: {name} has more pixels than max_image_pixels={max_image_pixels:,} and PIL.Image."
            f"MAX_IMAGE_PIXELS allow ({error}); raise both, the first with limits=MediaLimits(max_image_pixels=...)"
        )
    reason = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({printable(error)})"
    return ValueError(f"image: {name} is not a picture that Pillow can read{reason}")
