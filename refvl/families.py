"""A table of model families: the encoder, processor and text model for a config.json, and how to build them."""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from refvl import encoders
from refvl.attention import choose_backend
from refvl.checkpoints import check_sizes, iterate_weights, weight_headers
from refvl.checks import blame, read_json
from refvl.contracts import Encoder, Processor
from refvl.language.glm4v import Glm4vMoeTextModel, GlmOcrTextModel
from refvl.language.minicpmv import MiniCPMTextModel, MiniCPMVConfig, MiniCPMVTextModel, minicpm_config
from refvl.language.minicpmv4_6 import VISION as FOLDED_VISION
from refvl.language.minicpmv4_6 import MiniCPMV4_6TextModel, MiniCPMV4_7TextModel
from refvl.language.model import CausalTextModel
from refvl.language.qwen3_5 import Qwen3_5TextModel
from refvl.language.qwen3_vl import Qwen3VLTextModel
from refvl.language.step3_vl import Step3ForCausalLM
from refvl.language.step_vl import VISION, Step37TextModel, StepVLTextModel
from refvl.positions.canvas import CanvasMarks
from refvl.processors import glm4v, minicpmv, minicpmv4_6, qwen2_5_vl, qwen3_vl, step3_vl
from refvl.processors.tokenizers import TOKENIZER_FILES

CAPABILITIES = {  # optional capability of a family -> the argument that requests it
    "drafts": "prompt_lookup_num_tokens",
    "assistant": "assistant_model",
    "chunks": "prefill_chunk",
    "chunked_beams": "num_beams",  # beam search together with prefill_chunk
    "static_cache": "cache_implementation",
    "attentions": "attentions",
    "pruning": "pruning_rate",
    "graphs": "graphs",
    "embeds": "image_embeds",
    "adapters": "adapter",
    "quantised": "quantization_config",
}


@dataclass(frozen=True, slots=True)
class Family:
    """The parts and capabilities of a model family; `model_types` are values of `model_type` in config.json."""

    name: str
    model_types: tuple[str, ...]
    encoder: type[Encoder]
    processor: type[Processor]
    vision_prefix: str = r"^(model\.)?visual\."  # a regular expression for the vision tower's names in checkpoints
    text_model: type[CausalTextModel] = CausalTextModel
    config: Callable[..., PretrainedConfig] | None = None  # a reader of config.json if transformers has no class for it
    version: str | None = None  # the version, if families share a model_type (see `minicpmv_version`)
    left_out: str = "(?!)"  # a regular expression for checkpoint names that are neither vision nor text
    cannot: Mapping[str, str] = field(default_factory=dict, hash=False)  # capability -> why the family lacks it

    @property
    def can(self) -> Mapping[str, bool]:
        """Whether this family has each of the `CAPABILITIES`, by name."""
        return {capability: capability not in self.cannot for capability in CAPABILITIES}

    def require(self, capability: str) -> None:
        """Raise ValueError, naming the argument and the family, if the family lacks this capability."""
        if capability in self.cannot:
            raise ValueError(f"{CAPABILITIES[capability]}: not supported by {self.name}, {self.cannot[capability]}")


