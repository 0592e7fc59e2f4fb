"""Budgets, inferred limits and packing: against vLLM's golden plans, and against every possible partition."""

import inspect
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from graph_families import build
from hypothesis import given, settings
from hypothesis import strategies as st

from refvl.graphs import Batch, EncoderGraphManager, Limits, generate_budgets, infer_limits, padding_waste, plan_batches
from refvl.graphs.budgets import pack_items
from refvl.graphs.packing import Capacity, pack, search
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


@given(st.integers(1, 500), st.integers(1, 5000))
def test_budgets_double_and_end_with_the_largest(smallest, largest):
    """Neighbours differ by a factor of 2, the last two by at most that: padding takes at most half of a replay."""
    budgets = generate_budgets(smallest, largest)
    assert (budgets[0], budgets[-1]) == (min(smallest, largest), largest)
    assert all(b == 2 * a for a, b in itertools.pairwise(budgets[:-1]))
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(budgets))


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


def test_frames_are_as_many_as_items_and_at_least_32():
    assert [infer_limits(64, 2048, max_items=n).max_frames for n in (1, 32, 50)] == [32, 32, 50]
    assert infer_limits(64, 256, max_frames=3) == Limits(budgets=(64, 128, 256), max_items=4, max_frames=3)


def test_a_capture_is_not_mostly_empty():
    """Oracle: the grid of flash-attn 2, a block for each 128 queries of the longest segment, head and segment.

    By default at most 32,768 blocks of a layer of 16 heads, four patches to a token; by request as many as it takes.
    """
    limits, wide = infer_limits(64, 4096), infer_limits(64, 4096, max_frames=64)

    def blocks(limits, budget):
        return 4 * budget // 128 * 16 * limits.frames_of(budget)

    assert [limits.frames_of(budget) for budget in limits.budgets] == [64, 64, 64, 64, 64, 32, 16]
    assert max(blocks(limits, budget) for budget in limits.budgets) == 32_768
    assert (wide.frames_of(4096), blocks(wide, 4096)) == (64, 131_072)


def test_frames_beyond_those_of_a_large_budget_run_eagerly():
    """A captured budget has as many segments as its frames; a batch with more of them takes none."""
    manager = EncoderGraphManager(build("Qwen2.5-VL"), min_budget=8, max_budget=32, progress=False, backend="trace")
    manager.limits[""] = replace(manager.limits[""], frame_tokens=64)
    manager.capture()
    segments = {budget: len(captured.metadata.cu_seqlens) - 1 for (_, budget), captured in manager.captured.items()}
    assert segments == {8: 8, 16: 4, 32: 2}
    budgets = [manager.plan([(t, 2, 2 * w)]).batches[0].budget for t, w in ((8, 1), (4, 4), (5, 3), (2, 16), (3, 8))]
    assert budgets == [8, 16, None, 32, None]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_items": 5000}, ValueError, r"max_items: must not exceed the smallest budget, got 5000 .* \[2048\]"),
        ({"max_items": 9, "budgets": [64, 8]}, ValueError, r"max_items: .* got 9 for budgets \[8, 64\]"),
        ({"max_items": 0}, ValueError, "max_items: must be at least 1, got 0"),
        ({"max_items": 1.5}, TypeError, "max_items: expected an integer, got float"),
        ({"max_frames": 0}, ValueError, "max_frames: must be at least 1, got 0"),
        ({"budgets": []}, ValueError, "budgets: expected at least one budget, got none"),
        ({"budgets": [64, 0]}, ValueError, r"budgets\[1\]: must be at least 1, got 0"),
        ({"budgets": ["64"]}, TypeError, r"budgets\[0\]: expected an integer, got str"),
    ],
)
def test_limits_that_contradict_each_other_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        infer_limits(64, 2048, **arguments)


def test_an_empty_range_is_named():
    with pytest.raises(ValueError, match="min_budget: must not exceed max_budget, got 169 and 160"):
        infer_limits(169, 160)
    with pytest.raises(ValueError, match="max_budget: must be at least 1, got -1"):
        generate_budgets(64, -1)
    with pytest.raises(ValueError, match="min_budget: must be at least 1, got 0"):
        generate_budgets(0, 64)


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


def test_golden_holds_plans_that_differ():
    """Otherwise the comparison above would say little: optimal beats both of upstream's plans somewhere."""
    costs = {c["name"]: [summed_budgets(golden_batches(c[n])) for n in ("v033", "plain_greedy")] for c in PLANS}
    ours = {c["name"]: summed_budgets(plan_case(c, "optimal")) for c in PLANS}
    assert any(ours[name] < v033 < greedy for name, (v033, greedy) in costs.items())


sizes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=9)
limits = st.tuples(
    st.lists(st.integers(1, 48), min_size=1, max_size=4), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 8))
)


def plan(sizes, limits, policy):
    """`plan_batches` of (tokens, frames) pairs."""
    budgets, max_items, max_frames = limits
    tokens, frames = [n for n, _ in sizes], [n for _, n in sizes]
    return plan_batches(tokens, budgets, max_items, policy=policy, frames=frames, max_frames=max_frames)


