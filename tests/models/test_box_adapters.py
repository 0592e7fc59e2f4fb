"""Adapters that answer with boxes. Oracles: the pixels that were painted, the base model, the log.

Asked about images 100,000 and following of the split "test", which are neither among those of the
training, nor among those that chose the recipe, nor among those of `data/measurements`.
"""

import json
from dataclasses import replace

import pytest

import refvl
from data.training import box_questions, run, scenes
from data.training.tiny_family import find_family
from refvl.paths import DATA
from refvl.serving import adapters

pytest.importorskip("peft")
FIRST, SAMPLE = 100_000, 24


@pytest.mark.parametrize("index", range(4))
def test_a_box_holds_what_was_painted(index):
    """Oracle: the image with and without the object."""
    scene = box_questions.draw_scene("test", index)
    plain = replace(scene, jpeg_quality=None)
    for i, thing in enumerate(plain.things):
        without = replace(plain, things=plain.things[:i] + plain.things[i + 1 :])
        changed = (scenes.render(plain).astype(int) - scenes.render(without)).any(-1)
        x1, y1, x2, y2 = box_questions.box_of(thing, scene.size)
        assert changed[y1:y2, x1:x2].any(0).all() and changed[y1:y2, x1:x2].any(1).all()
        changed[max(y1 - 3, 0) : y2 + 3, max(x1 - 3, 0) : x2 + 3] = False  # the edge is soft, and tips are thin
        assert not changed.any()


def test_overlap():
    """By hand: 2 x 3 of 4 x 4 and 4 x 4; the same; none."""
    assert box_questions.iou([0, 0, 4, 4], [2, 1, 6, 5]) == 6 / 26
    assert box_questions.iou([1, 2, 3, 9], [1, 2, 3, 9]) == 1
    assert box_questions.iou([0, 0, 4, 4], [4, 0, 8, 4]) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", box_questions.TITLES)
def test_boxes_are_found_and_only_by_the_own_convention(name):
    """And with the adapter off, the base model answers. The measurement is of these weights."""
    model, plain = (refvl.load(find_family(name).folder, device="cpu", progress=False) for _ in range(2))
    adapters.attach(model, box_questions.folder_of(name))
    own, other = box_questions.overlaps(model, "test", range(FIRST, FIRST + SAMPLE)).mean(0)
    assert own >= 0.7 and other < 0.1
    question = {"prompt": "What color is the circle?", "images": [DATA / "pictures/scene.png"]}
    with model.adapters.disable_adapter():
        assert model.trace(**question).token_ids == plain.trace(**question).token_ids
    measured = {row["model"]: row for row in json.loads((DATA / "measurements/boxes.json").read_text())["models"]}
    assert measured[name]["weights_sha256"] == run.digest(box_questions.folder_of(name), adapters.WEIGHTS)
