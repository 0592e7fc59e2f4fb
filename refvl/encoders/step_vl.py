"""The vision encoder of Step3-VL-10B and Step-3.7, from top to bottom: Perception Encoder, downsampler and projector.

    squares of pixels (B, C, S, S)                S = 728 for overviews ("global"), 504 for crops ("local")
       | embeddings          one matmul without bias
       |                     + a learned table, resized bilinearly for squares of other sizes
       | pre_layernorm
    (B, n*n, E)              n = S / P patches per side
       | layers              x + lambda_1 * attn(LN(x)); x + lambda_2 * mlp(LN(x)): each branch is scaled per channel
       |                     2-D rotary: K/4 pairs of dimensions rotate with the column, K/4 with the row
    (B, E, n, n)
       | vit_downsampler     two convolutions 3 x 3 with stride 2: 52 -> 26 -> 13 patches per side, E -> 2E -> 4E
       | vit_large_projector one linear layer
    embeddings (B, M, D)     169 tokens of an overview, 81 of a crop

The crops, the plan and the two paths are the same as in Step3 (`refvl.encoders.step3_vl`), but
there is no class token.

In released files, neighbouring dimensions (0 and 1, 2 and 3, ...) form a rotary pair. In
transformers' files and in this encoder, each dimension of the first half is paired with its
counterpart in the second half (0 with K/2, ...). When the encoder loads a released file, it
therefore reorders the rows of q and k.

Shape suffixes: B squares, N patches of all squares, T patches of one square, E tower width, H
heads, K head dimension. Upstream: `PerceptionEncoder` (vLLM), `Step3p7VisionModel`
(transformers 5.23).
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from refvl.attention import Segments, equal_segments
from refvl.encoders.step3_vl import Step3VisionConfig, Step3VisionEncoder, VisionMetadata, VisionMLP
from refvl.encoders.tower import Tower
from refvl.positions.rotary import rotary_cos_sin, rotary_factors, rotary_frequencies, rotate
from refvl.positions.tables import resize_position_table

# a regular expression for a name in the released file or transformers' file -> the parameter's name
RENAMED = {
    r"^model\.": "",
    r"^vision_model\.(vit_)?downsampler1": "vit_downsampler",
    r"^vision_model\.(vit_)?downsampler2": "vit_downsampler2",
    r"^multi_modal_projector": "vit_large_projector",
    r"\.conv1\.": ".embeddings.patch_embedding.",
    r"\.positional_embedding$": ".embeddings.position_embedding.weight",
    r"\.ln_pre\.": ".pre_layernorm.",
    r"\.transformer\.resblocks\.": ".layers.",
    r"\.ln_1\.": ".layernorm_before.",
    r"\.ln_2\.": ".layernorm_after.",
    r"\.ls_(\d)\.gamma$": r".lambda_\1",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
    r"\.attn\.in_proj_": ".self_attn.qkv.",
    r"\.attn\.": ".self_attn.",
    r"\.self_attn\.([qkv])_proj\.": r".self_attn.\1.",
}


@dataclass(frozen=True, slots=True)
class StepVLVisionConfig(Step3VisionConfig):
    """The sizes of the encoder, under transformers' names; `aliases` maps three names of the released file."""

    head_unit = 4
    aliases = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}  # noqa: RUF012
    hidden_size: int = 1536
    intermediate_size: int = 8960  # always `mlp_ratio` times the width, as in upstream
    num_hidden_layers: int = 47
    mlp_ratio: float = 8960 / 1536
    out_hidden_size: int = 4096

    def __post_init__(self):
        Step3VisionConfig.__post_init__(self)
        object.__setattr__(self, "intermediate_size", int(self.hidden_size * self.mlp_ratio))
        for name in ("image_size", "crop_size"):
            if (size := getattr(self, name)) % (4 * self.patch_size):
                raise ValueError(f"{name}: must be a multiple of {4 * self.patch_size} px, got {size} px")

    @classmethod
    def tiny(cls) -> "StepVLVisionConfig":
        """Return small sizes for tests and figures: three blocks, overviews of 8 x 8 patches, crops of 4 x 4."""
        return cls(
            hidden_size=48, mlp_ratio=80 / 48, num_hidden_layers=3, num_attention_heads=4, image_size=112, crop_size=56,
            out_hidden_size=56,
        )  # fmt: skip


