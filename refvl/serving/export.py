"""Encode a folder of images and videos to files of embeddings, for an engine that accepts them (`refvl encode`).

    folder -> media that are not encoded yet -> assigned by size to the ranks that torchrun started, if any
    rank   -> batches of media -> shards of its own, each renamed once it is written in full
    rank 0 -> manifest.json: image or video -> shard, layout, tokens, pixels, state of the file, digest of the inputs

The headers of the shards alone record which media are finished (`shards.py`); they are compared with the current files
(`images.py`). The same command continues a run that was killed, with any number of ranks; each rank loses at most one
unfinished shard.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from PIL import Image
from tqdm.auto import tqdm

from refvl.checks import check_positive_int
from refvl.graphs.manager import adapter_switches
from refvl.model import VLM
from refvl.pixels.media import Video, load_image
from refvl.serving.handover import MANIFEST
from refvl.serving.handover import read_embeddings as read_embeddings  # also public in this module
from refvl.serving.images import STAMP, MediaFile, find_media, is_unchanged
from refvl.serving.parallel import get_load_balance_assignment, torchrun_ranks
from refvl.serving.provenance import digest_of_files, digest_of_inputs
from refvl.serving.shards import SHARDS, Encoded, held_folder, read_header, write_shard, written_whole

BATCH_PATCHES = 2**14  # at most this many patches are decoded and encoded together
T = TypeVar("T")


def encode_folder(
    vlm: VLM,
    folder: str | Path,
    out: str | Path,
    *,
    shard_size: int = 64,
    force: bool = False,
    progress: bool = True,
) -> dict:
    """Encode every image and video in `folder` that `out` does not yet contain; return the manifest, on every rank.

    folder: a folder, a .tar file, or a text file that lists paths (see `find_media`); videos are included if the model
    accepts them. shard_size: media per shard. force: rename existing files that refvl did not write, if it needs their
    names. Processes that torchrun started share the work (`torchrun_ranks`). An image that cannot be read or encoded is
    skipped and listed under "unreadable" with the reason. Raises ValueError if `out` contains embeddings from a
    different model or dtype, or a shard that cannot be read. The same error is raised if the folder contains no image,
    or if images appeared or changed during the run. Raises BlockingIOError while another process writes to `out`,
    FileExistsError for files that refvl did not write (see `held_folder`), and OSError if `out` cannot be written.
    """
    check_positive_int(shard_size, "shard_size")
    folder, out, model = Path(folder), Path(out), describe_model(vlm)
    with torchrun_ranks() as (rank, world_size), ExitStack() as until_the_end:

        def deal() -> list[list[MediaFile]]:
            found = find_media(folder, videos=vlm.processor.video_config is not None)
            until_the_end.enter_context(held_folder(out, force=force))
            finished = _finished(out, model, found)
            todo = [_measured(vlm, image) for image in found if image.name not in finished]
            order, counts, _ = get_load_balance_assignment([image.rows for image in todo], world_size)
            dealt = torch.tensor(order, dtype=torch.int64).split(counts)
            return [[todo[i] for i in own.tolist()] for own in dealt]

        own = _from_rank_0(deal, rank, world_size)[rank]
        waiting, unreadable = deque(own), dict[str, str]()
        encoded: Encoded = {}
        with tqdm(total=len(own), desc=f"encode, rank {rank}", unit="image", disable=not progress) as bar:
            while waiting:
                batch = _next_batch(waiting, shard_size - len(encoded))
                encoded |= _encode_batch(vlm, batch, unreadable)
                if len(encoded) == shard_size or (encoded and not waiting):
                    write_shard(out, model, rank, encoded)
                    encoded = {}
                bar.update(len(batch))
        return _finish(vlm, folder, out, model, unreadable, rank, world_size)


def describe_model(vlm: VLM) -> dict:
    """Describe the model by its family, its dtype, and a digest of configs, adapters and weights.

    A run continues only if the description is the same. The text model's files do not affect embeddings, so they may
    change. The digest covers every byte of the encoder; it takes about a second per GB if the CPU has instructions for
    SHA-256.
    """
    encoder: Any = vlm.encoder
    settings = f"{vlm.processor.image_config} {vlm.processor.video_config} {encoder.config}"
    digest = hashlib.sha256("".join([settings, *adapter_switches(encoder)]).encode())
    tensors = [*encoder.named_parameters(), *encoder.named_buffers()]
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    dtype = str(encoder.dtype).removeprefix("torch.")
    return {"family": vlm.family.name, "dtype": dtype, "weights": digest.hexdigest()}


# --- assignment to ranks ----------------------------------------------------------------------------------------------


def _from_rank_0(work: Callable[[], T], rank: int, world_size: int) -> T:
    """Return rank 0's result of `work` on every rank, or raise its error, so no rank waits for a rank that stopped."""
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


def _measured(vlm: VLM, image: MediaFile) -> MediaFile:
    """Return the item with its number of patch rows, or with 0 if it cannot be read. A video counts as a full batch."""
    if image.stamp is None:  # opening a pipe would block
        return image
    if image.is_video:
        return replace(image, rows=BATCH_PATCHES)
    try:
        source = image.source()
        with source if isinstance(source, Image.Image) else Image.open(source) as opened:
            layout = vlm.processor.layout_of(opened)
        return replace(image, rows=vlm.encoder.item_size(layout)[0])
    except Exception:  # Pillow's readers raise errors of all kinds; the decoding step reports the reason
        return image


