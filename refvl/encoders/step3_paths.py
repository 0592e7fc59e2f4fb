"""Step3-VL's two stacks as encoders that graphs can capture: crops ("local") and overviews ("global").

    patch rows (N, C*P*P) of whole squares        N = squares * n * n
       | `Step3VisionEncoder.encode_stack`        the same code that an eager forward runs
    embeddings (M, D)

A layout of a path is (squares, n, n), in patches. `refvl.graphs` packs and captures each path separately.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from refvl.checks import Grid, as_grids, check_pixel_rows


@dataclass(frozen=True, slots=True, eq=False)
class StackMetadata:
    """The input of a stack of equal squares in addition to the pixels.

    Everything else follows from the pixels' shape.
    """

    position_embeds: Tensor = field(metadata={"pad": "zero"})  # (1 + n^2 or n^2, E), the same for all squares of a path


class SquarePath:
    """One of the two stacks; its layouts are (squares, n, n) in patches.

    Every square of a path has the same size, so padding consists of whole squares, to which no other square attends.
    """

    def __init__(self, encoder: Any, side: int, tokens: int):
        """Wrap one stack of a `Step3VisionEncoder`.

        side: the patches along a side of a square. tokens: the number of output tokens of a square.
        """
        self.encoder = encoder
        self.side = side
        self.tokens = tokens

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.dtype

    @property
    def graph_attention(self) -> str:
        """The backend for graph capture: "varlen" if it can run, otherwise "sdpa": equal segments need no mask."""
        return "varlen" if self.encoder.graph_attention == "varlen" else "sdpa"

    def check_layouts(self, layouts, *, name: str = "layouts") -> list[Grid]:
        """Return (squares, n, n) per item, normalised.

        Raise TypeError or ValueError for an invalid layout, or for squares of a different size.
        """
        grids = as_grids(layouts, name=name)
        for i, (_, h, w) in enumerate(grids):
            if (h, w) != (self.side, self.side):
                raise ValueError(f"{name}[{i}]: expected squares of {self.side} x {self.side} patches, got {h} x {w}")
        return grids

    def item_size(self, layout: Grid) -> tuple[int, int, int]:
        """Return (patch rows, output tokens, squares) of `layout`."""
        [(squares, h, w)] = self.check_layouts([layout])
        return squares * h * w, squares * self.tokens, squares

    def plan(self, layouts) -> StackMetadata:
        """Return one square's positions under the current weights; they are the same for every batch."""
        self.check_layouts(layouts)
        return StackMetadata(self.encoder.position_embeds(self.side))

    def plan_capacity(self, max_tokens: int, max_frames: int) -> StackMetadata:
        """Return metadata, which has the same size for any capacity."""
        return StackMetadata(torch.zeros_like(self.encoder.position_embeds(self.side)))

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """Return zeros of shape (patch rows, C*P*P), for as many squares as `max_tokens` output tokens allow."""
        rows = max_tokens // self.tokens * self.side**2
        return torch.zeros(rows, self.encoder.patch_values, dtype=self.dtype, device=self.device)

    def __call__(self, pixel_values: Tensor, *, metadata: StackMetadata, attention: str | None = None) -> Tensor:
        """Encode (N, C*P*P) rows of whole squares into (M, D)."""
        rows = ("patches", ("values (C*P*P)", self.encoder.patch_values))
        check_pixel_rows(pixel_values, rows, self.device)
        return self.encoder.encode_stack(pixel_values, metadata.position_embeds, attention=attention).flatten(0, 1)
