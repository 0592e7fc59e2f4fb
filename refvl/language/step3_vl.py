"""Step3's config and text model, which transformers (up to 5.23) has no classes for.

The keys of the config are those of the released file, and so are the defaults, which data/configs/README.md traces.
transformers learns the three `model_type`s at the end of this file: `AutoConfig` and `AutoTokenizer` then read a Step3
folder like any other. The text model: MFA attention, and experts beside a shared one.

    embeddings (B, L, D)
      -> layers:  x + attention(RMSNorm(x))
                  x + mlp(RMSNorm(x))                          in a dense layer
                  x + share_expert(y) + moe(y), y = RMSNorm(x)  in a layer of `moe_layers_enum`
      -> RMSNorm -> (B, L, D)

Multi-matrix factorisation attention (MFA, arXiv 2412.19255) spends its width on queries: 64 heads of 256 read one
key-value head, so that the cache holds as little as two vectors of 256 per token and layer. The query of that width is
low-rank: 7168 -> 2048 (`q_proj`), RMSNorm (`inter_norm`), -> 64 * 256 (`wq`).

The cache, masks, attention kernels and generation are transformers'; refvl/language/model.py puts the head on top.
Shapes: B prompts, L tokens, D hidden, H heads, K head dimension, R rank of the query, T = B * L tokens, E experts.
Upstream: vLLM's `Step3TextModel`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils.output_capturing import capture_outputs

from refvl.attention import is_ampere
from refvl.checks import check_positive_int
from refvl.language.model import SequentialTextModel
from refvl.positions.rotary import rotary_factors, rotate


class Step3TextConfig(PretrainedConfig):
    """Sizes of the language model. `moe_layers_enum` lists the layers that hold experts: "4,5,6", or [4, 5, 6]."""

    model_type = "step3_text"
    base_config_key = "text_config"
    attribute_map = {  # noqa: RUF012  what transformers calls it: what the file calls it
        "max_position_embeddings": "max_position_embedding",
        "num_key_value_heads": "num_attention_groups",
    }
    default_theta = 500_000.0

    vocab_size: int = 128815
    hidden_size: int = 7168
    intermediate_size: int = 18432  # of a dense layer
    num_hidden_layers: int = 61
    num_attention_heads: int = 64
    num_attention_groups: int = 1  # key-value heads; MFA has one
    head_dim: int = 256
    share_q_dim: int = 2048  # rank of the query
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
        """Numbers of the layers that hold experts; without `moe_layers_enum` all but the first, as upstream."""
        if self.moe_layers_enum is None:
            return frozenset(range(1, self.num_hidden_layers))
        listed = self.moe_layers_enum
        numbers = listed.split(",") if isinstance(listed, str) else listed
        return frozenset(int(n) for n in numbers if str(n).strip())


class Step3VisionEncoderConfig(PretrainedConfig):
    """Sizes of the images, of the vision tower, and of the first of the two convolutions after it."""

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
    crop_size: int = 504  # this and the next are constants of the released code; small checkpoints state others
    max_side: int = 3024
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5


class Step3VLConfig(PretrainedConfig):
    """The whole config.json."""

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
        hidden_size = self.get_text_config().hidden_size  # upstream reads it here
        super().__post_init__(**(kwargs | {"hidden_size": hidden_size}))


class Step3TextAttention(nn.Module):
    """MFA: a low-rank query of H heads, one head of keys and values for all of them."""

    is_causal = True

    def __init__(self, config: Step3TextConfig, layer_idx: int):
        super().__init__()
        hidden, heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.config, self.layer_idx = config, layer_idx
        self.num_key_value_groups = heads  # transformers' kernels ask how many heads share one of keys and values
        self.q_proj = nn.Linear(hidden, config.share_q_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.inter_norm = nn.RMSNorm(config.share_q_dim, eps=config.rms_norm_eps)
        self.wq = nn.Linear(config.share_q_dim, heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(
        self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor], mask, past_key_values=None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """What is added to x (B, L, D), and the weights (B, H, L, all keys) where the implementation has them."""
        q_BLR = self.inter_norm(self.q_proj(x_BLD))
        q_BHLK, k_B1LK, v_B1LK = (
            x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for x in (self.wq(q_BLR), self.k_proj(x_BLD), self.v_proj(x_BLD))
        )
        qk_BHLK = rotate(torch.cat([q_BHLK, k_B1LK], dim=1), *rotary)  # in one pass: half as many kernels
        q_BHLK, k_B1LK = qk_BHLK.tensor_split([-1], dim=1)
        if past_key_values is not None:  # from here on L of keys and values counts what came before, too
            k_B1LK, v_B1LK = past_key_values.update(k_B1LK, v_B1LK, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out_BLHK, weights = attend(self, q_BHLK, k_B1LK, v_B1LK, mask, scaling=self.head_dim**-0.5, **kwargs)
        return self.o_proj(out_BLHK.flatten(2)), weights


class Step3TextMLP(nn.Module):
    """SwiGLU: of a dense layer, and the expert that every token visits."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertLinear(nn.Module):
    """One matrix per expert in one tensor (E, out, in), as the checkpoint stores them."""

    def __init__(self, num_experts: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x_CI: Tensor, ends: Tensor | list[int]) -> Tensor:
        """(C, in) rows, expert by expert -> (C, out). ends: where each expert's end; a tensor for a grouped matmul."""
        if isinstance(ends, Tensor):
            return F.grouped_mm(x_CI, self.weight.mT, offs=ends)
        pieces = zip(x_CI.tensor_split(ends[:-1]), self.weight, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in pieces if len(rows)])


