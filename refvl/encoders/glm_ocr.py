"""The GLM-OCR vision tower, from top to bottom; its checkpoints resemble GLM-4.1V's, but the tower differs.

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matmul; no norm after it, and no position table
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x)); attention inside frames
       |                  q and k are normalised per head, then rotated; all layers have biases
       | post_layernorm   RMSNorm
    (N, E)
       | downsample       each m x m block of patches becomes one token
       | merger           Linear - LayerNorm - GELU, then SwiGLU, C times as wide as the language model
    embeddings (M, D)                             M = N / m^2 tokens of the language model's width

Positions come only from the 2-D rotary angles. The MLP and the merger are those of GLM-4.1V,
imported from `refvl.encoders.glm4v`; this file defines the parts that differ.

The CPU plans and the device executes: `plan(grid_thw)` computes everything that depends on
sizes into `GridMetadata`. `forward` neither reads values back nor branches on tensors.
`GridEncoder` and `Tower` define the input checks, device, backends and weight names.

Shape suffixes: N patches, M merged tokens of B = m * m patches, E tower width, D language
width, H heads, K head dimension. Upstream: `GlmOcrVisionModel` (transformers).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from refvl.attention import Segments
from refvl.checks import Grid
from refvl.encoders.glm4v import PatchMerger, SwiGLU
from refvl.encoders.grid import GridEncoder, GridMetadata, GridVisionConfig
from refvl.encoders.tower import to_device
from refvl.positions.rotary import rotary_cos_sin, rotary_factors, rotate


@dataclass(frozen=True, slots=True)
class GlmOcrVisionConfig(GridVisionConfig):
    """The sizes of the tower; the names and defaults are those of transformers' `GlmOcrVisionConfig`."""

    depth: int = 24
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 1536
    attention_bias: bool = True  # whether attention and the MLPs have biases
    rms_norm_eps: float = 1e-5

    @classmethod
    def tiny(cls) -> "GlmOcrVisionConfig":
        """Return sizes for tests: three blocks."""
        return cls(depth=3, hidden_size=64, intermediate_size=112, num_heads=4, out_hidden_size=96)


class GlmOcrVisionTransformer(GridEncoder):
    """The tower, which computes the same embeddings as transformers' tower with the same weights."""

    config_class = GlmOcrVisionConfig
    config: GlmOcrVisionConfig

    def __init__(self, config: GlmOcrVisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        convolution = nn.Linear(self.patch_values, config.hidden_size)  # stride = kernel size
        self.patch_embed = nn.Sequential(OrderedDict(proj=convolution))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.post_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.downsample = nn.Linear(config.hidden_size * config.block_size, config.out_hidden_size)
        self.merger = PatchMerger(config.out_hidden_size, config.out_hidden_size * config.in_channels)

    def plan_checked(self, grids: Sequence[Grid]) -> GridMetadata:
        """Compute the plan on the CPU, and move it to the tower's device.

        grids: the (t, h, w) of each item, in patches; images and videos may be mixed. `plan`
        also accepts tensors, and checks the grids.
        """
        return to_device(GridMetadata(**self.plan_frames(grids)), self.device)

    def forward(self, pixel_values: Tensor, grid_thw=None, *, metadata=None, attention: str | None = None) -> Tensor:
        """Encode (N, C*Tp*P*P) patch rows of all items as (M, D) embeddings, with items in order.

        Pass `grid_thw`, which this call plans, or the `metadata` of an earlier `plan`.
        `attention` overrides the tower's backend; a graph capture requests static shapes.
        Raises ValueError if the rows do not match the plan, and TypeError if they are not
        floats.
        """
        patches_NC, metadata, backend = self.inputs(pixel_values, grid_thw, metadata, attention)
        rotary = rotary_factors(*rotary_cos_sin(metadata.positions, metadata.frequencies))  # shared by all blocks
        x_NE = self.patch_embed(patches_NC)
        for block in self.blocks:
            x_NE = block(x_NE, rotary, metadata, backend)
        x_MBE = self.post_layernorm(x_NE).unflatten(0, (-1, self.block_size))
        return self.merger(self.downsample(x_MBE.transpose(1, 2).flatten(1)))  # channel first, as in the kernel

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the kernel shapes of the patch embedding and of the downsampling."""
        config, m = self.config, self.config.spatial_merge_size
        return super().kernels | {"downsample.weight": (config.out_hidden_size, config.hidden_size, m, m)}


class VisionBlock(nn.Module):
    """A pre-norm block: x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: GlmOcrVisionConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = VisionAttention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.attention_bias)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], frames: Segments, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), rotary, frames, backend)
        return x_NE + self.mlp(self.norm2(x_NE))


class VisionAttention(nn.Module):
    """Attention with a fused QKV projection; q and k are normalised per head (RMSNorm), then rotated.

    Each patch attends only within its own frame.
    """

    def __init__(self, config: GlmOcrVisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], frames: Segments, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_NHK, k_NHK = self.q_norm(q_NHK), self.k_norm(k_NHK)
        qk_NHK = torch.cat([k_NHK[:, :1], q_NHK, k_NHK, q_NHK[:, :1]], dim=1)[:, 1:-1]  # with margins for `rotate`
        q_NHK, k_NHK = rotate(qk_NHK, *rotary).chunk(2, dim=1)
        return self.proj(frames.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)
