"""The Qwen2.5-VL vision tower, from top to bottom.

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matmul (a convolution with stride = kernel size)
       | [window_index]   sort merge blocks by window, once
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x))
       |                  attention inside windows of 112 px; inside whole frames in `fullatt_block_indexes`
    (N, E)
       | merger           RMSNorm, fold each m x m block, Linear - GELU - Linear
       | [reverse_index]  back to row-major order
    embeddings (M, D)                             M = N / m^2 tokens of the language model's width

The CPU plans and the device executes: `plan(grid_thw)` computes everything that depends on
sizes (permutation, positions, segment lengths) into `VisionMetadata`. `forward` neither reads
values back nor branches on tensors. `GridEncoder` and `Tower` define the input checks, device,
backends and weight names.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, H heads, K head
dimension. Upstream: `Qwen2_5_VisionTransformer` (vLLM),
`Qwen2_5_VisionTransformerPretrainedModel` (transformers).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments, group_segments, plan_segments
from refvl.checks import Grid
from refvl.encoders.grid import GridEncoder, GridMetadata, GridVisionConfig
from refvl.encoders.tower import to_device
from refvl.positions.rotary import block_positions, rotary_cos_sin, rotary_factors, rotary_frequencies, rotate
from refvl.positions.windows import max_window_count, window_order


@dataclass(frozen=True, slots=True)
class Qwen2_5_VisionConfig(GridVisionConfig):
    """The sizes of the tower; the names and defaults are those of the checkpoint's `vision_config` (7B)."""

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

    @classmethod
    def tiny(cls) -> "Qwen2_5_VisionConfig":
        """Return sizes for tests and figures: four blocks, with attention in windows and in whole frames."""
        return cls(
            depth=4, hidden_size=64, intermediate_size=96, num_heads=4, window_size=56,
            fullatt_block_indexes=(1, 3), out_hidden_size=96,
        )  # fmt: skip

    @property
    def window_side(self) -> int:
        """The number of merged tokens along a side of a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size


@dataclass(frozen=True, slots=True, eq=False)
class VisionMetadata(GridMetadata):
    """The inputs of a forward pass other than the pixels, including the windows; positions are in window order."""

    window_index: Tensor = field(metadata={"pad": "identity"})  # (M,) int64: x[window_index] is in window order
    reverse_index: Tensor = field(metadata={"pad": "identity"})  # (M,) int64: the inverse of window_index
    cu_window_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (windows + 1,) int32, in patches
    window_groups: tuple[Tensor, ...] | None = field(metadata={"pad": "empty"})  # like `groups`, for windows
    max_window_seqlen: int  # the number of patches in the longest window

    @property
    def summary(self) -> str:
        """Return a one-line description for tables."""
        return f"{len(self.cu_window_seqlens) - 1} windows, {len(self.cu_seqlens) - 1} frames"


class Qwen2_5_VisionTransformer(GridEncoder):
    """The tower, which computes the same embeddings as transformers' tower with the same weights."""

    config_class = Qwen2_5_VisionConfig
    config: Qwen2_5_VisionConfig

    def __init__(self, config: Qwen2_5_VisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        convolution = nn.Linear(self.patch_values, config.hidden_size, bias=False)  # stride = kernel size
        self.patch_embed = nn.Sequential(OrderedDict(proj=convolution))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config)

    def plan_checked(self, grids: Sequence[Grid]) -> VisionMetadata:
        """Compute the plan on the CPU, and move it to the tower's device.

        grids: the (t, h, w) of each item, in patches; images and videos may be mixed. `plan`
        also accepts tensors, and checks the grids.
        """
        m, side = self.config.spatial_merge_size, self.config.window_side
        frames = [h * w for t, h, w in grids for _ in range(t)]  # the number of patches in each frame
        window_index, cu_window_seqlens = window_order(grids, m, side)
        blocks = block_positions(grids, m).int().unflatten(0, (-1, self.block_size))
        frequencies = rotary_frequencies(self.head_dim)
        needs_groups = self.backend() == "sdpa"
        metadata = VisionMetadata(
            **plan_segments(frames, with_groups=needs_groups),
            positions=blocks[window_index].flatten(0, 1),
            frequencies=frequencies,
            window_index=window_index,
            reverse_index=window_index.argsort(),
            cu_window_seqlens=cu_window_seqlens,
            window_groups=group_segments(cu_window_seqlens) if needs_groups else None,
            max_window_seqlen=int(cu_window_seqlens.diff().max()) if grids else 0,
        )
        return to_device(metadata, self.device)

    def forward(self, pixel_values: Tensor, grid_thw=None, *, metadata=None, attention: str | None = None) -> Tensor:
        """Encode (N, C*Tp*P*P) patch rows of all items as (M, D) embeddings, with items in order.

        Pass `grid_thw`, which this call plans, or the `metadata` of an earlier `plan`.
        `attention` overrides the tower's backend; a graph capture requests static shapes. In
        float16, the last blocks can overflow (see `clamp_overflow`).
        """
        patches_NC, metadata, backend = self.inputs(pixel_values, grid_thw, metadata, attention)
        windows = Segments(metadata.cu_window_seqlens, metadata.window_groups, metadata.max_window_seqlen)
        x_NE = self.patch_embed(patches_NC)
        rotary = rotary_factors(*rotary_cos_sin(metadata.positions, metadata.frequencies))  # shared by all blocks
        x_NE = x_NE.unflatten(0, (-1, self.block_size))[metadata.window_index].flatten(0, 1)  # in window order
        for i, block in enumerate(self.blocks):
            segments = metadata if i in self.config.fullatt_block_indexes else windows
            x_NE = block(x_NE, rotary, segments, backend)
        if x_NE.dtype == torch.float16:
            x_NE = clamp_overflow(x_NE)
        return self.merger(x_NE)[metadata.reverse_index]  # in row-major order

    def plan_capacity(self, max_tokens: int, max_frames: int) -> VisionMetadata:
        """Return metadata large enough for any batch of `max_tokens` output tokens and `max_frames` frames.

        Windows are filled one after another, and `max_window_count` limits the number of windows. A
        window contains at most the tokens of its square; a frame may contain all tokens.
        """
        side = self.config.window_side
        windows = max_window_count(max_tokens, min(max_frames, max_tokens), side)
        ends = (torch.arange(windows + 1, dtype=torch.int32) * side**2).clamp(max=max_tokens) * self.block_size
        metadata = replace(
            super().plan_capacity(max_tokens, max_frames),
            cu_window_seqlens=ends,
            window_groups=None,
            max_window_seqlen=min(side**2, max_tokens) * self.block_size,
        )
        return to_device(metadata, self.device)

    def block_rows(self, metadata: VisionMetadata) -> list[Tensor]:
        """Return the indices of the patch rows in window order."""
        [rows] = super().block_rows(metadata)
        return [rows.unflatten(0, (-1, self.block_size))[metadata.window_index].flatten(0, 1)]


