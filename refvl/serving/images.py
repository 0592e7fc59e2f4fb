"""The media to encode: their files, their names in a manifest, and a check for changes.

A source is a folder, a tar file as written by WebDataset, or a text file that lists paths; tar files in a folder are
also read. A file is unchanged if its size, mtime and ctime equal the recorded values (renaming a file sets its ctime).
If only the times differ, the digest of its bytes decides whether the file has changed. So a file that was touched or
copied counts as unchanged. A file that was overwritten by, or swapped with, a different file of the same size counts as
changed.
"""

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote_from_bytes

from PIL import Image

from refvl.pixels.formats import image_suffixes
from refvl.pixels.media import Video

STAMP = ("bytes", "mtime_ns", "ctime_ns")
VIDEO_SUFFIXES = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"))
LIST_SUFFIXES = (".txt", ".lst")


def is_video(item: Any) -> bool:
    """Return whether a media item is a video: by a path's suffix, as a list of frames, or as an array of frames."""
    if isinstance(item, (str, Path)):
        return Path(item).suffix.lower() in VIDEO_SUFFIXES
    return isinstance(item, (Video, list, tuple)) or getattr(item, "ndim", 3) == 4


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file to encode.

    name: see `media_name`; stamp: see `read_stamp`; rows: the number of patch rows, if already known.

    begin, size: the offset and length of an image in the tar file at `path`; None: the whole file at `path`.
    """

    name: str
    path: Path
    stamp: tuple[int, ...] | None
    rows: int = 0
    begin: int | None = None
    size: int = 0

    @property
    def is_video(self) -> bool:
        return self.begin is None and is_video(self.path)

    def read_stamp(self) -> tuple[int, ...] | None:
        """Return the current stamp of the file; for an image in a tar file, its own size and the tar file's times."""
        stamp = read_stamp(self.path)
        return stamp if stamp is None or self.begin is None else (self.size, *stamp[1:])

    def digest(self) -> str:
        """Return the sha256 of the bytes, as hexadecimal digits."""
        with open(self.path, "rb") if self.begin is None else self._member() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def source(self) -> Path | Image.Image:
        """Return an input for `load_image` or `load_video`; raise ValueError for a tar member that is not an image."""
        return self.path if self.begin is None else Image.open(self._member())

    def _member(self) -> BytesIO:
        with open(self.path, "rb") as file:
            file.seek(self.begin or 0)
            return BytesIO(file.read(self.size))


def find_media(source: Path, *, videos: bool = False) -> list[MediaFile]:
    """Find media by suffix, sorted by name: images that Pillow can open and, with `videos`, also videos.

    source: a folder (searched recursively), a .tar file, or a text file with one path per line, relative to that file.
    In tar files, only images are found. Links to folders are not followed. A listed path that does not exist has no
    stamp, and neither does a symbolic link in a tar file. Raises FileNotFoundError or NotADirectoryError if the source
    does not exist, or if none of the listed files exists. Raises OSError if a folder cannot be listed. Raises
    ValueError if nothing is found, a list names a file that is not an image, or a tar file cannot be read.
    """
    suffixes = image_suffixes() | {".tar"} | (VIDEO_SUFFIXES if videos else frozenset())
    is_list = source.is_file() and source.suffix.lower() in LIST_SUFFIXES
    root = source.parent if source.is_file() else source
    found = dict[str, MediaFile]()  # by name, because paths or tar members may repeat; the last one counts
    for path in _listed(source) if is_list else _walk(source):
        name = media_name(path.relative_to(root) if path.is_relative_to(root) else path)
        if path.suffix.lower() == ".tar" and path.is_file():
            found |= {file.name: file for file in _members(path, name)}
        elif path.suffix.lower() in suffixes:
            found[name] = MediaFile(name, path, read_stamp(path))
        elif is_list:
            raise ValueError(f"folder: {source} lists {path}; expected an image or a video")
    files = sorted(found.values(), key=lambda file: (file.path, file.begin or 0))
    if not files:
        raise ValueError(f"folder: {source} contains no image that Pillow can read")
    if is_list and all(file.stamp is None for file in files):
        raise FileNotFoundError(f"folder: no file listed in {source} exists; the first path is {files[0].path}")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    if folder.is_file() and folder.suffix.lower() == ".tar":
        yield folder
        return
    if not folder.is_dir():
        missing = NotADirectoryError if folder.exists() else FileNotFoundError
        raise missing(f"folder: expected a folder, a .tar file or a list ({', '.join(LIST_SUFFIXES)}), got {folder}")

    def refuse(error: OSError) -> None:
        raise OSError(f"folder: {error.filename} cannot be listed ({error.strerror})") from error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name) for name in names)


def _listed(file: Path) -> Iterator[Path]:
    """Yield the paths in the lines of a text file, without empty lines."""
    for line in file.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n"):
        if line.strip():
            yield file.parent / line.strip()


def _members(path: Path, name: str) -> Iterator[MediaFile]:
    """Yield the images in a tar file, named after the file and the member; other members, such as labels, are skipped.

    A hard link counts as its target if the target is a file in the archive. Any other link has no stamp.
    """
    stamp = read_stamp(path) or ()
    places = dict[PurePath, tuple[int, int] | None]()  # offset and size of each file's bytes
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isreg() and not member.issparse():
                    places[PurePath(member.name)] = member.offset_data, member.size
                elif member.islnk() or member.issym() or member.isreg():
                    places[PurePath(member.name)] = places.get(PurePath(member.linkname)) if member.islnk() else None
    except (tarfile.TarError, OSError) as error:
        raise ValueError(f"folder: {path} cannot be read as an uncompressed tar file ({error})") from error
    for file, place in places.items():
        if file.suffix.lower() in image_suffixes():
            called = media_name(PurePath(name, file))
            if place is None:
                yield MediaFile(called, path / file, None)
            else:
                begin, size = place
                yield MediaFile(called, path, (size, *stamp[1:]), begin=begin, size=size)


def media_name(path: PurePath) -> str:
    """Return the name that shards and manifest use for a path in the folder.

    Names contain only UTF-8. Any other path is percent-encoded byte by byte and gets the prefix "./". No other name
    begins with "./", so no two files share a name.

    >>> media_name(PurePath("cats/1.jpg")), media_name(PurePath("caf\\udce9.jpg"))
    ('cats/1.jpg', './caf%E9.jpg')
    """
    name = path.as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        return "./" + quote_from_bytes(os.fsencode(name))
    return name


def read_stamp(path: Path) -> tuple[int, ...] | None:
    """Return (bytes, mtime in ns, ctime in ns), or None for a broken link, a pipe or a device."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns) if stat.S_ISREG(found.st_mode) else None


def is_unchanged(file: MediaFile, entry: dict) -> bool:
    """Return whether a file is unchanged; its bytes are read only if the times differ and the size does not."""
    stamp = tuple(entry.get(key) for key in STAMP)
    if file.stamp is None or file.stamp == stamp:
        return file.stamp is not None
    try:
        return file.stamp[0] == stamp[0] and file.digest() == entry.get("sha256")
    except OSError:
        return False
