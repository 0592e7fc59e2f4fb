"""Canvas M-RoPE of MiniCPM-V 4.7: an overview and its slices share one canvas; the separators mark its corners.

    <image> 0 1 </image> <slice> 2 3 </slice><slice> 4 5 </slice>   an overview of 1 x 2 tokens, two slices of 1 x 2

    token      <image>  overview   </image>  <slice>  slice  </slice>  <slice>  slice  </slice>
    height     -1       0 0        1         0        0 0    0         0        0 0    0
    width      -1       0 3        4         0        0 1    1         2        2 3    3         from the canvas' origin

The slices are arranged as in the image, so the canvas is as large as all slices together. The
overview is stretched over the canvas, so its tokens have the positions of the slice tokens that
show the same content. Time is constant on a canvas. Without slices, the canvas is the grid of
the overview. Text continues one step after the canvas's longer side. Upstream:
`MiniCPMV4_7Model.get_rope_index` (transformers 5.23).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from refvl.positions.mrope import MediaSpan


class CanvasMarks(NamedTuple):
    """The ids of the separator tokens around overviews and slices."""

    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    newline: int


def canvas_positions(ids_L: Tensor, spans: Sequence[MediaSpan], marks: CanvasMarks) -> Tensor:
    """Return the positions of a prompt's tokens, (3, L) int64.

    ids_L: (L,) ids of the prompt. spans: the prompt's overviews and slices, h x w tokens each;
    a separator directly precedes each span.
    """
    ids = ids_L.tolist()
    positions_3L = torch.arange(len(ids)).repeat(3, 1)
    index = 0  # the index of the next token
    position = 0  # the position of the next token
    for overview, *slices in _frames(ids, spans, marks):
        start = overview.offset - 1
        end = (slices or [overview])[-1].offset + (slices or [overview])[-1].num_tokens
        while end < len(ids) and ids[end] in marks:
            end += 1
        if start > index:
            positions_3L[:, index:start] = torch.arange(position, position + start - index)
            position += start - index
        height, width = _draw(positions_3L[:, :end], position, overview, slices)
        position += max(height, width) + 1
        index = end
    positions_3L[:, index:] = torch.arange(position, position + len(ids) - index)
    return positions_3L


def _frames(ids: list[int], spans: Sequence[MediaSpan], marks: CanvasMarks) -> list[list[MediaSpan]]:
    """Group each overview with its slices: a span after a slice separator belongs to the overview before it."""
    frames = list[list[MediaSpan]]()
    for span in sorted(spans, key=lambda s: s.offset):
        if frames and ids[span.offset - 1] == marks.slice_start:
            frames[-1].append(span)
        else:
            frames.append([span])
    return frames


def _draw(positions_3L: Tensor, origin: int, overview: MediaSpan, slices: list[MediaSpan]) -> tuple[int, int]:
    """Write the positions of one frame, from its first separator to the tensor's end; return its (height, width)."""
    gaps = [after.offset - before.offset - before.num_tokens for before, after in pairwise(slices)]
    columns = next((i + 1 for i, gap in enumerate(gaps) if gap > 2), len(slices))  # a newline ends the first row
    columns = columns if slices and len(slices) % columns == 0 else len(slices)
    height, width = overview.h, overview.w
    if slices:
        height, width = len(slices) // columns * slices[0].h, columns * slices[0].w

    start, end = overview.offset, overview.offset + overview.num_tokens
    positions_3L[:, start - 1 :] = origin  # this also sets the separators' positions
    positions_3L[1:, start - 1] = max(origin - 1, 0)
    positions_3L[1:, start:end] = origin + _grid(overview, height, width)
    if end < positions_3L.shape[1]:
        positions_3L[1:, end] = origin + torch.tensor([height, width])

    for k, piece in enumerate(slices):
        corner = torch.tensor([k // columns * slices[0].h, k % columns * slices[0].w])
        start, end = piece.offset, piece.offset + piece.num_tokens
        positions_3L[1:, start - 1] = origin + corner
        positions_3L[1:, start:end] = origin + corner[:, None] + _grid(piece, piece.h, piece.w)
        if end < positions_3L.shape[1]:
            positions_3L[1:, end] = origin + corner + torch.tensor([piece.h - 1, piece.w - 1])
        if k < len(gaps) and gaps[k] > 2:
            edge = torch.tensor([(k // columns + 1) * slices[0].h - 1, width])
            positions_3L[1:, end + 1 : end + gaps[k] - 1] = (origin + edge)[:, None]
    return height, width


def _grid(span: MediaSpan, height: int, width: int) -> Tensor:
    """Return the row and column of each token, (2, h * w), with h x w tokens stretched over height x width cells."""
    rows = torch.linspace(0, height - 1, span.h).round().long()
    columns = torch.linspace(0, width - 1, span.w).round().long()
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")).flatten(1)
