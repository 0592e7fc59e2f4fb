"""Mistakes that would fail or lie on a GPU are planted, one at a time: the simulated device catches each of them.

Without any, graphs give what the eager tower gives on the CPU.
"""

from dataclasses import replace

import pytest
import torch
from graph_families import build, distance, make_case, manager_of

import refvl.encoders.qwen2_5_vl as qwen
from refvl.graphs import CaptureError
from refvl.graphs.buffers import fill_metadata

FAMILY, FIRST, SECOND = "Qwen2.5-VL", [(1, 4, 4), (2, 4, 2)], [(1, 4, 6), (1, 2, 4)]


@pytest.fixture(scope="module")
def cases():
    encoder = build(FAMILY).bfloat16()
    return [make_case(encoder, layouts, seed) for seed, layouts in enumerate((FIRST, SECOND))]


def run(cases):
    """Both batches through the same graphs, the first one's outputs kept meanwhile: how far off each is."""
    manager = manager_of(build(FAMILY).to("cuda", torch.bfloat16))
    outputs = [manager.execute(case.rows.to("cuda"), case.layouts) for case in cases]
    assert manager.stats().misses == 0
    wanted = [case.wanted for case in cases]
    return max(distance([x.cpu() for x in out], want) for out, want in zip(outputs, wanted, strict=True))


def change_plan(monkeypatch, **changes):
    """Plans in which a function of the field stands instead of it."""
    for method in ("plan", "plan_capacity"):
        right = getattr(qwen.Qwen2_5_VisionTransformer, method)

        def wrong(self, *args, right=right):
            plan = right(self, *args)
            return replace(plan, **{name: change(getattr(plan, name)) for name, change in changes.items()})

        monkeypatch.setattr(qwen.Qwen2_5_VisionTransformer, method, wrong)


def change_rotary(monkeypatch, change):
    right = qwen.rotate
    monkeypatch.setattr(qwen, "rotate", lambda x, cos, sin: change(right(x, cos, sin)))


def test_without_a_mistake_all_is_well(machine, cases):
    assert run(cases) < 8 * torch.finfo(torch.bfloat16).eps


MISTAKES = {
    "float32 behind the rotary": (
        lambda m: change_rotary(m, lambda x: x.float()), RuntimeError, "fp16 and bf16 data type",
    ),
    "int64 cumulative lengths": (
        lambda m: change_plan(m, cu_seqlens=lambda x: x.long()), RuntimeError, "cu_seqlens of dtype int32",
    ),
    "a host read": (
        lambda m: change_rotary(m, lambda x: x * float(x.isfinite().all())), CaptureError, "reads a value back",
    ),
    "a tensor made during a capture": (
        lambda m: change_rotary(m, lambda x: x * torch.tensor([1.0], device=x.device).to(x.dtype)),
        CaptureError, "copy from the host",
    ),
    "a CPU tensor in the metadata": (
        lambda m: change_plan(m, positions=lambda x: x.cpu()), RuntimeError, "on the same device",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises(machine, cases, monkeypatch, mistake):
    plant, error, message = MISTAKES[mistake]
    plant(monkeypatch)
    with pytest.raises(error, match=message):
        run(cases)


def test_a_missing_clone_shows(machine, cases, monkeypatch):
    """The second replay overwrites what the first returned."""
    monkeypatch.setattr(torch.Tensor, "clone", lambda x: x)
    assert run(cases) > 0.1


def test_a_stale_field_shows(machine, cases, monkeypatch):
    """The way back to reading order as it was at the capture: tokens come out in the order of the windows."""

    def forgets(buffers, metadata):
        stale = torch.arange(len(metadata.reverse_index), device="cuda")
        fill_metadata(buffers, replace(metadata, reverse_index=stale))

    monkeypatch.setattr("refvl.graphs.manager.fill_metadata", forgets)
    assert run(cases) > 0.1
