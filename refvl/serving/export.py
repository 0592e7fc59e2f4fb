"""Encode images and videos to safetensors, one file per item, for an engine that accepts embeddings (`refvl encode`).

    cats/1.jpg -> out/cats/1.jpg.safetensors     embeds (tokens, width)
                  its header                     layout and size of the item, state of its source, settings of the model

A file gets its final name only when it is complete, so running the same command again continues
a stopped run. Items whose source and settings are unchanged are skipped. Under torchrun, rank r
of n encodes every n-th item from the r-th on.

`vllm_inputs` returns these embeddings in the form that vLLM accepts, so vLLM needs no vision tower:

    llm = LLM(checkpoint, enable_mm_embeds=True, limit_mm_per_prompt={"image": 0, "video": 0})
    media = vllm_inputs("outputs/embeddings", ["coffee.jpg"])
    llm.generate({"prompt": prompt, "multi_modal_data": media})

The prompt is the chat template's text, with one placeholder per item. vLLM 0.32 accepts embeddings
of Qwen2.5-VL and of MiniCPM-V (images only, from 2.6 on). Field names are those of vLLM's
`Qwen2_5_VLImageEmbeddingInputs`, `Qwen2_5_VLVideoEmbeddingInputs` and
`MiniCPMVImageEmbeddingInputs`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm.auto import tqdm

from refvl.graphs.manager import adapter_switches
from refvl.paths import SHIPPED, write_whole
from refvl.pixels.media import VIDEO_SUFFIXES, Video, is_video, load_image
from refvl.serving.parallel import torchrun_ranks

IMAGE_SUFFIXES = frozenset((".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
BATCH_PATCHES = 2**14  # at most this many patches are decoded and encoded together
ACCEPTED = ("Qwen2.5-VL", "MiniCPM-V 2.6", "MiniCPM-V 4.0", "MiniCPM-V 4.5")  # vLLM 0.32 accepts their embeddings


Item = tuple[Image.Image | Video, dict[str, Any]]  # a decoded image or video, and its header


def encode_folder(vlm: Any, media: str | Path | Sequence, out: str | Path, *, progress: bool = True) -> dict[str, Any]:
    """Encode all images and videos that `out` lacks; return {"encoded": names, "skipped": names, "failed": reasons}.

    media: a folder, or a list of files and folders (see `find_media`). An item that cannot be read
    or encoded is listed under "failed" with the reason. Raises ValueError, before anything is
    encoded, if there are no media, or if `out` contains files that were written with a different
    model or by a different program.
    """
    found, settings = find_media(media, videos=vlm.processor.video_config is not None), describe_model(vlm)
    with torchrun_ranks() as (rank, world_size):
        own = dict(list(found.items())[rank::world_size])
        skipped = [name for name, path in own.items() if is_done(target_of(out, name), path, settings)]
        todo = {name: path for name, path in own.items() if name not in skipped}
        encoded, failed = list[str](), dict[str, str]()
        with tqdm(total=len(todo), desc=f"encode, rank {rank}", unit="item", disable=not progress) as bar:
            for batch in _batches(vlm, todo, failed):
                for name, embeds in _encode(vlm, batch, failed).items():
                    write_item(target_of(out, name), embeds, batch[name][1] | {"settings": settings})
                    encoded.append(name)
                bar.update(len(batch))
        result: dict[str, Any] = {"encoded": encoded, "skipped": skipped, "failed": failed}
        results = [result] * world_size
        if world_size > 1:
            dist.all_gather_object(results, result)
    lists = {kind: sorted(name for result in results for name in result[kind]) for kind in ("encoded", "skipped")}
    return lists | {"failed": {name: why for result in results for name, why in result["failed"].items()}}


def find_media(media: str | Path | Sequence, *, videos: bool) -> dict[str, Path]:
    """Return {name: path} of the media in a folder, or in a list of files and folders, sorted by path.

    Folders are searched recursively for images and, with `videos`, videos. A file's name is its
    path relative to the folder. Raises ValueError if nothing is found, or if two media have the
    same name.
    """
    suffixes = IMAGE_SUFFIXES | (VIDEO_SUFFIXES if videos else frozenset())
    found = dict[str, Path]()
    for source in map(Path, [media] if isinstance(media, (str, Path)) else media):
        files = {source.name: source if source.exists() else SHIPPED.get(str(source), source)}
        if source.is_dir():
            paths = [path for path in sorted(source.rglob("*")) if path.suffix.lower() in suffixes]
            files = {path.relative_to(source).as_posix(): path for path in paths}
        for name in files.keys() & found.keys():
            raise ValueError(f"media: {found[name]} and {files[name]} have the same name; encode them separately")
        found |= files
    if not found:
        raise ValueError(f"media: {media} contains no image or video")
    return found


def describe_model(vlm: Any) -> str:
    """Describe everything that determines an item's embeddings: family, dtype, configs, the encoder's weights."""
    encoder = vlm.encoder
    digest = hashlib.sha256(f"{vlm.processor.image_config} {vlm.processor.video_config} {encoder.config}".encode())
    digest.update("".join(adapter_switches(encoder)).encode())
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"{vlm.family.name}, {encoder.dtype}, {digest.hexdigest()[:16]}"


def target_of(out: str | Path, name: str) -> Path:
    """Return the path of the file for an item's embeddings."""
    return Path(out) / f"{name}.safetensors"


