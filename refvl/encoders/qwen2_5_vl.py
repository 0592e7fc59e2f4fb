"""The Qwen2.5-VL vision tower, read downward.

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matrix product (a convolution whose stride is its kernel)
       | [window_index]   sort merge blocks by window, once
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x))
       |                  attention inside windows of 112 px; inside whole frames in `fullatt_block_indexes`
    (N, E)
       | merger           RMSNorm, fold each m x m block, Linear - GELU - Linear
       | [reverse_index]  back to reading order
    embeddings (M, D)                             M = N / m^2 tokens of the language model's width

The CPU plans, the device executes: everything that depends on sizes - permutation, angles, segment lengths -
is computed by `plan(grid_thw)` into `VisionMetadata`; `forward` reads no value back and branches on no tensor.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, H heads, K head dimension.
Upstream: `Qwen2_5_VisionTransformer` (vLLM), `Qwen2_5_VisionTransformerPretrainedModel` (transformers).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import available_backends, choose_backend, group_segments, varlen_attention
from refvl.checks import Grid, as_grids, check_shape
from refvl.encoders.weights import config_values, load_strict
from refvl.positions.rotary import apply_rotary, vision_rotary_cos_sin
from refvl.positions.windows import get_window_index, invert_permutation, max_window_count


@dataclass(frozen=True, slots=True)
class Qwen2_5_VisionConfig:
    """Sizes of the tower; the names and defaults are those of the checkpoint's `vision_config` (7B)."""

    depth: int = 32
    hidden_size: int = 1280
    intermediate_size: int = 3420
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    out_hidden_size: int = 3584
    tokens_per_second: float = 2
    norm_eps: float = 1e-6

    def __post_init__(self):
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                "hidden_size: must be num_heads times a head dimension that is a multiple of 4, "
                f"got {self.hidden_size} for {self.num_heads} heads"
            )

    @classmethod
    def from_hf(cls, config) -> "Qwen2_5_VisionConfig":
        """From a transformers vision config, the dict in `config.json`, or either of the whole model's.

        Unknown keys are ignored.
        """
        values = config_values(config, fields(cls), aliases={"in_chans": "in_channels"})
        if values.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act: the tower is written for 'silu', got {values['hidden_act']!r}")
        values.pop("hidden_act", None)
        values["fullatt_block_indexes"] = tuple(values.get("fullatt_block_indexes", cls().fullatt_block_indexes))
        return cls(**values)

    @classmethod
    def tiny(cls) -> "Qwen2_5_VisionConfig":
        """Four blocks, windows and full frames both present: for tests and pictures."""
        return cls(
            depth=4, hidden_size=64, intermediate_size=96, num_heads=4, window_size=56,
            fullatt_block_indexes=(1, 3), out_hidden_size=96,
        )  # fmt: skip

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values in one patch row: C * Tp * P * P."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True, eq=False)
class VisionMetadata:
    """What one forward needs besides pixels. Fixed addresses, changing contents: the contract of a captured graph.

    The integers are baked in by a capture: there they are capacities, and a replay must stay below them.
    """

    cos: Tensor = field(metadata={"pad": "zero"})  # (N, K/2) float32, window order
    sin: Tensor = field(metadata={"pad": "zero"})  # (N, K/2) float32, window order
    window_index: Tensor = field(metadata={"pad": "identity"})  # (M,) int64
    reverse_index: Tensor = field(metadata={"pad": "identity"})  # (M,) int64
    cu_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (frames + 1,) int32, patches
    cu_window_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (windows + 1,) int32, patches
    frame_groups: tuple[Tensor, ...] = field(metadata={"pad": "empty"})  # equal-length frames, for the sdpa backend
    window_groups: tuple[Tensor, ...] = field(metadata={"pad": "empty"})  # equal-length windows, for the sdpa backend
    max_seqlen: int  # patches in the longest frame
    max_window_seqlen: int  # patches in the longest window

    @property
    def summary(self) -> str:
        """One line for tables."""
        return f"{len(self.cu_window_seqlens) - 1} windows, {len(self.cu_seqlens) - 1} frames"


