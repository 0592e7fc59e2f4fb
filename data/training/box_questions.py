"""Questions that a shipped model answers with boxes, if one of the adapters `data/adapters/boxes-*` is on.

An adapter is a LoRA of the language model, trained by `data/training/train_boxes.py` at commit 8923bd7. Each of the
tower's tokens describes the content in its middle; so here, too, every object lies within one token's cell, slightly
off centre. Images have many sizes and aspect ratios. The processor stretches them to 4 x 3 or 3 x 4 tokens, so the unit
of coordinates (see `refvl.study.boxes`) determines where a box appears in the image.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

import refvl
from data.training import scenes
from refvl.paths import DATA
from refvl.study import boxes

TITLES = {"qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}
PHRASES = scenes.PHRASES["place"]  # the model answers with a place while the adapter is off
SIDES, ASPECTS = (160, 280), ((1.1, 1.5), (1 / 1.5, 1 / 1.1))  # ranges of sqrt(area) in px, and of width / height
CELLS = ((4, 3), (3, 4))  # (columns, rows) of tokens for each shape
RADII, JITTER = (9 / 28, 11.5 / 28), 2 / 28  # sides of objects, in cells, as in `scenes.py`


def folder_of(name: str) -> Path:
    return DATA / "adapters" / f"boxes-{name}"


def draw_scene(split: str, index: int) -> scenes.Scene:
    """Draw image number `index` of a split: wide and tall ones alternate, so every second image has the same grid.

    The scene is number `index` of `scenes.draw_scene`, with a different size and different places, so the same
    scenes are held out.
    """
    rng = np.random.default_rng([scenes.SEED, scenes.SPLITS[split], index, 11])
    scene, (columns, rows) = scenes.draw_scene(split, index), CELLS[index % 2]
    side, stretch = rng.uniform(*SIDES), rng.uniform(*ASPECTS[index % 2]) ** 0.5
    width, height = round(side * stretch), round(side / stretch)
    cell = np.array([width / columns, height / rows])
    placed = []
    for thing, place in zip(scene.things, rng.permutation(columns * rows), strict=False):
        x, y = cell * (np.array([place % columns, place // columns]) + 0.5 + rng.uniform(-JITTER, JITTER, 2))
        placed.append(replace(thing, center=(float(x), float(y)), radius=float(cell.min() * rng.uniform(*RADII))))
    return replace(scene, things=tuple(placed), size=(width, height))


def box_of(thing: scenes.Thing, size: tuple[int, int]) -> list[int]:
    """Return x1, y1, x2, y2 in pixels of the image, around all pixels of which the object covers at least half."""
    (x, y), covered = scenes.coverage(thing, thing.center, size)
    rows, columns = (np.flatnonzero((covered >= 0.5).any(axis)) for axis in (1, 0))
    return [int(v) for v in (x + columns[0], y + rows[0], x + columns[-1] + 1, y + rows[-1] + 1)]


def request(split: str, index: int) -> dict:
    """Return arguments of `chat` that ask for the first object of an image."""
    scene = draw_scene(split, index)
    name = f"{scene.things[0].color} {scene.things[0].shape}"
    return {"prompt": PHRASES[index % 3].format(x=name), "images": [Image.fromarray(scenes.render(scene))]}


def overlaps(vlm: refvl.VLM, split: str, indices: Sequence[int]) -> np.ndarray:
    """Ask about the first object of each image; return (images, 2), the overlaps with its box.

    The answer is read in the family's own convention, then in the other family's.
    """
    said = vlm.chat_batch([request(split, index) for index in indices], max_new_tokens=32, progress=False)
    [other] = [title for title in TITLES.values() if title != vlm.family.name]
    found = []
    for index, text in zip(indices, said, strict=True):
        scene, read = draw_scene(split, index), boxes.parse(text, vlm.family.name)[:1]
        resized = vlm.processor.image_config.target_size(*scene.size[::-1])[::-1]
        for title in (vlm.family.name, other):
            placed = boxes.to_picture(read, picture=scene.size, resized=resized, family=title).tolist()
            found.append(iou(placed[0], box_of(scene.things[0], scene.size)) if placed else 0.0)
    return np.array(found).reshape(-1, 2)


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the intersection over union of two boxes x1, y1, x2, y2."""
    sides = [max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1)]
    areas = [max(0.0, x2 - x1) * max(0.0, y2 - y1) for x1, y1, x2, y2 in (a, b)]
    return sides[0] * sides[1] / (sum(areas) - sides[0] * sides[1])
