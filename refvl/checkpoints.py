"""Files and weights of a checkpoint: find the folder, list its shards, stream its tensors. Safetensors only."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import parse_local_safetensors_file_metadata
from huggingface_hub.utils import TensorInfo
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm.auto import tqdm

from refvl.checks import printable, read_json

CONFIG_FILES = ["*.json", "*.txt", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = (  # what transformers and the tokenizer read: their own errors do not name the file
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "chat_template.json", "processor_config.json",
)  # fmt: skip
MAX_LAYERS = 1000


def find_checkpoint(path_or_id: str | Path, *, weights: bool = True, **hub) -> Path:
    """The local folder of a checkpoint; a hub id (`owner/name`) is downloaded into the hub's cache first.

    weights=False downloads configs and tokenizer only. hub: `revision`, `cache_dir`, `token`, `local_files_only` of
    `huggingface_hub.snapshot_download`.
    Raises FileNotFoundError for a path that does not exist or holds no config.json, ValueError for a revision of a
    local folder or a JSON file that is not an object.
    """
    folder = Path(path_or_id).expanduser()
    if not os.path.exists(folder):  # False, too, for a path that is too long or holds a zero byte
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path_or_id)):
            raise FileNotFoundError(f"path_or_id: no folder {printable(folder)} (a hub id has the form owner/name)")
        folder = download(str(path_or_id), CONFIG_FILES + WEIGHT_FILES * weights, hub)
    elif hub.get("revision") is not None:
        raise ValueError(f"revision: {folder} is a local folder; only hub ids have revisions")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"path_or_id: {folder} holds no config.json")
    for name in JSON_FILES:
        if (folder / name).is_file():
            read_json(folder / name)
    return folder


def download(repo_id: str, patterns: list[str], hub: dict, *, name: str = "path_or_id") -> Path:
    """The files of a hub id that fit the patterns, in the hub's cache; name: of the caller's argument."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns, **hub))
    except Exception as error:  # offline, gated, misspelt: one sentence, the cause kept
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(f"{name}: {repo_id!r} is no local folder, and the hub said: {reason}") from error


def check_layer_counts(values: dict, name: str) -> None:
    """Raise ValueError where a config asks for more than `MAX_LAYERS` layers: building them would never end."""
    for key, value in values.items():
        if isinstance(value, dict):
            check_layer_counts(value, f"{name}: {key}")
        elif key in ("num_hidden_layers", "num_layers", "depth") and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"{name}: {key} is {value}, at most {MAX_LAYERS} layers are built")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: model.safetensors, or else the shards of its index, as transformers reads.

    Raises FileNotFoundError when there are none or some lack, and ValueError for an index that is not one, or that
    names a file outside the folder.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder}: no *.safetensors file to read, neither {WEIGHTS} nor one named by {INDEX}")
    index = read_json(folder / INDEX)
    for key in ("weight_map", "metadata"):  # transformers reads both
        if not isinstance(index.get(key), dict):
            raise ValueError(f"{folder / INDEX}: expected an object under {key!r}, got {index.get(key)!r}")
    weight_map = index["weight_map"]
    for weight, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX}: {weight!r} must name a *.safetensors file, got {file!r}")
        path = PureWindowsPath(file)  # reads both kinds of slashes
        if path.anchor or ".." in path.parts:
            raise ValueError(f"{folder / INDEX}: {weight!r} must name a file inside the folder, got {file!r}")
    files = [folder / file for file in sorted(set(weight_map.values()))]
    if not files:
        raise ValueError(f"{folder / INDEX}: 'weight_map' names no *.safetensors file to read")
    if lacking := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{folder}: the index names shards that are not there: {lacking}")
    return files


def raise_for_weights(where: object, part: str, problems: Mapping[str, Sequence[str]]) -> None:
    """Raise one ValueError that lists, kind by kind, all weights that do not fit, if there are any."""
    lines = [f"  {kind} ({len(names)}): {', '.join(names)}" for kind, names in problems.items() if names]
    if lines:
        raise ValueError(f"{where}: the weights do not match the {part}\n" + "\n".join(lines))


def open_shard(file: Path) -> Any:
    """A safetensors file, by `safe_open`. Raises ValueError, naming it, for anything else."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error})") from error


def iterate_weights(folder: Path, pattern: str, *, progress: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of every weight whose name matches `pattern`, shard by shard, one tensor at a time."""
    for file in tqdm(weight_files(folder), desc="vision weights", unit="shard", disable=not progress, leave=False):
        with open_shard(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                if re.search(pattern, name):
                    yield name, shard.get_tensor(name)


def weight_headers(folder: Path) -> dict[str, TensorInfo]:
    """Shape, dtype and place in its file of every weight by its checkpoint name; reads no tensor."""
    headers = dict[str, TensorInfo]()
    for file in weight_files(folder):
        with open_shard(file):  # refuses a file that is cut short
            headers |= parse_local_safetensors_file_metadata(file).tensors
    return headers
