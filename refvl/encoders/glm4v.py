"""The GLM-4.1V vision tower, read downward; GLM-4.5V, GLM-4.6V and GLM-GA have the same one, GLM-OCR another.

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matrix product (a convolution whose stride is its kernel), RMSNorm
       | [position_embeds] + a learned table of positions, sampled bicubically at each patch's centre
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x)); attention inside frames, 2-D rotary
       | post_layernorm   RMSNorm
    (N, E)
       | downsample       each m x m block of patches becomes one token (a convolution, as above)
       | merger           Linear - LayerNorm - GELU, then SwiGLU
    embeddings (M, D)                             M = N / m^2 tokens of the language model's width

The tower gets positions twice: the table tells where in the image a patch lies, whatever the image's size; the rotary
angles tell how many patches lie between two of them. Both depend on the grid (the first on the table as well), so both
are planned: `plan(grid_thw)` computes them into `TableMetadata`, and `encode` reads no value back and branches on no
tensor. What is not particular to this tower is imported from `refvl.encoders.frames`.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, H heads, K head dimension.
Upstream: `Glm4vVisionTransformer` (vLLM), `Glm4vVisionModel` and `Glm4vMoeVisionModel` (transformers).
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments
from refvl.checks import Grid
from refvl.encoders.frames import PatchEmbed, SwiGLU, TableEncoder, TableMetadata, VisionBlock
from refvl.encoders.grid import GridVisionConfig
from refvl.positions.rotary import rotate
from refvl.positions.tables import interpolate_position_table


@dataclass(frozen=True, slots=True)
class Glm4vVisionConfig(GridVisionConfig):
    """Sizes of the tower; the names and defaults are those of the checkpoint's `vision_config` (GLM-4.1V-9B)."""

    depth: int = 24
    hidden_size: int = 1536
    intermediate_size: int = 13696  # of the merger; the blocks' MLPs are out_hidden_size wide
    num_heads: int = 12
    in_channels: int = 3
    image_size: int = 336  # pixels along a side of the images that the position table was learned on
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 4096
    attention_bias: bool = False
    rms_norm_eps: float = 1e-5

    def __post_init__(self):
        GridVisionConfig.__post_init__(self)
        self.check_image_size()

    @classmethod
    def tiny(cls) -> "Glm4vVisionConfig":
        """Three blocks and a table of 6 x 6 positions: for tests and figures."""
        return cls(depth=3, hidden_size=64, intermediate_size=112, num_heads=4, image_size=84, out_hidden_size=96)

    @property
    def num_positions(self) -> int:
        """Rows of the position table."""
        return (self.image_size // self.patch_size) ** 2


class Glm4vVisionTransformer(TableEncoder):
    """Patch rows in, embeddings of the language model's width out; equal to transformers' tower on the same weights."""

    config_class = Glm4vVisionConfig
    config: Glm4vVisionConfig

    def __init__(self, config: Glm4vVisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        c, E = config, config.hidden_size
        self.patch_embed = PatchEmbed(c)
        self.post_conv_layernorm = nn.RMSNorm(E, c.rms_norm_eps)
        self.embeddings = nn.ModuleDict({"position_embedding": nn.Embedding(c.num_positions, E)})
        self.blocks = nn.ModuleList(
            VisionBlock(E, c.rms_norm_eps, VisionAttention(c), SwiGLU(E, c.out_hidden_size, bias=False))
            for _ in range(c.depth)
        )
        self.post_layernorm = nn.RMSNorm(E, c.rms_norm_eps)
        self.downsample = nn.Linear(E * c.block_size, c.out_hidden_size)
        self.merger = PatchMerger(c.out_hidden_size, c.intermediate_size)

    def position_embeds(self, grids: list[Grid]) -> Tensor:
        """(N, E): the table, sampled bicubically at each patch's centre."""
        table = self.get_parameter("embeddings.position_embedding.weight")
        return interpolate_position_table(table, grids, spatial_merge_size=self.config.spatial_merge_size)

    def encode(self, patches_NC: Tensor, metadata: TableMetadata, backend: str) -> Tensor:
        """(N, C*Tp*P*P) -> (M, D)."""
        x_NE = self.post_conv_layernorm(self.patch_embed(patches_NC)) + metadata.position_embeds
        rotary = metadata.rotary()
        for block in self.blocks:
            x_NE = block(x_NE, rotary, metadata, backend)
        x_MD = self.downsample(fold_blocks(self.post_layernorm(x_NE), self.config.block_size))
        return self.merger(x_MD)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Of the patch embedding and the downsampling."""
        return super().kernels | {"downsample.weight": downsample_kernel(self.config)}


class VisionAttention(nn.Module):
    """Fused q, k, v; rotary on q and k; every patch attends within its own frame."""

    def __init__(self, config: Glm4vVisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments, backend: str) -> Tensor:
        qk_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3 * self.num_heads, -1)).tensor_split([2 * self.num_heads], dim=1)
        q_NHK, k_NHK = rotate(qk_NHK, *rotary).chunk(2, dim=1)  # in one pass: half as many kernels
        return self.proj(segments.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)


class PatchMerger(SwiGLU):
    """Linear - LayerNorm - GELU, then SwiGLU, all at the language model's width."""

    def __init__(self, size: int, intermediate_size: int):
        super().__init__(size, intermediate_size, bias=False)
        self.proj = nn.Linear(size, size, bias=False)
        self.post_projection_norm = nn.LayerNorm(size)

    def forward(self, x_MD: Tensor) -> Tensor:
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x_MD))))


def fold_blocks(x_NE: Tensor, block_size: int) -> Tensor:
    """(N, E) -> (M, E*m*m): one row per merge block, channel first, as the downsampling kernel is flattened."""
    return x_NE.unflatten(0, (-1, block_size)).transpose(1, 2).flatten(1)


def downsample_kernel(config: GridVisionConfig) -> tuple[int, ...]:
    """The shape of the downsampling in checkpoints, where it is a convolution."""
    return (config.out_hidden_size, config.hidden_size, config.spatial_merge_size, config.spatial_merge_size)
