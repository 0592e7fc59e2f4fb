"""Budgets, inferred limits and packing: against vLLM's golden plans, and against every possible partition."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from graph_families import build
from hypothesis import given, settings
from hypothesis import strategies as st

from refvl.graphs import Batch, EncoderGraphManager, generate_budgets, infer_limits, padding_waste, plan_batches
from refvl.graphs.budgets import pack_items
from refvl.graphs.packing import Capacity
from refvl.positions.windows import get_window_index, max_window_count

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "encoder_graph_plan.json").read_text())
# Two paths per item, capture axes and data parallelism of the manager are other models' and other modules' matters.
ONE_PATH = [c for c in GOLDEN["constructor"] if not c["paths"] and not c["capture_axes"]]
PLANS = [p for p in GOLDEN["plans"] if list(p["path_token_budgets"]) == ["default"]]


def by_name(case):
    return case["name"]


def golden_batches(plan):
    return [Batch(tuple(batch["indices"]), batch["calls"][0]["budget"]) for batch in plan["batches"]]


def plan_case(case, policy):
    tokens = [item["output_tokens"] for item in case["items"]]
    return plan_batches(tokens, case["token_budgets"], case["max_batch_size"], policy=policy)


def summed_budgets(batches):
    return sum(batch.budget or 0 for batch in batches)


# --- budgets and limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("min_budget", "max_budget", "want"), GOLDEN["generate_budgets"])
def test_budgets_golden(min_budget, max_budget, want):
    """Oracle: vLLM 0.33.0."""
    assert generate_budgets(min_budget, max_budget) == want


@pytest.mark.parametrize("case", ONE_PATH, ids=by_name)
def test_limits_golden(case):
    """Oracle: vLLM 0.33.0's constructor; budgets given twice are captured once here, and frames are our own rule."""
    smallest, largest = case["budget_range"]
    given_limits = {"budgets": case.get("budgets"), "max_items": case.get("items")}
    if "error" in case:
        with pytest.raises(ValueError, match="max_items|max_budget"):
            infer_limits(smallest, largest, **given_limits)
        return
    limits = infer_limits(smallest, largest, **given_limits)
    assert list(limits.budgets) == sorted(set(case["token_budgets"]))
    assert limits.max_items == case["max_batch_size"]


def test_frames_are_as_many_as_items_at_least_32_and_fewer_in_large_budgets():
    """Oracle: 65,536 by the budget, unless the caller asks for more."""
    assert [infer_limits(64, 2048, max_items=n).max_frames for n in (1, 32, 50)] == [32, 32, 50]
    limits, wide = infer_limits(64, 4096), infer_limits(64, 4096, max_frames=64)
    assert [limits.frames_of(budget) for budget in limits.budgets] == [64, 64, 64, 64, 64, 32, 16]
    assert wide.frames_of(4096) == 64


def test_frames_beyond_those_of_a_large_budget_run_eagerly():
    """A captured budget has as many segments as its frames; a batch with more of them takes none."""
    manager = EncoderGraphManager(build("Qwen2.5-VL"), min_budget=8, max_budget=32, progress=False, backend="trace")
    manager.limits[""] = replace(manager.limits[""], frame_tokens=64)
    manager.capture()
    segments = {budget: len(captured.metadata.cu_seqlens) - 1 for (_, budget), captured in manager.captured.items()}
    assert segments == {8: 8, 16: 4, 32: 2}
    budgets = [manager.plan([(t, 2, 2 * w)]).batches[0].budget for t, w in ((8, 1), (4, 4), (5, 3), (2, 16), (3, 8))]
    assert budgets == [8, 16, None, 32, None]


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PLANS, ids=by_name)
def test_greedy_golden(case):
    """Oracle: vLLM's plans without its deferral of items: order, batches, budgets, what runs eagerly."""
    assert plan_case(case, "greedy") == golden_batches(case["plain_greedy"])


@pytest.mark.parametrize("case", PLANS, ids=by_name)
def test_optimal_is_never_worse_than_the_golden_plans(case):
    """Oracle: vLLM's plans with and without deferral; the same items run eagerly."""
    batches = plan_case(case, "optimal")
    for name in ("v033", "plain_greedy"):
        golden = golden_batches(case[name])
        assert summed_budgets(batches) <= summed_budgets(golden)
        assert [b for b in batches if b.budget is None] == [b for b in golden if b.budget is None]


