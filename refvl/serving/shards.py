"""Embeddings on disk: shards in a folder that one process holds; a shard is renamed once it is fully written.

A shard is a safetensors file with one (tokens, width) tensor per image, named after the image's path in the folder.
The header names the model and contains each image's entry for the manifest.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from refvl.checks import read_json
from refvl.serving.handover import MANIFEST
from refvl.serving.lock import LOCK, folder_lock, is_lock

SHARDS, UNFINISHED = "embeds-*.safetensors", ".refvl-unfinished"
PARTIAL = (SHARDS, MANIFEST, ".tmp*")  # names of files in the folder UNFINISHED, which are still being written
Encoded = dict[str, tuple[Tensor, dict]]  # name -> (embeddings, entry in the manifest)


@contextmanager
def held_folder(out: Path, *, force: bool = False) -> Iterator[None]:
    """Hold `out` for this process (create it if it is missing), with an empty folder for files that are being written.

    Files left there by a killed run are removed. Under torchrun, rank 0 holds `out` for all ranks. Raises
    FileExistsError for files that refvl did not write, under a name that it needs; with `force` they are renamed.
    """
    with ExitStack() as lock:
        with speaking_of(out):
            if out.exists() and not out.is_dir():
                raise NotADirectoryError(f"out: {out} is a file, not a folder")
            out.mkdir(parents=True, exist_ok=True)
            for name, is_ours in {LOCK: is_lock, MANIFEST: _is_manifest, UNFINISHED: _is_unfinished}.items():
                if os.path.lexists(path := out / name) and not is_ours(path):
                    _make_room(path, force)
            lock.enter_context(folder_lock(out))
            _remove_unfinished(out)
            (out / UNFINISHED).mkdir()
        try:
            yield
        finally:
            with suppress(OSError):  # a different program has put a file there
                _remove_unfinished(out)


def _is_manifest(path: Path) -> bool:
    try:
        return path.is_file() and not path.is_symlink() and read_json(path).keys() >= {"family", "weights", "images"}
    except ValueError:
        return False


def _is_unfinished(path: Path) -> bool:
    """Return whether a folder contains only files left by a run."""
    return path.is_dir() and not path.is_symlink() and all(map(_is_partial, os.scandir(path)))


def _is_partial(entry: os.DirEntry) -> bool:
    return entry.is_file(follow_symlinks=False) and any(fnmatch(entry.name, pattern) for pattern in PARTIAL)


def _make_room(path: Path, force: bool) -> None:
    """Rename the file at `path`, or raise an error."""
    if not force:
        raise FileExistsError(f"out: {path} was not written by refvl; move it away, or use --force to rename it")
    names = (path.with_name(f"{path.name}.before{number or ''}") for number in count())
    path.rename(next(name for name in names if not os.path.lexists(name)))


def _remove_unfinished(out: Path) -> None:
    """Remove only the files that were being written, and their folder if it is then empty."""
    if (out / UNFINISHED).is_dir():
        for entry in filter(_is_partial, os.scandir(out / UNFINISHED)):
            os.unlink(entry)
        (out / UNFINISHED).rmdir()


@contextmanager
def speaking_of(out: Path) -> Iterator[None]:
    """Turn errors caused by a full disk or missing permissions into an OSError that begins with "out:"."""
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
    with written_whole(next(path for path in paths if not os.path.lexists(path))) as partial:
        save_file(tensors, partial, header)


def _plain(group):
    """Return a form for JSON: a slice of MiniCPM-V becomes its (h, w), which the encoder accepts as equivalent.

    Frames that share a set of tokens become the arguments of their `SliceGroup`.
    """
    return group.slices[0] if len(group.slices) == 1 and group.temporal_ids is None else dataclasses.asdict(group)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Open a new file that gets its name only once it is completely on disk; the name survives a power failure.

    Raises OSError, naming the folder, if the file cannot be written; `held_folder` removes its remains.
    """
    partial = path.parent / UNFINISHED / path.name
    with speaking_of(path.parent):
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors creates files that only their owner can read
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
    """Return {name: manifest entry} of a shard.

    Raises ValueError, naming the shard, unless this model wrote it in full.
    """
    try:
        with safe_open(path, framework="pt") as shard:
            header = shard.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"out: {path} is damaged ({error}); remove it to have its images encoded again") from error
    try:
        images, written_by = dict(json.loads(header["images"])), json.loads(header["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"out: {path} was not written by `refvl encode`; move it elsewhere") from error
    if written_by != model:
        raise ValueError(f"out: {path} contains embeddings of a different model or dtype: {header['model']}")
    return images
