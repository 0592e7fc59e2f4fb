"""Encoder graphs: recorded operations, the contents of buffers, items that share a replay,
and padding waste.

plot_recording       the recorded operations in order, by part of the tower, and the static buffers they read
plot_buffers         static buffers before a replay: the batch first, then padding
plot_packing         one bar per replay, its items side by side, the unused rest hatched
plot_launches        host and device, operation by operation, in an eager run and in one replay
plot_stale_errors    the effect of a buffer that is not refilled on operations and tokens
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from operator import itemgetter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from refvl.graphs import Batch, TraceGraph, padding_waste
from refvl.graphs.recorder import Operation
from refvl.study.costs import launch_timeline
from refvl.viz.bars import item_bars, outline_bar
from refvl.viz.positions import grid_of_axes, strip_of_axes
from refvl.viz.style import HIGHLIGHT, KEPT, SEQUENCE_CMAP, STAGE_COLORS, axes_or_new, centered, headed
from refvl.viz.windows import sequence_colors

ATTENTION = "attention: one kernel on a GPU"
_MARKS = "o^sDvP<>"  # series differ in marker as well as in colour


def plot_recording(graph: TraceGraph, buffers: Mapping[str, Tensor], tower: Module, *, ax: Axes | None = None) -> Axes:
    """Draw recorded operations from left to right, one row per part of the tower, and below them one
    row per static buffer, with a mark at each box that reads it.

    A box represents consecutive operations of a part, and contains their number. buffers:
    {name: tensor}; a name may stand for several, as a tuple of tensors. A view of a buffer counts
    as the buffer.
    """
    parts = list(_parts(graph.operations, buffers, tower))
    kinds = {part: dict[str, None]() for part in parts}
    for part, operation in zip(parts, graph.operations, strict=True):
        kinds[part][kind_of_operation(operation)] = None
    labels = {part: f"{part}: {', '.join(kinds[part])}" for part in kinds} | {ATTENTION: ATTENTION}
    labels |= {name: f"reads {name}" for name in buffers}
    rows = {name: row for row, name in enumerate([*kinds, *buffers])}
    boxes = [list(run) for _, run in groupby(zip(parts, graph.operations, strict=True), itemgetter(0))]

    ax = axes_or_new(ax, figsize=(11, 0.24 * len(rows) + 1))
    for x, box in enumerate(boxes):
        ax.barh(rows[box[0][0]], 0.9, left=x - 0.45, color="0.88")
        centered(ax, x, rows[box[0][0]], str(len(box)), size=8)
    for (name, tensors), color, marker in zip(buffers.items(), STAGE_COLORS, _MARKS, strict=False):
        readers = [x for x, box in enumerate(boxes) if any(one.reads(*tree_leaves(tensors)) for _, one in box)]
        ax.plot(readers, [rows[name]] * len(readers), marker, color=color, ms=6)
    ax.set_yticks(range(len(rows)), [labels[name] for name in rows], size=8)
    ax.set(xlim=(-0.7, len(boxes) - 0.3), ylim=(len(rows) - 0.4, -0.6), xticks=[])
    ax.set(title=f"{len(parts)} recorded operations", xlabel="from first to last; the number of operations in each box")
    return ax


def _parts(operations: Sequence[Operation], buffers: Mapping[str, Tensor], tower: Module) -> Iterator[str]:
    """Yield the name of the tower part that each operation belongs to.

    From the first operation that reads lengths (`cu_...`) on, the operations of an attention
    module build a mask and use it. On a GPU, one kernel replaces these operations, so they
    count as a separate part.
    """
    names, attending = {module: name.split(".") for name, module in tower.named_modules()}, set()
    lengths = [tensor for name, tensor in buffers.items() if name.startswith("cu_")]
    for operation in operations:
        if operation.reads(*lengths):
            attending.add(operation.module)
        name = names[operation.module]
        own = name[2] if name[0] == "blocks" and name[2:] else name[0] or "tower"
        yield ATTENTION if operation.module in attending else own


def kind_of_operation(operation: Operation) -> str:
    """Return the kind of an operation, such as `mul` for `aten.mul.Tensor`; cut long names."""
    name = str(operation.function).split(".")[1].strip("_")
    return name if len(name) <= 24 else f"{name[:23]}…"


def plot_launches(device_us: Sequence[float], launch_us: float, *, ax: Axes | None = None) -> Axes:
    """Draw three lanes, in microseconds: the host's launches, the device in an eager run,
    and the device in a replay.

    The arguments are those of `launch_timeline`; a replay costs one launch.
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

    buffers: the metadata that contains the buffers. planned: the metadata of the batch, whose
    tensors are as long as the filled parts. names: fields to show, by default all tensors. ax: an
    array of Axes, or None. Returns the Axes as a flat array.
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
    if buffer.ndim == 1:
        ax.plot(buffer.numpy(force=True), ".", ms=4, color="0.2")
        ax.set_ylabel("value", fontsize=8)
    else:
        columns = buffer.flatten(1).float().T
        high = float(columns.nan_to_num().abs().max()) or 1.0
        drawn = ax.imshow(columns, aspect="auto", cmap="RdBu_r", vmin=-high, vmax=high, interpolation="nearest")
        ax.figure.colorbar(drawn, ax=ax, label="value").ax.set_ylim(min(0.0, float(columns.nan_to_num().min())), high)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        if len(columns) == 2:  # the position of a patch
            ax.set_yticks([0, 1], ["row", "column"])
    ax.set_xlabel("position in the buffer", fontsize=8)
    ax.tick_params(labelsize=8)


def plot_packing(
    output_tokens: Sequence[int], batches: Sequence[Batch], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw one bar per replay, as long as its budget: its items, numbered by arrival,
    and the rest hatched.

    output_tokens: the tokens of each item. batches: the result of `plan_batches`; a batch
    without a budget runs eagerly.
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


def plot_stale_errors(row: Mapping, groups: Sequence[Mapping], *, title: str = "", ax=None) -> np.ndarray:
    """Draw the error of each recorded operation's result (left) and of each token's embedding
    (right).

    One buffer of the replay was stale. row: a row of a `GraphExplorer`: logarithmic error levels
    of operations, and relative errors of tokens. groups: names and sizes of groups of consecutive
    operations. ax: two Axes, or None. Returns both Axes.
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
    left.set_yticks([1, 64.5, 128, 191.5, 255], ["0.001", "0.01", "0.1", "1", "10"])
    tokens = np.asarray(row["tokens"])
    image = right.imshow(tokens, vmin=0, vmax=max(1.0, tokens.max()), cmap=SEQUENCE_CMAP)
    right.set(xticks=[], yticks=[], title="error per token")
    right.title.set_size(9)
    right.figure.colorbar(image, ax=right, shrink=0.8)
    right.figure.suptitle(title, size=9, wrap=True)
    return np.array([left, right])
