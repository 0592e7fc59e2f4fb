"""Embeddings from `refvl encode` as inputs for a serving engine, which then needs no vision tower.

    from vllm import LLM
    llm = LLM(checkpoint, enable_mm_embeds=True, limit_mm_per_prompt={"image": 0, "video": 0})
    media = vllm_inputs("outputs/embeddings", ["coffee.jpg"])
    llm.generate({"prompt": prompt, "multi_modal_data": media})

If a limit is 0, no vision tower is loaded. The prompt is the chat template's text, with one placeholder per
item. vLLM 0.32 accepts embeddings of Qwen2.5-VL and of MiniCPM-V (images only, from 2.6 on), but of no other family.
Field names are those of vLLM's `Qwen2_5_VLImageEmbeddingInputs`, `Qwen2_5_VLVideoEmbeddingInputs` and
`MiniCPMVImageEmbeddingInputs`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refvl.checkpoints import open_shard
from refvl.checks import blame, is_grid, read_json

MANIFEST = "manifest.json"
ACCEPTED = ("Qwen2.5-VL", "MiniCPM-V 2.6", "MiniCPM-V 4.0", "MiniCPM-V 4.5")  # families that vLLM 0.32 accepts
PATCHES = 4  # the number of patches per embedding in every Qwen2.5-VL


def vllm_inputs(folder: str | Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return vLLM's `multi_modal_data` for one prompt: {"image": ..., "video": ...}, media in the order of `names`.

    folder: the output of `refvl encode`. names: names from its manifest. Raises FileNotFoundError for a folder without
    a manifest, KeyError for a name that it does not contain, and TypeError for a bare string. Raises ValueError for a
    family whose embeddings vLLM does not accept, for MiniCPM-V's videos, and if the manifest points outside the folder
    or does not match the embeddings.
    """
    folder = Path(folder)
    if isinstance(names, str) or not names:
        raise TypeError(f"names: expected a list of names in the manifest, got {names!r}")
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"folder: {folder} has no {MANIFEST}; `refvl encode` writes one when it is done")
    manifest = read_json(folder / MANIFEST)
    if (family := manifest["family"]) not in ACCEPTED:
        raise ValueError(f"folder: expected embeddings that vLLM accepts ({', '.join(ACCEPTED)}), got {family}")
    found: dict[str, list[tuple[dict, Tensor]]] = {"image": [], "video": []}
    for name in names:
        kind = "video" if name in manifest["videos"] else "image"
        found[kind].append(_read_entry(folder, manifest, name))
    as_vllm = _of_grids if family == "Qwen2.5-VL" else _of_slices
    return {kind: as_vllm(kind, *zip(*items, strict=True)) for kind, items in found.items() if items}


def read_embeddings(out: str | Path, name: str) -> Tensor:
    """Return the embeddings of one image or video, (tokens, width), by its name in the manifest."""
    return _read_entry(Path(out), read_json(Path(out) / MANIFEST), name)[1]


def _read_entry(out: Path, manifest: dict, name: str) -> tuple[dict, Tensor]:
    """Return an item's manifest entry and its embeddings (tokens, width); raise KeyError if there is no entry.

    Raises ValueError if the two contradict each other, or for a shard outside the folder.
    """
    with blame(f"folder: {out / MANIFEST} was not written by `refvl encode`"):
        entry = (manifest["images"] | manifest["videos"]).get(name, {"shard": None, "tokens": 0})
        shard, tokens = entry["shard"], entry["tokens"]
        path = out / (shard or "")
    if shard is None:
        raise KeyError(f"{name} is not in {out / MANIFEST}")
    if not path.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"folder: {out / MANIFEST}: expected {name} in a shard inside the folder, got {shard}")
    with open_shard(path) as stored:
        embeds = stored.get_tensor(name)
    if len(embeds) != tokens:
        raise ValueError(f"folder: {name} has {len(embeds)} embeddings, but {out / MANIFEST} lists {tokens}")
    return entry, embeds


def _of_grids(kind: str, entries: Sequence[dict], embeds: Sequence[Tensor]) -> dict[str, Any]:
    """Return the joined embeddings of all media of a kind and their grids in patches; for videos, seconds per step."""
    for entry in entries:
        grid = entry["layout"]
        if not is_grid(grid) or math.prod(grid) != PATCHES * entry["tokens"]:
            raise ValueError(f"folder: {entry['tokens']} embeddings of {PATCHES} patches do not fit the grid {grid}")
    fields: dict[str, Any] = {f"{kind}_embeds": torch.cat(list(embeds))}
    fields[f"{kind}_grid_thw"] = torch.tensor([entry["layout"] for entry in entries])
    if kind == "video":
        fields["second_per_grid_ts"] = torch.tensor([entry["second_per_grid"] for entry in entries])
    return fields


def _of_slices(kind: str, entries: Sequence[dict], embeds: Sequence[Tensor]) -> dict[str, Any]:
    """Return a tensor per image and its (width, height), from which vLLM recomputes the number of slices."""
    if kind == "video":
        raise ValueError("names: expected images, because vLLM does not pack frames of MiniCPM-V's videos; got a video")
    for entry in entries:
        if not entry["layout"] or entry["tokens"] % len(entry["layout"]):
            tokens, slices = entry["tokens"], len(entry["layout"])
            raise ValueError(f"folder: {tokens} embeddings cannot be divided evenly among {slices} slices")
    return {"image_embeds": list(embeds), "image_sizes": torch.tensor([entry["size"] for entry in entries])}
