"""Weights that change after the capture: graphs are as new as the weights, in every family and in every way."""

from collections import Counter

import pytest
import torch
from graph_families import FAMILIES, FOLDED, GRIDS, SQUARES, build, distance, make_case, manager_of

from refvl.graphs.manager import baked_in

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}  # as in test_graph_threads; stale weights are off by 0.1
LAYOUTS = {
    "grids": [[(1, 4, 4), (2, 2, 6)], [(1, 8, 8)]],
    "slices": [[((4, 4), (2, 5))], [((1, 3),), ((5, 5), (3, 3))]],
    "folded": [[((8, 4), (4, 4))], [((4, 4),), ((12, 8), (4, 4))]],
    "crops": [[(1, 2), (0, 0)], [(2, 4)]],  # the last picture's crops run eagerly
}


def layouts_of(family):
    kinds = {"folded": FOLDED, "crops": SQUARES, "grids": GRIDS}
    return LAYOUTS[next((kind for kind, families in kinds.items() if family in families), "slices")]


def edit_the_data(encoder, family):
    """In place, and not counted by PyTorch: `_version` stays as it was."""
    for parameter in encoder.parameters():
        parameter.data.mul_(-1.5)


def assign(encoder, family):
    encoder.load_state_dict(build(family, seed=1).state_dict(), assign=True)


def change_the_dtype(encoder, family):
    encoder.double()


def replace_a_module(encoder, family):
    other = build(family, seed=1)
    for name in dict(encoder.named_children()):
        setattr(encoder, name, getattr(other, name))


CHANGES = [edit_the_data, assign, change_the_dtype, replace_a_module]


def check(encoder, manager, fresh, layouts):
    for batch in layouts:
        case = make_case(fresh, batch)
        outputs = manager.execute(case.rows, batch)
        assert outputs[0].dtype == encoder.dtype
        assert distance(outputs, case.wanted) <= TOLERANCE[encoder.dtype]


KINDS = ("Qwen2.5-VL", "MiniCPM-V 4.5", "Step3-VL")  # one of each way of capturing: grids, slices, two sizes


def pair(family, change):
    return pytest.param(family, change, id=f"{family}-{change.__name__}")


PAIRS = [pair(family, change) for family in KINDS for change in CHANGES]
PAIRS += [pair(family, edit_the_data) for family in FAMILIES if family not in KINDS]


@pytest.mark.parametrize(("family", "change"), PAIRS)
def test_graphs_follow_the_weights(family, change):
    """Oracle: a fresh encoder of the changed weights, without graphs.

    The sizes are those seen before the change.
    """
    encoder, layouts = build(family), layouts_of(family)
    manager = manager_of(encoder)
    check(encoder, manager, encoder, layouts)
    before = [case.wanted for case in (make_case(encoder, batch) for batch in layouts)]
    change(encoder, family)
    fresh = build(family).to(encoder.dtype)
    fresh.load_state_dict(encoder.state_dict())
    check(encoder, manager, fresh, layouts)
    if change is not change_the_dtype:  # the change can be seen at all
        assert min(distance(b, make_case(fresh, x).wanted) for b, x in zip(before, layouts, strict=True)) > 0.05


def test_in_place_changes_capture_nothing_again():
    encoder = build("Qwen2.5-VL")
    manager = manager_of(encoder)
    manager.capture()
    before = dict(manager.captured)
    edit_the_data(encoder, "")
    manager.capture()
    assert manager.captured == before
    encoder.double()
    manager.capture()
    assert list(manager.captured) == list(before)
    assert not any(manager.captured[budget] is before[budget] for budget in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_parameters_are_watched(family):
    """Oracle: `Module.parameters`, where each lies and as what."""
    encoder = build(family)
    assert Counter(baked_in(encoder)) == Counter((weight.data_ptr(), weight.dtype) for weight in encoder.parameters())


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("when", ["before the plan", "after it"])
def test_hooks_after_the_capture_are_called(family, when):
    """One that changes what a layer puts out, once for each forward. Oracle: the encoder without graphs."""
    encoder, [batch, _] = build(family), layouts_of(family)
    manager = manager_of(encoder)
    plain = manager.execute(make_case(encoder, batch).rows, batch)
    early = manager.plan(batch)
    hits = manager.stats().hits
    layer = next(module for module in encoder.modules() if isinstance(module, torch.nn.LayerNorm | torch.nn.Linear))
    with torch.no_grad():
        hook = layer.register_forward_hook(lambda _, __, output: output.flip(-1))
        case = make_case(encoder, batch)
        plan = early if when == "after it" else manager.plan(batch)
        hooked = manager.run(case.rows, plan)
    assert distance(hooked, case.wanted) <= TOLERANCE[torch.float32] and distance(hooked, plain) > 0.01
    assert manager.stats().hits == hits and {b.budget for b in manager.last_batches} == {None}
    hook.remove()
    assert distance(manager.execute(make_case(encoder, batch).rows, batch), plain) <= TOLERANCE[torch.float32]
    assert manager.stats().hits == 2 * hits, "graphs replay again"


def test_hooks_of_all_modules_are_called():
    """As profilers set them, and on what goes in. Oracle: how often a forward without graphs calls them."""
    encoder, [_, batch] = build("Qwen2.5-VL"), layouts_of("Qwen2.5-VL")
    manager, case = manager_of(encoder), make_case(encoder, batch)
    manager.capture()
    for register in (torch.nn.modules.module.register_module_forward_pre_hook, encoder.register_forward_pre_hook):
        calls: list[torch.nn.Module] = []
        hook = register(lambda module, _, calls=calls: calls.append(module))
        try:
            make_case(encoder, batch)
            eager = len(calls)
            manager.execute(case.rows, batch)
            assert len(calls) == 2 * eager > 0
        finally:
            hook.remove()
