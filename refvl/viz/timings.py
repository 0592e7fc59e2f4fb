"""Where the seconds of a run go."""

from matplotlib.axes import Axes

from refvl.trace import Trace
from refvl.viz.style import STAGE_COLORS, axes_or_new


def plot_stage_timings(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """One bar per stage, in milliseconds, with the shapes that it made."""
    rows = trace.rows()
    ax = axes_or_new(ax, figsize=(9, 0.32 * len(rows) + 1.2))
    names, milliseconds = [stage for stage, _, _ in rows], [seconds * 1e3 for _, _, seconds in rows]
    bars = ax.barh(names, milliseconds, color=STAGE_COLORS)
    labels = [f"{ms:.1f} ms   {shapes}" for ms, (_, shapes, _) in zip(milliseconds, rows, strict=True)]
    ax.bar_label(bars, labels, padding=4, size=8)
    ax.set(xlabel="milliseconds", xlim=(0, max(milliseconds) * 2.2))
    ax.invert_yaxis()
    ax.set_title(f"{sum(milliseconds):.0f} ms in all, {trace.ttft * 1e3:.0f} ms to the first token")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
