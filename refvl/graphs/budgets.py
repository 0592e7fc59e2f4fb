"""Budgets: how many graphs to capture, and which items share one replay.

A captured graph has fixed sizes, so one is captured per token budget (powers of two between the smallest sensible
output and the largest allowed), and arriving items are packed into the smallest budget that holds them. Whatever the
items leave free is computed for nothing: the padding waste.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from refvl.checks import check_positive_int
from refvl.graphs.packing import Capacity, greedy, pack

POLICIES = ("greedy", "optimal")


@dataclass(frozen=True, slots=True)
class Batch:
    """Items (indices into the caller's order) that run together; budget None: too large for any graph, eager.

    path: where an encoder has several, the one that runs. tokens: output tokens of the items, on that path.
    """

    indices: tuple[int, ...]
    budget: int | None
    path: str = field(default="", repr=False)
    tokens: int = field(default=0, repr=False, compare=False)  # follows from the indices


@dataclass(frozen=True, slots=True)
class Limits:
    """What graphs are captured for: sorted budgets in output tokens, and the most items and frames of one replay."""

    budgets: tuple[int, ...]
    max_items: int
    max_frames: int


def generate_budgets(min_budget: int, max_budget: int) -> list[int]:
    """Doubling from `min_budget` while it stays below `max_budget`, which is always the last.

    >>> generate_budgets(64, 600)
    [64, 128, 256, 512, 600]
    """
    check_positive_int(min_budget, "min_budget")
    check_positive_int(max_budget, "max_budget")
    budgets = []
    while min_budget < max_budget:
        budgets.append(min_budget)
        min_budget *= 2
    return [*budgets, max_budget]


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
    it raises the smallest budget. Budgets given twice count once. Frames default to as many as items, at least 32.
    Raises ValueError when the invariants do not hold. Upstream: the constructor of `EncoderCudaGraphManager`.
    """
    if check_positive_int(min_budget, "min_budget") > check_positive_int(max_budget, "max_budget"):
        raise ValueError(f"min_budget: must not exceed max_budget, got {min_budget} and {max_budget}")
    if max_items is not None:
        check_positive_int(max_items, "max_items")
    if budgets is not None:
        budgets = _check_budgets(budgets)
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
    rows: Sequence[int] | None = None,
    max_rows: Sequence[int] | None = None,
) -> list[Batch]:
    """Pack items into batches, each with the smallest budget that holds it.

    output_tokens: tokens of each item (an empty item is one, too). frames: frames of each item, bounded by `max_frames`
    per batch (optional). rows: patch rows of each item, and max_rows: how many the graph of each budget takes, in the
    order of the sorted budgets (optional): where tokens do not say how many rows there are, a batch needs a budget that
    holds both. policy "greedy": fill a batch with the sorted items while they fit the largest budget; "optimal": the
    smallest sum of budgets, then the fewest batches. That is exact for up to 12 items; for more, it is a bounded search
    that is never worse than the best cut of the sorted items into consecutive batches.

    Batches that begin with the smallest item come first; items that fit no graph come last, alone, with budget None.
    Every index appears once, and equal arguments give equal batches. Raises ValueError (TypeError for a wrong kind)
    naming the argument.

    >>> [batch.indices for batch in plan_batches([3, 15, 24], [16, 32], 4, policy="optimal")]
    [(0, 2), (1,)]
    >>> plan_batches([30, 30, 200], [64, 128, 256], max_items=8, policy="greedy")
    [Batch(indices=(0, 1), budget=64), Batch(indices=(2,), budget=256)]
    """
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy: expected one of {POLICIES}, got {policy!r}")
    tokens = _check_counts(output_tokens, "output_tokens")
    frames = [0] * len(tokens) if frames is None else _check_counts(frames, "frames")
    if len(frames) != len(tokens):
        raise ValueError(f"frames: expected one per item, {len(tokens)}, got {len(frames)}")
    max_frames = sum(frames) if max_frames is None else check_positive_int(max_frames, "max_frames")
    max_items = check_positive_int(max_items, "max_items")
    budgets = _check_budgets(budgets)
    rows, max_rows = _check_rows(rows, max_rows, len(tokens), budgets)

    sizes = list(zip(tokens, frames, rows, strict=True))
    capacity = Capacity(tuple(budgets), tuple(max_rows), max_items, max_frames)
    order = sorted(range(len(sizes)), key=tokens.__getitem__)  # stable: equal sizes keep their order
    fits = [capacity.level(1, *size) is not None for size in sizes]
    fitting = [i for i in order if fits[i]]
    groups = (greedy if policy == "greedy" else pack)([sizes[i] for i in fitting], capacity)
    together = [tuple(fitting[place] for place in group) for group in groups]
    alone = [(i,) for i in order if not fits[i]]
    return [
        Batch(indices, capacity.budget_for([sizes[i] for i in indices]), tokens=sum(tokens[i] for i in indices))
        for indices in together + alone
    ]


def padding_waste(batches: Sequence[Batch], output_tokens: Sequence[int] | None = None) -> float:
    """Share of the tokens computed by replays that is padding; items that run eagerly do not count.

    output_tokens: tokens of each item, as in `plan_batches`; None: the batches' own. 0 without replays.

    >>> padding_waste([Batch((0, 1), 64), Batch((2,), None)], [30, 18, 999])
    0.25
    """
    replays = [(batch, batch.budget) for batch in batches if batch.budget is not None]
    computed = sum(budget for _, budget in replays)
    if output_tokens is None:
        used = sum(batch.tokens for batch, _ in replays)
    else:
        used = sum(output_tokens[i] for batch, _ in replays for i in batch.indices)
    return 1 - used / computed if computed else 0.0


def _check_budgets(budgets: Sequence[int]) -> list[int]:
    """Sorted, each once; raises when one is no positive integer or there is none."""
    checked = sorted({check_positive_int(budget, f"budgets[{i}]") for i, budget in enumerate(budgets)})
    if not checked:
        raise ValueError("budgets: expected at least one, got none")
    return checked


def _check_counts(counts: Sequence[int], name: str) -> list[int]:
    return [count if count == 0 else check_positive_int(count, f"{name}[{i}]") for i, count in enumerate(counts)]


def _check_rows(rows, max_rows, count: int, budgets: list[int]) -> tuple[list[int], list[int]]:
    """Both given or neither; one row count per item, one growing capacity per budget."""
    if (rows is None) != (max_rows is None):
        raise ValueError("rows: give rows and max_rows together")
    if rows is None:
        return [0] * count, [0] * len(budgets)
    rows, max_rows = _check_counts(rows, "rows"), _check_counts(max_rows, "max_rows")
    if len(rows) != count:
        raise ValueError(f"rows: expected one per item, {count}, got {len(rows)}")
    if len(max_rows) != len(budgets) or max_rows != sorted(max_rows):
        raise ValueError(f"max_rows: expected one per budget, {len(budgets)}, none below the last, got {max_rows}")
    return rows, max_rows
