"""The files that determine a model, and one digest of everything that determines its answers.

files      weights, configs, tokenizer, chat template, processor and generation settings, adapters: `VLM.provenance`
memory     values that a program may have changed since loading: settings, active adapters, weights
inputs     the files, and a request's media by content: `digest_of_inputs`

A file's digest covers its bytes. It is computed on demand, in about a second per GB if the CPU has instructions for
SHA-256. It is computed only once per process as long as size, time and inode do not change. A file that has changed
since the model was loaded has no digest, because the model comes from its old bytes.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refvl.checkpoints import INDEX, weight_files
from refvl.graphs.manager import adapter_switches

ROLES = {  # role -> patterns of the files in a checkpoint's folder that refvl, transformers and tokenizers read
    "config": ("config.json",),
    "generation": ("generation_config.json",),
    "tokenizer": (
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "vocab.txt", "merges.txt", "tokenizer.model",
    ),
    "chat template": ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    "processor": ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
}  # fmt: skip
Stamp = tuple[int, int, int]  # (bytes, time of the contents in ns, inode)


@dataclass(frozen=True, slots=True)
class Source:
    """A file that determines a model. role: a key of `ROLES`, "weights", or "adapter"; stamp: when it was loaded."""

    role: str
    path: Path
    stamp: Stamp

    def digest(self) -> str:
        """Return the sha256 of the bytes in hexadecimal.

        Raises ValueError if they have changed since the model was loaded.
        """
        if not self.path.is_file() or _stamp(self.path) != self.stamp:
            raise ValueError(f"provenance: {self.path} has changed since the model was loaded; load it again")
        return _digest(self.path, self.stamp)


def sources(folder: Path | None, *, weights: bool, pattern: str = "") -> list[Source]:
    """Return the files in a checkpoint's folder that determine its model, in a fixed order.

    weights: whether to include the weight files. pattern: include only files that contain weights with matching
    names.
    """
    if folder is None:
        return []
    found = [(role, path) for role, names in ROLES.items() for name in names for path in sorted(folder.glob(name))]
    if weights:
        shards = weight_files(folder, pattern)
        index = [folder / INDEX] if (folder / INDEX).is_file() else []
        found += [("weights", path) for path in (*index, *shards)]
    return [source(role, path) for role, path in found]


def source(role: str, path: Path) -> Source:
    """Return the file and its current state."""
    return Source(role, path, _stamp(path))


def digest_of_files(provenance: Iterable[Source]) -> str:
    """Return the digest of a model's files, in their order, computed from role, name and bytes."""
    lines = [f"{file.role} {file.path.name} {file.digest()}\n" for file in provenance]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest_of_inputs(files: str, media: Iterable[str]) -> str:
    """Return the digest of a request's inputs. files: `digest_of_files`; media: `digests_of_media`.

    `chat --jsonl`, `encode` and the saved runs that `compare` reads contain the same digest for the same inputs.
    """
    return hashlib.sha256("\n".join([files, *media]).encode()).hexdigest()[:16]


def digests_of_media(media: Iterable) -> Iterator[str]:
    """Yield the sha256 of each file's bytes, or of the values of an image or array in memory; lists are flattened."""
    for medium in media:
        if isinstance(medium, (list, tuple)):
            yield from digests_of_media(medium)
        elif hasattr(medium, "__array__") or hasattr(medium, "__array_interface__"):
            values = np.asarray(medium)
            yield hashlib.sha256(f"{values.dtype} {values.shape} ".encode() + values.tobytes()).hexdigest()
        else:
            with open(medium, "rb") as file:
                yield hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(model: Any, *settings: object) -> str:
    """Return the digest of everything that determines a model's answers, and of `settings`: files and values in memory.

    The digest includes a sample of fewer than 2,000 values of each weight in memory, so any training changes it.
    """
    whole = hashlib.sha256(digest_of_files(model.provenance).encode())
    processor, text = model.processor, model.language_model
    generation = text.generation_config if text else None
    said = (*settings, model.config, generation, processor.image_config, processor.video_config)
    template = getattr(processor.tokenizer, "chat_template", None)
    active = model.adapters.active_adapters if model.adapters else []
    whole.update(f"{said} {template} {active}".encode())
    for part in filter(None, (model.encoder, text)):  # the model may have no language model
        whole.update("".join(adapter_switches(part)).encode())
        for piece in _sample(part):
            whole.update(piece)
    return whole.hexdigest()[:16]


def _sample(part: torch.nn.Module) -> Iterator[bytes]:
    for name, weight in part.named_parameters():
        yield f"{name} {tuple(weight.shape)} {weight.dtype}".encode()
        if type(weight) is torch.nn.Parameter and not weight.is_meta:  # neither packed by a quantiser nor on disk
            every = max(1, weight.numel() // 1000)
            yield weight.detach().reshape(-1)[::every].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


@cache
def _digest(path: Path, stamp: Stamp) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
