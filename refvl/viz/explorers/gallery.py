"""Every explorer, on pictures, clips and models that come with the repository: what the pages and the tests show."""

import json
from collections.abc import Callable

import refvl
from refvl.graphs import generate_budgets
from refvl.paths import DATA
from refvl.pipeline import VLM
from refvl.pixels.patches import PatchConfig
from refvl.pixels.slices import SliceConfig
from refvl.viz.explorers.base import Explorer
from refvl.viz.explorers.packing import arrivals_of_images
from refvl.viz.families import explore_families
from refvl.viz.graphs import explore_graph, explore_packing
from refvl.viz.minicpmv import explore_slices
from refvl.viz.windows import explore_windows

FAMILIES = DATA / "measurements/families.json"


def _load(name: str) -> VLM:
    return refvl.load(DATA / "checkpoints" / name, device="cpu", progress=False)


def _released() -> dict[str, VLM]:
    """The models of the family race at their true sizes, without memory."""
    counted = json.loads(FAMILIES.read_text())
    files = {name: DATA / f"configs/{file}.json" for name, file in counted["configs"].items()}
    return {n: refvl.load(f, weights="random", device="meta", progress=False) for n, f in files.items()}


GALLERY: dict[str, Callable[[], Explorer]] = {
    "windows": lambda: explore_windows(
        {name: DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea", "rocket")}, PatchConfig()
    ),
    "graph": lambda: explore_graph(
        _load("tiny-qwen2_5_vl"), DATA / "pictures/coffee.jpg", DATA / "pictures/scene.png", "Where is the star?"
    ),
    "packing": lambda: explore_packing(arrivals_of_images(PatchConfig()), generate_budgets(64, 512)),
    "slices": lambda: explore_slices(DATA / "pictures/coffee.jpg", SliceConfig(), model=_load("tiny-minicpmv-4_5")),
    "families": lambda: explore_families(_released(), json.loads(FAMILIES.read_text())),
}
