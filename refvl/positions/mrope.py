"""M-RoPE gives every prompt token three positions: time, height and width.

Text advances on all three axes together. A media item (an image or a video) spreads its tokens
over a grid that starts where the text stopped. Text continues after the largest position used
so far on any axis. An image of 40 x 30 tokens therefore uses 40 positions, not 1200. The
request's `delta` is the prompt's largest position + 1 - length, so decode step k has position
`length + k + delta`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refvl.checks import as_integers, check_int, check_number, check_positive_int

MAX_POSITION = 2**31


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The merged-grid extents of a media item, or of consecutive tokens in it, from prompt index `offset` on.

    t, h, w count merged tokens; the span fills `t * h * w` consecutive prompt tokens.
    `t_factor` scales the time axis (Qwen2.5-VL video: second_per_grid * tokens_per_second);
    images and GLM use 1.0. Raises TypeError or ValueError naming the field, for example if
    `t_factor` makes positions reach `MAX_POSITION`.
    """

    offset: int
    t: int
    h: int
    w: int
    t_factor: float = 1.0

    def __post_init__(self):
        for name, least in (("offset", 0), ("t", 1), ("h", 1), ("w", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:  # an image may have many spans, and most need no check
                object.__setattr__(self, name, check_int(value, f"MediaSpan.{name}", least))
        if type(self.t_factor) is not float or self.t_factor != 1.0 or self.t >= MAX_POSITION:
            check_t_factor(self.t_factor, self.t, "MediaSpan.t_factor")

    @property
    def num_tokens(self) -> int:
        """The number of merged tokens, t * h * w."""
        return self.t * self.h * self.w

    def grid_positions(self) -> Tensor:
        """Return positions relative to the item's start, (3, t*h*w) int64.

        Time is multiplied by `t_factor`, then truncated.
        """
        return grid_positions(self.t, self.h, self.w, self.t_factor)


def check_t_factor(t_factor: float, t: int, name: str) -> float:
    """Return `t_factor` if all t steps get valid positions; raise TypeError or ValueError naming `name`."""
    number = check_number(t_factor, name)
    if not (t <= MAX_POSITION and number >= 0 and t * number < MAX_POSITION):  # this also rejects nan
        wanted = f"finite, not negative, and keep {t} steps below position {MAX_POSITION}"
        raise ValueError(f"{name}: must be {wanted}, got {t_factor}")
    return number


def grid_positions(t: int, h: int, w: int, t_factor: float = 1.0) -> Tensor:
    """Return (int(frame * t_factor), row, column) of each token, (3, t*h*w) int64, frame-major."""
    frames = (torch.arange(t, dtype=torch.float64) * t_factor).long()
    axes = torch.meshgrid(frames, torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack(axes).flatten(1)


def get_mrope_input_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    """Return the positions, (3, L) int64, of a prompt of `num_tokens` tokens, and its delta = max + 1 - L.

    spans: the media items of the prompt, in any order. Raises ValueError if spans overlap or exceed the prompt.
    Upstream: `get_mrope_input_positions`. transformers 5.23 differs after long videos, because it ignores t.

    >>> get_mrope_input_positions(6, [MediaSpan(offset=1, t=1, h=2, w=2)])
    (tensor([[0, 1, 1, 1, 1, 3],
            [0, 1, 1, 2, 2, 3],
            [0, 1, 2, 1, 2, 3]]), -2)
    """
    num_tokens, end = check_positive_int(num_tokens, "num_tokens"), 0
    for span in sorted(spans, key=lambda s: s.offset):
        if span.offset < end or span.offset + span.num_tokens > num_tokens:
            raise ValueError(
                f"spans: {span} covers prompt tokens {span.offset} to {span.offset + span.num_tokens - 1}; "
                f"expected tokens from {end} on and below {num_tokens} (no overlap, inside the prompt)"
            )
        end = span.offset + span.num_tokens
    positions_3L = mrope_positions(num_tokens, spans)
    return positions_3L, mrope_delta(positions_3L)


def mrope_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor:
    """Return the positions of `get_mrope_input_positions` for spans that fit the prompt and do not overlap."""
    pieces = list[Tensor]()
    index = 0  # the index of the next token
    position = 0  # the position of the next token
    for span in sorted(spans, key=lambda s: s.offset):
        start = position + span.offset - index
        media_3M = grid_positions(span.t, span.h, span.w, span.t_factor) + start
        pieces += [torch.arange(position, start).expand(3, -1), media_3M]  # the text before the item, then the item
        index = span.offset + span.num_tokens
        position = int(media_3M.max()) + 1
    pieces.append(torch.arange(position, position + num_tokens - index).expand(3, -1))
    return torch.cat(pieces, dim=1)


def mrope_delta(positions_3L: Tensor) -> int:
    """Return 1 + the largest position on any axis, minus the number of tokens. positions_3L: (3, L)."""
    return int(positions_3L.max()) + 1 - positions_3L.shape[1]


def restrict_positions(positions_3L: Tensor, keep_L: Tensor) -> tuple[Tensor, int]:
    """Return the pruned layout, which is the full layout restricted to the kept tokens, and its delta.

    positions_3L: the positions of the unpruned prompt, (3, L). keep_L: (L,) bool, True for text
    and kept media tokens. Raises ValueError naming keep_L if its dtype or shape does not match.
    """
    if keep_L.dtype != torch.bool or keep_L.shape != positions_3L.shape[1:]:
        wanted = tuple(positions_3L.shape[1:])
        raise ValueError(f"keep_L: expected a bool mask of shape {wanted}, got {keep_L.dtype}, {tuple(keep_L.shape)}")
    positions = positions_3L[:, keep_L]
    return positions, mrope_delta(positions)


def mrope_axis_of_pairs(section: Sequence[int], *, interleaved: bool) -> Tensor:
    """Return the axis (0, 1, 2 for t, h, w) that rotates each rotary pair of a head, fastest first, (pairs,) int64.

    section: the number of pairs per axis. Contiguous (Qwen2.5-VL, GLM): t gets the fastest pairs,
    and w gets the slowest. Interleaved (Qwen3-VL): h and w each get every third pair, and t gets
    the remaining pairs, so every axis has fast and slow pairs. Raises ValueError or TypeError
    naming section unless it contains three counts. Upstream: `mrope_section`, `mrope_interleaved`.

    >>> [mrope_axis_of_pairs((4, 2, 2), interleaved=how).tolist() for how in (False, True)]
    [[0, 0, 0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2, 0, 0]]
    """
    counts = as_integers(section, "(t, h, w)", "section", least=0)
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(counts))
    axes = torch.zeros(sum(counts), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * counts[axis] : 3] = axis
    return axes
