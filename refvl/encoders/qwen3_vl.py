"""The Qwen3-VL vision tower, read downward; Qwen3.5's is the same without deepstack.

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matrix product (a convolution whose stride is its kernel)
       | [position_embeds] + a learned table of positions, sampled bilinearly, its corners on the image's corners
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x)); attention inside frames, 2-D rotary
       |   | deepstack_merger_list   behind the blocks in `deepstack_visual_indexes`: k times (M, D)
    (N, E)
       | merger           LayerNorm, fold each m x m block, Linear - GELU - Linear
    rows (M, D * (1 + k))                         the embedding of a token, then what k language layers add to it

Deepstack: the language model takes the tower's last features as embeddings, as ever, and adds those of k earlier blocks
to the hidden states of the same tokens, the i-th behind its layer i. All features of a token travel in one wide row, so
that pruning, graphs, sharding and files treat them as they do any row; `split` takes a batch of them apart.

The table and its sampled values are metadata, as GLM-4.1V's are. What is not particular to this tower is imported from
`refvl.encoders.grid` and, the attention, from `refvl.encoders.qwen2_5_vl`.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, k deeper features, W = D * (1 + k).
Upstream: `Qwen3_VisionTransformer` (vLLM); `Qwen3VLVisionModel`, `Qwen3VLMoeVisionModel`, `Qwen3_5VisionModel` and
`Qwen3_5MoeVisionModel` (transformers).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.checks import Grid, check_shape
from refvl.encoders.frames import PatchEmbed, TableEncoder, TableMetadata, VisionBlock
from refvl.encoders.grid import GridVisionConfig
from refvl.encoders.qwen2_5_vl import VisionAttention
from refvl.positions.tables import interpolate_position_table


@dataclass(frozen=True, slots=True)
class Qwen3VLVisionConfig(GridVisionConfig):
    """Sizes of the tower; the names and defaults are those of the checkpoint's `vision_config` (8B)."""

    activation = "gelu_pytorch_tanh"
    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 4096
    num_position_embeddings: int = 2304  # S * S places of the position table
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    norm_eps: float = 1e-6

    def __post_init__(self):
        GridVisionConfig.__post_init__(self)
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings: must be a square, got {self.num_position_embeddings}")
        if len({*self.deepstack_visual_indexes} & {*range(self.depth)}) != len(self.deepstack_visual_indexes):
            raise ValueError(
                f"deepstack_visual_indexes: must be different blocks, 0 to {self.depth - 1}, "
                f"got {list(self.deepstack_visual_indexes)}"
            )

    @classmethod
    def tiny(cls) -> "Qwen3VLVisionConfig":
        """Four blocks, two of them with a merger, and a table of 6 x 6 places: for tests and figures."""
        return cls(
            depth=4, hidden_size=64, intermediate_size=112, num_heads=4, out_hidden_size=96,
            num_position_embeddings=36, deepstack_visual_indexes=(1, 2),
        )  # fmt: skip


class Qwen3VLVisionTransformer(TableEncoder):
    """Patch rows in, wide rows out; equal to transformers' tower on the same weights."""

    config_class = Qwen3VLVisionConfig
    config: Qwen3VLVisionConfig

    def __init__(self, config: Qwen3VLVisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        c, E = config, config.hidden_size
        self.patch_embed = PatchEmbed(c)
        self.pos_embed = nn.Embedding(c.num_position_embeddings, E)
        self.blocks = nn.ModuleList(
            VisionBlock(E, c.norm_eps, VisionAttention(c), VisionMLP(E, c.intermediate_size), norm=nn.LayerNorm)
            for _ in range(c.depth)
        )
        self.merger = PatchMerger(c, E)
        self.deepstack_merger_list = nn.ModuleList(PatchMerger(c, E * c.block_size) for _ in c.deepstack_visual_indexes)

    def position_embeds(self, grids: list[Grid]) -> Tensor:
        """(N, E): the table, sampled bilinearly, its corners on the image's corners."""
        return interpolate_position_table(
            self.pos_embed.weight, grids, spatial_merge_size=self.config.spatial_merge_size,
            mode="bilinear", align_corners=True,
        )  # fmt: skip

    def encode(self, patches_NC: Tensor, metadata: TableMetadata, backend: str) -> Tensor:
        """(N, C*Tp*P*P) -> (M, W)."""
        mergers = dict(zip(self.config.deepstack_visual_indexes, self.deepstack_merger_list, strict=True))
        x_NE, deeper = self.patch_embed(patches_NC) + metadata.position_embeds, list[Tensor]()
        rotary = metadata.rotary()
        for i, block in enumerate(self.blocks):
            x_NE = block(x_NE, rotary, metadata, backend)
            if i in mergers:
                deeper.append(mergers[i](x_NE))  # (M, D)
        return torch.cat([self.merger(x_NE), *deeper], dim=1)

    def split(self, rows_MW: Tensor) -> tuple[Tensor, Tensor]:
        """Wide rows (M, W) -> embeddings (M, D) and deeper features (k, M, D), the earliest block's first."""
        D, k = self.config.out_hidden_size, len(self.config.deepstack_visual_indexes)
        check_shape(rows_MW, ("M", ("channels", D * (1 + k))), "rows")
        return rows_MW[:, :D], rows_MW[:, D:].unflatten(1, (k, D)).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Qwen3_5VisionConfig(Qwen3VLVisionConfig):
    """Sizes of Qwen3.5's tower; the defaults are those of its 27B."""

    out_hidden_size: int = 5120
    deepstack_visual_indexes: tuple[int, ...] = ()

    @classmethod
    def tiny(cls) -> "Qwen3_5VisionConfig":
        """Three blocks and a table of 6 x 6 places: for tests."""
        return cls(
            depth=3, hidden_size=64, intermediate_size=112, num_heads=4, out_hidden_size=96, num_position_embeddings=36
        )


class Qwen3_5VisionTransformer(Qwen3VLVisionTransformer):
    """Patch rows in, embeddings out: the tower of Qwen3-VL with k = 0."""

    config_class = Qwen3_5VisionConfig


class VisionMLP(nn.Module):
    """fc2(gelu(fc1(x))), the GELU by its tanh formula."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden_size, intermediate_size)
        self.linear_fc2 = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x_NE), approximate="tanh"))


class PatchMerger(nn.Module):
    """Fold each m x m block of patches into one token; `normed` values are normalised together.

    Those of one patch (E) in the last merger, those of the whole block (m * m * E) in deepstack's.
    """

    def __init__(self, config: Qwen3VLVisionConfig, normed: int):
        super().__init__()
        self.normed, self.folded = normed, config.hidden_size * config.block_size
        self.norm = nn.LayerNorm(normed, eps=config.norm_eps)
        self.linear_fc1 = nn.Linear(self.folded, self.folded)
        self.linear_fc2 = nn.Linear(self.folded, config.out_hidden_size)

    def forward(self, x_NE: Tensor) -> Tensor:
        x_MF = self.norm(x_NE.view(-1, self.normed)).view(-1, self.folded)
        return self.linear_fc2(F.gelu(self.linear_fc1(x_MF)))  # (M, D)
