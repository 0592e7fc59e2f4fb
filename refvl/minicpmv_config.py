"""MiniCPM-V's config.json: one flat object for text, vision and prompts, told apart by `version`.

The released files name a config class of their own in `auto_map`, code beside the weights that is never executed here:
`MiniCPMVConfig` reads the same keys, and gives the text model's part as the transformers config of its architecture.

    version   text model             config of transformers
    2.0       MiniCPM                Granite, whose multipliers say what MiniCPM scales
    2.5       Llama 3                Llama
    2.6       Qwen2                  Qwen2
    4.0       MiniCPM4 (as Llama)    Llama, rotary angles with LongRoPE factors
    4.5       Qwen3                  Qwen3
"""

import math

from transformers import GraniteConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from refvl.encoders.minicpmv import minicpmv_version

TEXT_CONFIGS = {"2.0": GraniteConfig, "2.5": LlamaConfig, "2.6": Qwen2Config, "4.0": LlamaConfig, "4.5": Qwen3Config}
TEXT_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "attention_bias", "attention_dropout", "mlp_bias", "use_sliding_window", "sliding_window", "max_window_layers",
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "tie_word_embeddings",
)  # fmt: skip


class MiniCPMVConfig(PretrainedConfig):
    """The whole config.json as attributes, and `text_config`: the part that transformers' text model reads."""

    model_type = "minicpmv"

    def __init__(self, **values):
        """values: the keys of config.json. Raises ValueError, listing the known ones, for an unknown version."""
        version = minicpmv_version(values)  # refused before anything is built from it
        values = {"tie_word_embeddings": False} | values
        values.pop("minicpmv_version", None)
        if isinstance(text_config := values.pop("text_config", None), dict):  # both stand in what `to_dict` gives
            values["rope_parameters"] = text_config.get("rope_parameters")
        text_config = read_text_config(values, version)
        values = {key: value for key, value in values.items() if not key.startswith("rope_")}  # text_config has them
        super().__init__(**values, minicpmv_version=version, text_config=text_config)


def read_text_config(values: dict, version: str) -> PretrainedConfig:
    """The text model's own config from the flat keys of a MiniCPM-V config.json."""
    text = {key: values[key] for key in TEXT_KEYS if values.get(key) is not None}
    if version == "2.0":
        text |= granite_multipliers(values)
    rope = {"rope_type": "default", "rope_theta": values.get("rope_theta", 1e4), **(values.get("rope_scaling") or {})}
    return TEXT_CONFIGS[version](**text, rope_parameters=values.get("rope_parameters") or rope)


def granite_multipliers(values: dict) -> dict:
    """MiniCPM's maximal update parametrisation (muP) in Granite's words.

    Embeddings are scaled by scale_emb, what a layer adds to the residual by scale_depth / sqrt(layers), logits by
    dim_model_base / hidden_size. Granite scales whatever embeddings it is given; in MiniCPM-V those of pictures are not
    scaled, so that this one factor is left to the embedding itself (`refvl.language.MiniCPMTextModel`).
    """
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    return {
        "scale_emb": values.get("scale_emb", 1.0),
        "embedding_multiplier": 1.0,
        "attention_multiplier": (hidden // heads) ** -0.5,
        "residual_multiplier": values.get("scale_depth", 1.0) / math.sqrt(values["num_hidden_layers"]),
        "logits_scaling": hidden / values.get("dim_model_base", hidden),
    }
