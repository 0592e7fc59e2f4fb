"""Sizes repeat, so an encoder keeps what it planned lately. That must never show: the oracle is a plan made anew."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from graph_families import FAMILIES, build, draw_layouts, make_case, manager_of

from refvl.encoders import kept as kept_plans
from refvl.encoders.kept import KeptPlans
from refvl.graphs.buffers import metadata_tensors

GRIDS = [(1, 6, 6), (2, 4, 8)]


@pytest.fixture
def made(monkeypatch):
    """The keys of what was planned because it was not kept."""
    keys, get = [], KeptPlans.get

    def counted(self, key, make):
        return get(self, key, lambda: keys.append(key) or make())

    monkeypatch.setattr(KeptPlans, "get", counted)
    return keys


def case_of(family: str, seed: int = 0):
    encoder = build(family)
    return encoder, make_case(encoder, draw_layouts(family, random.Random(seed)))


def same(a, b) -> bool:
    pairs = zip(metadata_tensors(a).items(), metadata_tensors(b).items(), strict=True)
    return all(x == y and torch.equal(p, q) for (x, p), (y, q) in pairs)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_size_is_planned_once_and_encoded_the_same(family, mode, made):
    """Step3's places are read from the weights, with nothing else to plan but its order."""
    encoder, case = case_of(family)
    encoder, made[:] = deepcopy(encoder), []
    with mode():
        want = encoder(case.rows, metadata=encoder.plan(case.layouts))
        assert all(torch.equal(encoder(case.rows, case.layouts), want) for _ in range(3))
    assert len(made) == (family != "Step3-VL")


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_plan_a_repeated_size_once(family, made):
    encoder, case = case_of(family)
    manager, made[:] = manager_of(deepcopy(encoder)), []
    runs = [manager.execute(case.rows, case.layouts) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    assert len(made) == len(set(made)) and bool(made) == (family != "Step3-VL")


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "GLM-4.1V", "MiniCPM-V 4.5"])
def test_gradients_flow_after_inference_has_planned(family):
    """What inference mode makes cannot be saved for a backward pass."""
    encoder, case = case_of(family)
    gradients = []
    for ask in (
        lambda: encoder(case.rows, metadata=encoder.plan(case.layouts)),
        lambda: encoder(case.rows, case.layouts),
    ):
        with torch.inference_mode():
            encoder(case.rows, case.layouts)
        encoder.zero_grad()
        ask().square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_kept_plan_that_was_written_to_is_not_given_again():
    encoder = build("Qwen2.5-VL")
    for spoil in (lambda plan: plan.positions.zero_(), lambda plan: plan.window_groups[0].add_(1)):
        for mode in (torch.inference_mode, torch.enable_grad):
            with mode():
                spoil(encoder.kept_plan(GRIDS))
                kept, new = encoder.kept_plan(GRIDS), encoder.plan(GRIDS)
            assert same(kept, new) and all(map(torch.equal, kept.window_groups, new.window_groups))


def test_plan_is_always_new():
    encoder = build("Qwen2.5-VL")
    encoder.kept_plan(GRIDS)
    assert encoder.plan(GRIDS).positions is not encoder.plan(GRIDS).positions
    assert encoder.kept_plan(torch.tensor(GRIDS)).positions is encoder.kept_plan(GRIDS).positions


def test_what_a_plan_depends_on_beside_sizes():
    """The config, the backend, the dtype that goes with it, and the device."""
    encoder = build("Qwen2.5-VL")
    assert encoder.kept_plan(GRIDS).groups is not None
    encoder.config = replace(encoder.config, window_size=112)
    assert same(encoder.kept_plan(GRIDS), encoder.plan(GRIDS))
    encoder.attention = "masked"
    assert encoder.kept_plan(GRIDS).groups is None
    assert encoder.to("meta").kept_plan(GRIDS).positions.is_meta


@pytest.mark.parametrize("copied", [deepcopy, lambda encoder: pickle.loads(pickle.dumps(encoder))])
def test_a_copy_keeps_plans_of_its_own(copied):
    encoder, case = case_of("GLM-4.1V")
    want = encoder(case.rows, case.layouts)
    other = copied(encoder)
    assert torch.equal(other(case.rows, case.layouts), want) and other._kept is not encoder._kept


def test_memory_is_bounded(monkeypatch, made):
    """The most recent plans stay, what was dropped is planned again, and what is too large is not kept."""
    monkeypatch.setattr(kept_plans, "KEPT_BYTES", 8000)
    encoder = build("GLM-OCR")
    grids = [(1, 2 * h, 2 * w) for h in range(1, 7) for w in range(1, 7)]
    for grid in grids:
        encoder.kept_plan([grid])
        kept = [tensor for _, tensors, _ in encoder._kept._kept.values() for tensor in tensors]
        assert sum(tensor.nbytes for tensor in kept) == encoder._kept._bytes <= 8000
    count = len(made)
    assert count == len(grids)
    encoder.kept_plan(grids[-1:])
    assert len(made) == count
    assert same(encoder.kept_plan(grids[:1]), encoder.plan(grids[:1])) and len(made) == count + 1
    encoder.kept_plan([(1, 60, 60)])
    assert encoder._kept._bytes == 0


def test_threads_share_an_encoder():
    """Few bytes are kept, so that plans come and go."""
    encoder = build("Qwen2.5-VL")
    draws = [draw_layouts("Qwen2.5-VL", random.Random(seed)) for seed in range(8)]
    cases = [make_case(encoder, layouts) for layouts in draws]

    def ask(i: int) -> bool:
        case = cases[i % len(cases)]
        return torch.equal(encoder(case.rows, case.layouts), wanted[i % len(cases)])

    with torch.no_grad():
        wanted = [encoder(case.rows, metadata=encoder.plan(case.layouts)) for case in cases]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(kept_plans, "KEPT_BYTES", 6000)
        assert all(pool.map(ask, range(400)))
