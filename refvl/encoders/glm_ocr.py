"""The GLM-OCR vision tower, read downward. Its checkpoints resemble GLM-4.1V's, but the tower differs:

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matrix product; no norm after it, and no position table
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x)); attention inside frames
       |                  q and k are normed per head, then rotated; biases everywhere
       | post_layernorm   RMSNorm
    (N, E)
       | downsample       each m x m block of patches becomes one token
       | merger           Linear - LayerNorm - GELU, then SwiGLU, C times as wide as the language model
    embeddings (M, D)                             M = N / m^2 tokens of the language model's width

Positions come from the 2-D rotary angles alone, so `FrameMetadata` is all the metadata there is. What GLM-4.1V's tower
has as well is imported from there, and from `refvl.encoders.frames`.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, H heads, K head dimension.
Upstream: `GlmOcrVisionModel` (transformers).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from refvl.attention import Segments
from refvl.encoders.frames import FrameEncoder, FrameMetadata, PatchEmbed, SwiGLU, VisionBlock
from refvl.encoders.glm4v import PatchMerger, downsample_kernel, fold_blocks
from refvl.encoders.grid import GridVisionConfig
from refvl.positions.rotary import rotate


@dataclass(frozen=True, slots=True)
class GlmOcrVisionConfig(GridVisionConfig):
    """Sizes of the tower; the names and defaults are those of transformers' `GlmOcrVisionConfig`."""

    depth: int = 24
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 1536
    attention_bias: bool = True  # of the MLPs as well
    rms_norm_eps: float = 1e-5

    @classmethod
    def tiny(cls) -> "GlmOcrVisionConfig":
        """Three blocks: for tests."""
        return cls(depth=3, hidden_size=64, intermediate_size=112, num_heads=4, out_hidden_size=96)


class GlmOcrVisionTransformer(FrameEncoder):
    """Patch rows in, embeddings of the language model's width out; equal to transformers' tower on the same weights."""

    config_class = GlmOcrVisionConfig
    config: GlmOcrVisionConfig

    def __init__(self, config: GlmOcrVisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        c, E = config, config.hidden_size
        self.patch_embed = PatchEmbed(c)
        self.blocks = nn.ModuleList(
            VisionBlock(E, c.rms_norm_eps, VisionAttention(c), SwiGLU(E, c.intermediate_size, bias=c.attention_bias))
            for _ in range(c.depth)
        )
        self.post_layernorm = nn.RMSNorm(E, c.rms_norm_eps)
        self.downsample = nn.Linear(E * c.block_size, c.out_hidden_size)
        self.merger = PatchMerger(c.out_hidden_size, c.out_hidden_size * c.in_channels)

    def encode(self, patches_NC: Tensor, metadata: FrameMetadata, backend: str) -> Tensor:
        """(N, C*Tp*P*P) -> (M, D)."""
        x_NE = self.patch_embed(patches_NC)
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
    """Fused q, k, v; RMSNorm of q and k per head, then rotary; every patch attends within its own frame."""

    def __init__(self, config: GlmOcrVisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        qk_NHK = torch.cat([self.q_norm(q_NHK), self.k_norm(k_NHK)], dim=1)
        q_NHK, k_NHK = rotate(qk_NHK, *rotary).chunk(2, dim=1)
        return self.proj(segments.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)
