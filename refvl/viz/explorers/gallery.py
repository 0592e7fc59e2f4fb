"""Every explorer, on pictures, clips and models that come with the repository: what the pages and the tests show."""

from collections.abc import Callable
from functools import cache

import refvl
from refvl.paths import DATA
from refvl.pixels.patches import PatchConfig
from refvl.viz.attention import explore_attention, explore_tower
from refvl.viz.evs import explore_evs
from refvl.viz.explorers.base import Explorer
from refvl.viz.positions import explore_mrope, explore_positions
from refvl.viz.windows import explore_windows

SCENE, ROCKET, CLIP = (DATA / "pictures" / "scene.png", DATA / "pictures" / "rocket.jpg", DATA / "clips" / "scene.mp4")

GALLERY: dict[str, Callable[[], Explorer]] = {
    "windows": lambda: explore_windows(
        {name: DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea", "rocket")}, PatchConfig()
    ),
    "positions": explore_positions,
    "mrope": explore_mrope,
    "attention": lambda: explore_attention(
        small_model(),
        {
            question: (question, SCENE)
            for question in ("What color is the circle?", "What shape is in the center?", "Where is the square?")
        },
    ),
    "tower": lambda: explore_tower(
        small_model(),
        {"a scene": ("What color is the circle?", SCENE), "a rocket": ("What is in the picture?", ROCKET)},
    ),
    "evs": lambda: explore_evs(
        small_model(),
        {question: (question, CLIP) for question in ("Which way does the circle move?", "What color is the circle?")},
    ),
}


@cache
def small_model() -> refvl.VLM:
    """Qwen2.5-VL's architecture, trained on scenes: a tower with windows, and pruning of videos."""
    return refvl.load(DATA / "checkpoints" / "tiny-qwen2_5_vl", device="cpu", progress=False)