class Qwen2_5_VisionTransformer(nn.Module):
    """Patch rows in, embeddings of the language model's width out; equal to transformers' tower on the same weights."""

    def __init__(self, config: Qwen2_5_VisionConfig, *, attention: str = "auto"):
        super().__init__()
        self.config, self.attention = config, attention
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config)

    @classmethod
    def from_config(cls, config, *, attention: str = "auto") -> "Qwen2_5_VisionTransformer":
        """Build from a `Qwen2_5_VisionConfig`, a transformers vision config, or the dict in `config.json`.

        attention: a backend of `refvl.attention`, or "auto" for the best one on the device the pixels come from.
        """
        config = config if isinstance(config, Qwen2_5_VisionConfig) else Qwen2_5_VisionConfig.from_hf(config)
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
        window_index, cu_window_seqlens = get_window_index(
            grids, window_size=c.window_size, patch_size=c.patch_size, spatial_merge_size=c.spatial_merge_size
        )
        cos, sin = vision_rotary_cos_sin(grids, head_dim=c.head_dim, spatial_merge_size=c.spatial_merge_size)
        frames = torch.tensor([h * w for t, h, w in grids for _ in range(t)], dtype=torch.int32)
        cu_seqlens = F.pad(frames.cumsum(0, dtype=torch.int32), (1, 0))

        def to(x):
            return x.to(self.device, non_blocking=True)

        return VisionMetadata(
            cos=to(self._permute_blocks(cos, window_index)),
            sin=to(self._permute_blocks(sin, window_index)),
            window_index=to(window_index),
            reverse_index=to(invert_permutation(window_index)),
            cu_seqlens=to(cu_seqlens),
            cu_window_seqlens=to(cu_window_seqlens),
            frame_groups=tuple(map(to, group_segments(cu_seqlens))),
            window_groups=tuple(map(to, group_segments(cu_window_seqlens))),
            max_seqlen=int(cu_seqlens.diff().max()) if grids else 0,
            max_window_seqlen=int(cu_window_seqlens.diff().max()) if grids else 0,
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

        Cumulative lengths say "one frame, windows filled one after the other", so that a warm-up runs on legal values.
        Windows are bounded by `max_window_count`; a window holds at most its square of tokens, a frame all of them.
        """
        c, unit = self.config, self.config.spatial_merge_size**2
        side = c.window_size // c.spatial_merge_size // c.patch_size
        patches, frames = max_tokens * unit, min(max_frames, max_tokens)
        windows = max_window_count(max_tokens, frames, side)

        def filled(segments: int, length: int) -> Tensor:
            steps = torch.arange(segments + 1, dtype=torch.int32, device=self.device)
            return (steps * length).clamp(max=patches)

        index_M = torch.arange(max_tokens, device=self.device)
        angles = torch.zeros(patches, c.head_dim // 2, device=self.device)
        return VisionMetadata(
            cos=angles, sin=angles.clone(), window_index=index_M, reverse_index=index_M.clone(),
            cu_seqlens=filled(frames, patches), cu_window_seqlens=filled(windows, side**2 * unit),
            frame_groups=(), window_groups=(), max_seqlen=patches, max_window_seqlen=min(side**2, max_tokens) * unit,
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
        (a capture asks for one with static shapes). Raises ValueError when the rows do not match. In float16 the last
        blocks can overflow on long inputs; then values are clamped to the finite range.
        """
        if (metadata is None) == (grid_thw is None):
            raise ValueError("forward: give exactly one of grid_thw and metadata")
        metadata = self.plan(grid_thw) if metadata is None else metadata
        rows = (("patches", len(metadata.cos)), ("values (C*Tp*P*P)", self.config.patch_values))
        check_shape(pixel_values, rows, "pixel_values")
        backend = choose_backend(attention or self.attention, pixel_values.device, self.dtype, self.config.head_dim)

        x_NE = self.patch_embed(pixel_values.to(self.dtype))
        x_NE = self._permute_blocks(x_NE, metadata.window_index)
        for i, block in enumerate(self.blocks):
            if i in self.config.fullatt_block_indexes:
                segments = (metadata.cu_seqlens, metadata.max_seqlen, metadata.frame_groups)
            else:
                segments = (metadata.cu_window_seqlens, metadata.max_window_seqlen, metadata.window_groups)
            x_NE = block(x_NE, metadata.cos, metadata.sin, segments, backend)
        x_NE = clamp_overflow(x_NE)
        return self.merger(x_NE)[metadata.reverse_index]  # (M, D)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; returns the names of the parameters that were filled.

        Reads the original naming (`visual.`), the one after transformers 4.52 (`model.visual.`), bare names, and
        separate q, k, v projections. Missing, unexpected and misshapen names are listed in one ValueError.
        """
        c = self.config
        kernel = (c.hidden_size, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
        return load_strict(
            self, weights, rename=checkpoint_to_module_name, fuse=("q", "k", "v"),
            kernels={"patch_embed.proj.weight": kernel},
        )  # fmt: skip

    def _permute_blocks(self, x_N: Tensor, index_M: Tensor) -> Tensor:
        """Reorder (N, ...) by whole merge blocks of m * m rows."""
        return x_N.unflatten(0, (-1, self.config.spatial_merge_size**2))[index_M].flatten(0, 1)


def clamp_overflow(x: Tensor) -> Tensor:
    """float16: when anything overflowed, clamp to finfo.max - 1000, as upstream does; other dtypes pass through.

    Written without a branch on the tensor, so that a captured graph can hold it.
    """
    if x.dtype != torch.float16:
        return x
    bound = torch.finfo(x.dtype).max - 1000
    overflowed = ~x.isfinite().all()
    return torch.where(overflowed, x.clamp(-bound, bound), x)


class PatchEmbed(nn.Module):
    """Conv3d with kernel = stride = (Tp, P, P) over a patch row is one matrix product with the flattened kernel."""

    def __init__(self, config: Qwen2_5_VisionConfig):
        super().__init__()
        self.proj = nn.Linear(config.patch_values, config.hidden_size, bias=False)

    def forward(self, patches_NC: Tensor) -> Tensor:
        return self.proj(patches_NC)  # (N, E)


class VisionBlock(nn.Module):
    """Pre-norm: x + attn(norm1(x)), then x + mlp(norm2(x)); the caller says which segments, windows or frames."""

    def __init__(self, config: Qwen2_5_VisionConfig):
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def forward(self, x_NE: Tensor, cos: Tensor, sin: Tensor, segments, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), cos, sin, segments, backend)
        return x_NE + self.mlp(self.norm2(x_NE))


class VisionAttention(nn.Module):
    """Fused q, k, v with bias; rotary on q and k; every token attends within its own segment."""

    def __init__(self, config: Qwen2_5_VisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_NE: Tensor, cos: Tensor, sin: Tensor, segments, backend: str) -> Tensor:
        cu_seqlens, max_seqlen, groups = segments
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_NHK, k_NHK = apply_rotary(q_NHK, cos, sin), apply_rotary(k_NHK, cos, sin)
        out_NHK = varlen_attention(q_NHK, k_NHK, v_NHK, cu_seqlens, max_seqlen, backend=backend, groups=groups)
        return self.proj(out_NHK.flatten(1))  # (N, E)


class VisionMLP(nn.Module):
    """SwiGLU with biases."""

    def __init__(self, config: Qwen2_5_VisionConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_NE)) * self.up_proj(x_NE))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        # float32 inside, cast back before the weight: as transformers does, so that half precision agrees too
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class PatchMerger(nn.Module):
    """Fold each m x m block of patches into one token of the language model."""

    def __init__(self, config: Qwen2_5_VisionConfig):
        super().__init__()
        self.block_size = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(self.block_size, self.block_size), nn.GELU(), nn.Linear(self.block_size, config.out_hidden_size)
        )

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x_NE).view(-1, self.block_size))  # (N, E) -> (M, m*m*E) -> (M, D)


def checkpoint_to_module_name(name: str) -> str:
    """`visual.blocks.0.norm1.weight`, `model.visual.blocks...` and the bare name are the same parameter."""
    return re.sub(r"^(model\.)?visual\.", "", name)
