"""The images of a folder: which files they are, what they are called in a manifest, and whether one has changed.

A file counts as unchanged while its size and both its times (of its contents, and of its entry, which a renaming sets)
are those that were written down. Where only times differ, the digest of its bytes decides: a file that was touched or
copied is the same, one that was overwritten by another of its size, or swapped with it, is not.
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePath
from urllib.parse import quote_from_bytes

from refvl.pixels.media import image_suffixes

STAMP = ("bytes", "mtime_ns", "ctime_ns")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file to encode. name: see `image_name`; stamp: see `read_stamp`; rows: patch rows, as far as is known yet."""

    name: str
    path: Path
    stamp: tuple[int, ...] | None
    rows: int = 0


def find_images(folder: Path) -> list[ImageFile]:
    """Files in `folder` and below whose suffix is that of an image which Pillow can open, sorted by path.

    Links to folders are not followed. Raises FileNotFoundError or NotADirectoryError where there is no folder, OSError
    for one that cannot be listed, and ValueError when no image is found.
    """
    if not folder.is_dir():
        missing = NotADirectoryError if folder.exists() else FileNotFoundError
        raise missing(f"folder: {folder} is no folder")
    suffixes = image_suffixes()
    files = (Path(parent, name) for parent, _, names in os.walk(folder, onerror=_refuse) for name in names)
    paths = sorted(path for path in files if path.suffix.lower() in suffixes)
    if not paths:
        raise ValueError(f"folder: {folder} holds no image that Pillow can read")
    return [ImageFile(image_name(path.relative_to(folder)), path, read_stamp(path)) for path in paths]


def image_name(path: PurePath) -> str:
    """A path in the folder as shards and manifest name it.

    They hold UTF-8 alone. A path that is something else is percent-encoded, byte by byte, behind a "./": nothing else
    begins with that, so no two files share a name.

    >>> image_name(PurePath("cats/1.jpg")), image_name(PurePath("caf\\udce9.jpg"))
    ('cats/1.jpg', './caf%E9.jpg')
    """
    name = path.as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        return "./" + quote_from_bytes(os.fsencode(name))
    return name


def _refuse(error: OSError) -> None:
    raise OSError(f"folder: {error.filename} cannot be listed ({error.strerror})") from error


def read_stamp(path: Path) -> tuple[int, ...] | None:
    """(bytes, times in ns of contents and entry); None for a link that leads nowhere, a pipe, a device."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns) if stat.S_ISREG(found.st_mode) else None


def is_unchanged(image: ImageFile, entry: dict) -> bool:
    """Whether the file is still what was encoded; its bytes are read only where times differ and the size does not."""
    stamp = tuple(entry.get(key) for key in STAMP)
    if image.stamp is None or image.stamp == stamp:
        return image.stamp is not None
    try:
        return image.stamp[0] == stamp[0] and digest_of(image.path) == entry.get("sha256")
    except OSError:
        return False


def digest_of(path: Path) -> str:
    """The sha256 of a file's bytes, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
