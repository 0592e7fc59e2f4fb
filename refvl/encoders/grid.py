"""What the towers that read grids have in common: Qwen2.5-VL's, Qwen3-VL's, GLM-4.1V's and GLM-OCR's.

An item is a grid (t, h, w) of patches, t = 1 for an image. Its rows lie in merge-block order, so that m * m consecutive
rows become one token. Each tower is read in its own file; here is what does not differ:

    GridVisionConfig    sizes that follow from other sizes
    FrameMetadata       row and column of every patch, and where each frame begins
    TableMetadata       and what a learned table of positions says of it: values of the weights
    GridEncoder         plan (the part about frames) -> forward (checks, then the tower's own `encode`); sizes
    TableEncoder        the same with such a table
    PatchEmbed, SwiGLU, VisionBlock

Shape suffixes: N patches, M merged tokens, E tower width, D language width, K head dimension.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments, plan_segments, segment_capacity
from refvl.checks import Grid, as_grids, check_pixel_rows
from refvl.encoders.tower import Tower, TowerConfig
from refvl.encoders.weights import named_tensors
from refvl.positions.rotary import merge_block_coordinates, rotary_cos_sin, rotary_factors, rotary_frequencies


class GridVisionConfig(TowerConfig):
    """The base of the towers' configs, which are frozen dataclasses of at least these fields."""

    __slots__ = ()
    activation = "silu"
    aliases = MappingProxyType({"in_chans": "in_channels"})
    depth: int
    num_heads: int
    in_channels: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int

    def __post_init__(self):
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                "hidden_size: must be num_heads times a head dimension that is a multiple of 4, "
                f"got {self.hidden_size} for {self.num_heads} heads"
            )

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """(C, Tp, P, P): what one patch row holds, flattened."""
        return (self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size)

    @property
    def block_size(self) -> int:
        """Patches that are merged into one token: m * m."""
        return self.spatial_merge_size**2


@dataclass(frozen=True, slots=True, eq=False)
class FrameMetadata(Segments):
    """What one forward needs besides pixels; segments are frames.

    Rotary angles are computed from rows and columns where the tower is: they are 40 times as many bytes. The
    frequencies are planned because a buffer of the module would be rounded by `.to(torch.bfloat16)`.

    Fixed addresses, changing contents: the contract of a captured graph. Integers are baked in by a capture: there they
    are capacities, and a replay must not exceed them.
    """

    positions: Tensor = field(metadata={"pad": "zero"})  # (N, 2) int32: row and column of each patch
    frequencies: Tensor = field(metadata={"pad": "zero"})  # (K/4,) float32, see `rotary_frequencies`

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Of the rotary angles, each (N, K/2) float32."""
        return rotary_cos_sin(self.positions, self.frequencies)

    def rotary(self) -> tuple[Tensor, Tensor]:
        """What `rotate` multiplies queries and keys by, each (N, 1, K) float32."""
        return rotary_factors(*self.cos_sin())

    @property
    def summary(self) -> str:
        """One line for tables."""
        return f"{len(self.cu_seqlens) - 1} frames"


class GridEncoder(Tower):
    """Patch rows in, embeddings of the language model's width out. A tower adds its modules, `plan` and `encode`."""

    def check_layouts(self, grid_thw, *, name: str = "grid_thw") -> list[Grid]:
        """(t, h, w) per item, normalised; ValueError or TypeError for anything else and sides that do not merge."""
        return as_grids(grid_thw, spatial_merge_size=self.config.spatial_merge_size, name=name)

    def item_size(self, grid: Grid) -> tuple[int, int, int]:
        """(patch rows, output tokens, frames) of one item of `grid` patches."""
        t, h, w = grid
        return t * h * w, t * h * w // self.config.block_size, t

    def plan(self, grid_thw) -> FrameMetadata:
        """Everything that depends on sizes, computed on the CPU and moved to the tower's device.

        grid_thw: (t, h, w) per item, in patches; a list or an integer tensor (items, 3), images and videos mixed.
        """
        return self.move(FrameMetadata(**self.plan_frames(self.check_layouts(grid_thw))))

    def plan_frames(self, grids: list[Grid]) -> dict[str, Any]:
        """The fields of `FrameMetadata`."""
        positions = merge_block_coordinates(grids, spatial_merge_size=self.config.spatial_merge_size)
        segments = plan_segments([h * w for t, h, w in grids for _ in range(t)], with_groups=self.reads_groups)
        return segments | {"positions": positions.int(), "frequencies": rotary_frequencies(self.head_dim)}

    def plan_capacity(self, max_tokens: int, max_frames: int) -> FrameMetadata:
        """Metadata as large as any batch of `max_tokens` output tokens and `max_frames` frames can need, for a capture.

        Cumulative lengths describe one frame that holds everything, so that a warm-up runs on legal values.
        """
        return self.move(FrameMetadata(**self.frame_capacity(max_tokens, max_frames)))

    def frame_capacity(self, max_tokens: int, max_frames: int) -> dict[str, Any]:
        """The fields of `FrameMetadata` at capacity."""
        patches = max_tokens * self.config.block_size
        positions = torch.zeros(patches, 2, dtype=torch.int32)
        segments = segment_capacity(patches, min(max_frames, max_tokens))
        return segments | {"positions": positions, "frequencies": rotary_frequencies(self.head_dim)}

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """(patch rows, C*Tp*P*P) zeros for `max_tokens` output tokens."""
        rows = max_tokens * self.config.block_size
        return torch.zeros(rows, self.config.patch_values, dtype=self.dtype, device=self.device)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw=None,
        *,
        metadata: FrameMetadata | None = None,
        attention: str | None = None,
    ) -> Tensor:
        """(N, C*Tp*P*P) patch rows of all items -> (M, D) embeddings, items in order.

        Give `grid_thw` to plan here, or the `metadata` of an earlier `plan`; `attention` overrides the tower's backend
        (a capture asks for one with static shapes). Raises ValueError when the rows do not match, TypeError when they
        hold no floating-point numbers.
        """
        if (metadata is None) == (grid_thw is None):
            raise ValueError("forward: give exactly one of grid_thw and metadata")
        metadata = self.kept_plan(grid_thw) if metadata is None else metadata
        rows = (("patches", len(metadata.positions)), ("values (C*Tp*P*P)", self.config.patch_values))
        check_pixel_rows(pixel_values, rows, self.device)
        backend = self.backend(attention, pixel_values.device)
        return self.encode(pixel_values.to(self.dtype), metadata, backend)

    def encode(self, patches_NC: Tensor, metadata: Any, backend: str) -> Tensor:
        """The tower itself: patch rows in its dtype -> (M, D). Reads no value back and branches on no tensor."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; returns the names of the parameters that were filled.

        Reads names under `visual.` (the original), `model.visual.` (after transformers 4.52) and bare ones; q, k, v
        fused or separate, and gate and up as well. All that does not fit is listed in one ValueError, see
        `load_strict`.
        """
        return super().load_weights(split_gate_up(weights))

    def rename(self, name: str) -> str:
        """`visual.blocks.0.norm1.weight`, `model.visual.blocks...` and the bare name are the same parameter."""
        return re.sub(r"^(model\.)?visual\.", "", name)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Module name -> shape in checkpoints, where the module keeps a convolution's kernel as a matrix."""
        return {"patch_embed.proj.weight": self.config.patch_kernel}


