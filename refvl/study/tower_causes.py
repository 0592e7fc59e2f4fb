"""Causes of different embeddings from two towers with the same patch rows; they are tested one by one, not guessed.

A tower uses sizes only through its plan (`Encoder.plan`), so most causes are plans with one field changed: segment
lengths, window order, positions. A field from a different item's plan imitates a buffer that was not refilled.

Shape suffixes: N patch rows of one item, C values of a row, M merged tokens, W values of the encoder's rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refvl.positions.rotary import block_positions
from refvl.serving.features import share_weights
from refvl.study.text_causes import EPSILONS, HALVES, LEFT, compute_norms_in, norms_of, set_epsilon, word

Attempt = tuple[Any, Tensor, Any]  # (tower, rows, plan)


@torch.inference_mode()
def explain_tower(
    encoder: Any, patches_NC: Tensor, layouts: Sequence, medium: int, a_MW: Tensor, b_MW: Tensor
) -> tuple[str, str]:
    """Return "a" or "b", and the change of tower or plan that reproduces that run's embeddings ("" if none does).

    layouts: (t, h, w) in patches for all media of the run, or None. medium: the index of the item to which the rows
    belong.
    """
    rows, plan = patches_NC.to(encoder.device, encoder.dtype), encoder.plan([layouts[medium]])
    ours = encoder(rows, metadata=plan).cpu().float()
    distances = [float((ours - x.float()).norm()) for x in (a_MW, b_MW)]
    odd = distances.index(max(distances))
    others = {i: encoder.plan([x]) for i, x in enumerate(layouts) if x is not None and i != medium}
    enough = min(max(LEFT, 4 * min(distances) / distances[odd]), 0.5)  # kernels separate even two correct runs
    for name, change in _changes(encoder, rows, plan, layouts[medium], others):
        tower, given, changed_plan = change()
        made = tower(given, metadata=changed_plan).cpu().float()
        if float((made - (a_MW, b_MW)[odd].float()).norm()) <= enough * distances[odd]:
            return "ab"[odd], f"tower: {name}"
    return "ab"[odd], ""


def _changes(
    encoder: Any, rows: Tensor, plan: Any, grid: tuple[int, int, int], others: dict[int, Any]
) -> Iterator[tuple[str, Callable[[], Attempt]]]:
    """Yield the name of every cause, and a function that returns the tower, rows and plan with this cause."""

    def planned(**changes: Any) -> Callable[[], Attempt]:
        return lambda: (encoder, rows, replace(plan, **changes))

    whole = plan.cu_seqlens[[0, -1]]
    joined = {"cu_seqlens": whole, "groups": None, "max_seqlen": int(whole[-1])}
    yield "attention across the frames of a video (cu_seqlens)", planned(**joined)
    if hasattr(plan, "window_index"):
        frames = {"cu_window_seqlens": plan.cu_seqlens, "window_groups": None, "max_window_seqlen": plan.max_seqlen}
        windows = {"cu_seqlens": plan.cu_window_seqlens, "groups": None, "max_seqlen": plan.max_window_seqlen}
        yield "every block attends to whole frames (cu_window_seqlens)", planned(**frames)
        yield "every block attends to windows (cu_seqlens)", planned(**windows)
        identity = torch.arange(len(plan.window_index), device=plan.window_index.device)
        in_order = plan.positions.unflatten(0, (len(identity), -1))[plan.reverse_index].flatten(0, 1)
        yield "window order not undone (reverse_index)", planned(reverse_index=identity)
        yield "rotary positions not in window order", planned(positions=in_order)
        unsorted = {"window_index": identity, "reverse_index": identity, "positions": in_order}
        yield "patches not in window order", planned(**unsorted)
    yield "rotary, rows and columns exchanged", planned(positions=plan.positions.flip(1))
    yield "patch rows in row-major order", lambda: (encoder, _line_by_line(rows, grid, encoder), plan)
    for name, value in _left_over(plan, others):
        yield f"{name} (a buffer that was not refilled)", planned(**{name.split()[0]: value})
    for epsilon in EPSILONS:
        yield f"norms, epsilon {epsilon:g}", partial(_with, encoder, set_epsilon, epsilon, rows, plan)
    for half in HALVES:
        yield f"norms, computed in {word(half)}", partial(_with, encoder, compute_norms_in, half, rows, plan)


def _line_by_line(rows_NC: Tensor, grid: tuple[int, int, int], encoder: Any) -> Tensor:
    """Return the rows of each frame in row-major order instead of merge-block order."""
    (t, h, w), m = grid, encoder.config.spatial_merge_size
    row, column = block_positions([(1, h, w)], m).unbind(1)
    order = (row * w + column).argsort().to(rows_NC.device)
    return rows_NC.unflatten(0, (t, h * w))[:, order].flatten(0, 1)


def _left_over(plan: Any, others: dict[int, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors from other items' plans that fit into a buffer of this item's plan, with their names."""
    for medium, other in others.items():
        for field in fields(plan):
            own, left = getattr(plan, field.name), getattr(other, field.name)
            if isinstance(own, Tensor) and own.shape == left.shape and not torch.equal(own, left):
                yield f"{field.name} of item {medium + 1}", left


def _with(encoder: Any, change: Callable[[list, Any], None], value: Any, rows: Tensor, plan: Any) -> Attempt:
    """Return a copy of the tower with the same weights but changed norms."""
    changed = share_weights(encoder)
    change(norms_of(changed.modules()), value)
    return changed, rows, plan
