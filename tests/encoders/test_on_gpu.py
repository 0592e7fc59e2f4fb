"""What towers do differently on a GPU, run on a CPU: the same numbers. `tests/cuda_sim` counts kernels and copies."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from refvl.encoders import Glm4vVisionConfig, Glm4vVisionTransformer, Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.encoders.sending import ALIGNMENT, _send_packed, send_plan
from refvl.positions.rotary import apply_rotary, rotary_matrices, rotate_by_matrices, vision_rotary_cos_sin
from refvl.serving.joined import JOINED, join_gate_up, joined
from tests.closeness import assert_agree

TOWERS = {
    "Qwen2.5-VL": (Qwen2_5_VisionTransformer, Qwen2_5_VisionConfig),
    "GLM-4.1V": (Glm4vVisionTransformer, Glm4vVisionConfig),
}
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


def test_rotation_in_two_kernels_compiles_without_a_break():
    """Oracle: the same, uncompiled."""
    cos, sin = vision_rotary_cos_sin([GRID], head_dim=16)
    x, factors = torch.randn(48, 3, 16).bfloat16(), rotary_matrices(cos, sin)
    with torch.inference_mode():
        compiled = torch.compile(rotate_by_matrices, backend="aot_eager", fullgraph=True, dynamic=True)
        assert torch.equal(compiled(x, factors), rotate_by_matrices(x, factors))


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


# --- gate and up in one product ---------------------------------------------------------------------------------------


def make(family):
    torch.manual_seed(0)
    tower, config = TOWERS[family]
    encoder = tower(config.tiny()).eval()
    return encoder, torch.randn(48, encoder.patch_values)


@pytest.mark.parametrize("family", TOWERS)
@torch.inference_mode()
def test_joined_weights_are_the_weights(family, monkeypatch):
    """Names, values and what is saved stay; the tower gives what it gave, and takes one product for two."""
    encoder, rows = make(family)
    want, before = encoder(rows, [GRID]), {name: x.clone() for name, x in encoder.state_dict().items()}
    join_gate_up(encoder)
    now = encoder.state_dict()
    assert now.keys() == before.keys() and all(torch.equal(now[name], x) for name, x in before.items())
    assert {type(module) for module in encoder.modules()} & set(JOINED) == set()
    called = []
    monkeypatch.setattr(
        nn.Linear, "forward", lambda self, x: called.append(self) or nn.functional.linear(x, self.weight, self.bias)
    )
    assert_agree(encoder(rows, [GRID]), want, encoder)
    assert not {block.mlp.gate_proj for block in encoder.blocks} & set(called)


def test_joined_weights_are_saved_and_loaded(tmp_path):
    """safetensors refuses tensors that overlap; these lie side by side."""
    from safetensors.torch import load_file, save_file

    encoder, _ = make("Qwen2.5-VL")
    join_gate_up(encoder)
    save_file(encoder.state_dict(), tmp_path / "a.safetensors")
    loaded = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(x, loaded[name]) for name, x in encoder.state_dict().items())


def moved(encoder):
    encoder.double().float()


def assigned(encoder):
    encoder.load_state_dict({name: x.clone() for name, x in encoder.state_dict().items()}, assign=True)


def replaced(encoder):
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    for block in encoder.blocks:
        block.mlp.up_proj.__class__ = Twice


def hooked(encoder):
    for block in encoder.blocks:
        block.mlp.gate_proj.register_forward_hook(lambda module, inputs, output: output)


@pytest.mark.parametrize("change", [moved, assigned, replaced, hooked])
def test_where_one_product_cannot_be_there_are_two(change, monkeypatch):
    """Oracle: the layers one by one, bit for bit; each of them is called."""
    encoder, rows = make("Qwen2.5-VL")
    with torch.inference_mode():
        want = encoder(rows, [GRID])
    join_gate_up(encoder)
    change(encoder)
    with torch.inference_mode():
        assert torch.equal(encoder(rows, [GRID]), want)


def test_gradients_reach_both_weights():
    """Oracle: the tower before; bit for bit."""
    (plain, rows), (other, _) = make("Qwen2.5-VL"), make("Qwen2.5-VL")
    join_gate_up(other)
    for encoder in (plain, other):
        encoder(rows, [GRID]).sum().backward()
    for name in ("gate_proj", "up_proj"):
        grads = [encoder.blocks[0].mlp.get_submodule(name).weight.grad for encoder in (plain, other)]
        assert grads[0].any() and torch.equal(*grads)


def test_new_values_are_read_and_copies_are_of_their_own():
    from copy import deepcopy

    encoder, rows = make("Qwen2.5-VL")
    join_gate_up(encoder)
    copy = deepcopy(encoder)
    with torch.no_grad():
        want = encoder(rows, [GRID])
        encoder.blocks[0].mlp.up_proj.weight.mul_(2)
        assert not torch.equal(encoder(rows, [GRID]), want)
        assert_agree(copy(rows, [GRID]), want, encoder)


def test_only_neighbours_are_joined():
    memory = torch.arange(12.0).view(6, 2)
    assert torch.equal(joined(memory[:2], memory[2:5]), memory[:5])
    assert joined(memory[:2], memory[3:]) is None
    assert joined(memory[:2], memory[2:].clone()) is None
    assert joined(torch.zeros(2), torch.zeros(2)) is None