sizes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=9)
limits = st.tuples(
    st.lists(st.integers(1, 48), min_size=1, max_size=4), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 8))
)


@settings(max_examples=200)
@given(sizes, limits, st.sampled_from(["greedy", "optimal"]))
def test_every_item_once_and_within_the_limits(sizes, limits, policy):
    """Each batch has the smallest budget that holds it; eager items, and they alone, fit no graph."""
    budgets, max_items, max_frames = limits
    given_frames = {"frames": [n for _, n in sizes], "max_frames": max_frames}
    batches = plan_batches([n for n, _ in sizes], budgets, max_items, policy=policy, **given_frames)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(sizes)))
    for batch in batches:
        tokens, frames = (sum(column) for column in zip(*(sizes[i] for i in batch.indices), strict=True))
        fits = max_frames is None or frames <= max_frames
        smallest = min((b for b in budgets if b >= tokens), default=None) if fits else None
        assert batch.budget == smallest
        assert len(batch.indices) <= (max_items if batch.budget else 1)


def partitions(items):
    """All set partitions of a list."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions(rest):
        yield [[first], *groups]
        for i in range(len(groups)):
            yield [*groups[:i], [first, *groups[i]], *groups[i + 1 :]]


def value_of(groups, budgets, max_rows, max_items, max_frames):
    """(summed budgets, number of groups), by hand; infinite where a group fits no budget.

    Items are (tokens, frames, rows).
    """
    total = 0
    for group in groups:
        tokens, frames, rows = (sum(column) for column in zip(*group, strict=True))
        limits = zip(budgets, max_rows, max_frames, strict=True)
        fits = len(group) <= max_items
        holds = [(b, most) for b, n, most in limits if fits and b >= tokens and n >= rows][:1]
        holds = [b for b, most in holds if frames <= most]
        total += min(holds, default=float("inf"))
    return total, len(groups)


def best_cut(items, value):
    """Oracle: the optimum over consecutive groups of the sorted items, by the plain quadratic recurrence."""
    items, best = sorted(items, key=lambda item: item[0]), [(0, 0)]
    for stop in range(1, len(items) + 1):
        options = []
        for start in range(stop):
            cost, _ = value([items[start:stop]])
            options.append((best[start][0] + cost, best[start][1] + 1))
        best.append(min(options))
    return best[-1]


@st.composite
def packings(draw, max_items):
    """Items that fit the largest budget, and limits on tokens, items, frames of each budget, and rows."""
    budgets = sorted(draw(st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True)))
    max_rows = sorted(draw(st.lists(st.integers(0, 120), min_size=len(budgets), max_size=len(budgets))))
    frames = draw(st.lists(st.integers(1, 8), min_size=len(budgets), max_size=len(budgets)))
    max_frames = sorted(frames, reverse=True)
    item = st.tuples(st.integers(0, budgets[-1]), st.integers(0, max_frames[-1]), st.integers(0, max_rows[-1]))
    return draw(st.lists(item, max_size=max_items)), (budgets, max_rows, draw(st.integers(1, 6)), max_frames)


def pack_checked(items, limits, policy="optimal"):
    """(summed budgets, number of batches) of a policy, whose batches are checked one by one."""
    budgets, max_rows, max_items, max_frames = limits
    capacity = Capacity(tuple(budgets), tuple(max_rows), max_items, max(max_frames), tuple(max_frames))
    sizes = {i: (rows, tokens, frames) for i, (tokens, frames, rows) in enumerate(items)}
    batches = pack_items(sizes, capacity, policy)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(items)))
    for batch in batches:
        assert value_of([[items[i] for i in batch.indices]], *limits) == (batch.budget, 1)
        assert batch.tokens == sum(items[i][0] for i in batch.indices)
    return summed_budgets(batches), len(batches)


@settings(max_examples=150)
@given(packings(max_items=7))
def test_optimal_equals_brute_force(case):
    """Oracle: all set partitions; lowest sum of budgets, then fewest batches."""
    items, limits = case
    assert pack_checked(items, limits) == min(value_of(groups, *limits) for groups in partitions(items))


@settings(max_examples=60)
@given(packings(max_items=40))
def test_optimal_is_never_above_the_best_cut_of_the_sorted_items(case):
    """And beyond twelve items it is that cut; greedy is a cut, so it is never better."""
    items, limits = case
    got, bound = pack_checked(items, limits), best_cut(items, lambda groups: value_of(groups, *limits))
    assert got == bound if len(items) > 12 else got <= bound
    assert got[0] <= pack_checked(items, limits, "greedy")[0]


def test_cuts_are_planned_in_steps_that_grow_with_the_items_not_with_their_square(monkeypatch):
    """Oracle: how often a batch is measured, at most 16 times per item and budget (the square: 1400 times)."""
    items, looks, level = 10_000, [0], Capacity.level

    def counted(self, *held):
        looks[0] += 1
        return level(self, *held)

    monkeypatch.setattr(Capacity, "level", counted)
    draw, budgets = random.Random(0), [64, 128, 256, 512, 1024, 2048, 4096]
    batches = plan_batches([draw.randint(16, 1369) for _ in range(items)], budgets, 10_000, policy="optimal")
    assert sum(len(batch.indices) for batch in batches) == items
    assert 0 < looks[0] < 16 * items * len(budgets)


def test_frames_split_a_batch_and_a_long_clip_runs_eagerly():
    """Tokens alone would let all four share one graph of 64."""
    batches = plan_batches([10, 10, 10, 10], [64], 8, frames=[3, 9, 2, 4], max_frames=6)
    assert batches == [Batch((0, 2), 64), Batch((3,), 64), Batch((1,), None)]
    assert plan_batches([10, 10, 10, 10], [64], 8, frames=[3, 9, 2, 4]) == [Batch((0, 1, 2, 3), 64)]


def test_waste_counts_the_tokens_of_replays_alone():
    """64 tokens computed for 48, whatever ran eagerly; nothing computed is nothing wasted."""
    assert padding_waste([Batch((0, 1), 64), Batch((2,), None)], [30, 18, 999]) == 0.25
    assert padding_waste([Batch((0,), None)], [999]) == padding_waste([], []) == 0.0


# --- the bound on windows ---------------------------------------------------------------------------------------------


def most_windows_of_a_frame(tokens, side):
    """The worst shape of one frame of `tokens` merged tokens, counted by the encoder's own `get_window_index`."""
    shapes = [(h, tokens // h) for h in range(1, tokens + 1) if tokens % h == 0]
    counts = [
        len(get_window_index([(1, h, w)], window_size=side, patch_size=1, spatial_merge_size=1)[1]) for h, w in shapes
    ]
    return max(counts) - 1


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_no_batch_has_more_windows_than_the_bound_and_some_batch_has_as_many(side):
    """Oracle: every shape of every frame, and the worst way to share the tokens among the frames.

    All up to 24 tokens in up to 6 frames; a video is that many frames of one shape, so it is among
    them.
    """
    most_tokens, most_frames = 24, 6
    of_a_frame = [0] + [most_windows_of_a_frame(n, side) for n in range(1, most_tokens + 1)]
    worst = [0] * (most_tokens + 1)  # windows of at most this many tokens in the frames counted so far
    for frames in range(1, most_frames + 1):
        worst = [max(worst[n - k] + of_a_frame[k] for k in range(n + 1)) for n in range(most_tokens + 1)]
        for tokens in range(1, most_tokens + 1):
            assert max_window_count(tokens, frames, side) == worst[tokens], (tokens, frames)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (plan_batches, {"policy": "best"}, ValueError, r"policy: expected one of \('greedy', 'optimal'\), got 'best'"),
        (plan_batches, {"budgets": []}, ValueError, "budgets: expected at least one budget, got none"),
        (plan_batches, {"budgets": [0]}, ValueError, r"budgets\[0\]: must be at least 1, got 0"),
        (plan_batches, {"max_items": 0}, ValueError, "max_items: must be at least 1, got 0"),
        (infer_limits, {"max_items": 5000}, ValueError, r"max_items: must not exceed .*, got 5000 .* \[2048\]"),
        (infer_limits, {"max_items": 9, "budgets": [64, 8]}, ValueError, r"max_items: .* got 9 for budgets \[8, 64\]"),
        (infer_limits, {"budgets": ["64"]}, TypeError, r"budgets\[0\]: expected an integer, got str"),
        (infer_limits, {"min_budget": 2049}, ValueError, "min_budget: must not exceed max_budget, got 2049 and 2048"),
        (generate_budgets, {"min_budget": 0}, ValueError, "min_budget: must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(function, arguments, error, message):
    valid = {"min_budget": 64, "max_budget": 2048}
    if function is plan_batches:
        valid = {"output_tokens": [8, 8], "budgets": [64], "max_items": 4}
    with pytest.raises(error, match=message):
        function(**valid | arguments)