class Step3TextMoE(nn.Module):
    """Softmax over all experts, the best `moe_top_k` of them, weighted by what the softmax gave them.

    These weights sum to less than one; `norm_expert_weight` divides them by their sum.
    """

    def __init__(self, config: Step3TextConfig):
        super().__init__()
        experts, hidden, intermediate = config.moe_num_experts, config.hidden_size, config.moe_intermediate_size
        self.top_k, self.norm_expert_weight = config.moe_top_k, config.norm_expert_weight
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.gate_proj = ExpertLinear(experts, hidden, intermediate)
        self.up_proj = ExpertLinear(experts, hidden, intermediate)
        self.down_proj = ExpertLinear(experts, intermediate, hidden)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(T, top_k) weights and (T, top_k) numbers of the experts chosen; the softmax is in float32."""
        weights, chosen = self.gate(x_TD).softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.norm_expert_weight:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x_TD.dtype), chosen

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Rows sorted by expert, so that each reads its own in one piece: C = T * top_k of them."""
        x_TD = x_BLD.flatten(0, -2)
        weights, chosen = self.route(x_TD)
        experts_C, order = chosen.flatten().sort(stable=True)
        numbers_E = torch.arange(len(self.gate_proj.weight), device=order.device)
        ends_E = torch.searchsorted(experts_C, numbers_E, right=True, out_int32=True)
        ends = ends_E if self._has_grouped_matmul(x_TD) else ends_E.tolist()  # the one value read back
        x_CD = x_TD[order // self.top_k]
        hidden = F.silu(self.gate_proj(x_CD, ends)) * self.up_proj(x_CD, ends)
        out_CD = torch.empty_like(x_CD).index_copy(0, order, self.down_proj(hidden, ends))  # as they were chosen
        return (weights[:, None] @ out_CD.unflatten(0, (-1, self.top_k))).view_as(x_BLD)

    def _has_grouped_matmul(self, x: Tensor) -> bool:
        """Whether the device multiplies by all experts at once, without the host knowing how many rows each has."""
        return x.dtype == torch.bfloat16 and is_ampere(x.device)


class Step3TextDecoderLayer(nn.Module):
    """A dense layer has `mlp`, a layer of `moe_layers_enum` has `moe` and `share_expert`: checkpoint names differ."""

    def __init__(self, config: Step3TextConfig, layer_idx: int):
        super().__init__()
        self.use_moe = layer_idx in config.moe_layers
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Step3TextAttention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if self.use_moe:
            self.moe = Step3TextMoE(config)
            self.share_expert = Step3TextMLP(config.hidden_size, config.share_expert_dim)
        else:
            self.mlp = Step3TextMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor], mask, past_key_values=None, **kwargs) -> Tensor:
        attended_BLD, _ = self.self_attn(self.input_layernorm(x_BLD), rotary, mask, past_key_values, **kwargs)
        x_BLD = x_BLD + attended_BLD
        y_BLD = self.post_attention_layernorm(x_BLD)
        return x_BLD + (self.share_expert(y_BLD) + self.moe(y_BLD) if self.use_moe else self.mlp(y_BLD))


