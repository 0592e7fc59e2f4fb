"""Copies from the host to a tower's GPU: one for a plan, and one for an item's pixels.

    send_plan     all tensors of a plan in one copy, from one pinned buffer
    send_levels   one byte per pixel value, converted on the GPU by one gather

The host takes about 5 us to launch a kernel, even if the kernel computes little. This file is
imported only if a tower is on a GPU. `tests/cuda_sim/test_budgets.py` counts copies and
kernels.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # in bytes, for every tensor in a packed plan


def send_plan(plan: Any, device: torch.device) -> Any:
    """Return a plan with all of its tensors on `device`; tensors on the CPU are sent to a GPU in one copy."""
    if device.type != "cuda":
        return _map_tensors(plan, lambda x: x.to(device))
    there: list[Tensor] = []
    _map_tensors(plan, lambda x: x if x.is_cuda else there.append(x))
    sent = iter(_send_packed(there, device))
    return _map_tensors(plan, lambda x: x if x.is_cuda else next(sent))


def _send_packed(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return views of one buffer on `device`, filled by a single copy; padding bytes between tensors are zero."""
    ends, size = list[int](), 0
    for x in tensors:
        ends.append(size + x.nbytes)
        size = -(-ends[-1] // ALIGNMENT) * ALIGNMENT
    if not size:
        return [x.to(device, non_blocking=True) for x in tensors]
    packed = torch.zeros(size, dtype=torch.uint8)
    for x, end in zip(tensors, ends, strict=True):
        if x.numel():  # an empty tensor has no bytes to copy
            packed[end - x.nbytes : end] = x.contiguous().flatten().view(torch.uint8)
    sent = packed.pin_memory().to(device, non_blocking=True)
    return [
        sent[end - x.nbytes : end].view(x.dtype).view(x.shape) if x.numel() else torch.empty_like(x, device=device)
        for x, end in zip(tensors, ends, strict=True)
    ]


def _map_tensors(plan: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a plan, or a part of one, with `change` applied to each tensor, in the order of the fields."""
    if isinstance(plan, Tensor):
        return change(plan)
    if isinstance(plan, tuple):
        return tuple(_map_tensors(item, change) for item in plan)
    if is_dataclass(plan) and not isinstance(plan, type):
        return replace(plan, **{f.name: _map_tensors(getattr(plan, f.name), change) for f in fields(plan)})
    return plan


def send_levels(rows: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return patch rows on a GPU, (N, C*Tp*P*P) in `dtype`, without making the host wait.

    rows: `Levels`, which are normalised on the GPU, or a tensor of normalised rows, which is
    copied in `dtype`.
    """
    if isinstance(rows, Tensor):
        rows = rows.to(dtype).pin_memory() if rows.device.type == "cpu" else rows
        return rows.to(device, non_blocking=True)
    N, C, _, values = rows.values.shape
    table, levels = rows.table.to(dtype).view(torch.uint8).flatten(), rows.values.flatten()  # a single copy sends both
    sent = torch.cat([table, levels]).pin_memory().to(device, non_blocking=True)
    table, levels = sent[: len(table)].view(dtype).view(C, 1, -1), sent[len(table) :].view(rows.values.shape)
    shape = N, C, rows.frames  # an image has one frame, which is repeated Tp times
    index = levels.int().expand(*shape, values)
    return table.expand(*shape, -1).gather(3, index).flatten(1)
