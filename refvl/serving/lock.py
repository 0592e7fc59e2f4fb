"""One process at a time in a folder: a lock file that names its owner and needs no cleanup after a crash.

The file is created with O_EXCL, so only one of several processes creates it. Its owner also holds the kernel's lock on
the file (`flock`), which is released when the process ends for any reason. So a file whose kernel lock is free was left
behind, and the next process takes it over. Process ids are not consulted, because they are reused and because each
container has its own.
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

    Raises BlockingIOError, naming the owner, if another process holds the lock. The same error is raised if the owner
    is on a different machine, because this process cannot check whether the owner still runs.
    """
    path = folder / LOCK
    while (file := _take(path)) is None:
        pass  # the owner has released it in the meantime
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # first, so a process that has just opened the file notices that its name is gone
        os.close(file)


def is_lock(path: Path) -> bool:
    """Return whether the file at `path` is a lock (maybe from a crashed process), not a link or an unrelated file."""
    begin = b'{"host": '
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        return begin.startswith(file.read(len(begin)))


def _take(path: Path) -> int | None:
    """Return the locked lock file, or None if it appeared or vanished in the meantime."""
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
    """Take the kernel's lock and sign the file; return False if `path` now names a different file."""
    told, here = _read(file), socket.gethostname()
    owner = f"process {told.get('pid')} on {told.get('host')} since {told.get('since')}" if told else "another process"
    way_out = f"out: {path} names {owner}, and this machine cannot tell whether it still runs; if not, remove the file"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"out: {path.parent} is being written by {owner}; wait for it to finish") from None
    except OSError:  # the file system does not support locks, so an existing file counts as held
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
    """Return the owner's entry, or {} if the file is empty or contains anything else."""
    try:
        told = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