@settings(max_examples=200)
@given(sizes, limits, st.sampled_from(["greedy", "optimal"]))
def test_every_item_once_and_within_the_limits(sizes, limits, policy):
    """Each batch has the smallest budget that holds it; eager items, and they alone, fit no graph."""
    budgets, max_items, max_frames = limits
    batches = plan(sizes, limits, policy)
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


def pack_optimally(items, limits):
    """(summed budgets, number of batches) of the policy "optimal", whose batches are checked one by one."""
    budgets, max_rows, max_items, max_frames = limits
    capacity = Capacity(tuple(budgets), tuple(max_rows), max_items, max(max_frames), tuple(max_frames))
    sizes = {i: (rows, tokens, frames) for i, (tokens, frames, rows) in enumerate(items)}
    batches = pack_items(sizes, capacity, "optimal")
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
    assert pack_optimally(items, limits) == min(value_of(groups, *limits) for groups in partitions(items))


@settings(max_examples=60)
@given(packings(max_items=40))
def test_optimal_is_never_above_the_best_cut_of_the_sorted_items(case):
    items, limits = case
    got = pack_optimally(items, limits)
    assert got <= best_cut(items, lambda groups: value_of(groups, *limits))
    assert got == pack_optimally(items, limits)  # equal arguments, equal batches


def test_the_smallest_pairs_with_the_largest():
    """15 alone, and 3 with 24: 48, where consecutive groups cost 64."""
    assert plan_batches([3, 15, 24], [16, 32], 4, policy="optimal") == [Batch((0, 2), 32), Batch((1,), 16)]


ARRIVALS = {  # budgets, items per batch, tokens of a picture
    "up to 1024": ([64, 128, 256, 512, 1024], 8, (16, 1024)),
    "up to 4096": ([64, 128, 256, 512, 1024, 2048, 4096], 64, (16, 1369)),
    "last budget odd": ([64, 128, 256, 512, 600], 8, (16, 550)),
    "small pictures": ([64, 128, 256, 512, 1024], 8, (16, 200)),
    "few to a batch": ([64, 128, 256, 512, 1024], 3, (16, 400)),
}


def arrivals(name, items, times, seed=0):
    budgets, max_items, sizes = ARRIVALS[name]
    draw = random.Random(seed)
    for _ in range(times):
        yield (
            sorted((draw.randint(*sizes), 0, 0) for _ in range(items)),
            Capacity(tuple(budgets), (0,) * len(budgets), max_items, 0),
        )


@pytest.mark.parametrize("name", ARRIVALS)
def test_beyond_twelve_items_the_sum_stays_within_one_percent(name):
    """Oracle: the exact search, which takes long for as many; summed over ten arrivals of 13 to 15 pictures."""
    got = exact = 0
    for items in (13, 14, 15):
        for sizes, capacity in arrivals(name, items, 10 if items < 15 else 4):
            groups = pack(sizes, capacity)
            got += capacity.value(sizes, groups)[0]
            exact += capacity.value(sizes, search(sizes, capacity))[0]
    assert exact <= got <= 1.01 * exact


