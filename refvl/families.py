"""A table of model families: the encoder, processor and text model for a config.json.

An entry names its parts as "file:class" in encoders/, processors/ and language/. A part is
imported when it is used, so a model imports only the files of its own family. `refvl.loading`
builds the parts.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from refvl.checkpoints import check_sizes
from refvl.checks import blame, read_json

CAPABILITIES = {  # optional capability of a family -> the argument that requests it
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
    encoder_name: str  # "file:class", like the next two names
    processor_name: str
    text_name: str = "model:CausalTextModel"
    vision_prefix: str = r"^(model\.)?visual\."  # a regular expression for the tower's weight names in checkpoints
    config: Callable[..., PretrainedConfig] | None = None  # reads config.json if transformers has no class for it
    version: str | None = None  # the version, if families share a model_type (see `minicpmv_version`)
    left_out: str = "(?!)"  # a regular expression for names of weights outside vision and text
    names_class: bool = False  # whether a checkpoint's files name the class of the processor
    cannot: Mapping[str, str] = field(default_factory=dict, hash=False)  # capability -> why the family lacks it

    @property
    def encoder(self) -> Any:
        """The class of the encoder."""
        return _part("encoders", self.encoder_name)

    @property
    def processor(self) -> Any:
        """The class of the processor."""
        return _part("processors", self.processor_name)

    @property
    def text_model(self) -> Any:
        """The class of the text model; its module registers the configs that transformers lacks."""
        return _part("language", self.text_name)

    @property
    def can(self) -> Mapping[str, bool]:
        """A mapping from each of the `CAPABILITIES` to whether this family has it."""
        return {capability: capability not in self.cannot for capability in CAPABILITIES}

    def require(self, capability: str) -> None:
        """Raise ValueError, naming the argument and the family, if the family lacks this capability."""
        if capability in self.cannot:
            raise ValueError(f"{CAPABILITIES[capability]}: not supported by {self.name}, {self.cannot[capability]}")


def _part(folder: str, name: str) -> Any:
    file, _, class_name = name.partition(":")
    return getattr(import_module(f"refvl.{folder}.{file}"), class_name)


def minicpmv_config(text_class_name: str, /, **values) -> PretrainedConfig:
    """Read the flat config.json of MiniCPM-V; `text_class_name` names the class of the text
    model's config.
    """
    minicpmv = import_module("refvl.language.minicpmv")
    text_class = getattr(minicpmv, text_class_name, None) or getattr(transformers, text_class_name)
    return minicpmv.MiniCPMVConfig(text_class, **values)


NO_PLACES = {"pruning": "whose tokens have no fixed position in a frame"}
PERCEPTION = r"^(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\."
FOLDED = r"^(model\.)?(vision_tower|merger)\."
QWEN3 = partial(Family, processor_name="qwen3_vl:Qwen3VLProcessor")
GLM = partial(Family, encoder_name="glm4v:Glm4vVisionTransformer", names_class=True)
STEP = partial(Family, processor_name="step3_vl:Step3VLProcessor", cannot={"pruning": "which accepts no videos"})
MINICPMV = partial(  # all versions share a config class and the weight names
    Family, vision_prefix=r"^(vpm|resampler)\.", text_name="minicpmv:MiniCPMVTextModel",
    left_out=r"^(apm|tts|audio_\w+)\.", cannot=NO_PLACES,
)  # fmt: skip
FAMILIES = (
    Family("Qwen2.5-VL", ("qwen2_5_vl",), "qwen2_5_vl:Qwen2_5_VisionTransformer", "qwen2_5_vl:Qwen2_5_VLProcessor"),
    QWEN3("Qwen3-VL", ("qwen3_vl", "qwen3_vl_moe"), "qwen3_vl:Qwen3VLVisionTransformer",
          text_name="qwen3_vl:Qwen3VLTextModel"),
    QWEN3("Qwen3.5, Qwen3.6, Qwen3.8", ("qwen3_5", "qwen3_5_moe"), "qwen3_vl:Qwen3_5VisionTransformer",
          text_name="qwen3_5:Qwen3_5TextModel"),
    GLM("GLM-4.1V, GLM-4.6V-Flash", ("glm4v",), processor_name="glm4v:Glm4vProcessor"),
    GLM("GLM-4.5V, GLM-4.6V", ("glm4v_moe",), processor_name="glm4v:Glm4vProcessor",
        text_name="glm4v:Glm4vMoeTextModel"),
    GLM("GLM-4.6V (glm46v)", ("glm46v",), processor_name="glm4v:Glm46VProcessor"),
    GLM("GLM-GA", ("glmga",), processor_name="glm4v:GlmgaProcessor", names_class=False),  # files name GLM-4.6V's class
    GLM("GLM-OCR", ("glm_ocr",), encoder_name="glm_ocr:GlmOcrVisionTransformer", processor_name="glm4v:Glm46VProcessor",
        text_name="glm4v:GlmOcrTextModel"),
    STEP("Step3-VL", ("step3_vl",), "step3_vl:Step3VisionEncoder", text_name="step3_vl:Step3ForCausalLM",
         vision_prefix=r"^(model\.)?(vision_model|vit_downsampler2?|vit_large_projector)\."),
    STEP("Step3-VL-10B", ("step_robotics",), "step_vl:StepVLEncoder", text_name="step_vl:StepVLTextModel",
         vision_prefix=PERCEPTION),
    STEP("Step-3.7", ("step3p7",), "step_vl:StepVLEncoder", text_name="step_vl:Step37TextModel",
         vision_prefix=PERCEPTION),
    MINICPMV("MiniCPM-V 2.0", ("minicpmv",), "minicpmv:MiniCPMV2_0Encoder", "minicpmv:MiniCPMV2_0Processor",
             text_name="minicpmv:MiniCPMTextModel", config=partial(minicpmv_config, "minicpm_config"), version="2.0",
             cannot=NO_PLACES | {"graphs": "whose encoder has no graph path; load it with graphs=None"}),
    MINICPMV("MiniCPM-V 2.5", ("minicpmv",), "minicpmv:MiniCPMV2_5Encoder", "minicpmv:MiniCPMV2_5Processor",
             config=partial(minicpmv_config, "LlamaConfig"), version="2.5"),
    MINICPMV("MiniCPM-V 2.6", ("minicpmv", "minicpmo"),  # MiniCPM-o adds audio; images and text work in the same way
             "minicpmv:MiniCPMV2_6Encoder", "minicpmv:MiniCPMV2_6Processor",
             config=partial(minicpmv_config, "Qwen2Config"), version="2.6"),
    MINICPMV("MiniCPM-V 4.0", ("minicpmv",), "minicpmv:MiniCPMV4_0Encoder", "minicpmv:MiniCPMV4_0Processor",
             config=partial(minicpmv_config, "LlamaConfig"), version="4.0"),
    MINICPMV("MiniCPM-V 4.5", ("minicpmv",), "minicpmv:MiniCPMV4_5Encoder", "minicpmv:MiniCPMV4_5Processor",
             config=partial(minicpmv_config, "Qwen3Config"), version="4.5"),
    Family("MiniCPM-V 4.6", ("minicpmv4_6",), "minicpmv4_6:MiniCPMV4_6Encoder", "minicpmv4_6:MiniCPMV4_6Processor",
           "qwen3_5:MiniCPMV4_6TextModel", FOLDED, cannot=NO_PLACES),
    Family("MiniCPM-V 4.7", ("minicpmv4_7",), "minicpmv4_6:MiniCPMV4_7Encoder", "minicpmv4_6:MiniCPMV4_7Processor",
           "qwen3_5:MiniCPMV4_7TextModel", FOLDED, cannot=NO_PLACES),
)  # fmt: skip


PROCESSOR_FILES = ("tokenizer.json", "vocab.json", "processor_config.json", "preprocessor_config.json")
CANVAS_IDS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")  # in MiniCPM-V 4.7


def find_family(config: PretrainedConfig | dict) -> Family:
    """Return the family of a config; raise ValueError, listing the supported values, if there is none."""
    model_type = config.get("model_type") if isinstance(config, dict) else config.model_type
    families = {family.version: family for family in FAMILIES if model_type in family.model_types}
    if not families:
        known = ", ".join(dict.fromkeys(t for family in FAMILIES for t in family.model_types))
        raise ValueError(f"model_type: {model_type!r} is not supported; supported: {known}")
    if None in families:
        return families[None]
    version = minicpmv_version(config if isinstance(config, dict) else config.to_dict())
    if version not in families:
        known = ", ".join(map(str, families))
        raise ValueError(f"version: {model_type} {version!r} is not supported; supported: {known}")
    return families[version]


def minicpmv_version(values: dict) -> str:
    """Return the version of a MiniCPM-V config.json: the version it names, or else the version that its sizes imply.

    The configs of the first two releases name no version. A width of 2304 with 64 queries per
    slice implies 2.0; any other sizes imply 2.5.
    """
    implied = "2.0" if (values.get("hidden_size"), values.get("query_num")) == (2304, 64) else "2.5"
    return str(values.get("version") or implied)


def read_config(source: str | Path | dict | PretrainedConfig) -> PretrainedConfig:
    """Return a transformers config from a folder, a JSON file of any name, a dict or a config; check its family first.

    Raises ValueError, naming the file, if the file does not contain a JSON object.
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
    if not family.config and family.text_model and model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type: {model_type!r} needs transformers 5.23 or later, got {transformers.__version__}")
    with blame(name):
        return family.config(**values) if family.config else AutoConfig.for_model(model_type, **values)


