"""The checks behind the notebooks' exercises: each says which element of a reader's result differs first.

A check takes the reader's function, runs it on a few cases beside refvl's own, and returns a line of praise, or
raises AssertionError with the case, the place, what came and what was expected.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from refvl.positions import (
    MediaSpan,
    compute_retention_mask,
    get_mrope_input_positions,
    restrict_positions,
)
from refvl.positions.mrope import grid_positions


def _first_difference(got, want: Tensor) -> str | None:
    """Where `got` differs first from `want`, in words; None when they are equal."""
    if not isinstance(got, Tensor):
        return f"expected a tensor, got {type(got).__name__}"
    if got.shape != want.shape:
        return f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    equal = torch.isclose(got.double(), want.double(), rtol=1e-5, atol=1e-6)
    if equal.all():
        return None
    place = tuple((~equal).nonzero()[0].tolist())
    return f"element {list(place)} should be {want[place].item()}, got {got[place].item()}"


def _check(case: str, got, want: Tensor) -> None:
    if difference := _first_difference(got, want):
        raise AssertionError(f"{case}: {difference}")


def _check_positions_and_delta(case: str, got, want: tuple[Tensor, int]) -> None:
    if not isinstance(got, tuple) or len(got) != 2:
        raise AssertionError(f"{case}: expected (positions, delta), got {type(got).__name__}")
    _check(case, got[0], want[0])
    if got[1] != want[1]:
        raise AssertionError(f"{case}: the positions are right, but delta should be {want[1]}, got {got[1]}")


def check_grid_positions(function: Callable) -> str:
    """`function(t, h, w, t_factor) -> (3, t*h*w)`: time (scaled, truncated), row and column of every merged token."""
    cases = [(1, 2, 3, 1.0), (1, 3, 2, 1.0), (3, 2, 2, 2.0), (4, 1, 2, 1.4), (5, 2, 1, 0.5)]
    for t, h, w, t_factor in cases:
        _check(
            f"t={t}, h={h}, w={w}, t_factor={t_factor}", function(t, h, w, t_factor), grid_positions(t, h, w, t_factor)
        )
    return f"right in {len(cases)} cases"


def check_mrope_positions(function: Callable) -> str:
    """`function(num_tokens, spans) -> (positions (3, L), delta)`; the spans come in the order of the prompt."""
    cases = {
        "text alone": (5, []),
        "a wide picture": (12, [MediaSpan(2, 1, 2, 4)]),
        "a tall picture": (12, [MediaSpan(2, 1, 4, 2)]),
        "a long clip": (26, [MediaSpan(1, 6, 2, 2, 2.0)]),
        "a picture and a clip": (40, [MediaSpan(3, 1, 3, 2), MediaSpan(12, 5, 2, 2, 1.4)]),
        "a medium at the end": (8, [MediaSpan(2, 1, 2, 3)]),
    }
    for case, (num_tokens, spans) in cases.items():
        _check_positions_and_delta(case, function(num_tokens, spans), get_mrope_input_positions(num_tokens, spans))
    return f"right in {len(cases)} cases"


def check_retention_mask(function: Callable) -> str:
    """`function(video_embeds (M, D), merged_thw, q) -> (M,) bool`: what EVS keeps of a clip."""
    generator = torch.Generator().manual_seed(0)
    moving = torch.randn(4 * 6, 8, generator=generator)
    cases = {
        "everything changes": (moving, (4, 2, 3), 0.5),
        "q = 0 keeps all": (moving, (4, 2, 3), 0.0),
        "the first frame always stays": (moving, (4, 2, 3), 0.95),
        "nothing changes: ties go to the earlier token": (moving[:6].repeat(4, 1), (4, 2, 3), 0.6),
        "one frame": (moving[:6], (1, 2, 3), 0.5),
    }
    for case, (embeds, thw, q) in cases.items():
        _check(case, function(embeds, thw, q), compute_retention_mask(embeds, thw, 1, q))
    return f"right in {len(cases)} cases"


def check_restrict_positions(function: Callable) -> str:
    """`function(positions (3, L), keep (L,)) -> (positions (3, K), delta)`: the layout of a pruned prompt."""
    positions, _ = get_mrope_input_positions(30, [MediaSpan(3, 5, 2, 2, 2.0)])
    keep = torch.ones(30, dtype=torch.bool)
    some, first_frame = keep.clone(), keep.clone()
    some[torch.tensor([8, 9, 13, 20])] = False
    first_frame[7:23] = False
    ends_in_clip = torch.arange(30) < 20
    cases = {
        "nothing pruned": keep,
        "some tokens pruned": some,
        "only the first frame stays": first_frame,
        "the prompt is cut inside the clip": ends_in_clip,
    }
    for case, mask in cases.items():
        _check_positions_and_delta(case, function(positions, mask), restrict_positions(positions, mask))
    return f"right in {len(cases)} cases"
