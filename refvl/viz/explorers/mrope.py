"""M-RoPE playground: two tokens at (t, h, w), the angle of every rotary pair, and their score."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from refvl.positions import apply_rotary, mrope_axis_of_pairs, vision_rotary_cos_sin
from refvl.viz.explorers.base import Control, Explorer, module
from refvl.viz.style import AXIS_COLORS

THETAS = [5, 10_000, 100_000, 1_000_000, 5_000_000, 10_000_000]
SECTIONS = {  # rotary pairs of t, h and w, and whether they are interleaved
    "tiny Qwen2.5-VL: 4, 6, 6 contiguous": ((4, 6, 6), False),  # theta 5
    "Qwen2.5-VL: 16, 24, 24 contiguous": ((16, 24, 24), False),
    "Qwen3-VL: 24, 20, 20 interleaved": ((24, 20, 20), True),
    "GLM-4.1V: 8, 12, 12 contiguous": ((8, 12, 12), False),
}
EXTENT = {"t": 9, "h": 13, "w": 13}  # the number of positions of the key
QUERY = {"t": 4, "h": 6, "w": 6}


class MropeExplorer(Explorer):
    """The explorer of M-RoPE.

    Query and key are the same vector, so their score depends only on their positions.

    The query is fixed; the key moves. Items are rotary pairs, the fastest first. The score is 1 at
    equal positions.
    """

    _esm = module("mrope")

    def __init__(self):
        controls = [
            Control("sections", "pairs of t, h, w", list(SECTIONS), kind="menu", rare=True),
            Control("theta", "theta", THETAS, rare=True),
            *(Control(axis, f"{axis} of the key", list(range(extent))) for axis, extent in EXTENT.items()),
        ]
        self.axes = {name: mrope_axis_of_pairs(s, interleaved=i) for name, (s, i) in SECTIONS.items()}
        turns = {(name, theta): plane_turns(len(axes), theta) for name, axes in self.axes.items() for theta in THETAS}
        shared = {
            "query": list(QUERY.values()),
            "axes": list(self.axes.values()),
            "cos": [[turns[name, theta][0] for theta in THETAS] for name in SECTIONS],  # (positions, pairs) each
            "sin": [[turns[name, theta][1] for theta in THETAS] for name in SECTIONS],
            "scores": [
                [axis_scores(axes, *turns[name, theta]) for theta in THETAS] for name, axes in self.axes.items()
            ],
        }
        start = ("tiny Qwen2.5-VL: 4, 6, 6 contiguous", 5, 4, 6, 9)
        super().__init__(controls, shared=shared, start=start, selected=11)  # the second pair of w

    def row(self, index: int) -> dict:
        """Return axis, cos and sin (pairs,) of the key's pairs, the contribution of each axis to
        the score, and the score.
        """
        name, theta, *key = self.states[index]
        i, k = list(SECTIONS).index(name), THETAS.index(theta)
        position = torch.tensor(key)[self.axes[name]]  # the key's position on the axis of each pair
        distance = [abs(a - b) for a, b in zip(key, QUERY.values(), strict=True)]
        parts = self.shared["scores"][i][k][torch.arange(3), distance]
        cos, sin = (self.shared[which][i][k][position, range(len(position))] for which in ("cos", "sin"))
        return {"axes": self.axes[name], "cos": cos, "sin": sin, "parts": parts, "score": float(parts.sum())}

    def figure(self) -> Figure:
        options, row = self.options, self.row(self.index)
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(1, 1.6))
        i, k = list(SECTIONS).index(options["sections"]), THETAS.index(options["theta"])
        far = {axis: (torch.arange(EXTENT[axis]) - QUERY[axis]).abs() for axis in EXTENT}
        scores, cos = self.shared["scores"][i][k], self.shared["cos"][i][k]
        for number, axis in enumerate(EXTENT):  # the key moves along one axis only
            curve = scores[:, 0].sum() - scores[number, 0] + scores[number, far[axis]]
            offsets = torch.arange(EXTENT[axis]) - QUERY[axis]
            left.plot(offsets, curve, color=AXIS_COLORS[axis], lw=3 - number / 2, label=axis)
        left.set(xlabel="key - query, on one axis", ylabel="score", ylim=(min(0, left.get_ylim()[0]), 1.05))
        left.set_title("score of two equal vectors whose\npositions differ on one axis", fontsize=10)
        left.legend(title="axis", fontsize=8, loc="lower left")
        for number, axis in enumerate(EXTENT):
            planes = (row["axes"] == number).nonzero().flatten()
            right.bar(planes, cos[far[axis][options[axis]], planes], color=AXIS_COLORS[axis], label=axis)
        right.set(xlabel=f"rotary pair, {options['sections']}", ylabel="cos(angle of query - angle of key)")
        query, key = (", ".join(map(str, at)) for at in (QUERY.values(), (options[axis] for axis in EXTENT)))
        title = f"query at t, h, w = {query}, key at {key}:\nscore {row['score']:.2f}, the mean of the bars"
        right.set_title(title, fontsize=10)
        right.legend(title="rotated by", fontsize=8, loc="lower left")
        return figure

    def describe(self) -> str:
        options, row = self.options, self.row(self.index)
        model, _, sections = options["sections"].partition(": ")
        key = tuple(options[axis] for axis in EXTENT)
        return (
            f"Two equal tokens at (t, h, w) = {tuple(QUERY.values())} and {key} have a score of {row['score']:.2f} if "
            f"they are rotated as in {model} ({sections}), with theta {options['theta']:,}."
        )


def plane_turns(planes: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (positions, pairs), of every rotary pair of a head at every position.

    A tower head of twice the width rotates half of its pairs by row, so a column of patches has
    these angles.
    """
    column = [(1, max(EXTENT.values()), 1)]
    cos, sin = vision_rotary_cos_sin(column, head_dim=4 * planes, spatial_merge_size=1, theta=theta)
    return cos[:, :planes], sin[:, :planes]


def axis_scores(axes: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the contribution of each axis to the score of two equal tokens at every distance,
    (3, distances).
    """
    ones = torch.ones(len(cos), 1, 2 * len(axes))
    rotated = apply_rotary(ones, cos, sin)[:, 0] * apply_rotary(ones[:1], cos[:1], sin[:1])[0, 0]
    planes = rotated.unflatten(1, (2, len(axes))).sum(1) / (2 * len(axes))  # (distances, pairs)
    return torch.stack([planes[:, axes == axis].sum(1) for axis in range(3)])
