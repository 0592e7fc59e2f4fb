"""Assignment: images of many sizes arrive, one of two rules assigns them to devices,
and all devices wait for the slowest one.
"""

from collections.abc import Sequence
from itertools import islice

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from refvl.serving.parallel import get_speed_up
from refvl.viz.explorers.base import Control, Explorer, module
from refvl.viz.parallel import RULES, plot_assignment

EITHER = "either"  # the name shown if both rules make the same assignment


class AssignmentExplorer(Explorer):
    """The explorer of assignments. Items are the images, in order of arrival."""

    _esm = module("assignment")

    def __init__(self, sizes: Sequence[int], *, ranks: int, max_ranks: int, unit: str):
        self.sizes, self.unit = list(sizes), unit
        arrivals, groups = range(1, len(self.sizes) + 1), range(1, max_ranks + 1)
        rows: dict[tuple, dict] = {}
        for items in arrivals:
            dealt = {rule: [deal(self.sizes[:items], n) for n in groups] for rule, deal in RULES.items()}
            speed_ups = np.array([[get_speed_up(loads) for _, _, loads in each] for each in dealt.values()])
            for n, (by_size, by_count) in enumerate(zip(*dealt.values(), strict=True), 1):
                alike = str(by_size) == str(by_count)
                rules = {EITHER: by_size} if alike else dict(zip(RULES, (by_size, by_count), strict=True))
                for rule, assignment in rules.items():
                    rows[items, n, rule] = self._row(items, assignment, speed_ups)
        controls = [
            Control("items", "images", arrivals, kind="player", plays="add images"),
            Control("ranks", "devices", groups),
            Control("rule", "assigned", [*RULES, EITHER], kind="menu"),
        ]
        middle = max(1, 3 * len(self.sizes) // 4)
        start = next(state for state in rows if state[:2] == (middle, ranks))
        super().__init__(controls, rows, shared={"unit": unit, "ranks": max_ranks}, start=start)

    def _row(self, items: int, assignment, speed_ups: np.ndarray) -> dict:
        """Return the data of a state. speed_ups: (rules, ranks) for these items."""
        order, counts, loads = assignment
        dealt = iter(order)
        ranks = [{"items": list(islice(dealt, n)), "load": load} for n, load in zip(counts, loads, strict=True)]
        speed_up = round(get_speed_up(loads), 4)
        return {"sizes": self.sizes[:items], "ranks": ranks, "speed_up": speed_up, "speed_ups": speed_ups}

    def figure(self) -> Figure:
        items, ranks, rule = self.states[self.index]
        figure, ax = plt.subplots(figsize=(9, 0.34 * ranks + 1.3), layout="constrained")
        deal = RULES["by size" if rule == EITHER else rule]
        assignment, title = deal(self.sizes[:items], ranks), "by either rule" if rule == EITHER else rule
        plot_assignment(self.sizes[:items], assignment, title=title, unit=self.unit, ax=ax)
        return figure

    def describe(self) -> str:
        (items, ranks, rule), row = self.states[self.index], self.row(self.index)
        loads = ", ".join(str(rank["load"]) for rank in row["ranks"])
        assigned = "by either rule" if rule == EITHER else rule
        return (
            f"{items} image{'s' * (items != 1)} on {ranks} device{'s' * (ranks != 1)}, assigned {assigned}: the load "
            f"per device is {loads} {self.unit}, and the speed-up over one device is {row['speed_up']:.1f}."
        )
