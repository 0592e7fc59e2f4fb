"""The media to encode: which files they are, what they are called in a manifest, and whether one has changed.

A source is a folder, a tar file as WebDataset writes them, or a text file that lists paths; tar files in a folder count
as well. A file counts as unchanged while its size and both its times (of its contents, and of its entry, which a
renaming sets) are those that were written down. Where only times differ, the digest of its bytes decides: a file that
was touched or copied is the same, one that was overwritten by another of its size, or swapped with it, is not.
"""

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePath
from urllib.parse import quote_from_bytes

from PIL import Image

from refvl.pixels.formats import image_suffixes
from refvl.pixels.images import MediaLimits, open_image

STAMP = ("bytes", "mtime_ns", "ctime_ns")
VIDEO_SUFFIXES = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"))
LIST_SUFFIXES = (".txt", ".lst")


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file to encode. name: see `media_name`; stamp: see `read_stamp`; rows: patch rows, as far as is known yet.

    begin, size: of the bytes of a picture in the tar file at `path`; None: the file itself.
    """

    name: str
    path: Path
    stamp: tuple[int, ...] | None
    rows: int = 0
    begin: int | None = None
    size: int = 0

    @property
    def is_video(self) -> bool:
        return self.begin is None and self.path.suffix.lower() in VIDEO_SUFFIXES

    def read_stamp(self) -> tuple[int, ...] | None:
        """What the file's entry says now; of a picture in a tar file its own size and the tar file's times."""
        stamp = read_stamp(self.path)
        return stamp if stamp is None or self.begin is None else (self.size, *stamp[1:])

    def digest(self) -> str:
        """The sha256 of the bytes, as hexadecimal digits."""
        with open(self.path, "rb") if self.begin is None else self._member() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def source(self) -> Path | Image.Image:
        """What `load_image` and `load_video` take; raises ValueError for a picture in a tar file that is none."""
        return self.path if self.begin is None else open_image(self._member(), self.name, MediaLimits())

    def _member(self) -> BytesIO:
        with open(self.path, "rb") as file:
            file.seek(self.begin or 0)
            return BytesIO(file.read(self.size))


def find_media(source: Path, *, videos: bool = False) -> list[MediaFile]:
    """What `source` holds, sorted by name: pictures that Pillow can open, and with `videos` clips, by their suffix.

    source: a folder with all below it, a .tar file, or a text file with a path in each line, from where it lies. In
    tar files only pictures are found. Links to folders are not followed. A path of a list that is not there has no
    stamp, nor has a symbolic link in a tar file. Raises FileNotFoundError or NotADirectoryError if there is no source,
    or nothing of a list, OSError for a folder that cannot be listed, and ValueError if nothing is found, a list names a
    file that is no picture, or a tar file cannot be read.
    """
    suffixes = image_suffixes() | {".tar"} | (VIDEO_SUFFIXES if videos else frozenset())
    is_list = source.is_file() and source.suffix.lower() in LIST_SUFFIXES
    root = source.parent if source.is_file() else source
    found = dict[str, MediaFile]()  # by name: a list may repeat a path, a tar file a member, of which the last counts
    for path in _listed(source) if is_list else _walk(source):
        name = media_name(path.relative_to(root) if path.is_relative_to(root) else path)
        if path.suffix.lower() == ".tar" and path.is_file():
            found |= {file.name: file for file in _members(path, name)}
        elif path.suffix.lower() in suffixes:
            found[name] = MediaFile(name, path, read_stamp(path))
        elif is_list:
            raise ValueError(f"folder: {source} lists {path}, which is no file of a kind that is encoded")
    files = sorted(found.values(), key=lambda file: (file.path, file.begin or 0))
    if not files:
        raise ValueError(f"folder: {source} holds no image that Pillow can read")
    if is_list and all(file.stamp is None for file in files):
        raise FileNotFoundError(f"folder: nothing that {source} lists is there; the first path is {files[0].path}")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    if folder.is_file() and folder.suffix.lower() == ".tar":
        yield folder
        return
    if not folder.is_dir():
        missing = NotADirectoryError if folder.exists() else FileNotFoundError
        raise missing(f"folder: {folder} is no folder, no .tar file and no list ({', '.join(LIST_SUFFIXES)})")

    def refuse(error: OSError) -> None:
        raise OSError(f"folder: {error.filename} cannot be listed ({error.strerror})") from error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name) for name in names)


def _listed(file: Path) -> Iterator[Path]:
    """The paths in the lines of a text file; empty lines do not count."""
    for line in file.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n"):
        if line.strip():
            yield file.parent / line.strip()


def _members(path: Path, name: str) -> Iterator[MediaFile]:
    """The pictures in a tar file, called by its name and theirs; their labels, in other files, are not read.

    A hard link is read as the file that it means. A link that is no such thing has no stamp.
    """
    stamp = read_stamp(path) or ()
    places = dict[PurePath, tuple[int, int] | None]()  # where the bytes of each file begin, and how many there are
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
    """A path in the folder as shards and manifest name it.

    They hold UTF-8 alone. A path that is something else is percent-encoded, byte by byte, behind a "./": nothing else
    begins with that, so no two files share a name.

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
    """(bytes, times in ns of contents and entry); None for a link that leads nowhere, a pipe, a device."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns) if stat.S_ISREG(found.st_mode) else None


def is_unchanged(file: MediaFile, entry: dict) -> bool:
    """Whether the file is still what was encoded; its bytes are read only where times differ and the size does not."""
    stamp = tuple(entry.get(key) for key in STAMP)
    if file.stamp is None or file.stamp == stamp:
        return file.stamp is not None
    try:
        return file.stamp[0] == stamp[0] and file.digest() == entry.get("sha256")
    except OSError:
        return False