class Step3TextModel(PreTrainedModel):
    """Embeddings or ids in, hidden states out; transformers loads, places and caches it as its own models."""

    config: Step3TextConfig
    config_class = Step3TextConfig
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["Step3TextDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Step3TextDecoderLayer, "attentions": Step3TextAttention}  # noqa: RUF012

    def __init__(self, config: Step3TextConfig):
        super().__init__(config)
        check_config(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Step3TextDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ExpertLinear):
            init.normal_(module.weight, std=self.config.initializer_range)

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """(B, L) ids or (B, L, D) embeddings -> hidden states (B, L, D).

        position_ids: (B, L), by default those behind the cache. attention_mask: (B, cached + L), 0 for padding.
        kwargs: `output_hidden_states` and `output_attentions` (with eager attention), as in transformers' models.
        Raises ValueError unless exactly one of input_ids and inputs_embeds is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("inputs_embeds: give either input_ids or inputs_embeds")
        x_BLD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            start = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(start, start + x_BLD.shape[1], device=x_BLD.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x_BLD,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        rotary = rotary_factors(*rotary_cos_sin(position_ids, self.config, x_BLD.dtype))
        for layer in self.layers:
            x_BLD = layer(x_BLD, rotary, mask, past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BLD), past_key_values=past_key_values)


def rotary_cos_sin(position_ids: Tensor, config: Step3TextConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, L) positions -> cos, sin, each (B, L, K/2); angles are computed in float32, whatever the model's dtype."""
    dims = torch.arange(0, config.head_dim, 2, device=position_ids.device, dtype=torch.float32)
    inv_freq = (config.rope_parameters or {})["rope_theta"] ** -(dims / config.head_dim)
    angles = position_ids[..., None].float() * inv_freq
    return angles.cos().to(dtype), angles.sin().to(dtype)


def check_config(config: Step3TextConfig) -> None:
    """Raise ValueError, naming the key, for a text model that is not built here."""
    if config.num_attention_groups != 1:
        raise ValueError(f"num_attention_groups: MFA has one key-value head, got {config.num_attention_groups}")
    if (rope_type := (config.rope_parameters or {}).get("rope_type", "default")) != "default":
        raise ValueError(f"rope_parameters: only rope_type 'default' is built here, got {rope_type!r}")
    if (router := getattr(config, "moe_router_activation", "softmax")) != "softmax":
        raise ValueError(f"moe_router_activation: Step3's router is a softmax, got {router!r}")
    if unknown := sorted(n for n in config.moe_layers if not 0 <= n < config.num_hidden_layers):
        raise ValueError(f"moe_layers_enum: there are {config.num_hidden_layers} layers, got {unknown}")
    if check_positive_int(config.moe_top_k, "moe_top_k") > config.moe_num_experts:
        raise ValueError(f"moe_top_k: {config.moe_top_k} of {config.moe_num_experts} experts cannot be chosen")


class Step3ForCausalLM(SequentialTextModel):
    """Step3: the text model is refvl's own."""

    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"^(model\.)?(vision_model|vit_downsampler2?|vit_large_projector)\."
    ]


for _config in (Step3TextConfig, Step3VisionEncoderConfig, Step3VLConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
AutoModel.register(Step3TextConfig, Step3TextModel, exist_ok=True)
