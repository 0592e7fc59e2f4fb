"""Encoder graphs: recorded operations, contents of the buffers, items that share a replay,
and padding waste.

plot_recording       the recorded operations in order, by kind, and which of them read a static buffer
plot_buffers         static buffers before a replay: the batch first, then padding
plot_packing         one bar per replay, its items side by side, the unused rest hatched
plot_waste           padding waste against the number of graphs
plot_replay_timings  eager calls against replays, from a measurement file
plot_launches        host and device, operation by operation, in an eager run and in one replay
plot_stale_errors    the effect of a buffer that is not refilled on operations and tokens
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.utils._pytree import tree_leaves

from refvl.graphs import Batch, TraceGraph, padding_waste
from refvl.graphs.recorder import Operation
from refvl.study.costs import launch_timeline
from refvl.viz.bars import item_bars, outline_bar
from refvl.viz.positions import grid_of_axes, strip_of_axes
from refvl.viz.style import HIGHLIGHT, KEPT, SEQUENCE_CMAP, STAGE_COLORS, axes_or_new, headed
from refvl.viz.windows import sequence_colors

_MARKS = "o^sDvP<>"  # series differ in marker as well as in colour
_WAYS = {  # columns of a measurement
    "eager": "eager",
    "planned": "eager, existing plan",
    "doubling": "replay, doubling budgets",
    "fitted": "replay, fitted budgets",
}


def plot_recording(graph: TraceGraph, buffers: Mapping[str, Tensor], *, ax: Axes | None = None) -> Axes:
    """Draw recorded operations from left to right, one row per kind,
    coloured if they read a static buffer.

    buffers: {name: tensor}; a name may cover several, as a tuple of tensors. Views of a buffer
    count as the buffer. Tensors of the recorded graph may have any shape.
    """
    kinds = [kind_of_operation(operation) for operation in graph.operations]
    rows = {kind: row for row, kind in enumerate(dict.fromkeys(kinds))}
    ax = axes_or_new(ax, figsize=(10, 0.24 * len(rows) + 1.4))
    ax.plot([rows[kind] for kind in kinds], "|", color="0.65", ms=7)
    for (name, tensors), color, marker in zip(buffers.items(), STAGE_COLORS, _MARKS, strict=False):
        readers = [i for i, operation in enumerate(graph.operations) if operation.reads(*tree_leaves(tensors))]
        ax.plot(readers, [rows[kinds[i]] for i in readers], marker, color=color, ms=6, label=f"reads {name}")
    ax.set_yticks(range(len(rows)), [f"{kind}  ({kinds.count(kind)})" for kind in rows], size=8)
    ax.set(xlabel="position in the recording", title=f"{len(kinds)} recorded operations", ylim=(len(rows) - 0.4, -0.6))
    ax.grid(axis="y", alpha=0.25)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    return ax


def kind_of_operation(operation: Operation) -> str:
    """Return the kind of an operation, `mul` for `aten.mul.Tensor`; very long names are cut."""
    name = str(operation.function).split(".")[1].strip("_")
    return name if len(name) <= 24 else f"{name[:23]}…"


def plot_launches(device_us: Sequence[float], launch_us: float, *, ax: Axes | None = None) -> Axes:
    """Draw three lanes, in microseconds: the host's launches, the device in an eager run,
    and the device in a replay.

    Arguments as in `launch_timeline`; a replay costs one launch.
    """
    ax = axes_or_new(ax, figsize=(9, 1.8))
    eager = launch_timeline(device_us, launch_us)
    host = [(number * launch_us, launch_us) for number in range(len(eager))]
    replay = [(launch_us + start, stop - start) for start, stop in launch_timeline(device_us, 0)]
    lanes = {"host": host, "device, eager": [(start, stop - start) for start, stop in eager], "device, replay": replay}
    for lane, (bars, color) in enumerate(zip(lanes.values(), ("0.6", HIGHLIGHT, KEPT), strict=True)):
        ax.broken_barh(bars, (lane - 0.35, 0.7), facecolors=color, edgecolor="white", linewidth=0.8)
    ax.set_yticks(range(3), lanes)
    ax.invert_yaxis()
    busy, ends = sum(device_us), (eager[-1][1], sum(replay[-1]))
    times = f"eager {ends[0]:.3g} µs (device idle {1 - busy / ends[0]:.0%}), replay {ends[1]:.3g} µs"
    ax.set_title(f"{launch_us:g} µs per launch: {times}", loc="left", fontsize=9)
    return ax


def plot_buffers(buffers, planned, names: Sequence[str] | None = None, *, ax=None) -> np.ndarray:
    """Draw the current contents of a graph's buffers, one panel per field;
    the part after the batch is shaded.

    buffers: metadata at capacity, filled. planned: the metadata of the batch; its lengths are the
    ends of the contents. names: fields to show, by default all tensors. ax: an array of Axes, or
    None. Returns the Axes as a flat array.
    """
    rules = {field.name: field.metadata.get("pad") for field in fields(buffers)}
    names = [name for name in rules if isinstance(getattr(buffers, name), Tensor)] if names is None else list(names)
    panels = strip_of_axes(ax, len(names), 2, (5.2, 2.1))
    for panel, name in zip(panels, names, strict=True):
        buffer, count = getattr(buffers, name).cpu(), len(getattr(planned, name))
        _draw_buffer(panel, buffer)
        panel.axvspan(count - 0.5, len(buffer) - 0.5, color=HIGHLIGHT, alpha=0.2, lw=0)
        panel.set_xlim(-0.5, len(buffer) - 0.5)
        panel.set_title(f"{name}: {count} of {len(buffer)} filled, padding: {rules[name]}", fontsize=9)
    return panels


def _draw_buffer(ax: Axes, buffer: Tensor) -> None:
    colors = ""
    if buffer.ndim == 1:
        ax.plot(buffer.numpy(force=True), ".", ms=4, color="0.2")
        ax.set_ylabel("value", fontsize=8)
    else:
        colors = " (colour: value)"
        rows = buffer.flatten(1).float().T
        high = float(rows.nan_to_num().abs().max()) or 1.0
        ax.imshow(rows, aspect="auto", cmap="RdBu_r", vmin=-high, vmax=high, interpolation="nearest")  # zero is white
        ax.set_ylabel("column", fontsize=8)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(f"position in the buffer{colors}", fontsize=8)
    ax.tick_params(labelsize=8)


def plot_packing(
    output_tokens: Sequence[int], batches: Sequence[Batch], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw one bar per replay, as long as its budget: its items, numbered by arrival,
    and the rest hatched.

    output_tokens: tokens of each item. batches: the result of `plan_batches`; an item without
    budget ran eagerly.
    """
    ax = axes_or_new(ax, figsize=(9, 0.34 * len(batches) + 1.3))
    colors = sequence_colors(len(output_tokens))
    tokens = [sum(output_tokens[i] for i in batch.indices) for batch in batches]
    ends = [max(total, batch.budget or 0) for total, batch in zip(tokens, batches, strict=True)]
    widest = max([1, *ends])
    for row, (batch, total, end) in enumerate(zip(batches, tokens, ends, strict=True)):
        item_bars(ax, row, batch.indices, output_tokens, colors, widest=widest, end=batch.budget)
        said = "too large for a graph"
        if batch.budget is not None:
            said = f"{1 - total / batch.budget:.0%} padding"
            outline_bar(ax, row, 0, batch.budget)
        ax.text(end + 0.02 * widest, row, f"{total} tokens, {said}", size=8, va="center")
    labels = ["eager" if batch.budget is None else f"graph of {batch.budget}" for batch in batches]
    ax.set_yticks(range(len(batches)), labels)
    ax.set(xlabel="output tokens (hatched: padding)", xlim=(0, 1.32 * widest), ylim=(max(len(batches), 1) - 0.5, -0.5))
    budgets = [batch.budget for batch in batches if batch.budget is not None]
    replays = f"{len(budgets)} replay{'s' * (len(budgets) != 1)}, budgets sum to {sum(budgets)}"
    report = f"{replays}, {padding_waste(batches, output_tokens):.0%} padding"
    ax.set_title(headed(title, report), fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_waste(waste: Mapping[str, Mapping[int, float]], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Plot padding waste in percent against the number of captured graphs.

    waste: {name of a line: {number of graphs: share of the computed tokens that is padding}}.
    """
    ax = axes_or_new(ax, figsize=(6, 3.6))
    for i, (name, color, marker) in enumerate(zip(waste, STAGE_COLORS, _MARKS, strict=False)):
        percent, thin = [100 * share for share in waste[name].values()], max(1, 4 - i)  # equal lines stay visible
        ax.plot(list(waste[name]), percent, color=color, marker=marker, lw=thin, ms=2 * thin + 1, label=name)
    ax.set(xlabel="captured graphs", ylabel="padding (% of computed tokens)", title=title or "padding waste")
    ax.set_xticks(sorted({count for curve in waste.values() for count in curve}))
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=9)
    return ax


def plot_replay_timings(measurement: Mapping, *, images: int = 1, ax: Axes | None = None) -> Axes:
    """Plot milliseconds per call against image size: a point at the median,
    a line up to the 99th percentile.

    measurement: the output of `benchmarks/graphs.py`. images: images per call. The arithmetic at
    the device's peak is drawn if it is known. Raises ValueError for a number of images that was not
    measured.
    """
    rows = [row for row in measurement["rows"] if row["images"] == images]
    if not rows:
        known = sorted({row["images"] for row in measurement["rows"]})
        raise ValueError(f"images: expected one of the measured {known}, got {images!r}")
    ax = axes_or_new(ax, figsize=(7, 4))
    sizes = [row["px"] for row in rows]
    for (way, label), color, marker in zip(_WAYS.items(), STAGE_COLORS, _MARKS, strict=False):
        medians = [row[f"{way}_ms"] for row in rows]
        tails = [[0.0] * len(rows), [max(0.0, row[f"{way}_p99_ms"] - row[f"{way}_ms"]) for row in rows]]
        ax.errorbar(sizes, medians, tails, color=color, marker=marker, ms=5, lw=1.8, capsize=3, label=label)
    if all(row["floor_ms"] for row in rows):
        ax.plot(sizes, [row["floor_ms"] for row in rows], "k:", label="arithmetic at the device's peak")
    ax.set(yscale="log", xlabel="side of the image (px)", ylabel="one call (ms)", xticks=sizes)
    call = f"{images} image{'s' * (images > 1)} per call"
    ax.set_title(f"{call}: {measurement['device']}, {measurement['date']}", size=10)
    ax.grid(alpha=0.25, which="both")
    ax.legend(fontsize=8)
    return ax


def plot_stale_errors(row: Mapping, groups: Sequence[Mapping], *, title: str = "", ax=None) -> np.ndarray:
    """Draw the error of each recorded operation's result (left) and of each token's embedding
    (right).

    One buffer was stale. row: a row of a `GraphExplorer`: logarithmic error levels of operations,
    relative errors of tokens. groups: names and numbers of consecutive operations. ax: two Axes, or
    None. Returns both.
    """
    left, right = grid_of_axes(ax, 1, 2, (9, 2.8))[0]
    levels, start = np.asarray(row["operations"]), 0
    left.fill_between(range(len(levels)), levels, color=HIGHLIGHT, step="mid")
    for group in groups:
        left.axvline(start, color="0.7", lw=0.6)
        if group["count"] > len(levels) / 20:
            left.text(start + group["count"] / 2, 258, group["name"], size=7, ha="center")
        start += group["count"]
    left.set(ylim=(0, 255), xlim=(0, len(levels)), xlabel="recorded operation", ylabel="relative error")
    left.set_yticks([1, 85, 170, 255], ["0.001", "0.01", "0.1", "1"])
    image = right.imshow(np.asarray(row["tokens"]), vmin=0, vmax=1, cmap=SEQUENCE_CMAP)
    right.set(xticks=[], yticks=[], title="error per token")
    right.title.set_size(9)
    right.figure.colorbar(image, ax=right, shrink=0.8)
    right.figure.suptitle(title, size=9, wrap=True)
    return np.array([left, right])
