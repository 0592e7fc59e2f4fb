"""Find a checkpoint, read what it is, and stream its weights: safetensors only, no remote code.

folder or hub id -> config.json -> family -> encoder + text model + processor
"""

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoConfig, PretrainedConfig

from refvl.attention import choose_backend
from refvl.encoders import (
    Glm4vVisionTransformer,
    GlmOcrVisionTransformer,
    Qwen2_5_VisionTransformer,
    Step3VisionEncoder,
    minicpmv,
)
from refvl.graphs.dual import DualPathGraphManager
from refvl.graphs.manager import EncoderGraphManager
from refvl.language import (
    CausalTextModel,
    Glm4vMoeTextModel,
    GlmOcrTextModel,
    MiniCPMTextModel,
    MiniCPMVTextModel,
    Step3ForCausalLM,
)
from refvl.minicpmv_config import MiniCPMVConfig
from refvl.prompts import Qwen2_5_VLProcessor
from refvl.prompts_glm import Glm4vProcessor, Glm46VProcessor, GlmgaProcessor
from refvl.prompts_minicpmv import PROCESSORS as MINICPMV_PROCESSORS
from refvl.prompts_step3 import Step3VLProcessor

CONFIG_FILES = ["*.json", "*.txt", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]


@dataclass(frozen=True, slots=True)
class Family:
    """What the pipeline has to know of a model family; `model_types` are values of `model_type` in config.json."""

    name: str
    model_types: tuple[str, ...]
    encoder: type
    processor: type
    vision_prefix: str = r"^(model\.)?visual\."  # regular expression: which checkpoint names are the vision tower's
    text_model: type = CausalTextModel
    graphs: type = EncoderGraphManager
    config: type | None = None  # that reads config.json, where transformers has none
    version: str | None = None  # told by `minicpmv_version`, where families share a model_type
    left_out: str | None = None  # regular expression: checkpoint names that are neither vision nor text


FAMILIES = (
    Family(
        name="Qwen2.5-VL",
        model_types=("qwen2_5_vl",),
        encoder=Qwen2_5_VisionTransformer,
        processor=Qwen2_5_VLProcessor,
    ),
    Family(
        name="GLM-4.1V, GLM-4.6V-Flash",
        model_types=("glm4v",),
        encoder=Glm4vVisionTransformer,
        processor=Glm4vProcessor,
    ),
    Family(
        name="GLM-4.5V, GLM-4.6V",
        model_types=("glm4v_moe",),
        encoder=Glm4vVisionTransformer,
        processor=Glm4vProcessor,
        text_model=Glm4vMoeTextModel,
    ),
    Family(
        name="GLM-4.6V (glm46v)",
        model_types=("glm46v",),
        encoder=Glm4vVisionTransformer,
        processor=Glm46VProcessor,
    ),
    Family(
        name="GLM-GA",
        model_types=("glmga",),
        encoder=Glm4vVisionTransformer,
        processor=GlmgaProcessor,
    ),
    Family(
        name="GLM-OCR",
        model_types=("glm_ocr",),
        encoder=GlmOcrVisionTransformer,
        processor=Glm46VProcessor,
        text_model=GlmOcrTextModel,
    ),
    Family(
        name="Step3-VL",
        model_types=("step3_vl",),
        encoder=Step3VisionEncoder,
        processor=Step3VLProcessor,
        vision_prefix=r"^(model\.)?(vision_model|vit_downsampler2?|vit_large_projector)\.",
        text_model=Step3ForCausalLM,
        graphs=DualPathGraphManager,
    ),
    *(
        Family(
            name=f"MiniCPM-V {version}",
            model_types=("minicpmv", "minicpmo") if version == "2.6" else ("minicpmv",),
            encoder=encoder,
            processor=MINICPMV_PROCESSORS[version],
            vision_prefix=r"^(vpm|resampler)\.",
            text_model=MiniCPMTextModel if version == "2.0" else MiniCPMVTextModel,
            config=MiniCPMVConfig,
            version=version,
            left_out=r"^(apm|tts|audio_\w+)\.",
        )
        for version, encoder in minicpmv.ENCODERS.items()
    ),
)


def find_family(config: PretrainedConfig | dict) -> Family:
    """The family of a config; raises ValueError listing the known ones."""
    model_type = config.get("model_type") if isinstance(config, dict) else config.model_type
    families = [family for family in FAMILIES if model_type in family.model_types]
    if families and families[0].version:
        version = minicpmv.minicpmv_version(config)
        families = [family for family in families if family.version == version]
        if not families:
            raise ValueError(f"version: refvl knows model_type {model_type!r} in other versions than {version}")
    if families:
        return families[0]
    known = list(dict.fromkeys(t for family in FAMILIES for t in family.model_types))
    raise ValueError(f"model_type: {model_type!r} is of no family that refvl knows; known: {known}")


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


def read_config(source: str | Path | dict | PretrainedConfig) -> PretrainedConfig:
    """A transformers config from a folder, a config.json of any name, a dict, or a config. Checks the family first."""
    if isinstance(source, PretrainedConfig):
        find_family(source)
        return source
    if not isinstance(source, dict):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            source = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
    family = find_family(source)
    values = {name: value for name, value in source.items() if name != "model_type"}
    return family.config(**values) if family.config else AutoConfig.for_model(source["model_type"], **values)


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """The text config, told whether embedding and head share their weights (older configs say it one level up)."""
    text_config = config.get_text_config()
    text_config.tie_word_embeddings = bool(config.tie_word_embeddings)
    return text_config


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


def load_encoder(folder: Path, config: PretrainedConfig, *, dtype, device, attention: str, progress: bool = True):
    """The vision tower of the checkpoint in `folder`, loaded strictly, on `device` in `dtype`."""
    family = find_family(config)
    encoder = empty_encoder(config, dtype=dtype, device=device, attention=attention)
    encoder.load_weights(iterate_weights(folder, family.vision_prefix, progress=progress))
    if family.left_out and (names := weight_names(folder, family.left_out)):
        parts = sorted({name.split(".")[0] for name in names})
        warnings.warn(f"{folder}: {len(names)} weights of {', '.join(parts)} left out: no speech here", stacklevel=2)
    return encoder


def random_encoder(config: PretrainedConfig, *, dtype, device, attention: str, seed: int = 0):
    """The tower at its true shape with random weights (normal, std 0.02; norms 1, biases 0)."""
    encoder = empty_encoder(config, dtype=dtype, device=device, attention=attention)
    if encoder.device.type == "meta":
        return encoder
    generator = torch.Generator(encoder.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return encoder


def empty_encoder(config: PretrainedConfig, *, dtype, device, attention: str):
    """The tower with unwritten memory on `device` (none on `meta`)."""
    with torch.device("meta"):
        encoder = find_family(config).encoder.from_config(config, attention=attention)
    choose_backend(attention, torch.device(device), dtype, encoder.config.head_dim)  # refuses what cannot run later
    return encoder.to(dtype).to_empty(device=device).eval()


def load_processor(folder: Path | None, config: PretrainedConfig):
    """The processor of the checkpoint in `folder`; without a tokenizer there, one that plans but makes no prompts."""
    processor = find_family(config).processor
    has_tokenizer = folder is not None and any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    return processor.from_folder(folder, config) if has_tokenizer else processor(config)
