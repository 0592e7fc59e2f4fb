"""The Qwen3-VL vision tower, from top to bottom; Qwen3.5's tower is the same without DeepStack.

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matmul (a convolution with stride = kernel size)
       | [position_embeds] + a learned table of positions, sampled bilinearly, with its corners at the image's corners
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x)); attention inside frames, 2-D rotary
       |   | deepstack_merger_list   after the blocks in `deepstack_visual_indexes`: k times (M, D)
    (N, E)
       | merger           LayerNorm, fold each m x m block, Linear - GELU - Linear
    rows (M, D * (1 + k))                         a token's embedding, then the features that k layers add to it

DeepStack: the tower's last features become the embeddings of the language model. The language
model also adds the features of k earlier blocks to the hidden states of the same tokens, the
i-th features after its layer i. All features of a token form one wide row, so pruning, graphs,
sharding and files treat this row like any other row. `split` separates the features.

The CPU plans and the device executes: `plan(grid_thw)` computes everything that depends on
sizes into `TableMetadata`. `forward` neither reads values back nor branches on tensors. The
plan also contains the values sampled from the table, which depend on the grid and on the
weights. The attention module is that of Qwen2.5-VL's tower. `GridEncoder` and `Tower` define
the input checks, device, backends and weight names.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, H heads, K head
dimension, k DeepStack features, W = D * (1 + k). Upstream: `Qwen3_VisionTransformer` (vLLM);
`Qwen3VLVisionModel`, `Qwen3VLMoeVisionModel`, `Qwen3_5VisionModel` and `Qwen3_5MoeVisionModel`
(transformers).
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments
from refvl.checks import Grid, check_shape
from refvl.encoders.grid import GridEncoder, GridVisionConfig, TableMetadata
from refvl.encoders.qwen2_5_vl import VisionAttention
from refvl.encoders.tower import to_device
from refvl.positions.rotary import rotary_cos_sin, rotary_factors
from refvl.positions.tables import sample_position_table


@dataclass(frozen=True, slots=True)
class Qwen3VLVisionConfig(GridVisionConfig):
    """The sizes of the tower; the names and defaults are those of the checkpoint's `vision_config` (8B)."""

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
    num_position_embeddings: int = 2304  # the number of entries in the position table, S * S
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    norm_eps: float = 1e-6

    def __post_init__(self):
        GridVisionConfig.__post_init__(self)
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings: must be a square number, got {self.num_position_embeddings}")
        if len({*self.deepstack_visual_indexes} & {*range(self.depth)}) != len(self.deepstack_visual_indexes):
            said = f"distinct block indices from 0 to {self.depth - 1}, got {list(self.deepstack_visual_indexes)}"
            raise ValueError(f"deepstack_visual_indexes: expected {said}")

    @classmethod
    def tiny(cls) -> "Qwen3VLVisionConfig":
        """Return a small config for tests and figures: four blocks, two DeepStack mergers, and 6 x 6 positions."""
        return cls(
            depth=4, hidden_size=64, intermediate_size=112, num_heads=4, out_hidden_size=96,
            num_position_embeddings=36, deepstack_visual_indexes=(1, 2),
        )  # fmt: skip