NO_PLACES = {"pruning": "whose tokens have no fixed position in a frame"}
NO_VIDEOS = {"pruning": "which accepts no videos"}
MINICPMV = partial(  # all versions share a config class and the weight names
    Family, vision_prefix=r"^(vpm|resampler)\.", text_model=MiniCPMVTextModel, left_out=r"^(apm|tts|audio_\w+)\.",
    cannot=NO_PLACES,
)  # fmt: skip
FAMILIES = (
    Family("Qwen2.5-VL", ("qwen2_5_vl",), encoders.Qwen2_5_VisionTransformer, qwen2_5_vl.Qwen2_5_VLProcessor),
    Family("Qwen3-VL", ("qwen3_vl", "qwen3_vl_moe"), encoders.Qwen3VLVisionTransformer, qwen3_vl.Qwen3VLProcessor,
           text_model=Qwen3VLTextModel),
    Family("Qwen3.5, Qwen3.6, Qwen3.8", ("qwen3_5", "qwen3_5_moe"), encoders.Qwen3_5VisionTransformer,
           qwen3_vl.Qwen3VLProcessor, text_model=Qwen3_5TextModel),
    Family("GLM-4.1V, GLM-4.6V-Flash", ("glm4v",), encoders.Glm4vVisionTransformer, glm4v.Glm4vProcessor),
    Family("GLM-4.5V, GLM-4.6V", ("glm4v_moe",), encoders.Glm4vVisionTransformer, glm4v.Glm4vProcessor,
           text_model=Glm4vMoeTextModel),
    Family("GLM-4.6V (glm46v)", ("glm46v",), encoders.Glm4vVisionTransformer, glm4v.Glm46VProcessor),
    Family("GLM-GA", ("glmga",), encoders.Glm4vVisionTransformer, glm4v.GlmgaProcessor),
    Family("GLM-OCR", ("glm_ocr",), encoders.GlmOcrVisionTransformer, glm4v.Glm46VProcessor,
           text_model=GlmOcrTextModel),
    Family("Step3-VL", ("step3_vl",), encoders.Step3VisionEncoder, step3_vl.Step3VLProcessor,
           r"^(model\.)?(vision_model|vit_downsampler2?|vit_large_projector)\.", Step3ForCausalLM, cannot=NO_VIDEOS),
    Family("Step3-VL-10B", ("step_robotics",), encoders.StepVLEncoder, step3_vl.Step3VLProcessor, VISION,
           StepVLTextModel, cannot=NO_VIDEOS),
    Family("Step-3.7", ("step3p7",), encoders.StepVLEncoder, step3_vl.Step3VLProcessor, VISION, Step37TextModel,
           cannot=NO_VIDEOS),
    MINICPMV("MiniCPM-V 2.0", ("minicpmv",), encoders.MiniCPMV2_0Encoder, minicpmv.MiniCPMV2_0Processor, version="2.0",
             text_model=MiniCPMTextModel, config=partial(MiniCPMVConfig, minicpm_config),
             cannot=NO_PLACES | {"graphs": "whose encoder has no graph path; load it with graphs=None"}),
    MINICPMV("MiniCPM-V 2.5", ("minicpmv",), encoders.MiniCPMV2_5Encoder, minicpmv.MiniCPMV2_5Processor, version="2.5",
             config=partial(MiniCPMVConfig, LlamaConfig)),
    MINICPMV("MiniCPM-V 2.6", ("minicpmv", "minicpmo"),  # MiniCPM-o adds audio; images and text work in the same way
             encoders.MiniCPMV2_6Encoder, minicpmv.MiniCPMV2_6Processor, version="2.6",
             config=partial(MiniCPMVConfig, Qwen2Config)),
    MINICPMV("MiniCPM-V 4.0", ("minicpmv",), encoders.MiniCPMV4_0Encoder, minicpmv.MiniCPMV4_0Processor, version="4.0",
             config=partial(MiniCPMVConfig, LlamaConfig)),
    MINICPMV("MiniCPM-V 4.5", ("minicpmv",), encoders.MiniCPMV4_5Encoder, minicpmv.MiniCPMV4_5Processor, version="4.5",
             config=partial(MiniCPMVConfig, Qwen3Config)),
    Family("MiniCPM-V 4.6", ("minicpmv4_6",), encoders.MiniCPMV4_6Encoder, minicpmv4_6.MiniCPMV4_6Processor,
           FOLDED_VISION, MiniCPMV4_6TextModel, cannot=NO_PLACES),
    Family("MiniCPM-V 4.7", ("minicpmv4_7",), encoders.MiniCPMV4_7Encoder, minicpmv4_6.MiniCPMV4_7Processor,
           FOLDED_VISION, MiniCPMV4_7TextModel, cannot=NO_PLACES),
)  # fmt: skip
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# GLM-4.5V and GLM-4.6V share a model_type; the class name in a folder's files distinguishes them
GLM_PROCESSORS = {"Glm4vProcessor": glm4v.Glm4vProcessor, "Glm46VProcessor": glm4v.Glm46VProcessor}


def find_family(config: PretrainedConfig | dict) -> Family:
    """Return the family of a config; raise ValueError listing the known families."""
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
    """Return the version of a MiniCPM-V config.json: the version it names, or else the version that its sizes imply.

    The configs of the first two releases name no version. A width of 2304 with 64 queries per slice implies 2.0; all
    other configs are those of 2.5.
    """
    implied = "2.0" if (values.get("hidden_size"), values.get("query_num")) == (2304, 64) else "2.5"
    return str(values.get("version") or implied)


