"""A folder of images to embeddings on disk, for a serving engine that accepts them: `python -m refvl encode`.

    folder -> which images are not encoded yet -> dealt out by size to the ranks that torchrun started, if any
    rank   -> batches of images -> shards of its own, each written whole and then named
    rank 0 -> manifest.json: image -> shard, layout, tokens, what the file was

What is finished is read off the headers of the shards alone (`shards.py`), and checked against the files as they are
now (`images.py`). A run that was killed is continued by the same command, with any number of ranks, and loses at most
one unfinished shard per rank.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from PIL import Image
from tqdm.auto import tqdm

from refvl.checks import check_positive_int
from refvl.parallel import get_load_balance_assignment, torchrun_ranks
from refvl.pipeline import VLM
from refvl.pixels.media import load_image
from refvl.tools.images import STAMP, ImageFile, digest_of, find_images, is_unchanged, read_stamp
from refvl.tools.shards import SHARDS, Encoded, ShardWriter, held_folder, read_header, write_manifest
from refvl.tools.shards import read_embeddings as read_embeddings  # public here, beside `encode_folder`

BATCH_PATCHES = 2**14  # images are decoded and encoded together up to here
T = TypeVar("T")


def encode_folder(
    vlm: VLM, folder: str | Path, out: str | Path, *, shard_size: int = 64, progress: bool = True
) -> dict:
    """Encode every image in `folder` and below that `out` does not hold yet; returns the manifest, on every rank.

    shard_size: images per shard. Called in processes that torchrun started (`torchrun_ranks`), they share the work.
    An image that cannot be read or encoded is left out and listed under "unreadable" with the reason. Raises
    ValueError when `out` holds embeddings of another model or dtype or a shard that cannot be read, when the folder
    holds no image, or when images came or changed during the run; BlockingIOError while another process writes to
    `out`; OSError where `out` cannot be written.
    """
    check_positive_int(shard_size, "shard_size")
    folder, out, model = Path(folder), Path(out), describe_model(vlm)
    with torchrun_ranks() as (rank, world_size), ExitStack() as until_the_end:

        def deal() -> list[list[ImageFile]]:
            found = find_images(folder)
            until_the_end.enter_context(held_folder(out))
            return _deal(vlm, found, out, model, world_size)

        own = _from_rank_0(deal, rank, world_size)[rank]
        unreadable: dict[str, str] = {}
        shards, waiting = ShardWriter(out, model, rank, shard_size), deque(own)
        with tqdm(total=len(own), desc=f"encode, rank {rank}", unit="image", disable=not progress) as bar:
            while waiting:
                batch = _next_batch(waiting, shards.room)
                shards.add(_encode_batch(vlm, batch, unreadable))
                bar.update(len(batch))
            shards.write()
        return _finish(folder, out, model, unreadable, rank, world_size)


def describe_model(vlm: VLM) -> dict:
    """What must be equal for embeddings to be continued: family, dtype, and a digest of configs and all weights.

    The digest reads every byte of the encoder: about a second per GB where the processor has instructions for SHA-256.
    """
    digest = hashlib.sha256(f"{vlm.processor.image_config} {vlm.encoder.config}".encode())
    tensors = [*vlm.encoder.named_parameters(), *vlm.encoder.named_buffers()]
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    dtype = str(vlm.encoder.dtype).removeprefix("torch.")
    return {"family": vlm.family.name, "dtype": dtype, "weights": digest.hexdigest()}


# --- who encodes what -------------------------------------------------------------------------------------------------


def _from_rank_0(work: Callable[[], T], rank: int, world_size: int) -> T:
    """What rank 0 makes of `work`, on every rank; an error too, so that no rank waits for one that has stopped."""
    told: list = [None]
    if rank == 0:
        try:
            told = [work()]
        except Exception as error:
            told = [error]
    if world_size > 1:
        dist.broadcast_object_list(told)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


def _deal(vlm: VLM, images: list[ImageFile], out: Path, model: dict, world_size: int) -> list[list[ImageFile]]:
    finished = _finished(out, model, images)
    todo = [_measured(vlm, image) for image in images if image.name not in finished]
    order, counts, _ = get_load_balance_assignment([image.rows for image in todo], world_size)
    dealt = iter(order)
    return [[todo[i] for i in islice(dealt, own)] for own in counts]


def _measured(vlm: VLM, image: ImageFile) -> ImageFile:
    """With its patch rows; 0 for a file that will turn out to be unreadable."""
    if image.stamp is None:  # a pipe would be waited for
        return image
    try:
        with Image.open(image.path) as opened:
            layout = vlm.processor.layout_of(opened)
        return replace(image, rows=vlm.encoder.item_size(layout)[0])
    except Exception:  # Pillow's readers raise all kinds of errors; the reason is given when the image is decoded
        return image


def _finished(out: Path, model: dict, images: Sequence[ImageFile]) -> dict[str, dict]:
    """Manifest entries of the images that `out` holds, read off the shards' headers; files changed since are not."""
    finished, now = {}, {image.name: image for image in images}
    for path in sorted(out.glob(SHARDS)):
        for name, entry in read_header(path, model).items():
            if name in now and is_unchanged(now[name], entry):
                finished[name] = {"shard": path.name} | entry
    return finished


