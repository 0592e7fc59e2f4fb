"""Weights that change after the capture: graphs are as new as the weights, in every family and in every way."""

from collections import Counter

import pytest
import torch
from graph_families import FAMILIES, build, distance, make_case, manager_of

from refvl.graphs.weights import baked_in

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}  # as in test_graph_threads; stale weights are off by 0.1
LAYOUTS = {
    "grids": [[(1, 4, 4), (2, 2, 6)], [(1, 8, 8)]],
    "slices": [[((4, 4), (2, 5))], [((1, 3),), ((5, 5), (3, 3))]],
    "crops": [[(1, 2), (0, 0)], [(2, 4)]],  # the last picture's crops run eagerly
}


def layouts_of(family):
    return LAYOUTS["crops" if family == "Step3-VL" else "slices" if "MiniCPM" in family else "grids"]


def other_weights(family, encoder):
    return {name: tensor.to(encoder.dtype) for name, tensor in build(family, seed=1).state_dict().items()}


def load(encoder, family):
    encoder.load_state_dict(other_weights(family, encoder))


def load_a_checkpoint(encoder, family):
    encoder.load_weights(other_weights(family, encoder).items())


def edit_in_place(encoder, family):
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(-1.5)


def edit_the_data(encoder, family):
    """What PyTorch does not count: `_version` stays as it was."""
    for parameter in encoder.parameters():
        parameter.data.mul_(-1.5)


def assign(encoder, family):
    encoder.load_state_dict(other_weights(family, encoder), assign=True)


def move_and_edit(encoder, family):
    encoder.double().float()
    edit_in_place(encoder, family)


def change_the_dtype(encoder, family):
    encoder.double()


def replace_a_module(encoder, family):
    other = build(family, seed=1)
    for name in dict(encoder.named_children()):
        setattr(encoder, name, getattr(other, name))


CHANGES = [
    load, load_a_checkpoint, edit_in_place, edit_the_data, assign, move_and_edit, change_the_dtype, replace_a_module,
]  # fmt: skip


def check(encoder, manager, fresh, layouts):
    for batch in layouts:
        case = make_case(fresh, batch)
        outputs = manager.execute(case.rows, batch)
        assert outputs[0].dtype == encoder.dtype
        assert distance(outputs, case.wanted) <= TOLERANCE[encoder.dtype]


KINDS = ("Qwen2.5-VL", "MiniCPM-V 4.5", "Step3-VL")  # one of each way of capturing: grids, slices, two sizes


def pair(family, change):
    is_quick = family in KINDS or change in (load, edit_the_data, replace_a_module)
    return pytest.param(family, change, marks=() if is_quick else pytest.mark.slow, id=f"{family}-{change.__name__}")


@pytest.mark.parametrize(("family", "change"), [pair(family, change) for family in FAMILIES for change in CHANGES])
def test_graphs_follow_the_weights(family, change):
    """Oracle: a fresh encoder of the changed weights, without graphs. The sizes are those seen before the change."""
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


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_made_in_inference_mode(family):
    """They have no `_version`. Oracle: as above."""
    with torch.inference_mode():
        encoder = build(family)
    assert all(parameter.is_inference() for parameter in encoder.parameters())
    manager, layouts = manager_of(encoder), layouts_of(family)
    check(encoder, manager, encoder, layouts)
    with torch.inference_mode():
        load(encoder, family)
    check(encoder, manager, build(family, seed=1), layouts)


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "GLM-4.1V", "Step3-VL"])
def test_a_plan_of_moved_weights_is_made_again(family):
    """Planned before the encoder became float64, run afterwards."""
    encoder, [batch, _] = build(family), layouts_of(family)
    manager = manager_of(encoder)
    plan = manager.plan(batch)
    encoder.double()
    case = make_case(encoder, batch)
    outputs = manager.run(case.rows, plan)
    assert outputs[0].dtype == torch.float64
    assert distance(outputs, case.wanted) <= TOLERANCE[torch.float64]


def test_in_place_changes_capture_nothing_again():
    encoder = build("Qwen2.5-VL")
    manager = manager_of(encoder)
    manager.capture()
    before = dict(manager.captured)
    edit_in_place(encoder, "")
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