def _finished(out: Path, model: dict, images: Sequence[MediaFile]) -> dict[str, dict]:
    """Return manifest entries for the images in `out`, from the shards' headers, except for files that have changed."""
    finished, now = {}, {image.name: image for image in images}
    for path in sorted(out.glob(SHARDS)):
        for name, entry in read_header(path, model).items():
            if name in now and is_unchanged(now[name], entry):
                finished[name] = {"shard": path.name} | entry
    return finished


# --- encoding and writing ---------------------------------------------------------------------------------------------


def _next_batch(waiting: deque[MediaFile], room: int) -> list[MediaFile]:
    """Take the next images off the queue: at most `room` images and BATCH_PATCHES patch rows, or a single image."""
    batch = [waiting.popleft()]
    rows = batch[0].rows
    while waiting and len(batch) < room and (rows := rows + waiting[0].rows) <= BATCH_PATCHES:
        batch.append(waiting.popleft())
    return batch


def _encode_batch(vlm: VLM, images: Sequence[MediaFile], unreadable: dict[str, str]) -> Encoded:
    """Encode the readable images; record in `unreadable` why the other images could not be read.

    If a batch fails, its images are retried one by one.
    """
    decoded, encoded = {}, Encoded()
    for file in images:
        with _noted(file.name, unreadable):
            decoded[file.name] = _decode(vlm, file)
    with suppress(Exception):  # this frees the batch's tensors before the next attempt
        return _embed(vlm, decoded)
    for name, image in decoded.items():
        with _noted(name, unreadable):
            encoded |= _embed(vlm, {name: image})
    return encoded


@contextmanager
def _noted(name: str, unreadable: dict[str, str]) -> Iterator[None]:
    """Record any error, including a lack of memory, in one line of UTF-8, and continue.

    The line begins with the type of the error unless refvl wrote the message itself.
    """
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, OSError)) and str(error) else f"{type(error).__name__}: "
        unreadable[name] = " ".join(f"{kind}{error}".split()).encode(errors="backslashreplace").decode()


def _decode(vlm: VLM, file: MediaFile) -> tuple[Image.Image | Video, dict]:
    """Return the image or video and its manifest entry, which also describes its file."""
    stamp = file.read_stamp()
    if stamp is None:
        raise ValueError("expected a regular file, got a broken link, a pipe or a device")
    digest = file.digest()
    entry: dict[str, Any] = {}
    medium: Any
    if file.is_video:
        medium = vlm.processor.load_video(file.path, {})
        height, width = medium.frames.shape[1:3]
        step = getattr(vlm.processor.video_config, "temporal_patch_size", 1)
        entry = {"second_per_grid": step / medium.fps, "timestamps": medium.timestamps}
    else:
        medium = load_image(file.source(), limits=vlm.processor.limits)
        width, height = medium.size
    if file.read_stamp() != stamp:
        raise ValueError("the file changed while it was being read; run the same command again")
    entry |= {"size": (width, height), "layout": vlm.processor.layout_of(medium)}
    return medium, entry | dict(zip(STAMP, stamp, strict=True)) | {"sha256": digest}


def _embed(vlm: VLM, decoded: dict[str, tuple[Image.Image | Video, dict]]) -> Encoded:
    videos = {name: medium for name, (medium, _) in decoded.items() if isinstance(medium, Video)}
    images = {name: medium for name, (medium, _) in decoded.items() if name not in videos}
    embeds = vlm.encode([*images.values()], videos=[*videos.values()], progress=False) if decoded else []
    return {
        name: (x.cpu(), {"tokens": len(x)} | decoded[name][1])
        for name, x in zip([*images, *videos], embeds, strict=True)
    }


def _finish(vlm: VLM, folder: Path, out: Path, model: dict, unreadable: dict, rank: int, world_size: int) -> dict:
    """Wait for all ranks, write the manifest on rank 0, and return it on every rank.

    Raises ValueError unless every image that exists at this time is accounted for.
    """
    reasons = [unreadable]
    if world_size > 1:
        dist.all_gather_object(reasons := [{}] * world_size, unreadable)

    def account() -> dict:
        found = sorted(find_media(folder, videos=vlm.processor.video_config is not None), key=attrgetter("name"))
        finished = _finished(out, model, found)
        unread = {name: why for own in reasons for name, why in own.items()}
        lacking = [file.name for file in found if file.name not in finished.keys() | unread.keys()]
        if lacking:
            shown = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
            what = "images appeared or changed during the run, or their shards were removed"
            raise ValueError(f"folder: {len(lacking)} of {len(found)} {what}: {shown}; run the same command again")
        manifest = model | {"images": {}, "videos": {}, "unreadable": {}}
        files = digest_of_files(vlm.provenance)
        for file in found:
            if file.name in finished:
                entry = finished[file.name]
                inputs = {"inputs": digest_of_inputs(files, [entry["sha256"]])}
                manifest["videos" if file.is_video else "images"][file.name] = entry | inputs
            else:
                manifest["unreadable"][file.name] = unread[file.name]
        with written_whole(out / MANIFEST) as partial:
            partial.write_text(json.dumps(manifest, indent=1))
        return manifest

    return _from_rank_0(account, rank, world_size)
