"""Data-parallel encoding: the items of each rank, the gathered rows, and the speed-up.

plot_assignment     one bar per rank with its items, hatched while the rank waits for the slowest one
plot_gather         the rows of an all-gather, rank by rank with padding, above the caller's order
plot_speed_up       the speed-up over the number of ranks
"""

from collections.abc import Mapping, Sequence
from itertools import islice

from matplotlib.axes import Axes

from refvl.serving.parallel import Assignment, get_count_assignment, get_load_balance_assignment, get_speed_up
from refvl.viz.bars import item_bars, outline_bar
from refvl.viz.style import STAGE_COLORS, axes_or_new, headed
from refvl.viz.windows import sequence_colors

RULES = {"by size": get_load_balance_assignment, "by count": get_count_assignment}


def plot_assignment(
    sizes: Sequence[int], assignment: Assignment, *, title: str = "", unit: str = "patches", ax: Axes | None = None
) -> Axes:
    """Draw one bar per rank, with its items in order of assignment, numbered by arrival;
    hatching marks waiting.

    sizes: the size of each item, in `unit`. assignment: the result of
    `get_load_balance_assignment`.
    """
    order, counts, loads = assignment
    ax = axes_or_new(ax, figsize=(9, 0.34 * len(counts) + 1.3))
    colors, longest = sequence_colors(len(sizes)), max([1, *loads])
    for rank, (count, load, own) in enumerate(zip(counts, loads, _by_rank(order, counts), strict=True)):
        item_bars(ax, rank, own, sizes, colors, widest=longest, end=longest)
        ax.text(1.01 * longest, rank, f"{count} item{'s' * (count != 1)}, {load} {unit}", size=8, va="center")
    ax.set_yticks(range(len(counts)), [f"rank {rank}" for rank in range(len(counts))])
    right = max(1.25 * longest, ax.get_xlim()[1])  # an axis shared with another figure keeps that figure's width
    ax.set(xlabel=f"{unit} (hatched: waiting)", xlim=(0, right), ylim=(len(counts) - 0.5, -0.5))
    report = f"{get_speed_up(loads):.1f} times as fast on {len(counts)} ranks"
    ax.set_title(headed(title, report), fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _by_rank(order: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Return the items of each rank."""
    items = iter(order)
    return [list(islice(items, count)) for count in counts]


def plot_gather(tokens: Sequence[int], assignment: Assignment, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the gathered rows by rank, padded to those of the longest rank (above),
    and the caller's items (below).

    tokens: the output tokens of each item. assignment: which rank encoded which item.
    """
    order, counts, _ = assignment
    ax, colors = axes_or_new(ax, figsize=(9, 2)), sequence_colors(len(tokens))
    by_rank = _by_rank(order, counts)
    longest = max([1, *(sum(tokens[i] for i in own) for own in by_rank)])
    total = longest * len(counts)
    for rank, own in enumerate(by_rank):
        left = rank * longest
        item_bars(ax, 0, own, tokens, colors, widest=total, left=left, end=left + longest)
        outline_bar(ax, 0, left, longest)
        ax.text(left + longest / 2, -0.47, f"rank {rank}", size=8, ha="center")
    item_bars(ax, 1.1, range(len(tokens)), tokens, colors, widest=total)
    ax.set_yticks([0, 1.1], ["gathered", "returned"])
    ax.set(xlabel="rows (output tokens; hatched: padding)", xlim=(0, max(total, ax.get_xlim()[1])), ylim=(1.6, -0.75))
    report = f"{total} rows sent for {sum(tokens)} tokens, {1 - sum(tokens) / total:.0%} padding"
    ax.set_title(headed(title, report), fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_speed_up(speed_up: Mapping[str, Mapping[int, float]], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Plot the speed-up against the number of ranks, which is the ideal speed-up (dashed line).

    speed_up: {name of a line: {ranks: speed-up over one rank}}.
    """
    ax = axes_or_new(ax, figsize=(6.5, 4))
    ranks = sorted({n for curve in speed_up.values() for n in curve})
    ax.plot(ranks, ranks, "--", color="0.5", label="ideal")
    for (name, curve), color, marker in zip(speed_up.items(), STAGE_COLORS, "osd^v<>", strict=False):
        ax.plot(list(curve), list(curve.values()), color=color, marker=marker, ms=5, lw=1.8, label=name)
    ax.set(xlabel="ranks", ylabel="speed-up over one rank", title=title or "speed-up", xticks=ranks)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=9)
    return ax