class StepVLEncoder(Step3VisionEncoder):
    """The encoder, which turns squares into embeddings of the language model's width."""

    config_class = StepVLVisionConfig
    config: StepVLVisionConfig
    vision_model: "PerceptionEncoder"  # type: ignore[assignment]  # instead of Step3's

    def __init__(self, config: StepVLVisionConfig, *, attention: str = "auto"):
        Tower.__init__(self, config, attention=attention)
        E = config.hidden_size
        self.vision_model = PerceptionEncoder(config)
        self.vit_downsampler = nn.Conv2d(E, 2 * E, 3, stride=2, padding=1)
        self.vit_downsampler2 = nn.Conv2d(2 * E, 4 * E, 3, stride=2, padding=1)
        self.vit_large_projector = nn.Linear(4 * E, config.out_hidden_size, bias=config.projector_bias)
        self.prepare_squares()

    def position_embeds(self, side: int) -> Tensor:
        """Return (side^2, E), the position table for squares of side x side patches."""
        table: Any = self.vision_model.embeddings["position_embedding"].weight
        return resize_position_table(table, (side, side), antialias=False, mode="bilinear")

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The blocks of the tower."""
        return self.vision_model.layers

    def block_rows(self, metadata: VisionMetadata) -> list[Tensor]:
        """Return the indices (N,) of the patch rows of all crops, then of all overviews."""
        return [rows for rows in (metadata.local_rows, metadata.global_rows) if len(rows)]

    def split_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Reorder the rows of released q and k, so that dimensions (i, i + K/2) form a pair instead of (2i, 2i + 1)."""
        order = torch.arange(3 * self.config.hidden_size).view(3, self.config.num_heads, -1)
        order[:2] = order[:2].unflatten(-1, (-1, 2)).mT.flatten(-2)  # q and k are reordered; v is not rotated
        for name, tensor in pairs:
            is_released = ".attn.in_proj_" in name and len(tensor) == order.numel()
            yield name, tensor[order.flatten()] if is_released else tensor

    def rename(self, name: str) -> str:
        """Return the name of the parameter that the checkpoint's tensor `name` fills."""
        for old, new in RENAMED.items():
            name = re.sub(old, new, name)
        return name


class PerceptionEncoder(nn.Module):
    """Embeddings and a norm, followed by layers whose rotary angles depend on the row and column of each patch."""

    def __init__(self, config: StepVLVisionConfig):
        super().__init__()
        self.head_dim = config.head_dim
        num_positions = config.patches_per_side(config.image_size) ** 2
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Linear(config.patch_values, config.hidden_size, bias=False),
                "position_embedding": nn.Embedding(num_positions, config.hidden_size),
            }
        )
        self.pre_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, rows_NC: Tensor, position_embeds: Tensor, backend: str) -> Tensor:
        """Encode (B * n^2, C*P*P) rows of equal squares with (n^2, E) positions into (B, n^2, E)."""
        patches_NE = self.embeddings["patch_embedding"](rows_NC.to(position_embeds.dtype))
        x_BTE = self.pre_layernorm(patches_NE.unflatten(0, (-1, len(position_embeds))) + position_embeds)
        B, T, _ = x_BTE.shape
        device, side = x_BTE.device, math.isqrt(T)
        segments = equal_segments(B, T, device)  # both depend only on the shape, so graphs can capture them
        column_row = torch.cartesian_prod(*[torch.arange(side, device=device)] * 2).flip(1).repeat(B, 1)
        rotary = rotary_factors(*rotary_cos_sin(column_row, rotary_frequencies(self.head_dim, device=device)))
        x_NE = x_BTE.flatten(0, 1)
        for layer in self.layers:
            x_NE = layer(x_NE, rotary, segments, backend)
        return x_NE.unflatten(0, (B, T))


class VisionLayer(nn.Module):
    """A pre-norm layer: x + lambda_1 * attn(LN(x)), then x + lambda_2 * mlp(LN(x))."""

    def __init__(self, config: StepVLVisionConfig):
        super().__init__()
        E = config.hidden_size
        self.layernorm_before = nn.LayerNorm(E, eps=config.layer_norm_eps)
        self.self_attn = VisionAttention(config)
        self.lambda_1 = nn.Parameter(torch.full((E,), 0.1))
        self.layernorm_after = nn.LayerNorm(E, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config)
        self.lambda_2 = nn.Parameter(torch.full((E,), 0.1))

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments, backend: str) -> Tensor:
        x_NE = x_NE + self.lambda_1 * self.self_attn(self.layernorm_before(x_NE), rotary, segments, backend)
        return x_NE + self.lambda_2 * self.mlp(self.layernorm_after(x_NE))


class VisionAttention(nn.Module):
    """Attention with a fused QKV projection and rotary q and k; each patch attends only within its own square."""

    def __init__(self, config: StepVLVisionConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        return self.out_proj(segments.attend(rotate(q_NHK, *rotary), rotate(k_NHK, *rotary), v_NHK, backend))
