"""Budgets: how many graphs to capture, and which items share one replay.

A captured graph has fixed sizes, so one is captured per token budget (powers of two between the smallest sensible
output and the largest allowed), and arriving items are packed into the smallest budget that holds them. Whatever the
items leave free is computed for nothing: the padding waste.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from refvl.schema import check_positive_int

POLICIES = ("greedy", "optimal")


@dataclass(frozen=True, slots=True)
class Batch:
    """Items (indices into the caller's order) that run together; budget None: too large for any graph, eager."""

    indices: tuple[int, ...]
    budget: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """What graphs are captured for: sorted budgets in output tokens, and the most items and frames of one replay."""

    budgets: tuple[int, ...]
    max_items: int
    max_frames: int


def generate_budgets(min_budget: int, max_budget: int) -> list[int]:
    """Doubling from `min_budget`; `max_budget` is always the last, unless it lies below the first.

    >>> generate_budgets(64, 600)
    [64, 128, 256, 512, 600]
    """
    check_positive_int(min_budget, "min_budget")
    check_positive_int(max_budget, "max_budget")
    budgets = [min_budget]
    while 2 * budgets[-1] <= max_budget:
        budgets.append(2 * budgets[-1])
    return budgets + [max_budget] * (budgets[-1] < max_budget)


def infer_limits(
    min_budget: int,
    max_budget: int,
    *,
    budgets: Sequence[int] | None = None,
    max_items: int | None = None,
    max_frames: int | None = None,
) -> Limits:
    """Fill in what the user left open. min_budget, max_budget: what the model's sizes suggest.

    Every item needs at least one token in every graph, so `max_items` may not exceed the smallest budget; given alone,
    it raises the smallest budget. Frames default to as many as items, at least 32. Raises ValueError when the
    invariants do not hold. Upstream: the constructor of `EncoderCudaGraphManager`.
    """
    check_positive_int(min_budget, "min_budget")
    check_positive_int(max_budget, "max_budget")
    if max_items is not None:
        check_positive_int(max_items, "max_items")
    if budgets is not None:
        budgets = sorted({check_positive_int(b, f"budgets[{i}]") for i, b in enumerate(budgets)})
        if not budgets:
            raise ValueError("budgets: expected at least one, got none")
    else:
        budgets = generate_budgets(max(min_budget, max_items or 1), max_budget)
    if max_items is None:
        max_items = min(max(1, max_budget // min_budget), budgets[0])
    if max_items > budgets[0]:
        raise ValueError(f"max_items: must not exceed the smallest budget, got {max_items} for budgets {list(budgets)}")
    max_frames = max(max_items, 32) if max_frames is None else check_positive_int(max_frames, "max_frames")
    return Limits(tuple(budgets), max_items, max_frames)


def plan_batches(
    output_tokens: Sequence[int],
    budgets: Sequence[int],
    max_items: int,
    *,
    policy: str = "greedy",
    frames: Sequence[int] | None = None,
    max_frames: int | None = None,
) -> list[Batch]:
    """Pack items into batches, smallest items first.

    output_tokens: tokens of each item. frames: frames of each item, bounded by `max_frames` per batch (optional).
    policy "greedy": fill a batch while items fit the largest budget; "optimal": cut the sorted items into consecutive
    groups so that the summed budgets are smallest, then the fewest groups. Items that fit no graph come last, alone,
    with budget None. Every index appears once. Raises ValueError for an unknown policy.

    >>> plan_batches([30, 30, 200], [64, 128, 256], max_items=8, policy="greedy")
    [Batch(indices=(0, 1), budget=64), Batch(indices=(2,), budget=256)]
    """
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {POLICIES}, got {policy!r}")
    tokens = [check_positive_int(n, f"output_tokens[{i}]") for i, n in enumerate(output_tokens)]
    packing = _Packing(tokens, sorted(budgets), max_items, frames or [0] * len(tokens), max_frames)
    order = sorted(range(len(tokens)), key=tokens.__getitem__)  # stable: equal sizes keep their order
    fitting = [i for i in order if packing.budget_for([i]) is not None]
    groups = _greedy(fitting, packing) if policy == "greedy" else _optimal(fitting, packing)
    eager = [Batch((i,), None) for i in order if packing.budget_for([i]) is None]
    return [Batch(tuple(group), packing.budget_for(group)) for group in groups] + eager


def padding_waste(batches: Sequence[Batch], output_tokens: Sequence[int]) -> float:
    """Share of the tokens computed by replays that is padding; items that run eagerly do not count.

    output_tokens: tokens of each item, as in `plan_batches`. 0 without replays.

    >>> padding_waste([Batch((0, 1), 64), Batch((2,), None)], [30, 18, 999])
    0.25
    """
    replays = [batch for batch in batches if batch.budget is not None]
    computed = sum(batch.budget for batch in replays)
    return 1 - sum(output_tokens[i] for batch in replays for i in batch.indices) / computed if computed else 0.0


@dataclass(frozen=True, slots=True)
class _Packing:
    tokens: Sequence[int]
    budgets: Sequence[int]
    max_items: int
    frames: Sequence[int]
    max_frames: int | None

    def budget_for(self, group: Sequence[int]) -> int | None:
        """The smallest budget that holds the group, None if none does."""
        too_many_frames = self.max_frames is not None and sum(self.frames[i] for i in group) > self.max_frames
        if len(group) > self.max_items or too_many_frames:
            return None
        total = sum(self.tokens[i] for i in group)
        return next((budget for budget in self.budgets if total <= budget), None)


def _greedy(order: list[int], packing: _Packing) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in order:
        if groups and packing.budget_for([*groups[-1], i]) is not None:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _optimal(order: list[int], packing: _Packing) -> list[list[int]]:
    """Dynamic programming over cuts: best[k] = (summed budgets, groups, start of the last group) of the first k."""
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for stop in range(1, len(order) + 1):
        options = []
        for start in range(stop - 1, -1, -1):
            budget = packing.budget_for(order[start:stop])
            if budget is None:  # more items fit even less
                break
            cost, groups, _ = best[start]
            options.append((cost + budget, groups + 1, start))
        best.append(min(options))
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][2])
    return [order[start:stop] for start, stop in itertools.pairwise(reversed(cuts))]
