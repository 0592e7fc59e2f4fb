"""What `refvl encode` wrote, as a serving engine takes it: an engine that is given embeddings needs no vision tower.

    from vllm import LLM
    llm = LLM(checkpoint, enable_mm_embeds=True, limit_mm_per_prompt={"image": 0, "video": 0})
    media = vllm_inputs("outputs/embeddings", ["coffee.jpg"])
    llm.generate({"prompt": prompt, "multi_modal_data": media})

A limit of 0 means that no vision tower is loaded. The prompt is the chat template's text, with one placeholder per
medium. vLLM 0.32 takes embeddings for Qwen2.5-VL and MiniCPM-V (from 2.6 on, pictures); of the other families it
refuses them. Field names are those of vLLM's `Qwen2_5_VLImageEmbeddingInputs`, `Qwen2_5_VLVideoEmbeddingInputs` and
`MiniCPMVImageEmbeddingInputs`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refvl.arguments import is_grid
from refvl.checkpoints import open_shard
from refvl.checks import blame, read_json

MANIFEST = "manifest.json"
ACCEPTED = ("Qwen2.5-VL", "MiniCPM-V 2.6", "MiniCPM-V 4.0", "MiniCPM-V 4.5")  # families of vLLM 0.32
PATCHES = 4  # of one embedding, in every Qwen2.5-VL


def vllm_inputs(folder: str | Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """vLLM's `multi_modal_data` of one prompt: {"image": ..., "video": ...}, the media of a kind as `names` has them.

    folder: what `refvl encode` wrote; names: of its manifest. Raises FileNotFoundError for another folder, KeyError for
    a name that it does not hold, TypeError for a bare string, and ValueError for a family that vLLM takes no embeddings
    for, MiniCPM-V's clips, and a manifest that leads out of the folder or does not fit the embeddings.
    """
    folder = Path(folder)
    if isinstance(names, str) or not names:
        raise TypeError(f"names: expected a list of names in the manifest, got {names!r}")
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"folder: {folder} has no {MANIFEST}; `refvl encode` writes one when it is done")
    manifest = read_json(folder / MANIFEST)
    if (family := manifest["family"]) not in ACCEPTED:
        raise ValueError(f"folder: vLLM takes embeddings for {', '.join(ACCEPTED)}, these are of {family}")
    found: dict[str, list[tuple[dict, Tensor]]] = {"image": [], "video": []}
    for name in names:
        kind = "video" if name in manifest["videos"] else "image"
        found[kind].append(_read_entry(folder, manifest, name))
    as_vllm = _of_grids if family == "Qwen2.5-VL" else _of_slices
    return {kind: as_vllm(kind, *zip(*items, strict=True)) for kind, items in found.items() if items}


def read_embeddings(out: str | Path, name: str) -> Tensor:
    """(tokens, width) of one image or clip, by its name in the manifest."""
    return _read_entry(Path(out), read_json(Path(out) / MANIFEST), name)[1]


def _read_entry(out: Path, manifest: dict, name: str) -> tuple[dict, Tensor]:
    """What the manifest says of an image or clip, and its (tokens, width) embeddings; KeyError where it has none.

    Raises ValueError where the two contradict each other, and for a shard outside the folder.
    """
    with blame(f"folder: {out / MANIFEST} was not written by `refvl encode`"):
        entry = (manifest["images"] | manifest["videos"]).get(name, {"shard": None, "tokens": 0})
        shard, tokens = entry["shard"], entry["tokens"]
        path = out / (shard or "")
    if shard is None:
        raise KeyError(f"{name} is not in {out / MANIFEST}")
    if not path.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"folder: {out / MANIFEST}: {name} must lie inside the folder, not in {shard}")
    with open_shard(path) as stored:
        embeds = stored.get_tensor(name)
    if len(embeds) != tokens:
        raise ValueError(f"folder: {name} has {len(embeds)} embeddings, and {out / MANIFEST} says {tokens}")
    return entry, embeds


def _of_grids(kind: str, entries: Sequence[dict], embeds: Sequence[Tensor]) -> dict[str, Any]:
    """All media of a kind behind each other, and their grids in patches; a clip's steps also have a length."""
    for entry in entries:
        grid = entry["layout"]
        if not is_grid(grid) or math.prod(grid) != PATCHES * entry["tokens"]:
            raise ValueError(f"folder: {entry['tokens']} embeddings are {PATCHES} patches each, the grid is {grid}")
    fields: dict[str, Any] = {f"{kind}_embeds": torch.cat(list(embeds))}
    fields[f"{kind}_grid_thw"] = torch.tensor([entry["layout"] for entry in entries])
    if kind == "video":
        fields["second_per_grid_ts"] = torch.tensor([entry["second_per_grid"] for entry in entries])
    return fields


def _of_slices(kind: str, entries: Sequence[dict], embeds: Sequence[Tensor]) -> dict[str, Any]:
    """A tensor per picture, and its (width, height), from which vLLM counts the slices again."""
    if kind == "video":
        raise ValueError("names: vLLM packs no frames of MiniCPM-V's clips, so their embeddings have no place there")
    for entry in entries:
        if not entry["layout"] or entry["tokens"] % len(entry["layout"]):
            raise ValueError(f"folder: {len(entry['layout'])} slices do not share {entry['tokens']} embeddings evenly")
    return {"image_embeds": list(embeds), "image_sizes": torch.tensor([entry["size"] for entry in entries])}
