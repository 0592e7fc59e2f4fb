"""The GLM-OCR vision tower, read downward. Its checkpoints look like GLM-4.1V's, but the tower is another:

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matrix product; no norm behind it, and no position table
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x)); attention inside frames
       |                  q and k are normed per head, then rotated; biases everywhere
       | post_layernorm   RMSNorm
    (N, E)
       | downsample       each m x m block of patches becomes one token
       | merger           Linear - LayerNorm - GELU, then SwiGLU, C times as wide as the language model
    embeddings (M, D)                             M = N / m^2 tokens of the language model's width

Positions are told by the 2-D rotary angles alone. What both towers have is imported from `refvl.encoders.glm4v`.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, H heads, K head dimension.
Upstream: `GlmOcrVisionModel` (transformers).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import available_backends, choose_backend, group_segments, varlen_attention
from refvl.checks import Grid, as_grids, check_shape
from refvl.encoders.glm4v import (
    PatchEmbed,
    PatchMerger,
    RMSNorm,
    VisionMLP,
    checkpoint_to_module_name,
    fold_blocks,
    split_gate_up,
)
from refvl.encoders.weights import config_values, load_strict
from refvl.positions.rotary import apply_rotary, vision_rotary_cos_sin


@dataclass(frozen=True, slots=True)
class GlmOcrVisionConfig:
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

    def __post_init__(self):
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                "hidden_size: must be num_heads times a head dimension that is a multiple of 4, "
                f"got {self.hidden_size} for {self.num_heads} heads"
            )

    @classmethod
    def from_hf(cls, config) -> "GlmOcrVisionConfig":
        """From a transformers vision config, the dict in `config.json`, or either of the whole model's.

        Unknown keys are ignored.
        """
        values = config_values(config, fields(cls), aliases={"in_chans": "in_channels"})
        if (activation := values.pop("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act: the tower is written for 'silu', got {activation!r}")
        return cls(**values)

    @classmethod
    def tiny(cls) -> "GlmOcrVisionConfig":
        """Three blocks: for tests."""
        return cls(depth=3, hidden_size=64, intermediate_size=112, num_heads=4, out_hidden_size=96)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values in one patch row: C * Tp * P * P."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True, eq=False)
class VisionMetadata:
    """What one forward needs besides pixels. The integer is baked in by a capture: there it is a capacity."""

    cos: Tensor = field(metadata={"pad": "zero"})  # (N, K/2) float32
    sin: Tensor = field(metadata={"pad": "zero"})  # (N, K/2) float32
    cu_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (frames + 1,) int32, patches
    frame_groups: tuple[Tensor, ...] = field(metadata={"pad": "empty"})  # equal-length frames, for the sdpa backend
    max_seqlen: int  # patches in the longest frame

    @property
    def summary(self) -> str:
        """One line for tables."""
        return f"{len(self.cu_seqlens) - 1} frames"


class GlmOcrVisionTransformer(nn.Module):
    """Patch rows in, embeddings of the language model's width out; equal to transformers' tower on the same weights."""

    def __init__(self, config: GlmOcrVisionConfig, *, attention: str = "auto"):
        super().__init__()
        self.config, self.attention = config, attention
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.post_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.downsample = nn.Linear(config.hidden_size * config.spatial_merge_size**2, config.out_hidden_size)
        self.merger = PatchMerger(config.out_hidden_size, config.out_hidden_size * config.in_channels)

    @classmethod
    def from_config(cls, config, *, attention: str = "auto") -> "GlmOcrVisionTransformer":
        """Build from a `GlmOcrVisionConfig`, a transformers vision config, or the dict in `config.json`.

        attention: a backend of `refvl.attention`, or "auto" for the best one on the device the pixels come from.
        """
        config = config if isinstance(config, GlmOcrVisionConfig) else GlmOcrVisionConfig.from_hf(config)
        return cls(config, attention=attention)

    @property
    def device(self) -> torch.device:
        return self.patch_embed.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed.proj.weight.dtype

    def check_layouts(self, grid_thw, *, name: str = "grid_thw") -> list[Grid]:
        """(t, h, w) per item, normalised; ValueError or TypeError for anything else and sides that do not merge."""
        return as_grids(grid_thw, spatial_merge_size=self.config.spatial_merge_size, name=name)

    def plan(self, grid_thw) -> VisionMetadata:
        """Everything that depends on sizes, computed on the CPU and moved to the tower's device.

        grid_thw: (t, h, w) per item, in patches; a list or an integer tensor (items, 3), images and videos mixed.
        """
        c = self.config
        grids = self.check_layouts(grid_thw)
        cos, sin = vision_rotary_cos_sin(grids, head_dim=c.head_dim, spatial_merge_size=c.spatial_merge_size)
        frames = torch.tensor([h * w for t, h, w in grids for _ in range(t)], dtype=torch.int32)
        cu_seqlens = F.pad(frames.cumsum(0, dtype=torch.int32), (1, 0))

        def to(x):
            return x.to(self.device, non_blocking=True)

        return VisionMetadata(
            cos=to(cos),
            sin=to(sin),
            cu_seqlens=to(cu_seqlens),
            frame_groups=tuple(map(to, group_segments(cu_seqlens))),
            max_seqlen=int(frames.max()) if grids else 0,
        )

    @property
    def graph_attention(self) -> str:
        """The backend for a capture: one whose shapes do not depend on the lengths of the segments."""
        available = available_backends(self.device, self.dtype, self.config.head_dim)
        return "varlen" if "varlen" in available else "masked"

    def item_size(self, grid: Grid) -> tuple[int, int, int]:
        """(patch rows, output tokens, frames) of one item of `grid` patches."""
        t, h, w = grid
        return t * h * w, t * h * w // self.config.spatial_merge_size**2, t

    def plan_capacity(self, max_tokens: int, max_frames: int) -> VisionMetadata:
        """Metadata as large as any batch of `max_tokens` output tokens and `max_frames` frames can need, for a capture.

        Cumulative lengths say "one frame that holds everything", so that a warm-up runs on legal values.
        """
        patches, frames = max_tokens * self.config.spatial_merge_size**2, min(max_frames, max_tokens)
        cu_seqlens = torch.full((frames + 1,), patches, dtype=torch.int32, device=self.device)
        cu_seqlens[0] = 0
        angles = torch.zeros(patches, self.config.head_dim // 2, device=self.device)
        return VisionMetadata(
            cos=angles, sin=angles.clone(), cu_seqlens=cu_seqlens, frame_groups=(), max_seqlen=patches
        )  # fmt: skip

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """(patch rows, C*Tp*P*P) zeros for `max_tokens` output tokens."""
        rows = max_tokens * self.config.spatial_merge_size**2
        return torch.zeros(rows, self.config.patch_values, dtype=self.dtype, device=self.device)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw=None,
        *,
        metadata: VisionMetadata | None = None,
        attention: str | None = None,
    ) -> Tensor:
        """(N, C*Tp*P*P) patch rows of all items -> (M, D) embeddings, items in order.

        Give `grid_thw` to plan here, or the `metadata` of an earlier `plan`; `attention` overrides the tower's backend
        (a capture asks for one with static shapes). Raises ValueError when the rows do not match.
        """
        if (metadata is None) == (grid_thw is None):
            raise ValueError("forward: give exactly one of grid_thw and metadata")
        metadata = self.plan(grid_thw) if metadata is None else metadata
        rows = (("patches", len(metadata.cos)), ("values (C*Tp*P*P)", self.config.patch_values))
        check_shape(pixel_values, rows, "pixel_values")
        backend = choose_backend(attention or self.attention, pixel_values.device, self.dtype, self.config.head_dim)

        x_NE = self.patch_embed(pixel_values.to(self.dtype))
        for block in self.blocks:
            x_NE = block(x_NE, metadata, backend)
        x_MD = self.downsample(fold_blocks(self.post_layernorm(x_NE), self.config.spatial_merge_size))
        return self.merger(x_MD)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; returns the names of the parameters that were filled.

        Reads names under `visual.`, `model.visual.` and bare ones; q, k, v fused or separate, and gate and up as well.
        Missing, unexpected and misshapen names are listed in one ValueError.
        """
        c = self.config
        kernels = {
            "patch_embed.proj.weight": (
                c.hidden_size, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size,
            ),
            "downsample.weight": (c.out_hidden_size, c.hidden_size, c.spatial_merge_size, c.spatial_merge_size),
        }  # fmt: skip
        return load_strict(
            self, split_gate_up(weights), rename=checkpoint_to_module_name, fuse=("q", "k", "v"), kernels=kernels
        )


class VisionBlock(nn.Module):
    """Pre-norm: x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: GlmOcrVisionConfig):
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm2 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size, bias=config.attention_bias)

    def forward(self, x_NE: Tensor, metadata: VisionMetadata, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), metadata, backend)
        return x_NE + self.mlp(self.norm2(x_NE))


class VisionAttention(nn.Module):
    """Fused q, k, v; RMSNorm of q and k per head, then rotary; every patch attends within its own frame."""

    def __init__(self, config: GlmOcrVisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x_NE: Tensor, metadata: VisionMetadata, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_NHK = apply_rotary(self.q_norm(q_NHK), metadata.cos, metadata.sin)
        k_NHK = apply_rotary(self.k_norm(k_NHK), metadata.cos, metadata.sin)
        out_NHK = varlen_attention(
            q_NHK, k_NHK, v_NHK, metadata.cu_seqlens, metadata.max_seqlen,
            backend=backend, groups=metadata.frame_groups,
        )  # fmt: skip
        return self.proj(out_NHK.flatten(1))  # (N, E)