@dataclass(frozen=True, slots=True, eq=False)
class TableMetadata(FrameMetadata):
    """`FrameMetadata`, and what the position table says of each patch: values of the weights."""

    position_embeds: Tensor = field(metadata={"pad": "zero"})  # (N, E) in the tower's dtype


class TableEncoder(GridEncoder):
    """A `GridEncoder` with a learned table of positions. A tower adds how it is sampled: `position_embeds`."""

    plan_reads_weights = True  # the position table

    def position_embeds(self, grids: list[Grid]) -> Tensor:
        """(N, E): what the table says of each patch."""
        raise NotImplementedError

    def plan(self, grid_thw) -> TableMetadata:
        """As in `GridEncoder`; only the table is sampled on its own device.

        The plan holds what the weights are now: plan again after loading.
        """
        grids = self.check_layouts(grid_thw)
        return self._with_table(super().plan(grids), grids)

    def kept_plan(self, grid_thw) -> TableMetadata:
        """As `Tower.kept_plan`, but for the table, which is sampled anew."""
        grids = self.check_layouts(grid_thw)
        return self._with_table(self._keep(grids, super().plan), grids)

    def _with_table(self, frames: FrameMetadata, grids: list[Grid]) -> TableMetadata:
        table = self.position_embeds(grids)
        return TableMetadata(**{f.name: getattr(frames, f.name) for f in fields(frames)}, position_embeds=table)

    def plan_capacity(self, max_tokens: int, max_frames: int) -> TableMetadata:
        """As in `GridEncoder`, with a position vector for every patch."""
        shape = max_tokens * self.config.block_size, self.config.hidden_size
        position_embeds = torch.zeros(shape, dtype=self.dtype)
        return self.move(TableMetadata(**self.frame_capacity(max_tokens, max_frames), position_embeds=position_embeds))


class PatchEmbed(nn.Module):
    """Conv3d with kernel = stride = (Tp, P, P) over a patch row is one matrix product with the flattened kernel."""

    def __init__(self, config: GridVisionConfig, *, bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(config.patch_values, config.hidden_size, bias=bias)

    def forward(self, patches_NC: Tensor) -> Tensor:
        return self.proj(patches_NC)  # (N, E)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionBlock(nn.Module):
    """Pre-norm: x + attn(norm1(x)), then x + mlp(norm2(x)). context: what the tower's attention needs besides x."""

    def __init__(self, hidden_size: int, eps: float, attn: nn.Module, mlp: nn.Module, norm=nn.RMSNorm):
        super().__init__()
        self.norm1, self.norm2 = norm(hidden_size, eps), norm(hidden_size, eps)
        self.attn, self.mlp = attn, mlp

    def forward(self, x_NE: Tensor, *context) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), *context)
        return x_NE + self.mlp(self.norm2(x_NE))


def split_gate_up(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A fused `gate_up_proj` is gate's rows, then up's: passed on as two. Other names, `up_proj` among them, stay."""
    for name, tensor in named_tensors(weights):
        if ".gate_up_proj." not in name or not isinstance(tensor, Tensor) or not tensor.ndim:
            yield name, tensor
            continue
        half = len(tensor) // 2
        yield name.replace(".gate_up_proj.", ".gate_proj."), tensor[:half]
        yield name.replace(".gate_up_proj.", ".up_proj."), tensor[half:]