def read_config(source: str | Path | dict | PretrainedConfig) -> PretrainedConfig:
    """Return a transformers config from a folder, a JSON file of any name, a dict or a config; check its family first.

    Raises ValueError, naming the file, if it does not contain a JSON object.
    """
    if isinstance(source, PretrainedConfig):
        find_family(source)
        check_sizes(source.to_dict(), "config")
        return source
    name, values = "config", source
    if not isinstance(values, dict):
        path = Path(values)
        path = path / "config.json" if path.is_dir() else path
        name, values = str(path), read_json(path)
    family = find_family(values)
    check_sizes(values, name)
    values = _without_code(values)
    model_type = values.pop("model_type")
    if not family.config and model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type: {model_type!r} needs transformers 5.23 or later, got {transformers.__version__}")
    with blame(name):
        return family.config(**values) if family.config else AutoConfig.for_model(model_type, **values)


def _without_code(values: dict) -> dict:
    """Remove kernel names from all levels of a config, because transformers would fetch these kernels from the hub."""
    kept = {key: value for key, value in values.items() if not re.search(r"_implementation(_internal)?$", str(key))}
    return {key: _without_code(value) if isinstance(value, dict) else value for key, value in kept.items()}


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the text config, including settings that belong to it but are stored elsewhere in the config.

    In older configs, one such setting is the flag that ties the weights of embedding and head. With DeepStack, it is
    the number of layers that add features; with a canvas, the ids of its special tokens.
    """
    text_config = config.get_text_config()
    if hasattr(config, "tie_word_embeddings"):
        text_config.tie_word_embeddings = bool(config.tie_word_embeddings)
    if (deeper := getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None)) is not None:
        text_config.deepstack_layers = len(deeper)
    for name in CanvasMarks._fields:
        if hasattr(config, f"{name}_id"):
            setattr(text_config, f"{name}_id", getattr(config, f"{name}_id"))
    return text_config


def load_encoder(folder: Path, config: PretrainedConfig, *, dtype, device, attention: str, progress: bool = True):
    """Load the vision tower of the checkpoint in `folder` strictly, onto `device` in `dtype`; read no other weights."""
    prefix = find_family(config).vision_prefix
    there = sum(header.parameter_count for header in weight_headers(folder, prefix).values())
    encoder = empty_encoder(config, dtype=dtype, device=device, attention=attention, stored=there)
    encoder.load_weights(iterate_weights(folder, prefix, progress=progress))
    return encoder


def warn_of_left_out(folder: Path, family: Family) -> None:
    """Warn about parts of a checkpoint that belong to neither vision nor text, naming them."""
    skipped = [name.split(".")[0] for name in weight_headers(folder) if re.search(family.left_out, name)]
    if skipped:
        parts = ", ".join(sorted(set(skipped)))
        warnings.warn(f"{folder}: {len(skipped)} weights of {parts} are skipped; refvl ignores audio", stacklevel=2)


def random_encoder(config: PretrainedConfig, *, dtype, device, attention: str, seed: int = 0):
    """Build the tower at full size with random weights (normal, std 0.02; norms 1, biases 0)."""
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


def empty_encoder(config: PretrainedConfig, *, dtype, device, attention: str, stored: int | None = None):
    """Build the tower with uninitialised weights on `device`, which take no memory on `meta`.

    stored: the number of values in the checkpoint; raises ValueError, before memory is allocated, if the tower has more
    than twice as many values.
    """
    with torch.device("meta"):
        encoder = find_family(config).encoder.from_config(config, attention=attention)
    values = sum(weight.numel() for weight in encoder.parameters())
    if stored is not None and values > 2 * stored:  # a few missing or misshapen weights are listed by name later
        raise ValueError(f"vision_config: its tower would have {values:,} values, but the weights contain {stored:,}")
    choose_backend(attention, torch.device(device), dtype, encoder.config.head_dim)  # check the backend
    return encoder.to(dtype).to_empty(device=device).eval()


def load_processor(folder: Path | None, config: PretrainedConfig) -> Processor:
    """Load the processor of the checkpoint in `folder`; without a tokenizer, it can plan but not build prompts.

    The class is that of the family, or the GLM class named in the files of `folder`. GLM-GA's files name the class of
    GLM-4.6V, although their contents are GLM-GA's, so their class name is ignored.
    """
    processor = find_family(config).processor
    if folder and processor is not glm4v.GlmgaProcessor:
        processor = GLM_PROCESSORS.get(glm4v.named_processor(folder) or "", processor)
    if not folder or not any((folder / name).is_file() for name in (*TOKENIZER_FILES, *PROCESSOR_FILES)):
        return processor(config)
    return processor.from_folder(folder, config)
