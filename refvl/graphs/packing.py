"""Packing: choose which items share a replay, so that the sum of the budgets is small.

    greedy   a group takes the next item while the largest budget fits the group: one pass over the items
    cut      the best cut of the sorted items into consecutive groups, by dynamic programming
    search   for few items: the best of all partitions, by dynamic programming over sets of items

`pack`, the policy "optimal", runs `search` for up to 12 items, and `cut` for any number.

An item is (output tokens, frames, patch rows); a group is a list of indices of sorted items, and a
packing is a list of groups.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

Item = tuple[int, int, int]
Group = list[int]

EXACT_ITEMS = 12
# more than the number of groups in any search; a cost is (sum of budgets) * COUNT_BASE + (number of groups)
COUNT_BASE = 2**8
NEVER = 2**60  # more than the cost of any packing


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of one replay.

    max_rows: the number of patch rows that fit the graph of each budget. frames: the maximum
    number of frames of each budget, in non-increasing order; empty: max_frames for all.
    """

    budgets: tuple[int, ...]
    max_rows: tuple[int, ...]
    max_items: int
    max_frames: int
    frames: tuple[int, ...] = ()

    def level(self, count: int, tokens: int, frames: int, rows: int) -> int:
        """Return the index of the smallest budget that fits these counts, or the number of budgets if none does."""
        if count > self.max_items or frames > self.max_frames:
            return len(self.budgets)
        level = max(bisect.bisect_left(self.budgets, tokens), bisect.bisect_left(self.max_rows, rows))
        return level if frames <= self.frames_at(level) else len(self.budgets)

    def frames_at(self, level: int) -> int:
        """Return the maximum number of frames in the budget with this index."""
        return self.frames[level] if level < len(self.frames) else self.max_frames

    def budget_for(self, items: Sequence[Item]) -> int | None:
        """Return the smallest budget that fits all of `items`, or None if none does."""
        level = self.level(len(items), *map(sum, zip(*items, strict=True)))
        return self.budgets[level] if level < len(self.budgets) else None

    def value(self, items: Sequence[Item], groups: Sequence[Group]) -> tuple[int, int]:
        """Return the value of a packing: the sum of its budgets, and its number of groups; less is better."""
        return sum(self.budget_for([items[i] for i in group]) or 0 for group in groups), len(groups)


def greedy(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """Pack the sorted items in order; a group ends when the next item no longer fits into the largest budget."""
    groups: list[Group] = []
    held = (0, 0, 0)
    for i, item in enumerate(items):
        more = held[0] + item[0], held[1] + item[1], held[2] + item[2]
        if groups and capacity.level(len(groups[-1]) + 1, *more) < len(capacity.budgets):
            groups[-1].append(i)
            held = more
        else:
            groups.append([i])
            held = item
    return groups


def cut(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """Return the best cut of the sorted items into consecutive groups.

    best[k] is (sum of budgets, number of groups, start of the last group) for the first k items.
    Fewer items never cost more, so for each budget, the longest last group that fits is the best,
    and the group's start only moves forward.
    """
    tokens, frames, rows = (list(itertools.accumulate(column, initial=0)) for column in zip(*items, strict=True))
    starts = [0] * len(capacity.budgets)
    best = [(0, 0, 0)]
    for stop in range(1, len(items) + 1):
        options = []
        for level, budget in enumerate(capacity.budgets):
            for start in range(starts[level], stop):
                held = tokens[stop] - tokens[start], frames[stop] - frames[start], rows[stop] - rows[start]
                if capacity.level(stop - start, *held) <= level:
                    options.append((best[start][0] + budget, best[start][1] + 1, start))
                    break
            else:
                start = stop
            starts[level] = start
        best.append(min(options))
    cuts = [len(items)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][2])
    return [list(range(a, b)) for a, b in itertools.pairwise(cuts[::-1])]


def pack(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """Return the best packing of at most EXACT_ITEMS items, or the best cut of more items.

    items: at least one item; each must fit the largest budget alone. If a cut is as good as the
    best partition, the cut is returned.
    """
    best = cut(items, capacity)
    if len(items) <= EXACT_ITEMS:
        best = min(best, search(items, capacity), key=lambda groups: capacity.value(items, groups))
    return sorted(best)


def search(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """Return the partition with the smallest sum of budgets, then the fewest groups.

    The bits of an integer represent a set of items. The best cost of a set follows from smaller
    sets, because its last item is in some group, and the best cost of the items outside that
    group is already known. Time and memory grow as 3 to the power of the number of items.
    """
    sets = np.arange(1 << len(items))
    members = sets[:, None] >> np.arange(len(items)) & 1
    tokens, frames, rows = (members @ np.array(items, dtype=np.int64).reshape(-1, 3)).T
    level = np.maximum(np.searchsorted(capacity.budgets, tokens), np.searchsorted(capacity.max_rows, rows))
    most = np.array([capacity.frames_at(i) for i in range(len(capacity.budgets) + 1)])[level]
    fits = (members.sum(1) <= capacity.max_items) & (frames <= most) & (level < len(capacity.budgets))
    costs = np.where(fits, np.array([*capacity.budgets, 0])[level] * COUNT_BASE + 1, NEVER)  # each set as one group
    best = np.zeros_like(costs)
    for last in (1 << i for i in range(len(items))):
        others, parts, starts = _subsets(last)
        best[last : 2 * last] = np.minimum.reduceat(costs[parts | last] + best[others ^ parts], starts)

    groups: list[Group] = []
    left = len(sets) - 1
    while left:
        inside = sets[1:][sets[1:] & ~left == 0]
        group = int(inside[np.argmax(costs[inside] + best[left ^ inside] == best[left])])
        groups.append(np.flatnonzero(members[group]).tolist())
        left ^= group
    return groups


@cache
def _subsets(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (sets, parts, starts): every set with each of its subsets, as bit masks below `count`, sorted by set.

    count: a power of two. starts: the index of the first pair of each set.
    """
    sets = parts = np.zeros(1, dtype=np.int64)
    for i in range(count.bit_length() - 1):
        bit = 1 << i
        sets = np.concatenate([sets, sets | bit, sets | bit])
        parts = np.concatenate([parts, parts, parts | bit])
    order = sets.argsort(kind="stable")
    return sets[order], parts[order], np.searchsorted(sets[order], np.arange(count))
