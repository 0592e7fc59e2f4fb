"""The common parts of all towers that encode grids: sizes, grid checks, capacities and weight names.

An item is a grid (t, h, w) of patches, with t = 1 for an image. An item's rows are in
merge-block order: m * m consecutive rows become one token.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from refvl.attention import Segments, plan_segments, segment_capacity
from refvl.checks import Grid, as_grids
from refvl.encoders.config import TowerConfig
from refvl.encoders.tower import Tower, to_device
from refvl.positions.rotary import block_positions, rotary_cos_sin, rotary_frequencies


class GridVisionConfig(TowerConfig):
    """The base class of the grid towers' configs, which are frozen dataclasses with at least these fields."""

    __slots__ = ()
    activation = "silu"
    head_unit = 4
    aliases = MappingProxyType({"in_chans": "in_channels"})
    depth: int
    num_heads: int
    in_channels: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """(C, Tp, P, P): the shape of a patch row before it is flattened."""
        return (self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size)

    @property
    def block_size(self) -> int:
        """The number of patches that are merged into one token: m * m."""
        return self.spatial_merge_size**2


@dataclass(frozen=True, slots=True, eq=False)
class GridMetadata(Segments):
    """The inputs of a forward pass other than the pixels; each segment is a frame.

    `pad`: the rule by which a graph fills the unused end of a buffer.

    A captured graph reads fixed addresses whose contents change. A capture records integers as
    constants, so the integers of this plan are capacities that a replay must not exceed. Rotary
    angles take 40 times as many bytes as rows and columns, so the angles are computed on the
    tower's device. The frequencies are part of the plan, because `.to(torch.bfloat16)` would
    round a buffer of the module.
    """

    positions: Tensor = field(metadata={"pad": "zero"})  # (N, 2) int32: the row and column of each patch
    frequencies: Tensor = field(metadata={"pad": "zero"})  # (K/4,) float32 (see `rotary_frequencies`)

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary angles, each (N, K/2) float32."""
        return rotary_cos_sin(self.positions, self.frequencies)

    @property
    def summary(self) -> str:
        """Return a one-line description for tables."""
        return f"{len(self.cu_seqlens) - 1} frames"


@dataclass(frozen=True, slots=True, eq=False)
class TableMetadata(GridMetadata):
    """The inputs of a forward pass other than the pixels, including the values sampled from a table of positions."""

    position_embeds: Tensor = field(metadata={"pad": "zero"})  # (N, E) in the tower's dtype


class GridEncoder(Tower):
    """The base class of the towers that encode grids as embeddings of the language model's width."""

    def __init__(self, config: Any, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        self.block_size = config.block_size  # patches per token: m * m
        self.patch_values = config.patch_values  # the number of values in a row, C * Tp * P * P

    def check_layouts(self, grid_thw, *, name: str = "grid_thw") -> list[Grid]:
        """Return the normalised grid (t, h, w) of each item.

        Raises ValueError or TypeError for an invalid grid, or for sides that are not multiples
        of the merge block's side.
        """
        return as_grids(grid_thw, spatial_merge_size=self.config.spatial_merge_size, name=name)

    def plan_frames(self, grids: Sequence[Grid]) -> dict[str, Any]:
        """Return the fields of `GridMetadata`, on the CPU."""
        frames = [h * w for t, h, w in grids for _ in range(t)]  # the number of patches in each frame
        return {
            **plan_segments(frames, with_groups=self.backend() == "sdpa"),
            "positions": block_positions(grids, self.config.spatial_merge_size).int(),
            "frequencies": rotary_frequencies(self.head_dim),
        }

    def plan_capacity(self, max_tokens: int, max_frames: int) -> Any:
        """Return metadata large enough for any batch of `max_tokens` output tokens and `max_frames` frames.

        The metadata contains one frame with all patches, which is valid for a warm-up; all
        other frames are empty.
        """
        m = self.config.spatial_merge_size
        one_frame = self.plan_checked([(1, m, m * max_tokens)])
        frames = segment_capacity(max_tokens * self.block_size, min(max_frames, max_tokens))
        return to_device(replace(one_frame, **frames), self.device)

    def split_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Split each fused `gate_up_proj` into the rows of gate and the rows of up; yield all other pairs unchanged."""
        for name, tensor in pairs:
            if ".gate_up_proj." not in name:
                yield name, tensor
                continue
            half = len(tensor) // 2
            yield name.replace(".gate_up_proj.", ".gate_proj."), tensor[:half]
            yield name.replace(".gate_up_proj.", ".up_proj."), tensor[half:]

    def rename(self, name: str) -> str:
        """Return `name` without the prefix `visual.` or `model.visual.`."""
        return re.sub(r"^(model\.)?visual\.", "", name)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint shapes, by name, of the convolution kernels that the module
        stores as matrices.
        """
        return {"patch_embed.proj.weight": self.config.patch_kernel}
