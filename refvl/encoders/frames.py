"""What Qwen3-VL's, GLM-4.1V's and GLM-OCR's towers share: attention inside frames, and a learned table of positions.

    FrameMetadata       row and column of every patch, and where each frame begins
    TableMetadata       and what a learned table of positions says of it: values of the weights
    PatchEmbed, SwiGLU, VisionBlock

Shape suffixes: N patches, M merged tokens, E tower width, D language width, K head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments, plan_segments, segment_capacity
from refvl.checks import Grid
from refvl.encoders.grid import GridEncoder, GridVisionConfig
from refvl.positions.rotary import merge_block_coordinates, rotary_cos_sin, rotary_factors, rotary_frequencies


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


class FrameEncoder(GridEncoder):
    """Patch rows in, embeddings of the language model's width out. A tower adds its modules and `encode`."""

    def plan_checked(self, grids: Sequence[Grid]) -> FrameMetadata:
        """Everything that depends on sizes, computed on the CPU and moved to the tower's device."""
        return self.move(FrameMetadata(**self.plan_frames(grids)))

    def plan_frames(self, grids: Sequence[Grid]) -> dict[str, Any]:
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
        return self.encode(*self.inputs(pixel_values, grid_thw, metadata, attention))

    def encode(self, patches_NC: Tensor, metadata: Any, backend: str) -> Tensor:
        """The tower itself: patch rows in its dtype -> (M, D). Reads no value back and branches on no tensor."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class TableMetadata(FrameMetadata):
    """`FrameMetadata`, and what the position table says of each patch: values of the weights."""

    position_embeds: Tensor = field(metadata={"pad": "zero"})  # (N, E) in the tower's dtype


class TableEncoder(FrameEncoder):
    """A `FrameEncoder` with a learned table of positions. A tower adds how it is sampled: `position_embeds`."""

    plan_reads_weights = True  # the position table

    def position_embeds(self, grids: list[Grid]) -> Tensor:
        """(N, E): what the table says of each patch."""
        raise NotImplementedError

    def plan_checked(self, grids: Sequence[Grid]) -> TableMetadata:
        """As in `FrameEncoder`; only the table is sampled on its own device.

        The plan holds what the weights are now: plan again after loading.
        """
        return self._with_table(super().plan_checked(grids), grids)

    def _with_table(self, frames: FrameMetadata, grids: Sequence[Grid]) -> TableMetadata:
        table = self.position_embeds(list(grids))
        return TableMetadata(**{f.name: getattr(frames, f.name) for f in fields(frames)}, position_embeds=table)

    def plan_capacity(self, max_tokens: int, max_frames: int) -> TableMetadata:
        """As in `FrameEncoder`, with a position vector for every patch."""
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
