"""Step3's text model, top down; transformers (up to 5.23) has no class for it, and `step3_config` contains its sizes.

    embeddings (B, L, D)
      -> layers:  x + attention(RMSNorm(x))
                  x + mlp(RMSNorm(x))                          in a dense layer
                  x + share_expert(y) + moe(y), y = RMSNorm(x)  in a layer of `moe_layers_enum`
      -> RMSNorm -> (B, L, D)

In multi-matrix factorisation attention (MFA, arXiv 2412.19255), 64 query heads of width 256 share
one key-value head, so the cache needs only two vectors of 256 values per token and layer. The
query projection is low-rank: 7168 -> 2048 (`q_proj`), RMSNorm (`inter_norm`), -> 64 * 256 (`wq`).

The cache, masks, attention kernels and generation are those of transformers;
refvl/language/model.py adds the output head. Shapes: B prompts, L tokens, D hidden, H heads, K head
dimension, R rank of the query, T = B * L tokens, E experts, C = T * top_k rows for experts.
Upstream: vLLM's `Step3TextModel`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils.output_capturing import capture_outputs

from refvl.attention import is_ampere
from refvl.language.model import SequentialTextModel
from refvl.language.step3_config import Step3TextConfig, check_config
from refvl.positions.rotary import rotate


class Step3ForCausalLM(SequentialTextModel):
    """Step3 with refvl's own text model."""

    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"^(model\.)?(vision_model|vit_downsampler2?|vit_large_projector)\."
    ]


