"""Step3's config.json, for which transformers (up to 5.23) has no classes.

The keys and defaults are those of the released file; data/configs/README.md documents the defaults.
The end of this file registers the three `model_type`s, so `AutoConfig` and `AutoTokenizer` can read
a Step3 folder.
"""

from collections.abc import Sequence

from transformers import AutoConfig, PretrainedConfig


class Step3TextConfig(PretrainedConfig):
    """The sizes of the language model. `moe_layers_enum` lists the MoE layers, as "4,5,6" or as [4, 5, 6]."""

    model_type = "step3_text"
    base_config_key = "text_config"
    attribute_map = {  # noqa: RUF012  the name in transformers: the name in the file
        "max_position_embeddings": "max_position_embedding",
        "num_key_value_heads": "num_attention_groups",
    }
    default_theta = 500_000.0

    vocab_size: int = 128815
    hidden_size: int = 7168
    intermediate_size: int = 18432  # the width of a dense layer's MLP
    num_hidden_layers: int = 61
    num_attention_heads: int = 64
    num_attention_groups: int = 1  # the number of key-value heads; MFA has one
    head_dim: int = 256
    share_q_dim: int = 2048  # the rank of the low-rank query projection
    max_position_embedding: int = 65536
    rms_norm_eps: float = 1e-5
    rope_parameters: dict | None = None
    moe_num_experts: int = 48
    moe_top_k: int = 3
    moe_intermediate_size: int = 5120
    share_expert_dim: int = 5120
    norm_expert_weight: bool = False
    moe_layers_enum: str | Sequence[int] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    @property
    def moe_layers(self) -> frozenset[int]:
        """The indices of the MoE layers; without `moe_layers_enum`, all except the first, as in upstream."""
        if self.moe_layers_enum is None:
            return frozenset(range(1, self.num_hidden_layers))
        listed = self.moe_layers_enum
        numbers = listed.split(",") if isinstance(listed, str) else listed
        return frozenset(int(n) for n in numbers if str(n).strip())


class Step3VisionEncoderConfig(PretrainedConfig):
    """The sizes of the images, of the vision tower, and of the first of the two convolutions after it."""

    model_type = "step3_vision_encoder"
    base_config_key = "vision_config"

    hidden_size: int = 1792
    intermediate_size: int = 15360
    output_hidden_size: int = 4096
    num_hidden_layers: int = 63
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 728
    patch_size: int = 14
    # crop_size and max_side are constants in the released code; small checkpoints change them
    crop_size: int = 504
    max_side: int = 3024
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5


class Step3VLConfig(PretrainedConfig):
    """The whole config.json of Step3."""

    model_type = "step3_vl"
    sub_configs = {"vision_config": Step3VisionEncoderConfig, "text_config": Step3TextConfig}  # noqa: RUF012

    vision_config: dict | PretrainedConfig | None = None
    text_config: dict | PretrainedConfig | None = None
    understand_projector_stride: int = 2
    projector_bias: bool = False
    image_token_id: int = 128001
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        for name, config_class in self.sub_configs.items():
            if not isinstance(values := getattr(self, name), PretrainedConfig):
                setattr(self, name, config_class(**(values or {})))
        hidden_size = self.get_text_config().hidden_size  # upstream reads it from this level
        super().__post_init__(**(kwargs | {"hidden_size": hidden_size}))


def check_config(config: Step3TextConfig) -> None:
    """Raise ValueError, naming the key, if the text model is not supported."""
    if config.num_attention_groups != 1:
        raise ValueError(f"num_attention_groups: expected 1, as in MFA, got {config.num_attention_groups}")
    if (rope_type := (config.rope_parameters or {}).get("rope_type", "default")) != "default":
        raise ValueError(f"rope_parameters: expected rope_type 'default', got {rope_type!r}")
    if (router := getattr(config, "moe_router_activation", "softmax")) != "softmax":
        raise ValueError(f"moe_router_activation: expected 'softmax', got {router!r}")
    if unknown := sorted(n for n in config.moe_layers if not 0 <= n < config.num_hidden_layers):
        raise ValueError(f"moe_layers_enum: expected indices from 0 to {config.num_hidden_layers - 1}, got {unknown}")


for _config in (Step3TextConfig, Step3VisionEncoderConfig, Step3VLConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