@pytest.mark.parametrize("name", ["up to 4096", "small pictures"])
def test_many_pictures_leave_almost_no_padding(name):
    """Oracle: the smallest multiple of the smallest budget that holds as many tokens; small items come close to it."""
    [(sizes, capacity)] = arrivals(name, 1000, 1)
    smallest = capacity.budgets[0]
    assert all(budget % smallest == 0 for budget in capacity.budgets)
    bound = -(-sum(tokens for tokens, _, _ in sizes) // smallest) * smallest
    assert bound <= capacity.value(sizes, pack(sizes, capacity))[0] <= 1.01 * bound


@pytest.mark.parametrize("budgets", [(64, 4096), (100, 1000, 4096), (4096,)])
def test_groups_too_large_to_be_searched_again_stay(budgets):
    """Twenty and more tiny pictures to a batch, of all of which none can be taken apart for a search."""
    sizes = sorted((10 + i % 50, 0, 0) for i in range(200))
    capacity = Capacity(budgets, (0,) * len(budgets), 64, 0)
    groups = pack(sizes, capacity)
    assert sorted(i for group in groups for i in group) == list(range(200))
    assert capacity.value(sizes, groups) <= best_cut(
        sizes, lambda parts: value_of(parts, budgets, capacity.max_rows, 64, (0,) * len(budgets))
    )


@pytest.mark.parametrize("policy", ["greedy", "optimal"])
@pytest.mark.parametrize("max_items", [64, 10_000])
def test_planning_grows_with_the_items_not_with_their_square(max_items, policy, monkeypatch):
    """Oracle: how often a batch is measured, at most 16 times per item and budget (the square: 1400 times)."""
    items = 10_000
    looks, level = [0], Capacity.level

    def counted(self, *held):
        looks[0] += 1
        return level(self, *held)

    monkeypatch.setattr(Capacity, "level", counted)
    draw, budgets = random.Random(0), [64, 128, 256, 512, 1024, 2048, 4096]
    for sizes in ([draw.randint(16, 1369) for _ in range(items)], [1] * items):
        batches = plan_batches(sizes, budgets, max_items, policy=policy)
        assert sum(len(batch.indices) for batch in batches) == items
    assert 0 < looks[0] < 16 * items * len(budgets)


def test_of_equal_sums_optimal_takes_the_fewest_batches():
    """5 + 5 against 1 + 1 + 8."""
    assert plan_batches([1, 1, 3, 5], [1, 5, 8], 3, policy="optimal") == [Batch((0, 1, 2), 5), Batch((3,), 5)]


@settings(max_examples=200)
@given(sizes, limits)
def test_optimal_is_never_worse_than_greedy(sizes, limits):
    greedy, optimal = plan(sizes, limits, "greedy"), plan(sizes, limits, "optimal")
    assert summed_budgets(optimal) <= summed_budgets(greedy)
    assert {b.indices for b in optimal if b.budget is None} == {b.indices for b in greedy if b.budget is None}


def test_frames_split_a_batch_and_a_long_clip_runs_eagerly():
    """Tokens alone would let all four share one graph of 64."""
    batches = plan_batches([10, 10, 10, 10], [64], 8, frames=[3, 9, 2, 4], max_frames=6)
    assert batches == [Batch((0, 2), 64), Batch((3,), 64), Batch((1,), None)]
    assert plan_batches([10, 10, 10, 10], [64], 8, frames=[3, 9, 2, 4]) == [Batch((0, 1, 2, 3), 64)]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), max_size=8),
    st.lists(st.integers(1, 48), min_size=1, max_size=4, unique=True),
    st.sampled_from(["greedy", "optimal"]),
)
def test_a_budget_holds_tokens_and_rows(sizes, budgets, policy):
    """Oracle: each batch alone: the smallest budget with as many tokens, and twice as many rows."""
    tokens, rows = [n for n, _ in sizes], [n for _, n in sizes]
    budgets = sorted(budgets)
    capacity = Capacity(tuple(budgets), tuple(2 * budget for budget in budgets), 3, 0)
    batches = pack_items({i: (m, n, 0) for i, (n, m) in enumerate(sizes)}, capacity, policy)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(sizes)))
    for batch in batches:
        held, needed = sum(tokens[i] for i in batch.indices), sum(rows[i] for i in batch.indices)
        assert batch.budget == min((b for b in budgets if b >= held and 2 * b >= needed), default=None)
        assert len(batch.indices) <= (3 if batch.budget else 1)
    if all(2 * n >= m for n, m in sizes):  # rows say nothing that tokens do not: as without them
        assert batches == plan_batches(tokens, budgets, 3, policy=policy)


def test_waste_counts_the_tokens_of_replays_alone():
    """64 tokens computed for 48, whatever ran eagerly; nothing computed is nothing wasted."""
    assert padding_waste([Batch((0, 1), 64), Batch((2,), None)], [30, 18, 999]) == 0.25
    assert padding_waste([Batch((0,), None)], [999]) == padding_waste([], []) == 0.0


def test_the_examples_of_the_docstrings():
    assert generate_budgets(64, 600) == [64, 128, 256, 512, 600]
    batches = plan_batches([30, 30, 200], [64, 128, 256], max_items=8, policy="greedy")
    assert repr(batches) in inspect.getdoc(plan_batches)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "best"}, ValueError, r"policy: expected one of \('greedy', 'optimal'\), got 'best'"),
        ({"output_tokens": [8, -1]}, ValueError, r"output_tokens\[1\]: must be at least 0, got -1"),
        ({"output_tokens": [8.0]}, TypeError, r"output_tokens\[0\]: expected an integer, got float"),
        ({"budgets": []}, ValueError, "budgets: expected at least one budget, got none"),
        ({"budgets": [0]}, ValueError, r"budgets\[0\]: must be at least 1, got 0"),
        ({"max_items": 0}, ValueError, "max_items: must be at least 1, got 0"),
        ({"frames": [1]}, ValueError, "frames: expected one number for each of 2 items, got 1"),
        ({"frames": [1, 1], "max_frames": 0}, ValueError, "max_frames: must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        plan_batches(**{"output_tokens": [8, 8], "budgets": [64], "max_items": 4} | arguments)


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

    All up to 24 tokens in up to 6 frames; a video is that many frames of one shape, so it is among them.
    """
    most_tokens, most_frames = 24, 6
    of_a_frame = [0] + [most_windows_of_a_frame(n, side) for n in range(1, most_tokens + 1)]
    worst = [0] * (most_tokens + 1)  # windows of at most this many tokens in the frames counted so far
    for frames in range(1, most_frames + 1):
        worst = [max(worst[n - k] + of_a_frame[k] for k in range(n + 1)) for n in range(most_tokens + 1)]
        for tokens in range(1, most_tokens + 1):
            assert max_window_count(tokens, frames, side) == worst[tokens], (tokens, frames)