class Step3TextModel(PreTrainedModel):
    """Step3 from embeddings or ids to hidden states; transformers loads, places and caches it like its own models."""

    config: Step3TextConfig
    config_class = Step3TextConfig
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["Step3TextDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

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
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None, attention_mask: Tensor | None = None, past_key_values=None,
        use_cache: bool | None = None, **kwargs,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """Return hidden states (B, L, D) for (B, L) ids or (B, L, D) embeddings.

        position_ids: (B, L); by default they continue after the cache. attention_mask: (B, cached +
        L), 0 for padding. kwargs: `output_hidden_states` and `output_attentions` (with eager
        attention), as in transformers' models. Raises ValueError unless exactly one of input_ids
        and inputs_embeds is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("forward: pass exactly one of input_ids and inputs_embeds")
        x_BLD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            start = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(start, start + x_BLD.shape[1], device=x_BLD.device)[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x_BLD, attention_mask=attention_mask,
            past_key_values=past_key_values, position_ids=position_ids,
        )  # fmt: skip
        rotary = text_rotary(position_ids, self.config, x_BLD.dtype)
        for layer in self.layers:
            x_BLD = layer(x_BLD, rotary, mask, past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BLD), past_key_values=past_key_values)


def text_rotary(position_ids: Tensor, config: Step3TextConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Turn (B, L) positions into the factors of a rotation, (B, 1, L, K) each: cos twice, and -sin followed by sin.

    Angles are computed in float32 for every dtype of the model.
    """
    dims = torch.arange(0, config.head_dim, 2, device=position_ids.device, dtype=torch.float32)
    inv_freq = (config.rope_parameters or {})["rope_theta"] ** -(dims / config.head_dim)
    angles = position_ids[:, None, :, None].float() * inv_freq  # (B, 1, L, K/2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


class Step3TextDecoderLayer(nn.Module):
    """A dense layer with `mlp`, or a layer from `moe_layers_enum` with `moe` and `share_expert` (checkpoint names)."""

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
        if self.use_moe:
            return x_BLD + (self.share_expert(y_BLD) + self.moe(y_BLD))
        return x_BLD + self.mlp(y_BLD)


class Step3TextAttention(nn.Module):
    """MFA: a low-rank query with H heads, and one head of keys and values for all of them."""

    is_causal = True

    def __init__(self, config: Step3TextConfig, layer_idx: int):
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.config = config  # the attention kernels of transformers read this attribute
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = heads  # for transformers' kernels: the number of query heads per key-value head
        self.q_proj = nn.Linear(hidden, config.share_q_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.inter_norm = nn.RMSNorm(config.share_q_dim, eps=config.rms_norm_eps)
        self.wq = nn.Linear(config.share_q_dim, heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(
        self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor], mask, past_key_values=None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Return the update of x, (B, L, D), and the weights, (B, H, L, all keys), if the implementation has them."""
        q_BLR = self.inter_norm(self.q_proj(x_BLD))
        q_BHLK = self.wq(q_BLR).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k_B1LK = self.k_proj(x_BLD)[:, None]
        v_B1LK = self.v_proj(x_BLD)[:, None]
        qk_BHLK = rotate(torch.cat([q_BHLK, k_B1LK], dim=1), *rotary)  # rotating both at once halves the kernel count
        q_BHLK, k_B1LK = qk_BHLK.tensor_split([-1], dim=1)
        if past_key_values is not None:  # from here on, L of keys and values includes cached tokens
            k_B1LK, v_B1LK = past_key_values.update(k_B1LK, v_B1LK, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out_BLHK, weights = attend(self, q_BHLK, k_B1LK, v_B1LK, mask, scaling=self.head_dim**-0.5, **kwargs)
        return self.o_proj(out_BLHK.flatten(2)), weights


class Step3TextMoE(nn.Module):
    """A mixture of experts: the outputs of the best `moe_top_k` experts, weighted by a softmax over all experts.

    The selected weights sum to less than one; `norm_expert_weight` divides them by their sum.
    """

    def __init__(self, config: Step3TextConfig):
        super().__init__()
        experts, hidden, intermediate = config.moe_num_experts, config.hidden_size, config.moe_intermediate_size
        self.top_k = config.moe_top_k
        self.norm_expert_weight = config.norm_expert_weight
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.gate_proj = ExpertLinear(experts, hidden, intermediate)
        self.up_proj = ExpertLinear(experts, hidden, intermediate)
        self.down_proj = ExpertLinear(experts, intermediate, hidden)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of the chosen experts, (T, top_k) each; the softmax is in float32."""
        weights, chosen = self.gate(x_TD).softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.norm_expert_weight:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x_TD.dtype), chosen

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Run the experts on C = T * top_k rows, sorted so that each expert reads one contiguous slice."""
        x_TD = x_BLD.flatten(0, -2)
        weights, chosen = self.route(x_TD)
        experts_C, order = chosen.flatten().sort(stable=True)
        numbers_E = torch.arange(len(self.gate_proj.weight), device=order.device)
        ends_E = torch.searchsorted(experts_C, numbers_E, right=True, out_int32=True)
        has_grouped_matmul = x_TD.dtype == torch.bfloat16 and is_ampere(x_TD.device)
        ends = ends_E if has_grouped_matmul else ends_E.tolist()  # the only value that is read back to the host
        x_CD = x_TD[order // self.top_k]
        hidden = F.silu(self.gate_proj(x_CD, ends)) * self.up_proj(x_CD, ends)
        out_CD = torch.empty_like(x_CD).index_copy(0, order, self.down_proj(hidden, ends))  # in the order of `chosen`
        return (weights[:, None] @ out_CD.unflatten(0, (-1, self.top_k))).view_as(x_BLD)


class ExpertLinear(nn.Module):
    """One matrix per expert, stored in one tensor (E, out, in), as in the checkpoint."""

    def __init__(self, num_experts: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x_CI: Tensor, ends: Tensor | list[int]) -> Tensor:
        """Map (C, in) rows, sorted by expert, to (C, out).

        ends: the end of each expert's rows; a tensor if the matmul is grouped.
        """
        if isinstance(ends, Tensor):
            return F.grouped_mm(x_CI, self.weight.mT, offs=ends)
        pieces = zip(x_CI.tensor_split(ends[:-1]), self.weight, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in pieces if len(rows)])


class Step3TextMLP(nn.Module):
    """A SwiGLU MLP, used in dense layers and as the shared expert for every token."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# transformers collects the outputs of these classes for `output_hidden_states` and `output_attentions`
Step3TextModel._can_record_outputs = {"hidden_states": Step3TextDecoderLayer, "attentions": Step3TextAttention}
AutoModel.register(Step3TextConfig, Step3TextModel, exist_ok=True)
