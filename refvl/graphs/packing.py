"""Which items share a replay, so that the summed budgets are smallest.

    cut      the sorted items cut into consecutive groups: the best cut, by dynamic programming
    fill     the largest item first, each budget filled with the largest items that still fit, the least waste wins
    search   every partition, by dynamic programming over sets of items: exact, for few
    improve  groups of a good partition taken apart, a few items at a time, and searched again

Items are (output tokens, frames, patch rows), sorted; a group is a list of their places, a packing a list of groups.
"""

import bisect
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import numpy as np

EXACT_ITEMS = 12
SEARCHED_ITEMS, ROUNDS, FILLS = 10, 8, 32  # beyond: items searched together, how often, and fills to start from
SCANNED_ITEMS = 16  # of a fill: how many are tried when tokens fit, but frames or rows do not
MOST_UNITS = 2**14  # of the table of lower bounds
COUNT_BASE, NEVER = 2**8, 2**60  # of a value in one integer: more than the groups; more than any value

Item = tuple[int, int, int]
Group = list[int]
Value = tuple[int, int]  # summed budgets, number of groups: what is made small, in this order


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replay holds. max_rows: patch rows that the graph of each budget takes."""

    budgets: tuple[int, ...]
    max_rows: tuple[int, ...]
    max_items: int
    max_frames: int

    def level(self, count: int, tokens: int, frames: int, rows: int) -> int | None:
        """Index of the smallest budget that holds so much; None if none does."""
        if count > self.max_items or frames > self.max_frames:
            return None
        smallest = max(bisect.bisect_left(self.budgets, tokens), bisect.bisect_left(self.max_rows, rows))
        return smallest if smallest < len(self.budgets) else None

    def budget_for(self, items: Sequence[Item]) -> int | None:
        """The smallest budget that holds all of `items`; None if none does."""
        level = self.level(len(items), *map(sum, zip(*items, strict=True)))
        return None if level is None else self.budgets[level]

    def value(self, items: Sequence[Item], groups: Iterable[Group]) -> Value:
        budgets = [self.budget_for([items[i] for i in group]) or 0 for group in groups]
        return sum(budgets), len(budgets)

    def lower_bound(self, count: int, tokens: int) -> Value:
        """No packing of `count` items with `tokens` in all is better than this."""
        if not count:
            return 0, 0
        unit, least = math.gcd(*self.budgets), -(-count // self.max_items)
        units, groups = -(-max(tokens, 1) // unit), 1
        total = units * unit
        if units <= MOST_UNITS:
            total, groups = _covers(self.budgets, 1 << (units - 1).bit_length())[units]
        smallest = least * self.budgets[0]
        return max(total, smallest), max(least, groups if total >= smallest else 1)


@lru_cache(maxsize=16)
def _covers(budgets: tuple[int, ...], most: int) -> list[Value]:
    """The smallest sum of budgets, and the fewest of them, that make up 0 ... `most` times their common divisor."""
    unit, covers = math.gcd(*budgets), [(0, 0)]
    for units in range(1, most + 1):
        rests = ((b, *covers[max(0, units - b // unit)]) for b in budgets)
        covers.append(min((b + total, groups + 1) for b, total, groups in rests))
    return covers


def pack(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """The best packing found; of equally good ones the cut. Every item must fit the largest budget alone."""
    if not items:
        return []
    value = partial(capacity.value, items)
    best = cut(items, capacity)
    if value(best) > capacity.lower_bound(len(items), sum(tokens for tokens, _, _ in items)):
        few = len(items) <= EXACT_ITEMS
        fills = 2 if few else max(1, min(FILLS, 4000 // len(items)))
        best = min(best, *(fill(items, capacity, seed) for seed in range(fills)), key=value)
        best = (search if few else improve)(items, capacity, best)
    return sorted(sorted(group) for group in best)


def greedy(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """The sorted items in order: a group ends where the next item no longer fits the largest budget."""
    groups: list[Group] = []
    held = (0, 0, 0)
    for i, item in enumerate(items):
        more = _add(held, item)
        if groups and capacity.level(len(groups[-1]) + 1, *more) is not None:
            groups[-1].append(i)
            held = more
        else:
            groups.append([i])
            held = item
    return groups


def cut(items: Sequence[Item], capacity: Capacity) -> list[Group]:
    """The best way to cut the sorted items into consecutive groups.

    best[k] is (summed budgets, groups, start of the last group) of the first k items. Fewer items never cost more, so
    of all last groups within one budget the longest is best, and its start only moves forward.
    """
    tokens, frames, rows = (list(itertools.accumulate(column, initial=0)) for column in zip(*items, strict=True))
    starts, best = [0] * len(capacity.budgets), [(0, 0, 0)]
    for stop in range(1, len(items) + 1):
        options = []
        for level, budget in enumerate(capacity.budgets):
            for start in range(starts[level], stop):
                held = tokens[stop] - tokens[start], frames[stop] - frames[start], rows[stop] - rows[start]
                needed = capacity.level(stop - start, *held)
                if needed is not None and needed <= level:
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


def fill(items: Sequence[Item], capacity: Capacity, seed: int = 0) -> list[Group]:
    """Take the largest item left, fill every budget that holds it, keep the one with the least waste, and so on.

    seed: 0 always takes the largest item that still fits; others now and then the one before it.
    """
    chance = random.Random(seed).random if seed else lambda: 1.0
    left, sizes, groups = list(range(len(items))), [tokens for tokens, _, _ in items], []
    while left:
        smallest = capacity.level(1, *items[left[-1]]) or 0
        options = (
            _fill_one(items, left, sizes, capacity, level, chance) for level in range(smallest, len(capacity.budgets))
        )
        _, _, places = min(options)
        groups.append([left[place] for place in places])
        for place in places:  # from the last to the first
            del left[place], sizes[place]
    return groups


def _fill_one(items, left, sizes, capacity: Capacity, level: int, chance) -> tuple[int, int, list[int]]:
    """(waste, minus tokens, places in `left`) of one budget, filled from the largest item downwards."""
    place, budget = len(left) - 1, capacity.budgets[level]
    places, held = [place], items[left[place]]
    while len(places) < capacity.max_items:
        last = bisect.bisect_right(sizes, budget - held[0], 0, place) - 1
        if last > 0 and chance() < 0.25:
            last -= 1
        for place in range(last, max(-1, last - SCANNED_ITEMS), -1):
            more = _add(held, items[left[place]])
            if more[1] <= capacity.max_frames and more[2] <= capacity.max_rows[level]:
                places.append(place)
                held = more
                break
        else:
            break
    return budget - held[0], -held[0], places


def search(items: Sequence[Item], capacity: Capacity, known: list[Group]) -> list[Group]:
    """The best of all partitions; `known`, a packing that it may improve, where that is as good.

    Sets of items are bits of an integer. What is best for a set follows from smaller ones: its last item is in some
    group, and what is best for the rest is known by then. Time and memory grow as 3 to the power of the items.
    """
    sets = np.arange(1 << len(items))
    members = sets[:, None] >> np.arange(len(items)) & 1
    tokens, frames, rows = (members @ np.array(items)).T
    level = np.maximum(np.searchsorted(capacity.budgets, tokens), np.searchsorted(capacity.max_rows, rows))
    fits = (members.sum(1) <= capacity.max_items) & (frames <= capacity.max_frames) & (level < len(capacity.budgets))
    costs = np.where(fits, np.array([*capacity.budgets, 0])[level] * COUNT_BASE + 1, NEVER)
    best = np.zeros_like(costs)  # (summed budgets) * COUNT_BASE + number of groups, of each set
    for last in (1 << i for i in range(len(items))):
        others, parts, starts = _subsets(last)
        best[last : 2 * last] = np.minimum.reduceat(costs[parts | last] + best[others ^ parts], starts)
    total, count = capacity.value(items, known)
    if best[-1] >= total * COUNT_BASE + count:
        return known
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
    """(sets, parts): each subset of each set of items below `count`, a power of two; where each set's subsets begin."""
    sets = parts = np.zeros(1, dtype=np.int64)
    for i in range(count.bit_length() - 1):
        sets, parts = (
            np.concatenate([sets, sets | 1 << i, sets | 1 << i]),
            np.concatenate([parts, parts, parts | 1 << i]),
        )
    order = sets.argsort(kind="stable")
    return sets[order], parts[order], np.searchsorted(sets[order], np.arange(count))


def improve(items: Sequence[Item], capacity: Capacity, groups: list[Group]) -> list[Group]:
    """Take the most wasteful group and others by lot apart, up to SEARCHED_ITEMS, and pack these in the best way."""

    def waste(group: Group) -> int:
        held = [items[i] for i in group]
        return (capacity.budget_for(held) or 0) - sum(tokens for tokens, _, _ in held)

    lot = random.Random(0)
    for turn in range(ROUNDS):
        groups = lot.sample(groups, len(groups))
        if turn % 2:
            groups.sort(key=waste, reverse=True)
        taken: list[Group] = []
        kept: list[Group] = []
        count = 0
        for group in groups:
            fits = count + len(group) <= SEARCHED_ITEMS
            (taken if fits else kept).append(group)
            count += len(group) * fits
        places = sorted(itertools.chain(*taken))
        known = [[places.index(i) for i in group] for group in taken]
        again = search([items[i] for i in places], capacity, known)
        groups = kept + [[places[i] for i in group] for group in again]
    return groups


def _add(a: Item, b: Item) -> Item:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