# --- encoding and writing ---------------------------------------------------------------------------------------------


def _next_batch(waiting: deque[ImageFile], room: int) -> list[ImageFile]:
    """Take the next images off the queue: at most `room`, and of at most BATCH_PATCHES patch rows together, or one."""
    batch = [waiting.popleft()]
    rows = batch[0].rows
    while waiting and len(batch) < room and (rows := rows + waiting[0].rows) <= BATCH_PATCHES:
        batch.append(waiting.popleft())
    return batch


def _encode_batch(vlm: VLM, images: Sequence[ImageFile], unreadable: dict[str, str]) -> Encoded:
    """What can be read and encoded; why others cannot goes to `unreadable`. A batch that fails is tried one by one."""
    decoded = {}
    for file in images:
        try:
            decoded[file.name] = _decode(vlm, file)
        except Exception as error:  # whatever a decoder raises, a lack of memory too: the others go on
            unreadable[file.name] = _reason(error)
    with suppress(Exception):  # which holds the batch's tensors; they are let go before the next attempt
        return _embed(vlm, decoded)
    encoded: Encoded = {}
    for name, image in decoded.items():
        try:
            encoded |= _embed(vlm, {name: image})
        except Exception as error:
            unreadable[name] = _reason(error)
    return encoded


def _decode(vlm: VLM, image: ImageFile) -> tuple[Image.Image, dict]:
    """The image, and what the manifest will say of its file."""
    stamp = read_stamp(image.path)
    if stamp is None:
        raise ValueError("no regular file, or a link that leads nowhere")
    digest, picture = digest_of(image.path), load_image(image.path, limits=vlm.processor.limits)
    layout = vlm.processor.layout_of(picture)
    if read_stamp(image.path) != stamp:
        raise ValueError("changed while it was read; the same command encodes it")
    return picture, {"layout": layout, **dict(zip(STAMP, stamp, strict=True)), "sha256": digest}


def _embed(vlm: VLM, decoded: dict[str, tuple[Image.Image, dict]]) -> Encoded:
    embeds = vlm.encode(images=[image for image, _ in decoded.values()], progress=False) if decoded else []
    return {
        name: (x.cpu(), {"tokens": len(x)} | entry)
        for (name, (_, entry)), x in zip(decoded.items(), embeds, strict=True)
    }  # fmt: skip


def _reason(error: Exception) -> str:
    """One line, in UTF-8; the kind of error where it is none of those that refvl words itself."""
    kind = "" if isinstance(error, (ValueError, OSError)) and str(error) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split()).encode(errors="backslashreplace").decode()


def _finish(folder: Path, out: Path, model: dict, unreadable: dict, rank: int, world_size: int) -> dict:
    """When all ranks are done, rank 0 writes the manifest, and every rank returns it.

    Raises ValueError unless every image that is found then is accounted for.
    """
    reasons = [unreadable]
    if world_size > 1:
        dist.all_gather_object(reasons := [{}] * world_size, unreadable)

    def account() -> dict:
        found = find_images(folder)
        images, unread = _finished(out, model, found), {name: why for own in reasons for name, why in own.items()}
        names = sorted(image.name for image in found)
        if lacking := [name for name in names if name not in images and name not in unread]:
            shown = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
            raise ValueError(
                f"folder: {len(lacking)} of {len(names)} images came or changed during the run, or their shards were "
                f"taken away: {shown}; the same command encodes them"
            )
        encoded = {name: images[name] for name in names if name in images}
        unreadable = {name: unread[name] for name in names if name not in images}
        manifest = model | {"images": encoded, "unreadable": unreadable}
        write_manifest(out, manifest)
        return manifest

    return _from_rank_0(account, rank, world_size)
