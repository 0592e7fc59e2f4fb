"""Launches: when the host launches each operation, and when the device runs it,
in an eager run and in a replay.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from refvl.study.costs import launch_timeline
from refvl.viz.explorers.base import Control, Explorer, module
from refvl.viz.graphs import plot_launches

LAUNCHES = (0.5, 1, 2, 3, 4, 5, 6, 8, 10)  # µs per launch
OPERATIONS = (1, 2, 3, 4, 6, 8, 12)  # µs per operation on the device
COUNT = 12  # operations


class LaunchesExplorer(Explorer):
    """The explorer of launches.

    Item i is operation i. Times are computed, not measured; a replay is one launch.
    """

    _esm = module("launches")

    def __init__(self):
        controls = [
            Control("launch", "host, µs per launch", LAUNCHES),
            Control("operation", "device, µs per operation", OPERATIONS),
        ]
        rows = [self._row(launch, operation) for launch in LAUNCHES for operation in OPERATIONS]
        super().__init__(controls, rows, start=(4, 3))

    def _row(self, launch: float, operation: float) -> dict:
        """Return the (operations, 2) starts and ends of launches and operations, in µs,
        and the device's idle share.
        """
        durations = [operation] * COUNT
        eager = np.array(launch_timeline(durations, launch), dtype=float)
        return {
            "host": launch * np.array([(i, i + 1) for i in range(COUNT)], dtype=float),
            "eager": eager,
            "replay": launch + np.array(launch_timeline(durations, 0), dtype=float),
            "idle": round(1 - sum(durations) / eager[-1, 1], 4),
        }

    def figure(self) -> Figure:
        launch, operation = self.states[self.index]
        figure, ax = plt.subplots(figsize=(9, 1.8), layout="constrained")
        plot_launches([operation] * COUNT, launch, ax=ax)
        ax.set_xlabel("microseconds")
        return figure

    def describe(self) -> str:
        (launch, operation), row = self.states[self.index], self.row(self.index)
        ends = row["eager"][-1, 1], row["replay"][-1, 1]
        return (
            f"At {launch:g} µs per launch, {COUNT} operations of {operation:g} µs take {ends[0]:g} µs in an eager "
            f"run, and the device is idle for {row['idle']:.0%} of that time. In a replay, they take {ends[1]:g} µs."
        )