class VisionBlock(nn.Module):
    """A pre-norm block: x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: Qwen2_5_VisionConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = VisionAttention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), rotary, segments, backend)
        return self.mlp(self.norm2(x_NE), x_NE)


class VisionAttention(nn.Module):
    """Attention with a fused, biased QKV projection and rotary q and k; a patch attends within its own segment."""

    def __init__(self, config: GridVisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments, backend: str) -> Tensor:
        qkv_NHK = self.qkv(x_NE).unflatten(-1, (3 * self.num_heads, -1))
        qk_NHK, v_NHK = qkv_NHK.tensor_split([2 * self.num_heads], dim=1)
        q_NHK, k_NHK = rotate(qk_NHK, *rotary).chunk(2, dim=1)  # rotating q and k together halves the number of kernels
        return self.proj(segments.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)


class SwiGLU(nn.Module):
    """A gated MLP and its residual: residual + down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x_NE: Tensor, residual_NE: Tensor) -> Tensor:
        return residual_NE + self.down_proj(F.silu(self.gate_proj(x_NE)) * self.up_proj(x_NE))


class PatchMerger(nn.Module):
    """A module that folds each m x m block of patches into one token of the language model."""

    def __init__(self, config: Qwen2_5_VisionConfig):
        super().__init__()
        self.block_size = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(self.block_size, self.block_size), nn.GELU(), nn.Linear(self.block_size, config.out_hidden_size)
        )

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x_NE).view(-1, self.block_size))  # (N, E) -> (M, m*m*E) -> (M, D)


def clamp_overflow(x_NE: Tensor) -> Tensor:
    """Clamp the float16 rows in which a value has overflowed; the limit is finfo.max - 1000.

    Upstream (`cast_overflow_tensors`) clamps all rows if one row has overflowed, so a value above
    the limit depends on the rest of the batch. In this function, a value depends only on its own
    row. The function does not branch on the tensor, so a graph can capture the function.
    """
    bound = torch.finfo(x_NE.dtype).max - 1000
    overflowed_N1 = ~x_NE.isfinite().all(-1, keepdim=True)
    return torch.where(overflowed_N1, x_NE.clamp(-bound, bound), x_NE)
