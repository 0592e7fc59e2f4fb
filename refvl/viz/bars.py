"""Bars end to end: numbered items that share a replay or a device, and the stages of a run."""

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes

from refvl.viz.style import STAGE_COLORS, UNUSED, centered, ink_on


def item_bars(
    ax: Axes, row: float, items: Iterable[int], sizes, colors, *, widest: float, left=0, end: float | None = None
) -> None:
    """Draw numbered items end to end from `left`, each as long as its size,
    and hatch the rest up to `end` if it is given.

    sizes, colors: those of each item. A bar much shorter than `widest` has no number.
    """
    for i in items:
        ax.barh(row, sizes[i], left=left, color=colors[i], edgecolor="white", height=0.7)
        if sizes[i] >= 0.02 * widest:
            ink = ink_on(colors[i])
            centered(ax, left + sizes[i] / 2, row, str(i), color=ink, size=8)
        left += sizes[i]
    if end is not None:
        ax.barh(row, end - left, left=left, height=0.7, **UNUSED)


def outline_bar(ax: Axes, row: float, left: float, size: float, *, linewidth=1.3, linestyle="-") -> None:
    """Draw a frame of `size` around a row's bars, from `left`."""
    look = {"facecolor": "none", "edgecolor": "black", "linewidth": linewidth, "linestyle": linestyle}
    ax.barh(row, size, left=left, height=0.7, **look)


def stage_bars(ax: Axes, seconds: Mapping[str, Mapping[str, float]], *, title: str) -> None:
    """Draw a bar per name with its stages end to end, in milliseconds.

    seconds: {name: {stage: seconds}}.
    """
    stages = dict.fromkeys(stage for of_name in seconds.values() for stage in of_name)
    left = [0.0] * len(seconds)
    for stage, color in zip(stages, STAGE_COLORS, strict=False):
        widths = [of_name.get(stage, 0.0) * 1e3 for of_name in seconds.values()]
        ax.barh(list(seconds), widths, left=left, color=color, label=stage)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    ax.invert_yaxis()
    ax.set(xlabel="milliseconds", title=title)
    ax.spines[["top", "right"]].set_visible(False)
