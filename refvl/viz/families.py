"""Families side by side: the same image or video in each family;
a family has one colour and one marker in every figure.

plot_family_costs    patches through the tower and tokens of the prompt, per family
plot_family_curves   tokens against the side of a square image
plot_family_stages   the time of each stage of a run, per family
plot_family_race     tokens, positions, memory and time as an image or a video grows
plot_ablations       a model's correct answers without one of its mechanisms, per kind of
question
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from refvl.viz.bars import stage_bars
from refvl.viz.positions import grid_of_axes
from refvl.viz.style import STAGE_COLORS, THEMES, axes_or_new, centered, ink_on

if TYPE_CHECKING:
    from refvl.study.costs import MediaPlan
    from refvl.study.report import Trace

FAMILY_KEYS = {  # the keys of families' colours in THEMES
    "Qwen2.5-VL": "image", "Qwen3-VL": "ink", "GLM-4.1V": "video", "MiniCPM-V 4.5": "kept", "Step3-VL": "text",
}  # fmt: skip
FAMILY_MARKS = {"Qwen2.5-VL": "o", "Qwen3-VL": "D", "GLM-4.1V": "^", "MiniCPM-V 4.5": "s", "Step3-VL": "v"}
FAMILY_COLORS = {name: THEMES["light"][key] for name, key in FAMILY_KEYS.items()}
RACE = {"tokens": "tokens", "positions": "positions", "bytes": "memory", "seconds": "minimum time to the first token"}


def plot_family_costs(plans: Mapping[str, Sequence["MediaPlan"]], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw two bars per family, patches (pale) and tokens, on a logarithmic scale,
    and label the family with their ratio.

    plans: for each family, the plans of the media items that its bars sum up.
    """
    ax = axes_or_new(ax, figsize=(1.6 * len(plans) + 0.6, 3.4))
    patches = [sum(plan.patches for plan in of_family) for of_family in plans.values()]
    tokens = [sum(plan.tokens for plan in of_family) for of_family in plans.values()]
    places = np.arange(len(plans))
    colors = [FAMILY_COLORS[name] for name in plans]
    for offset, counts, alpha in ((-0.2, patches, 0.35), (0.2, tokens, 1.0)):
        bars = ax.bar(places + offset, counts, 0.4, color=colors, alpha=alpha)
        ax.bar_label(bars, [f"{n:,}" for n in counts], fontsize=8, padding=2)
    names = [f"{name}\n{p / t:.3g} patches per token" for name, p, t in zip(plans, patches, tokens, strict=True)]
    ax.set_xticks(places, names, fontsize=9)
    ax.set(yscale="log", ylabel="patches (pale), tokens", ylim=(min(tokens) / 2, max(patches) * 2.5), title=title)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_family_curves(sides: Sequence[int], tokens: Mapping[str, Sequence[int]], *, ax: Axes | None = None) -> Axes:
    """Plot the tokens of a square image against its side in px, one line per family,
    on log-log axes.
    """
    ax = axes_or_new(ax, figsize=(7, 4))
    for place, (name, counts) in enumerate(tokens.items()):
        ax.plot(sides, counts, **_family_line(name, place))
    ax.set(xscale="log", yscale="log", xlabel="side of a square image (px)", ylabel="tokens in the prompt")
    ticks = [side for side in (112, 224, 448, 896, 1792, 3584) if min(sides) <= side <= max(sides)]
    ax.set_xticks(ticks, [str(side) for side in ticks])
    ax.minorticks_off()
    ax.grid(alpha=0.25)
    ax.legend(fontsize=9)
    ax.set_title("what an image costs the language model")
    return ax


def plot_family_stages(traces: Mapping[str, "Trace"], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw a bar per family with the stages of its run end to end, in milliseconds."""
    ax = axes_or_new(ax, figsize=(9, 0.5 * len(traces) + 1.4))
    stage_bars(ax, {name: trace.seconds for name, trace in traces.items()}, title=title)
    below = (0.5, -1.3 / len(traces))
    ax.legend(fontsize=8, ncols=len(STAGE_COLORS), loc="upper center", bbox_to_anchor=below, frameon=False)
    return ax


def plot_family_race(rows: Sequence[Mapping], kind: str, *, at: int | None = None, ax=None) -> np.ndarray:
    """Plot each measure of `RACE` in a panel, one line per family,
    against an image's side or a video's length.

    rows: the rows of a `FamiliesExplorer`, by size. at: the size to mark. ax: as many Axes as
    measures, or None. Returns the Axes.
    """
    axes = grid_of_axes(ax, 1, len(RACE), (13, 3.2))[0]
    names = list(dict.fromkeys(name for row in rows for name in row["families"]))
    for panel, (measure, label) in zip(axes, RACE.items(), strict=True):
        for place, name in enumerate(names):
            points = [(row["size"], row["families"][name][measure]) for row in rows if name in row["families"]]
            panel.plot(*zip(*points, strict=True), **_family_line(name, place))
        if at is not None:
            panel.axvline(at, color="0.5", ls="--", lw=1)
        unit = {"bytes": " (bytes)", "seconds": " (s)"}.get(measure, "")
        panel.set(xscale="log", yscale="log", title=label + unit)
        panel.set_xlabel("side (px)" if kind == "image" else "duration (s)")
        panel.title.set_size(9)
        panel.grid(alpha=0.25)
    axes[0].legend(fontsize=8)
    return axes


def _family_line(name: str, place: int) -> dict[str, Any]:
    """Return a family's line style.

    Later lines are thinner, so two lines that coincide are both visible.
    """
    fine = max(4 - place, 0)
    look = {"color": FAMILY_COLORS[name], "marker": FAMILY_MARKS[name]}
    return look | {"ms": 3.5 + 1.25 * fine, "lw": 1.2 + 0.7 * fine, "label": name}


def plot_ablations(rows: Sequence[Mapping], *, ax: Axes | None = None) -> Axes:
    """Draw correct answers in percent: one row per removed mechanism,
    one column per kind of question.

    rows: the rows of one model in `data/measurements/ablations.json`. A frame marks a cell that is
    significantly below the unchanged model. The first row is the unchanged model, and the chance
    score is written below each kind.
    """
    lines = list(dict.fromkeys(row["without"] for row in rows))
    kinds = {row["question"]: row["chance"] for row in rows}
    ax = axes_or_new(ax, figsize=(1.1 * len(kinds) + 3, 0.3 * len(lines) + 1.2))
    colors = colormaps["cividis"]
    for row in rows:
        x, y, share = list(kinds).index(row["question"]), lines.index(row["without"]), row["right"] / row["n"]
        color = colors(share)
        frame = {"edgecolor": THEMES["light"]["highlight"], "linewidth": 2, "zorder": 2} if row["needed"] else {}
        ax.add_patch(Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, **{"facecolor": color, "linewidth": 0} | frame))
        centered(ax, x, y, f"{share:.0%}", fontsize=8, color=ink_on(color), zorder=3)
    ax.set_xticks(range(len(kinds)), [f"{kind}\n(chance {chance:.0%})" for kind, chance in kinds.items()], fontsize=8)
    ax.set_yticks(range(len(lines)), [line or "unchanged" for line in lines], fontsize=8)
    ax.set(xlim=(-0.5, len(kinds) - 0.5), ylim=(len(lines) - 0.5, -0.5), title=f"{rows[0]['model']}, correct answers")
    ax.set(xlabel="question", ylabel="removed mechanism")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax
