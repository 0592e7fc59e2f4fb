"""A folder of pictures to embeddings on disk, for a serving engine that accepts them: `python -m refvl encode`.

    folder -> which pictures are not encoded yet -> dealt out by size to the ranks that torchrun started, if any
    rank   -> batches of pictures -> shards of its own, each written whole and then named
    rank 0 -> manifest.json: picture -> shard, layout, tokens

A shard is a safetensors file: one (tokens, D) tensor per picture, named by the picture's path in the folder; its header
says the same as the manifest, so what is finished can be read off the shards alone. A run that was killed is continued
by the same command, with any number of ranks, and loses at most one unfinished shard per rank.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from refvl.checks import check_positive_int
from refvl.parallel import get_load_balance_assignment, torchrun_ranks
from refvl.pipeline import VLM
from refvl.pixels.media import load_image

MANIFEST, SHARDS, PARTIAL = "manifest.json", "embeds-*.safetensors", ".partial"
BATCH_PATCHES = 2**14  # pictures are decoded and encoded together up to here


@dataclass(frozen=True, slots=True)
class Picture:
    """A file to encode; name: its path in the folder, size: patch rows as far as the file's header tells."""

    name: str
    path: Path
    bytes: int
    size: int = 0


def encode_folder(
    vlm: VLM, folder: str | Path, out: str | Path, *, shard_size: int = 64, progress: bool = True
) -> dict:
    """Encode every picture in `folder` and below that `out` does not hold yet; returns the manifest, on every rank.

    shard_size: pictures per shard. Called in processes that torchrun started (`torchrun_ranks`), they share the work.
    A picture that cannot be read is left out and listed under "unreadable" with the reason. Raises ValueError when
    `out` holds embeddings of another model or dtype, or the folder no picture.
    """
    check_positive_int(shard_size, "shard_size")
    folder, out, model = Path(folder), Path(out), describe_model(vlm)
    with torchrun_ranks() as (rank, world_size):
        own = _deal_out(vlm, folder, out, model, rank, world_size)
        unreadable, shards = {}, _Shards(out, model, rank, shard_size)
        bar = tqdm(total=len(own), desc=f"encode, rank {rank}", unit="picture", disable=not progress)
        for batch in _batches(own):
            shards.add(_encode_batch(vlm, batch, unreadable))
            bar.update(len(batch))
        shards.write()
        return _finish(folder, out, model, unreadable, rank, world_size)


def read_embeddings(out: str | Path, name: str) -> Tensor:
    """(tokens, D) of one picture, by its name in the manifest."""
    manifest = json.loads((Path(out) / MANIFEST).read_text())
    if name not in manifest["images"]:
        raise KeyError(f"{name} is not in {Path(out) / MANIFEST}")
    with safe_open(Path(out) / manifest["images"][name]["shard"], framework="pt") as shard:
        return shard.get_tensor(name)


def describe_model(vlm: VLM) -> dict:
    """What must be equal for embeddings to be continued: sizes, dtype, preprocessing, and a digest of the weights."""
    digest = hashlib.sha256(repr(vlm.processor.image_config).encode())
    for name, parameter in sorted(vlm.encoder.named_parameters()):
        head = parameter.detach().flatten()[:64].float().cpu().numpy()  # of each weight; reading all would take minutes
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + head.tobytes())
    dtype = str(vlm.encoder.dtype).removeprefix("torch.")
    return {"family": vlm.family.name, "dtype": dtype, "weights": digest.hexdigest()[:16]}


# --- who encodes what -------------------------------------------------------------------------------------------------


def find_pictures(folder: Path) -> list[Picture]:
    """Files in `folder` and below whose suffix Pillow knows, sorted by name."""
    if not folder.is_dir():
        raise FileNotFoundError(f"folder: {folder} is no folder")
    suffixes = Image.registered_extensions()
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix.lower() in suffixes)
    if not paths:
        raise ValueError(f"folder: {folder} holds no picture that Pillow can read")
    return [Picture(p.relative_to(folder).as_posix(), p, p.stat().st_size) for p in paths]


def _deal_out(vlm: VLM, folder: Path, out: Path, model: dict, rank: int, world_size: int) -> list[Picture]:
    """This rank's pictures. Rank 0 looks and tells: the others may start later, when it has written shards already."""
    told: list = [None]
    if rank == 0:
        try:
            told = [_deal(vlm, find_pictures(folder), out, model, world_size)]
        except (ValueError, OSError) as error:
            told = [error]  # told to all, so that no rank waits for one that has stopped
    if world_size > 1:
        dist.broadcast_object_list(told)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0][rank]


def _deal(vlm: VLM, pictures: list[Picture], out: Path, model: dict, world_size: int) -> list[list[Picture]]:
    out.mkdir(parents=True, exist_ok=True)
    for partial in out.glob(f"*{PARTIAL}"):
        partial.unlink()
    finished = _finished(out, model, pictures)
    todo = [_measured(vlm, picture) for picture in pictures if picture.name not in finished]
    order, counts, _ = get_load_balance_assignment([picture.size for picture in todo], world_size)
    order = iter(order)
    return [[todo[next(order)] for _ in range(count)] for count in counts]


def _measured(vlm: VLM, picture: Picture) -> Picture:
    """With its patch rows; 0 for a file that will turn out to be unreadable."""
    try:
        with Image.open(picture.path) as image:
            layout = vlm.processor.layout_of(image)
        return Picture(picture.name, picture.path, picture.bytes, vlm.encoder.item_size(layout)[0])
    except Exception:  # Pillow's readers raise all kinds of errors; the reason is given when the picture is decoded
        return picture


def _finished(out: Path, model: dict, pictures: Sequence[Picture]) -> dict[str, dict]:
    """Manifest entries of the pictures that `out` holds, read off the shards' headers; files changed since are not."""
    finished, bytes_now = {}, {picture.name: picture.bytes for picture in pictures}
    for path in sorted(out.glob(SHARDS)):
        try:
            with safe_open(path, framework="pt") as shard:
                header = shard.metadata() or {}
        except SafetensorError as error:
            raise ValueError(
                f"out: {path} is damaged ({error}); remove it to have its pictures encoded again"
            ) from error
        if json.loads(header.get("model", "null")) != model:
            raise ValueError(f"out: {path} holds embeddings of another model or dtype: {header.get('model')}")
        for name, entry in json.loads(header["images"]).items():
            if bytes_now.get(name) == entry["bytes"]:
                finished[name] = {"shard": path.name} | entry
    return finished


# --- encoding and writing ---------------------------------------------------------------------------------------------


def _batches(pictures: Sequence[Picture]) -> Iterator[list[Picture]]:
    """Consecutive pictures of at most BATCH_PATCHES patch rows together, or one."""
    batch, rows = [], 0
    for picture in pictures:
        if batch and rows + picture.size > BATCH_PATCHES:
            yield batch
            batch, rows = [], 0
        batch.append(picture)
        rows += picture.size
    if batch:
        yield batch


def _encode_batch(vlm: VLM, pictures: Sequence[Picture], unreadable: dict[str, str]) -> dict[str, tuple[Tensor, dict]]:
    """{name: (embeddings, manifest entry)} of the pictures that can be read; the reasons of others go to unreadable."""
    images, entries = [], {}
    for picture in pictures:
        try:
            image = load_image(picture.path)
            layout = vlm.processor.layout_of(image)
        except (ValueError, OSError) as error:
            unreadable[picture.name] = " ".join(str(error).split())
            continue
        images.append(image)
        entries[picture.name] = {"layout": layout, "bytes": picture.bytes}
    embeds = vlm.encode(images=images, progress=False) if images else []
    return {
        name: (x.cpu(), {"tokens": len(x)} | entry)
        for (name, entry), x in zip(entries.items(), embeds, strict=True)
    }  # fmt: skip


class _Shards:
    """Collects a rank's embeddings and writes them, `size` pictures at a time, under names that are still free."""

    def __init__(self, out: Path, model: dict, rank: int, size: int):
        self.out, self.model, self.rank, self.size = out, model, rank, size
        self.waiting: dict[str, tuple[Tensor, dict]] = {}

    def add(self, encoded: dict[str, tuple[Tensor, dict]]) -> None:
        self.waiting |= encoded
        while len(self.waiting) >= self.size:
            self.write()

    def write(self) -> None:
        """Up to `size` pictures as one file: under a partial name first, which a reader never takes for a shard."""
        names = list(self.waiting)[: self.size]
        if not names:
            return
        taken = {name: self.waiting.pop(name) for name in names}
        images = json.dumps({name: entry for name, (_, entry) in taken.items()}, default=_plain)
        header = {"format": "pt", "model": json.dumps(self.model), "images": images}
        path = self._free_name()
        partial = path.with_name(path.name + PARTIAL)
        save_file({name: x.clone() for name, (x, _) in taken.items()}, partial, header)
        _settle(partial, path)

    def _free_name(self) -> Path:
        number = 0
        while (path := self.out / f"embeds-{self.rank:03}-{number:05}.safetensors").exists():
            number += 1
        return path


def _plain(group):
    """What JSON has no form for: a slice of MiniCPM-V becomes its (h, w), which the encoder reads as the same."""
    [size] = group.slices
    return size


def _settle(partial: Path, path: Path) -> None:
    """Give a file its name once it is on disk as a whole."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def _finish(folder: Path, out: Path, model: dict, unreadable: dict, rank: int, world_size: int) -> dict:
    """When all ranks are done, rank 0 writes the manifest, and every rank returns it."""
    all_unreadable = [unreadable]
    if world_size > 1:
        dist.all_gather_object(all_unreadable := [None] * world_size, unreadable)
    told = [None]
    if rank == 0:
        images = _finished(out, model, find_pictures(folder))
        unreadable = {name: reason for found in all_unreadable for name, reason in found.items()}
        told = [model | {"images": dict(sorted(images.items())), "unreadable": dict(sorted(unreadable.items()))}]
        partial = out / (MANIFEST + PARTIAL)
        partial.write_text(json.dumps(told[0], indent=1))
        _settle(partial, out / MANIFEST)
    if world_size > 1:
        dist.broadcast_object_list(told)
    return told[0]
