"""The files and weights of a checkpoint: find its folder, list its shards, stream its tensors (only safetensors)."""

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

from refvl.checks import check_positive, nearest, printable, read_json
from refvl.paths import DATA

CONFIG_FILES = ["*.json", "*.txt", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = (  # transformers and the tokenizer read these files, but do not name them in errors
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "chat_template.json", "processor_config.json",
)  # fmt: skip
# keys in config.json -> the largest accepted value; products of a few such values stay below 2**63
MOST = {
    "num_hidden_layers num_layers depth layers": 1000,
    "temporal_patch_size spatial_merge_size in_channels in_chans num_channels understand_projector_stride": 64,
    "patch_size num_experts n_routed_experts moe_num_experts": 2**10,
    "num_heads heads num_attention_heads num_key_value_heads num_attention_groups query_num head_dim crop_size": 2**14,
    "hidden_size intermediate_size moe_intermediate_size out_hidden_size output_hidden_size embed_dim width": 2**17,
    "share_q_dim share_expert_dim image_size img_size window_size": 2**17,
    "vocab_size num_position_embeddings": 2**24,
}
SIZES = {name: most for names, most in MOST.items() for name in names.split()}
POSITIVE = re.compile(r"(^|_)(eps|epsilon|theta)$")  # matches keys whose numbers must be finite and above 0
LISTED = 12  # the maximum number of weights of each kind that an error names


def find_checkpoint(path_or_id: str | Path, *, weights: bool = True, **hub) -> Path:
    """Return a checkpoint's local folder; first download the files of a hub id (`owner/name`) to the hub's cache.

    path_or_id: a folder, a hub id, or the name of a shipped model, such as "tiny-qwen2_5_vl".

    weights=False downloads only configs and the tokenizer. hub: arguments of
    `huggingface_hub.snapshot_download` (`revision`, `cache_dir`, `token`, `local_files_only`).
    Raises FileNotFoundError if the path does not exist or contains no config.json. Raises
    ValueError if a revision is given for a local folder, or if a JSON file does not contain an
    object.
    """
    folder, shipped = Path(path_or_id).expanduser(), DATA / "checkpoints"
    if not os.path.exists(folder) and (names := sorted(os.listdir(shipped))).count(str(path_or_id)):
        folder = shipped / path_or_id
    if not os.path.exists(folder):  # `exists` is also False for a path that is too long or contains a NUL byte
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path_or_id)):
            known = f"expected an existing folder, a hub id (owner/name) or a shipped model ({', '.join(names)})"
            raise FileNotFoundError(f"path_or_id: {known}, got {printable(folder)}{nearest(str(path_or_id), names)}")
        folder = download(str(path_or_id), CONFIG_FILES + WEIGHT_FILES * weights, hub)
    elif hub.get("revision") is not None:
        raise ValueError(f"revision: {folder} is a local folder; only hub ids have revisions")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"path_or_id: {folder} contains no config.json")
    for name in JSON_FILES:
        if (folder / name).is_file():
            read_json(folder / name)
    return folder


def download(repo_id: str, patterns: list[str], hub: dict, *, name: str = "path_or_id") -> Path:
    """Download the files of `repo_id` that match `patterns`; return their folder in the hub's cache.
    name: the name of the caller's argument, for the error message.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns, **hub))
    except Exception as error:  # no network, a gated model, a misspelt id; each error becomes one sentence
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(f"{name}: {repo_id!r} is not a local folder; its download failed: {reason}") from error


def download_tower(path_or_id: Any, folder: Path, vision_prefix: str, hub: dict) -> None:
    """Download the vision tower's shards if `path_or_id` is a hub id, whose configs are already in `folder`."""
    if not (os.path.exists(Path(path_or_id).expanduser()) or folder.parent == DATA / "checkpoints"):
        shards = shards_of(folder, vision_prefix) if (folder / INDEX).is_file() else [WEIGHTS]
        download(str(path_or_id), shards, hub)


def check_sizes(values: Mapping, name: str) -> None:
    """Raise ValueError or TypeError, naming the key, if a config value has the wrong type or is out of range."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_sizes(value, f"{name}: {key}")
        elif key in ("vision_config", "text_config") and value is not None:
            raise ValueError(f"{name}: {key} must be an object, got {printable(repr(value))}")
        elif key in ("torch_dtype", "dtype") and isinstance(value, (bool, float, int, list)):
            raise ValueError(f"{name}: {key} must be the name of a dtype, got {printable(repr(value))}")
        elif key in SIZES and value is not None and not (type(value) is int and 1 <= value <= SIZES[key]):
            got = printable(repr(value))
            raise ValueError(f"{name}: {key} must be an integer from 1 to {SIZES[key]:,}, got {got}")
        elif POSITIVE.search(str(key)) and value is not None:
            for number in value if isinstance(value, list) else [value]:  # a list has one number for each layer
                check_positive(number, f"{name}: {key}")


def weight_files(folder: Path, pattern: str = "") -> list[Path]:
    """Return the safetensors files of a checkpoint: model.safetensors, or else the index's shards (as in transformers).

    pattern: a regular expression; shards that contain no matching weight may be missing. Raises
    FileNotFoundError if there are no files or a needed shard is missing, and ValueError if the
    index is malformed or names a file outside the folder.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder}: expected {WEIGHTS}, or {INDEX} with its *.safetensors files, got neither")
    files = [folder / file for file in shards_of(folder, pattern)]
    if lacking := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{folder}: the index names shards that do not exist: {lacking}")
    return files


def shards_of(folder: Path, pattern: str = "") -> list[str]:
    """Return the names of the index's shards that contain a weight matching `pattern`; errors as in `weight_files`."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX}: expected weights and their files under 'weight_map', got {weight_map!r}")
    for weight, file in weight_map.items():
        path = PureWindowsPath(str(file))  # this class accepts both kinds of slash
        if path.suffix != ".safetensors" or path.anchor or ".." in path.parts:
            raise ValueError(f"{folder / INDEX}: expected a .safetensors file beside it for {weight!r}, got {file!r}")
    return sorted({file for weight, file in weight_map.items() if re.search(pattern, weight)})


def raise_for_weights(where: object, part: str, problems: Mapping[str, Sequence[str]]) -> None:
    """Raise one ValueError if there are mismatches, with the number of weights and the first names for each kind."""
    lines = []
    for kind, names in problems.items():
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        lines += [f"  {kind} ({len(names)}): {', '.join(names[:LISTED])}{more}"] if names else []
    if lines:
        raise ValueError(f"{where}: the weights do not match the {part}\n" + "\n".join(lines))


def open_shard(file: Path) -> Any:
    """Open a safetensors file with `safe_open`. Raises ValueError, naming the file, if it is not a safetensors file."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file ({error})") from error


def iterate_weights(folder: Path, pattern: str, *, progress: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor) for every weight whose name matches `pattern`, one tensor at a time."""
    files = weight_files(folder, pattern)
    for file in tqdm(files, desc="vision weights", unit="shard", disable=not progress or len(files) < 2, leave=False):
        with open_shard(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                if re.search(pattern, name):
                    yield name, shard.get_tensor(name)


def weight_headers(folder: Path, pattern: str = "") -> dict[str, TensorInfo]:
    """Return the shape, dtype and file offsets of every weight whose name matches `pattern`; read no tensors."""
    headers = dict[str, TensorInfo]()
    for file in weight_files(folder, pattern):
        with open_shard(file):  # opening a truncated file raises an error
            headers |= parse_local_safetensors_file_metadata(file).tensors
    return {name: header for name, header in headers.items() if re.search(pattern, name)}
