"""One row per model family: which encoder, processor and text model a config.json asks for, and how they are built."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from refvl.attention import choose_backend
from refvl.checkpoints import check_layer_counts, iterate_weights, read_json_object, weight_names
from refvl.encoders import (
    Glm4vVisionTransformer,
    GlmOcrVisionTransformer,
    Qwen2_5_VisionTransformer,
    Step3VisionEncoder,
    minicpmv,
)
from refvl.graphs.dual import DualPathGraphManager
from refvl.graphs.manager import EncoderGraphManager
from refvl.language.glm4v import Glm4vMoeTextModel, GlmOcrTextModel
from refvl.language.minicpmv import MiniCPMTextModel, MiniCPMVConfig, MiniCPMVTextModel
from refvl.language.model import CausalTextModel
from refvl.language.step3_vl import Step3ForCausalLM
from refvl.processors.glm4v import Glm4vProcessor, Glm46VProcessor, GlmgaProcessor
from refvl.processors.minicpmv import PROCESSORS as MINICPMV_PROCESSORS
from refvl.processors.qwen2_5_vl import Qwen2_5_VLProcessor
from refvl.processors.step3_vl import Step3VLProcessor


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


def read_config(source: str | Path | dict | PretrainedConfig) -> PretrainedConfig:
    """A transformers config from a folder, a config.json of any name, a dict, or a config. Checks the family first."""
    if isinstance(source, PretrainedConfig):
        find_family(source)
        return source
    name, values = "config", source
    if not isinstance(values, dict):
        path = Path(values)
        path = path / "config.json" if path.is_dir() else path
        name, values = str(path), read_json_object(path)
    family = find_family(values)
    check_layer_counts(values, name)
    values = dict(values)
    model_type = values.pop("model_type")
    try:
        return family.config(**values) if family.config else AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers' own kinds, and what a value of the wrong type runs into
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from error


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """The text config, told whether embedding and head share their weights (older configs say it one level up)."""
    text_config = config.get_text_config()
    text_config.tie_word_embeddings = bool(config.tie_word_embeddings)
    return text_config


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
