"""Family race: one image or one video in all families, as its size or length grows."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from refvl.viz.explorers.base import Control, Explorer, module
from refvl.viz.families import FAMILY_KEYS, FAMILY_MARKS, RACE, plot_family_race

DEVICE = "H100"  # the times are computed for its peak rate


class FamiliesExplorer(Explorer):
    """The explorer of families. Items are families; a family without video support has no row for videos."""

    _esm = module("families")

    def __init__(self, counted: Mapping):
        rows: dict[tuple, dict] = {}
        for entry in counted["rows"]:
            kind, size = entry["kind"], entry["size"]
            row = rows.setdefault((kind, f"{size} {'px' if kind == 'image' else 's'}"), {"size": size, "families": {}})
            costs = {name: entry[name] for name in ("patches", "tokens", "positions", "cache", "bytes")}
            costs["seconds"] = (entry["tower"] + entry["prefill"]) / counted["peak"][DEVICE]
            row["families"][entry["family"]] = costs
        kinds = list(dict.fromkeys(kind for kind, _ in rows))
        controls = [
            Control("kind", "media item", kinds, kind="menu"),
            Control("size", "size or length", [size for _, size in rows], kind="player", plays="make it larger"),
        ]
        shared = {
            "families": {name: [FAMILY_KEYS[name], FAMILY_MARKS[name]] for name in counted["configs"]},
            "measures": RACE,
            "device": DEVICE,
            "clip": " x ".join(map(str, counted["clip_size"])),
            "curves": {kind: [row for (of, _), row in rows.items() if of == kind] for kind in kinds},
        }
        images = [state for state in rows if state[0] == kinds[0]]
        super().__init__(controls, rows, shared=shared, start=images[len(images) // 2])

    def figure(self) -> Figure:
        figure, axes = plt.subplots(1, len(RACE), figsize=(13, 3.2), layout="constrained")
        kind = self.options["kind"]
        plot_family_race(self.shared["curves"][kind], kind, at=self.row(self.index)["size"], ax=axes)
        return figure

    def describe(self) -> str:
        kind, size = self.states[self.index]
        costs = self.row(self.index)["families"]
        medium = f"a square image of {size}" if kind == "image" else f"a video of {size}"
        each = ", ".join(f"{of['tokens']:,} in {name}" for name, of in costs.items())
        return f"Tokens of {medium}: {each}."
