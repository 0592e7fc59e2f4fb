"""Files and weights of a checkpoint: find the folder, list its shards, stream its tensors. Safetensors only."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from tqdm.auto import tqdm

CONFIG_FILES = ["*.json", "*.txt", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]


def find_checkpoint(path_or_id: str | Path, *, weights: bool = True) -> Path:
    """The local folder of a checkpoint; a hub id (`owner/name`) is downloaded into the hub's cache first.

    weights=False downloads configs and tokenizer only.
    Raises FileNotFoundError for a path that does not exist or holds no config.json.
    """
    folder = Path(path_or_id).expanduser()
    if not folder.exists():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path_or_id)):
            raise FileNotFoundError(f"path_or_id: no folder {folder} (a hub id has the form owner/name)")
        folder = _download(str(path_or_id), CONFIG_FILES + WEIGHT_FILES * weights)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"path_or_id: {folder} holds no config.json")
    return folder


def _download(repo_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except Exception as error:  # offline, gated, misspelt: one sentence, the cause kept
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(f"path_or_id: {repo_id!r} is no local folder, and the hub said: {reason}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors shards of a checkpoint, in order. Raises FileNotFoundError when there are none or some lack."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors file (other weight formats are not read)")
    if lacking := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{folder}: the index names shards that are not there: {lacking}")
    return files


def iterate_weights(folder: Path, pattern: str, *, progress: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of every weight whose name matches `pattern`, shard by shard, one tensor at a time."""
    from safetensors import SafetensorError, safe_open

    for file in tqdm(weight_files(folder), desc="vision weights", unit="shard", disable=not progress, leave=False):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    if re.search(pattern, name):
                        yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: truncated or not a safetensors file ({error})") from error


def weight_names(folder: Path, pattern: str) -> list[str]:
    """The checkpoint names that match `pattern`; reads no tensor."""
    from safetensors import safe_open

    names = []
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as shard:
            names += [name for name in shard.keys() if re.search(pattern, name)]  # noqa: SIM118
    return names
