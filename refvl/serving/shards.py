"""Embeddings on disk: shards, each written whole before it gets its name, in a folder that one process holds.

A shard is a safetensors file: one (tokens, width) tensor per image, named by the image's path in the folder; its header
says of which model, and of each image what the manifest says.

A lock file names the owner of the folder, and nobody has to clean it up after a crash. The owner holds the kernel's
lock on it (`flock`), which ends with the process however that ends. So a file whose kernel lock is free was left
behind, and is taken over. No guess from process numbers is needed, which are used again, and which containers count
for themselves.
"""

import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TextIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARDS, UNFINISHED, LOCK = "embeds-*.safetensors", "unfinished", "encode.lock"
Encoded = dict[str, tuple[Tensor, dict]]  # name -> embeddings, manifest entry


# --- one process at a time --------------------------------------------------------------------------------------------


@contextmanager
def held_folder(out: Path) -> Iterator[None]:
    """`out`, made where it is missing, for this process alone, with an empty folder for files that are being written.

    What a killed run has left there is removed. Under torchrun rank 0 holds `out` for all ranks.
    """
    with ExitStack() as lock:
        with speaking_of(out):
            if out.exists() and not out.is_dir():
                raise NotADirectoryError(f"out: {out} is a file, not a folder")
            out.mkdir(parents=True, exist_ok=True)
            lock.enter_context(folder_lock(out))
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)
            (out / UNFINISHED).mkdir()
        try:
            yield
        finally:
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)


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


# --- written whole ----------------------------------------------------------------------------------------------------


@contextmanager
def speaking_of(out: Path) -> Iterator[None]:
    """A disk that is full, a folder that is not ours: an OSError that begins with "out:"."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if str(error).startswith("out: "):
            raise
        raise OSError(f"out: {out} cannot be written ({getattr(error, 'strerror', None) or error})") from error


def write_shard(out: Path, model: dict, rank: int, encoded: Encoded) -> None:
    """Write a rank's embeddings as one shard, under a name that is still free."""
    images = json.dumps({name: entry for name, (_, entry) in encoded.items()}, default=_plain)
    header = {"format": "pt", "model": json.dumps(model), "images": images}
    tensors = {name: x.clone(memory_format=torch.contiguous_format) for name, (x, _) in encoded.items()}
    paths = (out / f"embeds-{rank:03}-{number:05}.safetensors" for number in count())
    with written_whole(next(path for path in paths if not path.exists())) as partial:
        save_file(tensors, partial, header)


def _plain(group):
    """What JSON has no form for: a slice of MiniCPM-V becomes its (h, w), which the encoder reads as the same.

    Frames that share a set of tokens become the arguments of their `SliceGroup`.
    """
    return group.slices[0] if len(group.slices) == 1 and group.temporal_ids is None else dataclasses.asdict(group)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A new file to write to, which gets its name, and keeps it through a power cut, when it is on disk as a whole.

    Raises OSError, naming the folder, when it cannot be written; `held_folder` removes what is left of it.
    """
    partial = path.parent / UNFINISHED / path.name
    with speaking_of(path.parent):
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors puts a file of its own in place, which only its owner may read
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path, model: dict) -> dict[str, dict]:
    """{name: manifest entry} of a shard. Raises ValueError, naming it, unless it was written whole with this model."""
    try:
        with safe_open(path, framework="pt") as shard:
            header = shard.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"out: {path} is damaged ({error}); remove it to have its images encoded again") from error
    try:
        images, written_by = dict(json.loads(header["images"])), json.loads(header["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"out: {path} was not written by `refvl encode`: move it elsewhere") from error
    if written_by != model:
        raise ValueError(f"out: {path} holds embeddings of another model or dtype: {header['model']}")
    return images
