"""One process at a time in a folder: a lock file that names its owner, and that nobody has to clean up after a crash.

The file is made with O_EXCL, so that of several processes one makes it. Its owner also holds the kernel's lock on it
(`flock`), which ends with the process however that ends: a file whose kernel lock is free was left behind, and is taken
over. No guess from process numbers is needed, which are used again, and which containers count for themselves.
"""

import datetime
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

LOCK = ".refvl-lock"


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process.

    Raises BlockingIOError, naming the owner, when another process holds it, or when the owner is on another machine,
    where this one cannot see whether it still runs.
    """
    path = folder / LOCK
    while (file := _take(path)) is None:
        pass  # its owner gave it up meanwhile
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # first: whoever opens the file now finds that it has no name any more
        os.close(file)


def is_lock(path: Path) -> bool:
    """Whether the file at `path` is a lock, or what a crash left of one: no link, and nothing of another program."""
    begin = b'{"host": '
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        return begin.startswith(file.read(len(begin)))


def _take(path: Path) -> int | None:
    """The lock file, held; None when it came or vanished on the way."""
    is_new = not os.path.lexists(path)
    overtaken = FileExistsError if is_new else FileNotFoundError
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL) * is_new, 0o644)
    except overtaken:
        return None
    with ExitStack() as unless_held:
        unless_held.callback(os.close, file)
        if not _hold(file, path, is_new):
            return None
        unless_held.pop_all()
    return file


def _hold(file: int, path: Path, is_new: bool) -> bool:
    """Take the kernel's lock and sign the file; False when it is no longer the one at `path`."""
    told, here = _read(file), socket.gethostname()
    owner = f"process {told.get('pid')} on {told.get('host')} since {told.get('since')}" if told else "another process"
    way_out = f"out: {path} names {owner}, and from here nobody can tell whether it still runs; if not, remove the file"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"out: {path.parent} is being written by {owner}; wait for it to end") from None
    except OSError:  # a file system without locks: a file that exists is taken at its word
        if not is_new:
            raise BlockingIOError(way_out) from None
    try:
        if not os.path.samestat(os.fstat(file), path.stat()):
            return False
    except FileNotFoundError:
        return False
    if (told := _read(file)) and told.get("host") != here:
        raise BlockingIOError(way_out)
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"host": here, "pid": os.getpid(), "since": since}).encode(), 0)
    return True


def _read(file: int) -> dict:
    """What the owner wrote; {} where that is nothing, or not an owner's."""
    try:
        told = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
