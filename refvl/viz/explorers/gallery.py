"""Every explorer, built from images, videos and models in the repository, for the pages and the tests."""

import json
from collections.abc import Callable
from functools import cache

import numpy as np

import refvl
from refvl.graphs import generate_budgets
from refvl.model import VLM
from refvl.paths import DATA
from refvl.pixels.media import load_image
from refvl.pixels.patches import PatchConfig
from refvl.pixels.slices import SliceConfig
from refvl.viz import explore
from refvl.viz.explorers.base import Explorer
from refvl.viz.explorers.packing import arrivals_of_images

SCENE, CLIP = DATA / "pictures" / "scene.png", DATA / "clips" / "scene.mp4"
SIZES = [480, 2100, 768, 5320, 264, 1496, 3024, 620, 912, 4080, 352, 1180]  # the patches of images, in order of arrival


@cache
def small_model(name: str = "tiny-qwen2_5_vl") -> VLM:
    """Load a shipped model that was trained on scenes;
    the default has windows and can prune videos.

    The model uses torch's linear layers, so the pages are the same on every CPU.
    """
    return refvl.load(DATA / "checkpoints" / name, device="cpu", linear="torch", progress=False)


def bottom_first(image) -> np.ndarray:
    """Return the pixels of an image whose lower two thirds are moved to the top."""
    pixels = np.asarray(load_image(image))
    return np.roll(pixels, 2 * len(pixels) // 3, axis=0)


def about(medium, *questions: str) -> dict[str, tuple]:
    """Return questions about one image or video; each question is its own name."""
    return {question: (question, medium) for question in questions}


GALLERY: dict[str, Callable[[], Explorer]] = {
    "windows": lambda: explore.explore_windows(
        {name: DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea", "rocket")}, PatchConfig()
    ),
    "graph": lambda: explore.explore_graph(
        small_model(), DATA / "pictures/coffee.jpg", DATA / "pictures/scene.png", "Where is the square?"
    ),
    "launches": explore.explore_launches,
    "packing": lambda: explore.explore_packing(arrivals_of_images(PatchConfig()), generate_budgets(64, 512)),
    "slices": lambda: explore.explore_slices(
        DATA / "pictures/coffee.jpg", SliceConfig(), model=small_model("tiny-minicpmv-4_5")
    ),
    "families": lambda: explore.explore_families(json.loads((DATA / "measurements/families.json").read_text())),
    "positions": explore.explore_positions,
    "mrope": explore.explore_mrope,
    "attention": lambda: explore.explore_attention(
        small_model(), about(SCENE, "What color is the circle?", "What shape is in the center?", "Where is the square?")
    ),
    "deepstack": lambda: explore.explore_deepstack(
        small_model("tiny-qwen3_vl"),
        {
            "an image with its halves swapped": ("What shape is the red object?", bottom_first(SCENE)),
            "a video": ("Which way does the circle move?", CLIP),
            "an image": ("What color is the circle?", SCENE),
        },
    ),
    "timeline": explore.explore_timeline,
    "assignment": lambda: explore.explore_assignment(SIZES),
    "evs": lambda: explore.explore_evs(
        small_model(), about(CLIP, "Which way does the circle move?", "What color is the circle?")
    ),
}