def is_done(target: Path, source: Path, settings: str) -> bool:
    """Return whether an item's file exists and the item's source is unchanged.

    Raises ValueError if a different program wrote the file, or if refvl wrote it with different
    settings.
    """
    if not target.exists():
        return False
    header = read_header(target)
    if header["settings"] != settings:
        raise ValueError(f"out: {target} was written with a different model or dtype: {header['settings']}")
    return source.exists() and header["source"] == stamp_of(source)


def stamp_of(source: Path) -> list[int]:
    """Return the size of a file in bytes and the time of its last modification in nanoseconds."""
    found = source.stat()
    return [found.st_size, found.st_mtime_ns]


def write_item(target: Path, embeds: Tensor, header: dict) -> None:
    """Write an item's embeddings and header to a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, save({"embeds": embeds.cpu().contiguous()}, {"refvl": json.dumps(header, default=_plain)}))


def read_header(target: Path) -> dict:
    """Return an item's header: kind, size, layout, source, settings, and seconds per grid step for a video.

    Raises ValueError if `write_item` did not write the file, and FileNotFoundError if there is
    no file.
    """
    try:
        with safe_open(target, framework="pt") as stored:
            return json.loads(stored.metadata()["refvl"])
    except (SafetensorError, TypeError, KeyError) as error:
        raise ValueError(f"out: {target} was not written by `refvl encode`; move it elsewhere") from error


def read_embeddings(out: str | Path, name: str) -> Tensor:
    """Return the embeddings, (tokens, width), of the image or video called `name`."""
    with safe_open(target_of(out, name), framework="pt") as stored:
        return stored.get_tensor("embeds")


def vllm_inputs(out: str | Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return vLLM's `multi_modal_data` for one prompt: {"image": ..., "video": ...}, media in the order of `names`.

    out: the output folder of `refvl encode`. Raises ValueError for a family whose embeddings vLLM
    does not accept, and for MiniCPM-V's videos.
    """
    if isinstance(names, str):
        raise TypeError(f"names: expected a list of names, got {names!r}")
    data = dict[str, dict[str, Any]]()
    items = [(read_header(target_of(out, name)), read_embeddings(out, name)) for name in names]
    for kind in dict.fromkeys(header["kind"] for header, _ in items):
        headers, embeds = zip(*[item for item in items if item[0]["kind"] == kind], strict=True)
        family = headers[0]["settings"].partition(", ")[0]
        if family not in ACCEPTED:
            raise ValueError(f"out: expected embeddings that vLLM accepts ({', '.join(ACCEPTED)}), got {family}")
        if family == "Qwen2.5-VL":
            grids = torch.tensor([header["layout"] for header in headers])
            data[kind] = {f"{kind}_embeds": torch.cat(embeds), f"{kind}_grid_thw": grids}
            if kind == "video":
                seconds = [header["second_per_grid"] for header in headers]
                data[kind]["second_per_grid_ts"] = torch.tensor(seconds)
        elif kind == "image":  # vLLM recomputes the number of slices from the size of the image
            sizes = torch.tensor([header["size"] for header in headers])
            data[kind] = {"image_embeds": list(embeds), "image_sizes": sizes}
        else:
            raise ValueError("names: expected images, because vLLM does not pack frames of MiniCPM-V's videos")
    return data


# --- decoding and encoding --------------------------------------------------------------------------------------------


def _batches(vlm: Any, todo: dict[str, Path], failed: dict[str, str]) -> Iterator[dict[str, Item]]:
    """Yield the readable items in batches of at most BATCH_PATCHES patches, or of one larger item."""
    batch, total = dict[str, Item](), 0
    for name, path in todo.items():
        try:
            item = _decode(vlm, path)
            patches = vlm.encoder.item_size(item[1]["layout"])[0]
        except Exception as error:  # decoders raise errors of all kinds
            failed[name] = str(error) or type(error).__name__
            continue
        if batch and total + patches > BATCH_PATCHES:
            yield batch
            batch, total = {}, 0
        batch[name] = item
        total += patches
    if batch:
        yield batch


def _decode(vlm: Any, path: Path) -> Item:
    if is_video(path):
        medium = vlm.processor.load_video(path, {})
        step = getattr(vlm.processor.video_config, "temporal_patch_size", 1)
        header = {"kind": "video", "size": medium.frames.shape[2:0:-1], "second_per_grid": step / medium.fps}
    else:
        medium = load_image(path, limits=vlm.processor.limits)
        header = {"kind": "image", "size": medium.size}
    return medium, header | {"source": stamp_of(path), "layout": vlm.processor.layout_of(medium)}


def _encode(vlm: Any, batch: dict[str, Item], failed: dict[str, str]) -> dict[str, Tensor]:
    """Return the embeddings of a batch; if it fails, its items are encoded one by one."""
    images = {name: medium for name, (medium, _) in batch.items() if not isinstance(medium, Video)}
    videos = {name: medium for name, (medium, _) in batch.items() if isinstance(medium, Video)}
    try:
        embeds = vlm.encode([*images.values()], [*videos.values()], progress=False)
        return dict(zip([*images, *videos], embeds, strict=True))
    except Exception as error:
        if len(batch) == 1:
            failed[next(iter(batch))] = str(error) or type(error).__name__
            return {}
    singles = [_encode(vlm, {name: item}, failed) for name, item in batch.items()]
    return {name: embeds for single in singles for name, embeds in single.items()}


def _plain(group: Any) -> Any:
    """Return a `SliceGroup` in a JSON form that the encoder also accepts: (h, w) of a single slice, or all fields."""
    return group.slices[0] if len(group.slices) == 1 and group.temporal_ids is None else dataclasses.asdict(group)