class Qwen3VLVisionTransformer(GridEncoder):
    """The tower, which turns patch rows into wide rows, as transformers' tower does with the same weights."""

    config_class = Qwen3VLVisionConfig
    config: Qwen3VLVisionConfig

    def __init__(self, config: Qwen3VLVisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        convolution = nn.Linear(self.patch_values, config.hidden_size)  # stride = kernel size
        self.patch_embed = nn.Sequential(OrderedDict(proj=convolution))
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, normed=config.hidden_size)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, normed=config.hidden_size * config.block_size) for _ in config.deepstack_visual_indexes
        )

    def plan_checked(self, grids: Sequence[Grid]) -> TableMetadata:
        """Compute the plan on the CPU, and move it to the tower's device.

        grids: the (t, h, w) of each item, in patches; images and videos may be mixed. `plan`
        also accepts tensors, and checks the grids. Only the position table is sampled on the
        tower's device.
        """
        table, m = self.pos_embed.weight, self.config.spatial_merge_size
        sampled = sample_position_table(table, grids, m, mode="bilinear", align_corners=True)
        metadata = TableMetadata(**self.plan_frames(grids), position_embeds=sampled)
        return to_device(metadata, self.device)

    def forward(self, pixel_values: Tensor, grid_thw=None, *, metadata=None, attention: str | None = None) -> Tensor:
        """Encode (N, C*Tp*P*P) patch rows of all items as (M, W) wide rows, with items in order.

        Pass `grid_thw`, which this call plans, or the `metadata` of an earlier `plan`. `attention`
        overrides the tower's backend; a graph capture requests static shapes. Raises ValueError if
        the rows do not match the plan, and TypeError if they are not floats.
        """
        patches_NC, metadata, backend = self.inputs(pixel_values, grid_thw, metadata, attention)
        rotary = rotary_factors(*rotary_cos_sin(metadata.positions, metadata.frequencies))  # shared by all blocks
        mergers = dict(zip(self.config.deepstack_visual_indexes, self.deepstack_merger_list, strict=True))
        deeper: list[Tensor] = []  # k tensors (M, D)
        x_NE = self.patch_embed(patches_NC) + metadata.position_embeds
        for i, block in enumerate(self.blocks):
            x_NE = block(x_NE, rotary, metadata, backend)
            if i in mergers:
                deeper.append(mergers[i](x_NE))
        return torch.cat([self.merger(x_NE), *deeper], dim=1)

    def split(self, rows_MW: Tensor) -> tuple[Tensor, Tensor]:
        """Split wide rows (M, W) into embeddings (M, D) and DeepStack features (k, M, D), in block order."""
        D, k = self.config.out_hidden_size, len(self.config.deepstack_visual_indexes)
        check_shape(rows_MW, ("M", ("channels", D * (1 + k))), "rows")
        return rows_MW[:, :D], rows_MW[:, D:].unflatten(1, (k, D)).transpose(0, 1)


class VisionBlock(nn.Module):
    """A pre-norm block: x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: Qwen3VLVisionConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = VisionAttention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = VisionMLP(config)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], frames: Segments, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), rotary, frames, backend)
        return x_NE + self.mlp(self.norm2(x_NE))


class VisionMLP(nn.Module):
    """An MLP: fc2(gelu(fc1(x))), with the tanh approximation of GELU."""

    def __init__(self, config: Qwen3VLVisionConfig):
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x_NE), approximate="tanh"))


class PatchMerger(nn.Module):
    """A module that folds each m x m block of patches into one token.

    normed: the number of values that are normalised together. The last merger normalises the E
    values of each patch; the DeepStack mergers normalise the m * m * E values of each block.
    """

    def __init__(self, config: Qwen3VLVisionConfig, *, normed: int):
        super().__init__()
        self.normed = normed
        self.folded = config.hidden_size * config.block_size
        self.norm = nn.LayerNorm(normed, eps=config.norm_eps)
        self.linear_fc1 = nn.Linear(self.folded, self.folded)
        self.linear_fc2 = nn.Linear(self.folded, config.out_hidden_size)

    def forward(self, x_NE: Tensor) -> Tensor:
        x_MF = self.norm(x_NE.view(-1, self.normed)).view(-1, self.folded)
        return self.linear_fc2(F.gelu(self.linear_fc1(x_MF)))  # (M, D)


@dataclass(frozen=True, slots=True)
class Qwen3_5VisionConfig(Qwen3VLVisionConfig):
    """The sizes of Qwen3.5's tower; the defaults are those of the 27B model."""

    out_hidden_size: int = 5120
    deepstack_visual_indexes: tuple[int, ...] = ()

    @classmethod
    def tiny(cls) -> "Qwen3_5VisionConfig":
        """Return sizes for tests: three blocks and a table of 6 x 6 positions."""
        return cls(
            depth=3, hidden_size=64, intermediate_size=112, num_heads=4, out_hidden_size=96, num_position_embeddings=36
        )


class Qwen3_5VisionTransformer(Qwen3VLVisionTransformer):
    """The tower of Qwen3-VL without DeepStack (k = 0)."""

    config_class = Qwen3_5VisionConfig
