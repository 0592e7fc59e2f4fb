"""The time of each stage of a run, and how it grows; the measurements come from `benchmarks/`.

plot_stage_timings  one bar per stage of a trace
plot_stage_shares   one bar per question, its stages end to end
plot_cost_curves    costs over sizes, with fitted exponents
plot_roofline       operations per second against operations per byte, below the machine's limits
plot_gpu_estimates  matmuls, traffic and launches of a tower, as milliseconds of a GPU
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

from refvl.viz.bars import stage_bars
from refvl.viz.style import STAGE_COLORS, axes_or_new

if TYPE_CHECKING:
    from refvl.study.report import Trace


def plot_stage_timings(trace: "Trace", *, ax: Axes | None = None) -> Axes:
    """Draw one bar per stage, in milliseconds, with the shapes of its results."""
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


def plot_stage_shares(rows: Sequence[Mapping], *, ax: Axes | None = None) -> Axes:
    """Draw a bar per question with its stages. rows: a label `what`, and `seconds` by stage."""
    ax = axes_or_new(ax, figsize=(9, 0.5 * len(rows) + 1.6))
    stage_bars(ax, {row["what"]: row["seconds"] for row in rows}, title="stages of an answer")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    return ax


def plot_cost_curves(rows: Sequence[Mapping], *, ax: Axes | None = None) -> Axes:
    """Draw cost curves on logarithmic axes; the slope of a curve is its exponent.

    rows: the rows of one measurement, with the same `x`.
    """
    ax = axes_or_new(ax)
    for row, color in zip(rows, STAGE_COLORS, strict=False):
        xs, ms = [point["x"] for point in row["points"]], [point["ms"] for point in row["points"]]
        ax.loglog(xs, ms, "o-", color=color, ms=3, label=f"{row['curve']}: {row['time_exponent']:.2f}")
    ax.set(xlabel=rows[0]["x"], ylabel="milliseconds", title=f"by {rows[0]['x']}")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=9, frameon=False)
    ax.grid(alpha=0.25)
    return ax


def plot_roofline(measured: Mapping, *, ax: Axes | None = None) -> Axes:
    """Draw towers below a machine's roofline.

    measured: the `peaks` of a machine and its `towers`; each tower has `operations`, `bytes` and a
    time per dtype. In float32, the faster kernel of linear layers is shown.
    """
    ax, peaks = axes_or_new(ax, figsize=(8, 4.5)), measured["peaks"]
    intensity = np.geomspace(1, 1e3, 200)
    for dtype, color in (("float32", STAGE_COLORS[0]), ("bfloat16", STAGE_COLORS[1])):
        roof = np.minimum(peaks[dtype], intensity * peaks["bytes_per_s"]) / 1e9
        ax.loglog(intensity, roof, color=color, lw=1, label=f"{dtype}: best matmul, {peaks[dtype] / 1e9:.0f}")
        for row, marker in zip(measured["towers"], "ov^s<>Dp", strict=False):
            moved = sum(row["bytes"].values()) * (0.5 if dtype == "bfloat16" else 1)
            ways = ("float32", "onednn") if dtype == "float32" else (dtype,)
            rate = row["operations"] / min(row[way]["ms"] for way in ways) / 1e6
            label = f"{row['tower']}, {row['px']} px" if dtype == "float32" else None
            ax.plot(row["operations"] / moved, rate, marker, color=color, ms=6, ls="", label=label)
    ax.set(xlabel="operations per byte that kernels read or write", ylabel="10⁹ operations per second")
    ax.yaxis.set_major_formatter(LogFormatter())
    ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))  # as numbers, without powers of ten
    ax.set_title(f"towers below the roofline of {measured['device']}, one thread")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    ax.grid(alpha=0.25)
    return ax


def plot_gpu_estimates(rows: Sequence[Mapping], *, ax: Axes | None = None) -> Axes:
    """Draw estimated times of a tower on a GPU.

    rows: `px`, and milliseconds of `products`, `traffic` and `launches`, none of them measured.

    Products and traffic follow each other on the device; launches run in parallel on the host.
    """
    ax = axes_or_new(ax, figsize=(8, 3.8))
    places, width = np.arange(len(rows)), 0.38
    products, traffic, launches = ([row[name] for row in rows] for name in ("products", "traffic", "launches"))
    device, host = STAGE_COLORS[:2]
    ax.bar(places - width / 2, products, width, color=device, label="device: matmuls, attention")
    others = "device: memory traffic of all other kernels"
    ax.bar(places - width / 2, traffic, width, bottom=products, color=device, alpha=0.4, label=others)
    ax.bar(places + width / 2, launches, width, color=host, label="host: launches of an eager run")
    ax.set_xticks(places, [f"{row['px']} px" for row in rows])
    ax.set(ylabel="milliseconds, estimated", title="estimates, not measured")
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
