"""What towers do differently on a GPU, run on a CPU: the same numbers. `tests/cuda_sim` counts kernels and copies."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from refvl.encoders.sending import ALIGNMENT, _send_packed, send_plan
from refvl.positions.rotary import apply_rotary, rotary_matrices, rotate_by_matrices, vision_rotary_cos_sin

GRID = (1, 6, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_rotation_in_two_kernels(dtype, grad):
    """Oracle: float64. Each product and the sum are rounded to float32, then once to the dtype."""
    cos, sin = vision_rotary_cos_sin([GRID], head_dim=16)
    x = torch.randn(48, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_(grad)
    out = rotate_by_matrices(x, rotary_matrices(cos, sin))
    want = apply_rotary(x.detach().double(), cos.double(), sin.double())
    terms = apply_rotary(x.detach().double().abs(), cos.double().abs(), -sin.double().abs()).abs()
    size = x.detach().double().abs().amax(-1, keepdim=True) * 2 + terms  # above |x cos| + |x' sin|
    allowed = size * torch.finfo(torch.float32).eps + want.abs() * torch.finfo(dtype).eps
    assert out.dtype == dtype and bool(((out.double() - want).abs() <= allowed).all())
    if grad:  # a rotation: the gradient of the squared length is 2x
        out.double().square().sum().backward()
        assert torch.allclose(x.grad.double(), 2 * x.detach().double(), rtol=0, atol=16 * torch.finfo(dtype).eps)


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
