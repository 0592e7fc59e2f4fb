"""What towers do differently on a GPU, run on a CPU: the same numbers. `tests/cuda_sim` counts kernels and copies."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.encoders.sending import ALIGNMENT, _send_packed, send_plan
from refvl.positions.rotary import apply_rotary, rotary_factors, rotate_by_offsets, vision_rotary_cos_sin

GRID = (1, 6, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("around", [0, 3, 4, 9])
@pytest.mark.parametrize("heads", [slice(0, 5), slice(0, 3), slice(2, 5)], ids=["all", "first", "last"])
def test_rotation_in_two_kernels(dtype, around, heads):
    """With and without spare memory, of NaN, and at the edges of a row. Oracle: float64.

    Each product and the sum are rounded to float32, then once to the dtype.
    """
    cos, sin = vision_rotary_cos_sin([GRID], head_dim=8)
    values = torch.randn(1920, generator=torch.Generator().manual_seed(0)).to(dtype)
    memory = F.pad(values, (around, around), value=torch.nan)
    x_NHK = memory[around : around + 1920].view(48, 5, 8)[:, heads]
    out = rotate_by_offsets(x_NHK, *rotary_factors(cos, sin))
    x = x_NHK.double()
    want = apply_rotary(x, cos.double(), sin.double())
    size = x.abs().amax(-1, keepdim=True) * 4  # above |x cos| + |x' sin| and both roundings
    allowed = size * torch.finfo(torch.float32).eps + want.abs() * torch.finfo(dtype).eps
    assert out.dtype == dtype and bool(((out.double() - want).abs() <= allowed).all())


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    lengths: Tensor
    groups: tuple[Tensor, ...] | None
    longest: int


@pytest.mark.parametrize("groups", [None, (), (torch.zeros(0, 3, dtype=torch.int64), torch.arange(6).view(2, 3).T)])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_packed_plan_is_the_plan(groups, length, monkeypatch):
    """Empty tensors, odd sizes, strides; on the meta device, shapes alone. Oracle: each tensor as it was."""
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)  # which only a GPU's machine can
    plan = Plan(torch.arange(length, dtype=torch.int32), groups, 7)
    tensors = [plan.lengths, *(groups or ())]
    for packed, tensor in zip(_send_packed(tensors, torch.device("cpu")), tensors, strict=True):
        assert packed.dtype == tensor.dtype and torch.equal(packed, tensor)
        assert packed.storage_offset() * packed.itemsize % ALIGNMENT == 0
    sent = send_plan(plan, torch.device("meta"))
    assert sent.longest == 7 and sent.lengths.shape == (length,) and sent.lengths.is_meta
    assert groups is None or [x.shape for x in sent.groups] == [x.shape for x in groups]
    assert _send_packed([], torch.device("cpu")) == []
