"""One row per model family: which encoder, processor and text model a config.json asks for, and how they are built."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from refvl import encoders
from refvl.attention import choose_backend
from refvl.checkpoints import check_layer_counts, iterate_weights, weight_headers
from refvl.checks import blame, read_json
from refvl.contracts import Encoder, Processor
from refvl.language.glm4v import Glm4vMoeTextModel, GlmOcrTextModel
from refvl.language.minicpmv import MiniCPMTextModel, MiniCPMVConfig, MiniCPMVTextModel, minicpm_config
from refvl.language.model import CausalTextModel
from refvl.language.qwen3_vl import Qwen3_5TextModel, Qwen3VLTextModel
from refvl.language.step3_vl import Step3ForCausalLM
from refvl.processors import glm4v, minicpmv, qwen2_5_vl, qwen3_vl, step3_vl
from refvl.processors.tokenizers import TOKENIZER_FILES


@dataclass(frozen=True, slots=True)
class Family:
    """What the pipeline has to know of a model family; `model_types` are values of `model_type` in config.json."""

    name: str
    model_types: tuple[str, ...]
    encoder: type[Encoder]
    processor: type[Processor]
    vision_prefix: str = r"^(model\.)?visual\."  # regular expression: which checkpoint names are the vision tower's
    text_model: type[CausalTextModel] = CausalTextModel
    config: Callable[..., PretrainedConfig] | None = None  # that reads config.json, where transformers has none
    version: str | None = None  # see `minicpmv_version`, where families share a model_type
    left_out: str = "(?!)"  # regular expression: checkpoint names that are neither vision nor text


MINICPMV = partial(  # all versions share their config class and the names of their weights
    Family, vision_prefix=r"^(vpm|resampler)\.", text_model=MiniCPMVTextModel, left_out=r"^(apm|tts|audio_\w+)\.",
)  # fmt: skip
FAMILIES = (
    Family("Qwen2.5-VL", ("qwen2_5_vl",), encoders.Qwen2_5_VisionTransformer, qwen2_5_vl.Qwen2_5_VLProcessor),
    Family("Qwen3-VL", ("qwen3_vl", "qwen3_vl_moe"), encoders.Qwen3VLVisionTransformer, qwen3_vl.Qwen3VLProcessor,
           text_model=Qwen3VLTextModel),
    Family("Qwen3.5", ("qwen3_5", "qwen3_5_moe"), encoders.Qwen3_5VisionTransformer, qwen3_vl.Qwen3VLProcessor,
           text_model=Qwen3_5TextModel),
    Family("GLM-4.1V, GLM-4.6V-Flash", ("glm4v",), encoders.Glm4vVisionTransformer, glm4v.Glm4vProcessor),
    Family("GLM-4.5V, GLM-4.6V", ("glm4v_moe",), encoders.Glm4vVisionTransformer, glm4v.Glm4vProcessor,
           text_model=Glm4vMoeTextModel),
    Family("GLM-4.6V (glm46v)", ("glm46v",), encoders.Glm4vVisionTransformer, glm4v.Glm46VProcessor),
    Family("GLM-GA", ("glmga",), encoders.Glm4vVisionTransformer, glm4v.GlmgaProcessor),
    Family("GLM-OCR", ("glm_ocr",), encoders.GlmOcrVisionTransformer, glm4v.Glm46VProcessor,
           text_model=GlmOcrTextModel),
    Family("Step3-VL", ("step3_vl",), encoders.Step3VisionEncoder, step3_vl.Step3VLProcessor,
           r"^(model\.)?(vision_model|vit_downsampler2?|vit_large_projector)\.", Step3ForCausalLM),
    MINICPMV("MiniCPM-V 2.0", ("minicpmv",), encoders.MiniCPMV2_0Encoder, minicpmv.MiniCPMV2_0Processor, version="2.0",
             text_model=MiniCPMTextModel, config=partial(MiniCPMVConfig, minicpm_config)),
    MINICPMV("MiniCPM-V 2.5", ("minicpmv",), encoders.MiniCPMV2_5Encoder, minicpmv.MiniCPMV2_5Processor, version="2.5",
             config=partial(MiniCPMVConfig, LlamaConfig)),
    MINICPMV("MiniCPM-V 2.6", ("minicpmv", "minicpmo"),  # MiniCPM-o has audio besides; images and text are the same
             encoders.MiniCPMV2_6Encoder, minicpmv.MiniCPMV2_6Processor, version="2.6",
             config=partial(MiniCPMVConfig, Qwen2Config)),
    MINICPMV("MiniCPM-V 4.0", ("minicpmv",), encoders.MiniCPMV4_0Encoder, minicpmv.MiniCPMV4_0Processor, version="4.0",
             config=partial(MiniCPMVConfig, LlamaConfig)),
    MINICPMV("MiniCPM-V 4.5", ("minicpmv",), encoders.MiniCPMV4_5Encoder, minicpmv.MiniCPMV4_5Processor, version="4.5",
             config=partial(MiniCPMVConfig, Qwen3Config)),
)  # fmt: skip
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# GLM-4.5V and GLM-4.6V share a model_type: the class that a folder's files name tells them apart
GLM_PROCESSORS = {"Glm4vProcessor": glm4v.Glm4vProcessor, "Glm46VProcessor": glm4v.Glm46VProcessor}


def find_family(config: PretrainedConfig | dict) -> Family:
    """The family of a config; raises ValueError listing the known ones."""
    model_type = config.get("model_type") if isinstance(config, dict) else config.model_type
    families = {family.version: family for family in FAMILIES if model_type in family.model_types}
    if not families:
        known = ", ".join(dict.fromkeys(t for family in FAMILIES for t in family.model_types))
        raise ValueError(f"model_type: {model_type!r} is not supported; supported: {known}")
    if None in families:
        return families[None]
    version = minicpmv_version(config if isinstance(config, dict) else config.to_dict())
    if version not in families:
        raise ValueError(
            f"version: {model_type} {version!r} is not supported; supported: {', '.join(map(str, families))}"
        )
    return families[version]


def minicpmv_version(values: dict) -> str:
    """The version of a MiniCPM-V config.json: the one it names, or the one that its sizes imply.

    The first two releases do not name theirs: a width of 2304 with 64 queries means 2.0, all others 2.5.
    """
    implied = "2.0" if (values.get("hidden_size"), values.get("query_num")) == (2304, 64) else "2.5"
    return str(values.get("version") or implied)


def read_config(source: str | Path | dict | PretrainedConfig) -> PretrainedConfig:
    """A transformers config from a folder, a config.json of any name, a dict, or a config. Checks the family first.

    Raises ValueError, naming the file, where it does not hold a JSON object.
    """
    if isinstance(source, PretrainedConfig):
        find_family(source)
        return source
    name, values = "config", source
    if not isinstance(values, dict):
        path = Path(values)
        path = path / "config.json" if path.is_dir() else path
        name, values = str(path), read_json(path)
    family = find_family(values)
    check_layer_counts(values, name)
    values = dict(values)
    model_type = values.pop("model_type")
    with blame(name):
        return family.config(**values) if family.config else AutoConfig.for_model(model_type, **values)


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """The text config, with what is said one level up or beside it.

    In older configs that is whether embedding and head share their weights; with deepstack, how many layers add to what
    they are given.
    """
    text_config = config.get_text_config()
    text_config.tie_word_embeddings = bool(config.tie_word_embeddings)
    if (deeper := getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None)) is not None:
        text_config.deepstack_layers = len(deeper)
    return text_config


def load_encoder(folder: Path, config: PretrainedConfig, *, dtype, device, attention: str, progress: bool = True):
    """The vision tower of the checkpoint in `folder`, loaded strictly, on `device` in `dtype`."""
    family = find_family(config)
    encoder = empty_encoder(config, dtype=dtype, device=device, attention=attention)
    encoder.load_weights(iterate_weights(folder, family.vision_prefix, progress=progress))
    skipped = [name.split(".")[0] for name in weight_headers(folder) if re.search(family.left_out, name)]
    if skipped:
        parts = ", ".join(sorted(set(skipped)))
        warnings.warn(f"{folder}: {len(skipped)} weights of {parts} skipped: no audio here", stacklevel=2)
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


def load_processor(folder: Path | None, config: PretrainedConfig) -> Processor:
    """The processor of the checkpoint in `folder`; without a tokenizer there, one that plans but makes no prompts.

    It is of the family's class, or of the one of GLM's that the files of `folder` name. GLM-GA's files name GLM-4.6V's
    class, although the parts inside are its own.
    """
    processor = find_family(config).processor
    if folder and processor is not glm4v.GlmgaProcessor:
        processor = GLM_PROCESSORS.get(glm4v.named_processor(folder) or "", processor)
    if not folder or not any((folder / name).is_file() for name in (*TOKENIZER_FILES, *PROCESSOR_FILES)):
        return processor(config)
    return processor.from_folder(folder, config)
