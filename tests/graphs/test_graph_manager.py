"""What the manager packs, replays or leaves to the encoder, and the life of its graphs.

That any batch equals the eager encoder is in `contracts/test_encoders.py`, for every family.
"""

from functools import partial

import pytest
import torch
from closeness import assert_agree
from graph_families import build, make_case, manager_of

from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import Batch, CaptureError

CONFIG = Qwen2_5_VisionConfig.tiny()  # windows of 2 x 2 merged tokens, frames in two of four blocks
BUDGETS, MAX_ITEMS, MAX_FRAMES = [8, 16, 32], 3, 4
new_manager = partial(manager_of, budgets=BUDGETS, max_items=MAX_ITEMS, max_frames=MAX_FRAMES)


@pytest.fixture(scope="module")
def encoder():
    return build("Qwen2.5-VL")


@pytest.fixture(scope="module")
def manager(encoder):
    """One manager for all tests: what a test before left in its memory must not matter."""
    manager = new_manager(encoder)
    manager.capture()
    return manager


# --- limits -----------------------------------------------------------------------------------------------------------


def test_the_largest_batch_of_every_budget(encoder, manager):
    """As many tokens, items, frames and windows as the limits allow: strips one token high have the most windows."""
    for budget in BUDGETS:
        grids = [(1, 2, 2), (2, 2, 2), (1, 2, 2 * (budget - 3))]
        case = make_case(encoder, grids)
        assert_agree(manager.execute(case.rows, grids), case.wanted, encoder)
        assert manager.last_batches == [Batch((0, 1, 2), budget)]


# --- outputs, order, statistics ---------------------------------------------------------------------------------------


def test_outputs_are_clones(encoder, manager):
    """A later call through the same graph leaves earlier outputs as they were."""
    grids = [(1, 4, 8), (1, 4, 8)]
    first = manager.execute(make_case(encoder, grids, 1).rows, grids)
    kept = [output.clone() for output in first]
    second = manager.execute(make_case(encoder, grids, 2).rows, grids)
    graph_memory = {c.output.untyped_storage().data_ptr() for c in manager.captured.values()}
    for output, want, other in zip(first, kept, second, strict=True):
        assert torch.equal(output, want)
        assert not torch.equal(output, other)
        assert output.untyped_storage().data_ptr() not in graph_memory


def test_statistics_are_those_counted_by_hand(encoder):
    """Oracle: the comments."""
    manager = new_manager(encoder, policy="greedy")
    empty = manager.stats()
    assert (empty.hits, empty.misses, empty.hit_rate, empty.padding_waste) == (0, 0, 0, 0)
    grids = [(1, 4, 4), (1, 4, 12), (1, 16, 10)]  # 4 + 12 tokens share a graph of 16, 40 run eagerly
    case = make_case(encoder, grids)
    assert torch.equal(manager.execute(case.rows, grids)[2], case.wanted[2])
    assert manager.last_batches == [Batch((0, 1), 16), Batch((2,), None)]
    stats = manager.stats()
    assert (stats.hits, stats.misses, stats.hit_rate, stats.padding_waste) == (2, 1, 2 / 3, 0)
    grids = [(5, 2, 2), (1, 2, 10)]  # five frames run eagerly, 5 tokens in a graph of 8
    manager.execute(make_case(encoder, grids).rows, grids)
    later = manager.stats()
    assert (later.hits, later.misses, later.tokens, later.budget_tokens) == (3, 2, 21, 24)
    assert (later.hit_rate, later.padding_waste) == (3 / 5, 1 - 21 / 24)
    assert (stats.hits, stats.misses) == (2, 1)  # what was asked for before does not change
    assert empty.hits == 0


# --- life of the graphs -----------------------------------------------------------------------------------------------


def test_clear_gives_everything_back_and_the_next_use_captures_again(encoder):
    manager = new_manager(encoder)
    case = make_case(encoder, [(1, 4, 4), (1, 16, 10)])
    outputs = manager.execute(case.rows, case.layouts)
    assert manager.memory_bytes() > 0 and list(manager.captured) == [("", budget) for budget in BUDGETS[::-1]]
    manager.clear()
    assert (manager.captured, manager.memory_bytes(), manager.stats().hits) == ({}, 0, 0)
    assert_agree(outputs, case.wanted, encoder)  # clones outlive the graphs
    assert_agree(manager.execute(case.rows, case.layouts), case.wanted, encoder)
    assert manager.stats().hits == 1


def test_a_plan_belongs_to_its_call(encoder, manager):
    """Planned together, run in the other order: each plan packs and encodes its own items."""
    a, b = [(1, 4, 6), (1, 2, 2)], [(2, 2, 2), (1, 2, 6), (1, 16, 10)]
    plan_a, plan_b = manager.plan(a), manager.plan(b)
    for plan, grids in ((plan_b, b), (plan_a, a)):
        case = make_case(encoder, grids)
        assert_agree(manager.run(case.rows, plan), case.wanted, encoder)
        assert manager.last_batches == plan.batches


class ReadsBackIfSmall(Qwen2_5_VisionTransformer):
    """Chooses by a value of the pixels, as no captured encoder may."""

    def forward(self, pixel_values, grid_thw=None, *, metadata=None, attention=None):
        out = super().forward(pixel_values, grid_thw, metadata=metadata, attention=attention)
        return -out if len(pixel_values) < 50 and out.sum() < 0 else out


def test_an_encoder_that_reads_a_value_back_is_refused():
    """Runs eagerly, but not as a graph; when the smallest budget fails after the others, none of them is kept."""
    encoder = ReadsBackIfSmall(CONFIG).eval()
    case = make_case(encoder, [(1, 2, 2)])
    manager = new_manager(encoder)
    for _ in range(2):
        with pytest.raises(CaptureError, match="__bool__ reads a value back"):
            manager.execute(case.rows, case.layouts)
        assert manager.captured == {}


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "graph"}, r"backend: expected one of \('auto', 'cuda', 'trace'\), got 'graph'"),
        ({"backend": "cuda"}, "backend: 'cuda' needs an encoder on CUDA, got an encoder on cpu"),
        ({"budgets": [2, 64]}, r"max_items: must not exceed the smallest budget, got 3 for budgets \[2, 64\]"),
    ],
)
def test_limits_are_checked_before_anything_is_captured(encoder, options, message):
    with pytest.raises(ValueError, match=message):
        new_manager(encoder, **options)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((15, 1176), "pixel_values: dimension 0 must be 16, got 15"),
        ((16, 588), r"pixel_values: expected a shape that fits .*, got \(16, 588\)"),
    ],
)
def test_wrong_inputs_are_named_and_leave_the_manager_usable(encoder, manager, shape, message):
    case = make_case(encoder, [(1, 4, 4)])
    with pytest.raises(ValueError, match=message):
        manager.execute(torch.zeros(shape), case.layouts)
    assert_agree(manager.execute(case.rows, case.layouts), case.wanted, encoder)
