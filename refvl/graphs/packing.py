"""Packing: which items share a replay, so that the summed budgets are small.

    greedy   a group takes the next item while the largest budget holds it: one look at each item
    cut      the sorted items are cut into consecutive groups: the best cut, by dynamic programming

`refvl.graphs.search` goes beyond: there, any items may share a group. An item is (output tokens, frames, patch rows);
a group is a list of places in the sorted items, and a packing is a list of groups.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Item = tuple[int, int, int]
Group = list[int]
Value = tuple[int, int]  # summed budgets, number of groups: a packing is better if this is smaller


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of one replay. max_rows: the patch rows that the graph of each budget takes."""

    budgets: tuple[int, ...]
    max_rows: tuple[int, ...]
    max_items: int
    max_frames: int

    def level(self, count: int, tokens: int, frames: int, rows: int) -> int:
        """Return the index of the smallest budget that holds so much, or the number of budgets if none does."""
        if count > self.max_items or frames > self.max_frames:
            return len(self.budgets)
        return max(bisect.bisect_left(self.budgets, tokens), bisect.bisect_left(self.max_rows, rows))

    def budget_for(self, items: Sequence[Item]) -> int | None:
        """Return the smallest budget that holds all of `items`, or None."""
        level = self.level(len(items), *map(sum, zip(*items, strict=True)))
        return self.budgets[level] if level < len(self.budgets) else None

    def value(self, items: Sequence[Item], groups: Iterable[Group]) -> Value:
        """Return what a packing costs."""
        budgets = [self.budget_for([items[i] for i in group]) or 0 for group in groups]
        return sum(budgets), len(budgets)


def greedy(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """Pack the sorted items in order: a group ends where the next item no longer fits the largest budget."""
    groups: list[Group] = []
    held = (0, 0, 0)
    for i, item in enumerate(items):
        more = add(held, item)
        if groups and capacity.level(len(groups[-1]) + 1, *more) < len(capacity.budgets):
            groups[-1].append(i)
            held = more
        else:
            groups.append([i])
            held = item
    return groups


def cut(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """Return the best way to cut the sorted items into consecutive groups.

    best[k] is (summed budgets, groups, start of the last group) of the first k items. Fewer items never cost more, so
    the longest last group within a budget is the best one, and its start only moves forward.
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


def add(a: Item, b: Item) -> Item:
    """Return the size of two items together."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
