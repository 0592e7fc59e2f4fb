"""The common parts of all towers that encode grids: sizes, grid checks and weight names; no model-specific code.

An item is a grid (t, h, w) of patches, with t = 1 for an image. Its rows are in merge-block order: m * m consecutive
rows become one token.
"""

import re
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from refvl.checks import Grid, as_grids
from refvl.encoders.config import TowerConfig
from refvl.encoders.tower import Tower
from refvl.encoders.weights import named_tensors


class GridVisionConfig(TowerConfig):
    """The base class of the grid towers' configs, which are frozen dataclasses with at least these fields."""

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
        self.check_sizes()
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                "hidden_size: must be num_heads times a head dimension that is a multiple of 4, "
                f"got {self.hidden_size} for {self.num_heads} heads"
            )

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """(C, Tp, P, P): the shape of a patch row before it is flattened."""
        return (self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size)

    @property
    def block_size(self) -> int:
        """The number of patches that are merged into one token: m * m."""
        return self.spatial_merge_size**2


class GridEncoder(Tower):
    """Patch rows in, embeddings of the language model's width out. Subclasses add the computation."""

    def __init__(self, config: Any, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        self.block_size = config.block_size  # patches per token: m * m
        self.patch_values = config.patch_values  # the number of values in a row, C * Tp * P * P

    def check_layouts(self, grid_thw, *, name: str = "grid_thw") -> list[Grid]:
        """Return (t, h, w) per item, normalised.

        Raises ValueError or TypeError for an invalid grid, or for sides that are not multiples of the merge block's
        side.
        """
        return as_grids(grid_thw, spatial_merge_size=self.config.spatial_merge_size, name=name)

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """Return zeros of shape (patch rows, C*Tp*P*P) for `max_tokens` output tokens."""
        rows = max_tokens * self.block_size
        return torch.zeros(rows, self.patch_values, dtype=self.dtype, device=self.device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; return the names of the parameters that were filled.

        Accepts names under `visual.` (the original), names under `model.visual.` (since transformers 4.52), and bare
        names. The weights of q, k and v, and those of gate and up, may be fused or separate. Raises one ValueError that
        lists all mismatches (see `load_strict`).
        """
        return super().load_weights(split_gate_up(weights))

    def rename(self, name: str) -> str:
        """Return the bare name, without `visual.` or `model.visual.`."""
        return re.sub(r"^(model\.)?visual\.", "", name)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint shape by module name, for convolution kernels that the module stores as matrices."""
        return {"patch_embed.proj.weight": self.config.patch_kernel}


def split_gate_up(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Split each fused `gate_up_proj` into the rows of gate and the rows of up; yield all other pairs unchanged."""
    for name, tensor in named_tensors(weights):
        if ".gate_up_proj." not in name or not isinstance(tensor, Tensor) or not tensor.ndim:
            yield name, tensor
            continue
        half = len(tensor) // 2
        yield name.replace(".gate_up_proj.", ".gate_proj."), tensor[:half]
        yield name.replace(".gate_up_proj.", ".up_proj."), tensor[half:]
