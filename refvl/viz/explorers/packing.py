"""Packing player: images arrive one by one and share replays of captured graphs;
padding fills the unused part.
"""

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from refvl.graphs import Batch, padding_waste, plan_batches
from refvl.graphs.budgets import POLICIES
from refvl.pixels.by_hand import count_tokens
from refvl.pixels.patches import PatchConfig
from refvl.viz.explorers.base import Control, Explorer, module
from refvl.viz.graphs import plot_packing

EITHER = "either"  # the name shown if both policies give the same packing
ARRIVALS = {  # (width, height) in px, in order of arrival
    "photos of all sizes": (
        (280, 196), (448, 308), (140, 140), (532, 392), (308, 168), (140, 420), (364, 224), (140, 168), (336, 336),
    ),
    "thumbnails": ((224, 168), (168, 224), (196, 196), (224, 224), (140, 112), (252, 168), (168, 168), (224, 140),
                   (196, 224), (168, 140)),
    "equal sizes": ((280, 168),) * 10,
    "a page among icons": ((112, 112), (56, 84), (84, 84), (504, 700), (56, 56), (112, 84), (140, 112), (84, 56),
                           (112, 112)),
    "one too large": ((336, 224), (840, 616), (224, 224), (448, 336), (280, 280), (196, 308)),
}  # fmt: skip


def arrivals_of_images(config: PatchConfig) -> dict[str, list[int]]:
    """Return the number of output tokens of each image in `ARRIVALS`."""
    return {name: [count_tokens(height, width, config) for width, height in sizes] for name, sizes in ARRIVALS.items()}


class PackingExplorer(Explorer):
    """The explorer of packing.

    Items are images in order of arrival. A control sets how many `budgets` are captured.
    """

    _esm = module("packing")

    def __init__(self, arrivals: Mapping[str, Sequence[int]], budgets: Sequence[int], *, max_items: int):
        self.arrivals = {name: list(tokens) for name, tokens in arrivals.items()}
        self.budgets, self.max_items = sorted(set(budgets)), max_items
        captured = range(1, len(self.budgets) + 1)
        rows: dict[tuple, dict] = {}
        for name, graphs in itertools.product(self.arrivals, captured):
            for arrived in range(1, len(self.arrivals[name]) + 1):
                greedy, optimal = (self.batches((name, graphs, arrived, policy)) for policy in POLICIES)
                policies = [EITHER] if greedy == optimal else POLICIES
                states = [(name, graphs, arrived, policy) for policy in policies]
                rows |= {state: self._row(state) for state in states}
        most = max(map(len, self.arrivals.values()))
        controls = [
            Control("arrivals", "arrivals", list(self.arrivals), kind="menu"),
            Control("graphs", "captured graphs", captured),
            Control("arrived", "images so far", range(1, most + 1), kind="player", plays="add images"),
            Control("policy", "policy", [*POLICIES, EITHER], kind="menu"),
        ]
        largest = [max(tokens) for tokens in self.arrivals.values()]
        shared = {"most": most, "largest": largest, "widest": self.budgets[-1]}
        super().__init__(controls, rows, shared=shared, start=self._middle(rows))

    def batches(self, state: tuple) -> list[Batch]:
        """Return the batches of a state: the images that share each replay."""
        name, graphs, arrived, policy = state
        return plan_batches(
            self.arrivals[name][:arrived], self.budgets[-graphs:], self.max_items,
            policy=POLICIES[0] if policy == EITHER else policy,
        )  # fmt: skip

    def _row(self, state: tuple) -> dict:
        """Return the captured budgets, and the items and the budget of each batch;
        an eager batch has budget 0.

        wastes: the share of padding with 1, 2, ... captured graphs.
        """
        name, graphs, arrived, policy = state
        by_graphs = [self.batches((name, i + 1, arrived, policy)) for i in range(len(self.budgets))]
        batches = by_graphs[graphs - 1]
        replays = [{"items": b.indices, "tokens": b.tokens, "budget": b.budget or 0} for b in batches]
        return {
            "tokens": self.arrivals[name][:arrived],
            "budgets": self.budgets[-graphs:],
            "replays": replays,
            "wastes": [round(padding_waste(each), 4) for each in by_graphs],
        }

    def _middle(self, rows: Mapping) -> tuple:
        """Return the initial state, in which one graph is missing, some images are still to come,
        and the policies differ.
        """
        name, graphs = next(iter(self.arrivals)), max(1, len(self.budgets) - 1)
        last = len(self.arrivals[name])
        best = [s for s in rows if s[:2] == (name, graphs) and s[3] != "greedy" and 1 < s[2] < last] or list(rows)
        return max(best, key=lambda state: (state[3] == "optimal", state[2]))

    def figure(self) -> Figure:
        name, _, arrived, policy = state = self.states[self.index]
        batches = self.batches(state)
        figure, ax = plt.subplots(figsize=(9, 0.36 * len(batches) + 1.4), layout="constrained")
        plot_packing(self.arrivals[name][:arrived], batches, title=f"{name}, {policy} policy", ax=ax)
        return figure

    def describe(self) -> str:
        (name, _, arrived, policy), row = self.states[self.index], self.row(self.index)
        replays = sum(replay["budget"] > 0 for replay in row["replays"])
        rule = "either policy" if policy == EITHER else f"the {policy} policy"
        images, budgets = (
            f"{arrived} image{'s' * (arrived > 1)}",
            ", ".join(map(str, row["budgets"])),
        )
        return (
            f"{images} ({name}), packed by {rule}, take{'s' * (arrived == 1)} {replays} replay{'s' * (replays != 1)}, "
            f"with {row['wastes'][len(row['budgets']) - 1]:.0%} padding. The captured graphs hold {budgets} tokens."
        )
