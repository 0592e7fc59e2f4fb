"""One process at a time in a folder: a lock file that names its owner, and that nobody has to clean up after a crash.

The owner holds the kernel's lock on the file (`flock`), which ends with the process however that ends. So a file whose
kernel lock is free was left behind, and is taken over. No guess from process numbers is needed, which are used again,
and which containers count for themselves.
"""

import datetime
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOCK = "encode.lock"


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process.

    Raises BlockingIOError, naming the owner, when another process holds it, or when the owner is on another machine,
    where this one cannot see whether it still runs.
    """
    path, held = folder / LOCK, False
    while not held:
        with open(path, "a+", encoding="utf-8") as file:
            _hold(file, path)
            held = os.fstat(file.fileno()).st_nlink > 0  # else its owner removed it before we held it
            if held:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # while it is held: who opens it now finds that it has no name


def _hold(file: TextIO, path: Path) -> None:
    """Take the kernel's lock and sign the file; on a file system without such locks a signed file is somebody's."""
    failure = None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        failure = error
    here, told = socket.gethostname(), _read(file)
    owner = f"process {told.get('pid')} on {told.get('host')} since {told.get('since')}" if told else "another process"
    if isinstance(failure, BlockingIOError):
        raise BlockingIOError(f"out: {path.parent} is being written by {owner}; wait for it to end")
    if told.get("host", here) != here or (failure and told):
        unknown = "and from here nobody can tell whether it still runs; if not, remove the file"
        raise BlockingIOError(f"out: {path} names {owner}, {unknown}")
    file.truncate(0)
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    json.dump({"host": here, "pid": os.getpid(), "since": since}, file)
    file.flush()


def _read(file: TextIO) -> dict:
    """What the owner wrote; {} where that is nothing, or not an owner's."""
    file.seek(0)
    try:
        told = json.load(file)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
