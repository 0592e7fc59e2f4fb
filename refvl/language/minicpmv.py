"""MiniCPM-V's config.json: one flat object for text, vision and prompts; its keys depend on its `version`.

The released files name their own config class in `auto_map`. The code of that class is stored next
to the weights, but refvl never runs it. `MiniCPMVConfig` reads the same keys and provides the text
model's settings as a transformers config, whose class `refvl.families` selects:

    version   text model             config of transformers
    2.0       MiniCPM                Granite, whose multipliers express MiniCPM's scaling
    2.5       Llama 3                Llama
    2.6       Qwen2                  Qwen2
    4.0       MiniCPM4 (as Llama)    Llama, rotary angles with LongRoPE factors
    4.5       Qwen3                  Qwen3
"""

import math
from collections.abc import Callable

from torch import Tensor, nn
from transformers import GraniteConfig, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from refvl.language.model import SequentialTextModel

TEXT_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "attention_bias", "attention_dropout", "mlp_bias", "use_sliding_window", "sliding_window", "max_window_layers",
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "tie_word_embeddings",
    "scale_emb", "scale_depth", "dim_model_base",  # MiniCPM's own keys
)  # fmt: skip


class MiniCPMVConfig(PretrainedConfig):
    """The whole config.json as attributes; `text_config` is the part for transformers' text model."""

    model_type = "minicpmv"

    def __init__(self, text_config_class: Callable[..., PretrainedConfig] = PretrainedConfig, **values):
        """Split the keys of config.json into those of the text model and the rest.

        text_config_class: the config class of the version's text model.
        """
        values = {"tie_word_embeddings": False} | values
        if isinstance(text_config := values.pop("text_config", None), dict):  # `to_dict` adds text_config
            values["rope_parameters"] = text_config.get("rope_parameters")
        text_config = read_text_config(values, text_config_class)
        values = {key: value for key, value in values.items() if not key.startswith("rope_")}  # they are in text_config
        super().__init__(**(values | {"text_config": text_config}))


def read_text_config(values: dict, config_class: Callable[..., PretrainedConfig]) -> PretrainedConfig:
    """Build the text model's own config from the flat keys of a MiniCPM-V config.json."""
    text = {key: values[key] for key in TEXT_KEYS if values.get(key) is not None}
    rope = {"rope_type": "default", "rope_theta": values.get("rope_theta", 1e4), **(values.get("rope_scaling") or {})}
    return config_class(**text, rope_parameters=values.get("rope_parameters") or rope)


def minicpm_config(scale_emb=1.0, scale_depth=1.0, dim_model_base=None, **values) -> GraniteConfig:
    """Express MiniCPM's maximal update parametrisation (muP) as a Granite config.

    The scales are scale_emb for embeddings, scale_depth / sqrt(layers) for each layer's residual
    update, and dim_model_base / hidden_size for logits. Granite scales all embeddings, but
    MiniCPM-V does not scale image embeddings. The embedding layer therefore applies `scale_emb`
    (`MiniCPMTextModel`).
    """
    hidden = values["hidden_size"]
    return GraniteConfig(
        **(values | {"scale_emb": scale_emb}),
        embedding_multiplier=1.0,
        attention_multiplier=(hidden // values["num_attention_heads"]) ** -0.5,
        residual_multiplier=scale_depth / math.sqrt(values["num_hidden_layers"]),
        logits_scaling=hidden / (dim_model_base or hidden),
    )


class ScaledEmbedding(nn.Embedding):
    """An embedding layer whose vectors are multiplied by a constant whenever ids are embedded."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, scale: float):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed ids of any shape (...) as (..., D)."""
        return super().forward(input_ids) * self.scale


class MiniCPMVTextModel(SequentialTextModel):
    """The text model of MiniCPM-V 2.5 to 4.5; checkpoints store its weights under `llm.`, next to vision or speech."""

    _keys_to_ignore_on_load_unexpected = [r"^(vpm|resampler|apm|tts|audio_\w+)\."]  # noqa: RUF012


class MiniCPMTextModel(MiniCPMVTextModel):
    """The text model of MiniCPM-V 2.0: Granite, but with only text embeddings scaled."""

    def __init__(self, config):
        super().__init__(config)
        embedding = self.model.embed_tokens
        size = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        self.model.embed_tokens = ScaledEmbedding(*size, config.scale_emb)
        self.post_init()

    def forward(self, *args, attention_mask=None, **kwargs) -> CausalLMOutputWithPast:
        """Run the model and divide its logits by hidden_size / dim_model_base, which affects only sampling."""
        outputs = super().forward(*args, **kwargs | {"attention_mask": attention_mask})
        outputs.logits = outputs.logits / self.config.logits_scaling
        return outputs
