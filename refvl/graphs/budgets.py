"""Budgets: the sizes for which graphs are captured, and the items that share one replay.

A captured graph has fixed sizes, so one graph is captured per token budget. By default, the budgets
double from the smallest sensible output to the largest allowed output. Arriving items are packed
into the smallest budget that fits them. A replay always computes the whole budget; the unused share
is the padding waste.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from refvl.checks import check_positive_int, check_positive_ints
from refvl.graphs.packing import Capacity, greedy, pack

PACKERS = {"greedy": greedy, "optimal": pack}
POLICIES = tuple(PACKERS)
FRAME_TOKENS = 2**16
"""This limit exists because a captured attention kernel launches thread blocks for `max_frames` frames, each assumed to
be as long as the whole budget. But all frames together are at most that long, so only one thread block in `max_frames`
has work, and the empty ones take time. With 64 frames, 4,096 tokens and 16 heads, a layer launches 131,072 thread
blocks, of which 2,048 have work; with 16 frames, it launches 32,768. Batches with more frames run eagerly, which costs
little at this size, because the GPU needs more time than the host.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that run together, as indices into the caller's order; if `budget` is None, they run eagerly.

    path: the path on which the items run, if the encoder has several. tokens: the number of
    output tokens of the items on that path.
    """

    indices: tuple[int, ...]
    budget: int | None
    path: str = field(default="", repr=False)
    tokens: int = field(default=0, repr=False, compare=False)  # follows from the indices, so it is not compared


@dataclass(frozen=True, slots=True)
class PairedBatch:
    """Items that run together on all paths.

    budgets: the budget on each path, or None for an eager run; an unused path is absent.
    """

    indices: tuple[int, ...]
    budgets: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one path's graphs: sorted budgets in output tokens, and the maximum items and frames of one replay.

    frame_tokens: the maximum product of frames and output tokens in a capture; if None, every
    budget allows `max_frames` frames.
    """

    budgets: tuple[int, ...]
    max_items: int
    max_frames: int
    frame_tokens: int | None = field(default=None, repr=False, compare=False)

    def frames_of(self, budget: int) -> int:
        """Return the maximum number of frames in one replay of this budget."""
        return min(self.max_frames, max(1, (self.frame_tokens or self.max_frames * budget) // budget))


def generate_budgets(min_budget: int, max_budget: int) -> list[int]:
    """Return budgets that double from `min_budget` while they stay below `max_budget`, which is always the last budget.

    Raises ValueError for budgets below 1.

    >>> generate_budgets(64, 600)
    [64, 128, 256, 512, 600]
    """
    min_budget, max_budget = check_positive_ints(min_budget=min_budget, max_budget=max_budget)
    budgets = []
    while min_budget < max_budget:
        budgets.append(min_budget)
        min_budget *= 2
    return [*budgets, max_budget]


def infer_limits(
    min_budget: int, max_budget: int, *, budgets: Sequence[int] | None = None,
    max_items: int | None = None, max_frames: int | None = None,
) -> Limits:  # fmt: skip
    """Infer the limits that the user does not set. min_budget, max_budget: the values that the model's sizes suggest.

    Every item needs at least one token in every graph, so `max_items` must not exceed the
    smallest budget. If `budgets` is None, a large `max_items` raises the smallest budget.
    Repeated budgets count once. By default, a replay may contain as many frames as items, but
    at least 32; large budgets allow fewer frames (see `FRAME_TOKENS`). Raises ValueError if
    limits contradict each other. Upstream: the constructor of `EncoderCudaGraphManager`.
    """
    min_budget, max_budget = check_positive_ints(min_budget=min_budget, max_budget=max_budget)
    if min_budget > max_budget:
        raise ValueError(f"min_budget: must not exceed max_budget, got {min_budget} and {max_budget}")
    if max_items is not None:
        max_items = check_positive_int(max_items, "max_items")
    if budgets is not None:
        budgets = _check_budgets(budgets)
    else:
        budgets = generate_budgets(max(min_budget, max_items or 1), max_budget)
    if max_items is None:
        max_items = min(max(1, max_budget // min_budget), budgets[0])
    if max_items > budgets[0]:
        raise ValueError(f"max_items: must not exceed the smallest budget, got {max_items} for budgets {list(budgets)}")
    if max_frames is not None:
        return Limits(tuple(budgets), max_items, check_positive_int(max_frames, "max_frames"))
    return Limits(tuple(budgets), max_items, max(max_items, 32), FRAME_TOKENS)


def plan_batches(
    output_tokens: Sequence[int], budgets: Sequence[int], max_items: int, *, policy: str = "greedy",
    frames: Sequence[int] | None = None, max_frames: int | None = None,
) -> list[Batch]:  # fmt: skip
    """Pack items into batches, each with the smallest budget that fits it.

    output_tokens: the number of tokens of each item, which may be 0. frames: the number of
    frames of each item (optional); `max_frames` limits their sum per batch. policy: "greedy"
    adds sorted items to a batch while they fit the largest budget. "optimal" minimises the sum
    of budgets, then the number of batches. For up to 12 items, it searches all partitions; longer
    lists are sorted and cut into consecutive batches.

    Batches are in the order of their smallest items; items that fit no graph come last, each
    alone, with budget None. Every index appears once, and equal arguments give equal batches.
    Raises ValueError for an unknown policy, for limits below 1, or for lists of different
    lengths.

    >>> [batch.indices for batch in plan_batches([3, 15, 24], [16, 32], 4, policy="optimal")]
    [(0, 2), (1,)]
    >>> plan_batches([30, 30, 200], [64, 128, 256], max_items=8, policy="greedy")
    [Batch(indices=(0, 1), budget=64), Batch(indices=(2,), budget=256)]
    """
    check_policy(policy)
    frames = [0] * len(output_tokens) if frames is None else frames
    max_frames = sum(frames) if max_frames is None else check_positive_int(max_frames, "max_frames")
    max_items = check_positive_int(max_items, "max_items")
    budgets = _check_budgets(budgets)

    items = enumerate(zip(output_tokens, frames, strict=True))
    sizes = {i: (0, tokens, count) for i, (tokens, count) in items}
    return pack_items(sizes, Capacity(tuple(budgets), (0,) * len(budgets), max_items, max_frames), policy)


def pack_items(
    sizes: Mapping[int, tuple[int, int, int]], capacity: Capacity, policy: str, path: str = ""
) -> list[Batch]:
    """Pack items as `plan_batches` does, without its checks. sizes: (patch rows, output tokens, frames) by index.

    The token count does not determine the row count, so both must fit the graph of a batch's
    budget.
    """
    items = {i: (tokens, frames, rows) for i, (rows, tokens, frames) in sizes.items()}
    order = sorted(items, key=lambda i: items[i][0])  # stable: equal sizes keep their order
    fits = {i: capacity.budget_for([items[i]]) is not None for i in order}
    fitting = [i for i in order if fits[i]]
    packed = [[place] for place in range(len(fitting))]
    if len(fitting) > 1:  # a single item cannot share its replay
        packed = PACKERS[policy]([items[i] for i in fitting], capacity)

    groups = [[fitting[place] for place in group] for group in packed]
    groups += [[i] for i in order if not fits[i]]
    batches = []
    for group in groups:
        together = [items[i] for i in group]
        tokens = sum(tokens for tokens, _, _ in together)
        batches.append(Batch(tuple(group), capacity.budget_for(together), path, tokens))
    return batches


def plan_paired_batches(
    path_tokens: Sequence[Mapping[str, int]], budgets: Mapping[str, Sequence[int]], max_items: int
) -> list[PairedBatch]:
    """Pack items once for all paths, smallest first, while the tokens fit the largest budget of every path.

    path_tokens: the number of output tokens of each item on each path. budgets: the budgets of each
    path. An item that is too large for a path forms a separate batch: that path runs eagerly, and
    the other paths replay graphs. Upstream: the greedy plan of vLLM's dual-path manager.

    Raises ValueError if max_items is below 1.

    >>> plan_paired_batches([{"local": 162, "global": 169}, {"local": 0, "global": 169}],
    ...                     {"local": [81, 162, 324], "global": [169, 338]}, 8)
    [PairedBatch(indices=(1, 0), budgets={'local': 162, 'global': 338})]
    """
    max_items = check_positive_int(max_items, "max_items")

    def smallest_budgets(indices: Sequence[int]) -> dict[str, int | None]:
        tokens = {path: sum(path_tokens[i].get(path, 0) for i in indices) for path in budgets}
        return {path: min((b for b in budgets[path] if b >= n), default=None) for path, n in tokens.items() if n}

    groups: list[list[int]] = []
    for i in sorted(range(len(path_tokens)), key=lambda i: sum(path_tokens[i].values())):  # stable
        more = [*groups[-1], i] if groups else []
        if 0 < len(more) <= max_items and None not in smallest_budgets(more).values():
            groups[-1] = more
        else:
            groups.append([i])
    return [PairedBatch(tuple(group), smallest_budgets(group)) for group in groups]


def padding_waste(batches: Sequence[Batch], output_tokens: Sequence[int] | None = None) -> float:
    """Return the share of padding among the tokens that replays compute; items that run eagerly do not count.

    output_tokens: the tokens of each item, as in `plan_batches`; None: the numbers stored in the
    batches. Without replays, the share is 0.

    >>> padding_waste([Batch((0, 1), 64), Batch((2,), None)], [30, 18, 999])
    0.25
    """
    used = computed = 0
    for batch in batches:
        if batch.budget is not None:
            used += batch.tokens if output_tokens is None else sum(output_tokens[i] for i in batch.indices)
            computed += batch.budget
    return 1 - used / computed if computed else 0.0


def check_policy(policy: str) -> str:
    """Return the policy; raise ValueError unless it is one of `POLICIES`."""
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {POLICIES}, got {policy!r}")
    return policy


def _check_budgets(budgets: Sequence[int]) -> list[int]:
    """Return the sorted budgets without duplicates; raise an error unless they are one or more positive integers."""
    checked = {check_positive_int(budget, f"budgets[{i}]") for i, budget in enumerate(budgets)}
    if not checked:
        raise ValueError("budgets: expected at least one budget, got none")
    return sorted(checked)
