"""Family race: one image or one video through all families, while its size or length grows."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from refvl.pipeline import VLM
from refvl.tools.costs import (
    blank_clip,
    count_positions,
    encoder_activation_bytes,
    kv_cache_bytes_per_token,
    plan_media,
)
from refvl.viz.explorers.base import Control, Explorer, module
from refvl.viz.families import FAMILY_KEYS, RACE, plot_family_race

DEVICE = "H100"  # whose peak the times are of


class FamiliesExplorer(Explorer):
    """Items are the families. `models` may be on the meta device; `counted` is what `benchmarks/families.py` writes."""

    _esm = module("families")
    title = "Family race"

    def __init__(self, models: Mapping[str, VLM], counted: Mapping):
        self.models, self.counted, self.clip_size = models, counted, counted["clip_size"]
        peak = counted["peak"][DEVICE]
        rows: dict[tuple, dict] = {}
        for entry in counted["rows"]:
            if (family := entry["family"]) not in models:
                continue
            state = (entry["kind"], f"{entry['size']} {'px' if entry['kind'] == 'image' else 's'}")
            costs = self.costs(models[family], entry["kind"], entry["size"])
            if costs["tokens"] != entry["tokens"]:
                raise ValueError(
                    f"counted: {family} makes {costs['tokens']} tokens of an {entry['kind']} of {state[1]}, the file "
                    f"was made where it made {entry['tokens']}; run benchmarks/families.py again"
                )
            costs["seconds"] = (entry["tower"] + entry["prefill"]) / peak
            rows.setdefault(state, {"size": entry["size"], "families": {}})["families"][family] = costs
        kinds = list(dict.fromkeys(kind for kind, _ in rows))
        controls = [
            Control("kind", "medium", kinds, kind="menu"),
            Control("size", "size or length", [size for _, size in rows], kind="player"),
        ]
        shared: dict[str, Any] = {
            "families": {name: FAMILY_KEYS[name] for name in models},
            "measures": RACE,
            "device": DEVICE,
            "clip": " x ".join(map(str, self.clip_size)),
            "curves": {kind: [row for (of, _), row in rows.items() if of == kind] for kind in kinds},
        }
        images = [state for state in rows if state[0] == kinds[0]]
        start = images[len(images) // 2]
        super().__init__(controls, list(rows.values()), shared=shared, states=list(rows), start=start)

    def costs(self, model: VLM, kind: str, size: int) -> dict[str, int]:
        """Patches, tokens, positions, and bytes of an image of `size` x `size` px or a video of so many seconds."""
        medium = Image.new("RGB", (size, size)) if kind == "image" else blank_clip(model, size, *self.clip_size)
        plan = plan_media(model, medium)
        cache = plan.tokens * kv_cache_bytes_per_token(model.language_model.config, model.encoder.dtype)
        return {
            "patches": plan.patches,
            "tokens": plan.tokens,
            "positions": count_positions(model, medium),
            "cache": cache,
            "bytes": cache + encoder_activation_bytes(model.encoder, plan.patches),
        }

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
