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

The CPU plans, the device executes: everything that depends on sizes - permutation, angles, segment lengths - is
computed by `plan(grid_thw)` into `VisionMetadata`; `forward` checks its arguments and calls `encode`, which reads no
value back and branches on no tensor. What is not particular to this tower is imported from `refvl.encoders.grid`.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, H heads, K head dimension.
Upstream: `Qwen2_5_VisionTransformer` (vLLM), `Qwen2_5_VisionTransformerPretrainedModel` (transformers).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from refvl.attention import Segments, group_segments
from refvl.encoders.grid import FrameMetadata, GridEncoder, GridVisionConfig, PatchEmbed, SwiGLU, VisionBlock
from refvl.positions.rotary import rotate
from refvl.positions.windows import get_window_index, invert_permutation, max_window_count


@dataclass(frozen=True, slots=True)
class Qwen2_5_VisionConfig(GridVisionConfig):
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

    @classmethod
    def tiny(cls) -> "Qwen2_5_VisionConfig":
        """Four blocks, windows and full frames both present: for tests and figures."""
        return cls(
            depth=4, hidden_size=64, intermediate_size=96, num_heads=4, window_size=56,
            fullatt_block_indexes=(1, 3), out_hidden_size=96,
        )  # fmt: skip

    @property
    def window_side(self) -> int:
        """Merged tokens along a side of a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size


@dataclass(frozen=True, slots=True, eq=False)
class VisionMetadata(FrameMetadata):
    """`FrameMetadata`, its positions in window order, and the windows."""

    window_index: Tensor = field(metadata={"pad": "identity"})  # (M,) int64
    reverse_index: Tensor = field(metadata={"pad": "identity"})  # (M,) int64
    cu_window_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (windows + 1,) int32, patches
    window_groups: tuple[Tensor, ...] | None = field(metadata={"pad": "empty"})  # as `groups`
    max_window_seqlen: int  # patches in the longest window

    @property
    def summary(self) -> str:
        """One line for tables."""
        return f"{len(self.cu_window_seqlens) - 1} windows, {len(self.cu_seqlens) - 1} frames"


class Qwen2_5_VisionTransformer(GridEncoder):
    """Patch rows in, embeddings of the language model's width out; equal to transformers' tower on the same weights."""

    config_class = Qwen2_5_VisionConfig
    config: Qwen2_5_VisionConfig

    def __init__(self, config: Qwen2_5_VisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        c, E = config, config.hidden_size
        self.patch_embed = PatchEmbed(c, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(E, c.norm_eps, VisionAttention(c), SwiGLU(E, c.intermediate_size, bias=True))
            for _ in range(c.depth)
        )
        self.merger = PatchMerger(c)

    def plan(self, grid_thw) -> VisionMetadata:
        """Everything that depends on sizes, computed on the CPU and moved to the tower's device.

        grid_thw: (t, h, w) per item, in patches; a list or an integer tensor (items, 3), images and videos mixed.
        """
        c, grids = self.config, self.check_layouts(grid_thw)
        window_index, cu_window_seqlens = get_window_index(
            grids, window_size=c.window_size, patch_size=c.patch_size, spatial_merge_size=c.spatial_merge_size
        )
        frames = self.plan_frames(grids)
        frames["positions"] = self._permute_blocks(frames["positions"], window_index)
        metadata = VisionMetadata(
            **frames,
            window_index=window_index,
            reverse_index=invert_permutation(window_index),
            cu_window_seqlens=cu_window_seqlens,
            window_groups=group_segments(cu_window_seqlens) if self.reads_groups else None,
            max_window_seqlen=int(cu_window_seqlens.diff().max()) if grids else 0,
        )
        return self.move(metadata)

    def plan_capacity(self, max_tokens: int, max_frames: int) -> VisionMetadata:
        """Metadata as large as any batch of `max_tokens` output tokens and `max_frames` frames can need, for a capture.

        Cumulative lengths describe one frame and windows filled one after the other, so that a warm-up runs on legal
        values. `max_window_count` bounds the windows; a window holds at most its square of tokens, a frame all tokens.
        """
        side, block = self.config.window_side, self.config.block_size
        windows = max_window_count(max_tokens, min(max_frames, max_tokens), side)
        steps = torch.arange(windows + 1, dtype=torch.int32)
        metadata = VisionMetadata(
            **self.frame_capacity(max_tokens, max_frames),
            window_index=torch.arange(max_tokens),
            reverse_index=torch.arange(max_tokens),
            cu_window_seqlens=(steps * side**2).clamp(max=max_tokens) * block,
            window_groups=None,
            max_window_seqlen=min(side**2, max_tokens) * block,
        )
        return self.move(metadata)

    def encode(self, patches_NC: Tensor, metadata: VisionMetadata, backend: str) -> Tensor:
        """(N, C*Tp*P*P) -> (M, D). In float16 the last blocks can overflow on long inputs: see `clamp_overflow`."""
        x_NE = self._permute_blocks(self.patch_embed(patches_NC), metadata.window_index)
        rotary = metadata.rotary()
        windows = Segments(metadata.cu_window_seqlens, metadata.window_groups, metadata.max_window_seqlen)
        for i, block in enumerate(self.blocks):
            segments = metadata if i in self.config.fullatt_block_indexes else windows
            x_NE = block(x_NE, rotary, segments, backend)
        return self.merger(clamp_overflow(x_NE))[metadata.reverse_index]  # (M, D)

    def block_rows(self, metadata: VisionMetadata) -> list[Tensor]:
        """Windows one after the other."""
        return [self._permute_blocks(rows, metadata.window_index) for rows in super().block_rows(metadata)]

    def _permute_blocks(self, x_N: Tensor, index_M: Tensor) -> Tensor:
        """Reorder (N, ...) by whole merge blocks of m * m rows."""
        return x_N.unflatten(0, (-1, self.config.block_size))[index_M].flatten(0, 1)


def clamp_overflow(x_NE: Tensor) -> Tensor:
    """float16: a row in which anything overflowed is clamped to finfo.max - 1000; other dtypes pass through.

    Upstream (`cast_overflow_tensors`) clamps all rows when one has overflowed, so that values within 1000 of the limit
    depend on the rest of the batch; here they depend on their own row. Written without a branch on the tensor, so that
    a captured graph can hold it.
    """
    if x_NE.dtype != torch.float16:
        return x_NE
    bound = torch.finfo(x_NE.dtype).max - 1000
    overflowed_N1 = ~x_NE.isfinite().all(-1, keepdim=True)
    return torch.where(overflowed_N1, x_NE.clamp(-bound, bound), x_NE)


class VisionAttention(nn.Module):
    """Fused q, k, v with bias; rotary on q and k; every token attends within its own segment."""

    def __init__(self, config: GridVisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments, backend: str) -> Tensor:
        qk_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3 * self.num_heads, -1)).tensor_split([2 * self.num_heads], dim=1)
        q_NHK, k_NHK = rotate(qk_NHK, *rotary).chunk(2, dim=1)  # in one pass: half as many kernels
        return self.proj(segments.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)


class PatchMerger(nn.Module):
    """Fold each m x m block of patches into one token of the language model."""

    def __init__(self, config: Qwen2_5_VisionConfig):
        super().__init__()
        self.block_size = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(self.block_size, self.block_size), nn.GELU(), nn.Linear(self.block_size, config.out_hidden_size)
        )

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x_NE).view(-1, self.block_size))  # (N, E) -> (M, m*m*E) -> (M, D)