def _without_code(values: dict) -> dict:
    """Return a config without any kernel names, because transformers would fetch these kernels from the hub."""
    kept = {key: value for key, value in values.items() if not re.search(r"_implementation(_internal)?$", str(key))}
    return {key: _without_code(value) if isinstance(value, dict) else value for key, value in kept.items()}


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the text config, including settings that belong to it but are stored elsewhere in the config.

    These settings are whether embeddings and output head share weights (in older configs), the
    number of layers that add DeepStack features, and the ids of a canvas's special tokens.
    """
    text_config = config.get_text_config()
    if hasattr(config, "tie_word_embeddings"):
        text_config.tie_word_embeddings = bool(config.tie_word_embeddings)
    if (deeper := getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None)) is not None:
        text_config.deepstack_layers = len(deeper)
    for name in CANVAS_IDS:
        if hasattr(config, name):
            setattr(text_config, name, getattr(config, name))
    return text_config


def load_processor(folder: Path | None, config: PretrainedConfig) -> Any:
    """Load the processor from a checkpoint's `folder`; a processor without a tokenizer can plan but not build prompts.

    The class is that of the family, unless the files in `folder` name a different GLM class.
    """
    family = find_family(config)
    processor = family.processor
    if folder and family.names_class:
        processor = import_module(processor.__module__).class_named_in(folder) or processor
    if not folder or not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return processor(config)
    return processor.from_folder(folder, config)
