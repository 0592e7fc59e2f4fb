"""The resampler of MiniCPM-V 2.0: queries form a fixed grid, and both queries and keys have positions in this grid.

For the keys of a slice, the grid's positions are resized to the slice. The data flow is that of
`refvl.encoders.resampler`.

Shape suffixes: N patches of all slices, D the language model's width, Q queries.
Upstream: `Resampler2` (vLLM).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refvl.checks import as_integers, check_shape
from refvl.encoders.resampler import Resampler, SetMetadata
from refvl.encoders.tower import to_device
from refvl.positions.tables import resize_position_table, sincos_2d


@dataclass(frozen=True, slots=True, eq=False)
class FixedGridMetadata(SetMetadata):
    """The metadata of `Resampler2`: positions (N, D) of the keys and (Q, D) of the queries, in the module's dtype."""

    query_positions: Tensor  # (Q, D) in the module's dtype


class Resampler2(Resampler):
    """The resampler of MiniCPM-V 2.0: a fixed grid of queries, in which queries and keys have positions."""

    unused = r"(resampler\.)?pos_embed$"  # not loaded, because a formula computes the positions

    def __init__(self, grid_size: int, embed_dim: int, num_heads: int, kv_dim: int | None = None, **options):
        """Build the modules. grid_size: G, for Q = G * G queries. The other arguments are those of `Resampler`."""
        super().__init__(grid_size**2, embed_dim, num_heads, kv_dim, **options)
        self.grid_size = grid_size

    def plan_checked(self, layouts: Sequence[tuple[int, int]]) -> FixedGridMetadata:
        """Compute the plan on the CPU, and move it to the resampler's device.

        layouts: the (h, w) of each slice.
        """
        queries_QD = sincos_2d(self.embed_dim, (self.grid_size, self.grid_size)).flatten(0, 1)
        keys = [resize_position_table(queries_QD, size, antialias=False) for size in layouts]
        metadata = FixedGridMetadata(
            positions=torch.cat([queries_QD[:0], *keys]).to(self.dtype),
            query_positions=queries_QD.to(self.dtype),
            **self.plan_sets([h * w for h, w in layouts]),
        )
        return to_device(metadata, self.device)

    def attention_inputs(self, rows_NC: Tensor, metadata: FixedGridMetadata) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (Q, D), keys and values (N, D) as `Resampler` does; queries also have positions."""
        query_QD, keys_ND, values_ND = super().attention_inputs(rows_NC, metadata)
        return query_QD + metadata.query_positions, keys_ND, values_ND

    def add_positions(self, x_ND: Tensor, metadata: FixedGridMetadata) -> Tensor:
        """Add the planned positions (N, D) to x_ND."""
        return x_ND + metadata.positions

    def forward(self, x: Tensor, tgt_size: tuple[int, int] | None = None) -> Tensor:
        """Resample x (B, L, kv_dim) to (B, Q, D).

        tgt_size: the (h, w) of every slice in patches; None: a square. Raises ValueError unless
        h * w = L.
        """
        check_shape(x, ("B", "L", "kv_dim"), "x")
        side = int(x.shape[1] ** 0.5)
        h, w = (side, side) if tgt_size is None else as_integers(tgt_size, "(h, w)", "tgt_size")
        if h * w != x.shape[1]:
            raise ValueError(f"tgt_size: expected h * w = {x.shape[1]}, the number of patches in x, got {(h, w)}")
        metadata = self.plan([(h, w)] * len(x))
        return self.resample(x.flatten(0, 1), metadata).unflatten(0, (len(x), self.num_queries))
