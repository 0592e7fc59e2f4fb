"""Adapters that answer with boxes. Oracles: the pixels that were painted, the base model, the log, a formula for IoU.

Asked about pictures 100,000 and following of the split "test", which are neither among those of the training, nor among
those that chose the recipe, nor among those of `data/measurements`.
"""

import json
from dataclasses import asdict, replace

import pytest

import refvl
from data.training import run, scenes, train_boxes
from data.training.tiny_family import find_family
from refvl.paths import DATA
from refvl.serving import adapters

pytest.importorskip("peft")
FIRST, SAMPLE = 100_000, 24


@pytest.fixture(scope="module", params=train_boxes.TITLES)
def adapted(request):
    """(name, the model with its adapter)."""
    model = refvl.load(find_family(request.param).folder, device="cpu", progress=False)
    adapters.attach(model, train_boxes.folder_of(request.param))
    return request.param, model


@pytest.mark.parametrize("index", range(4))
def test_a_box_holds_what_was_painted(index):
    """Oracle: the picture with and without the object."""
    scene = train_boxes.draw_scene("test", index)
    plain = replace(scene, jpeg_quality=None)
    for i, thing in enumerate(plain.things):
        without = replace(plain, things=plain.things[:i] + plain.things[i + 1 :])
        changed = (scenes.render(plain).astype(int) - scenes.render(without)).any(-1)
        x1, y1, x2, y2 = train_boxes.box_of(thing, scene.size)
        assert changed[y1:y2, x1:x2].any(0).all() and changed[y1:y2, x1:x2].any(1).all()
        changed[max(y1 - 3, 0) : y2 + 3, max(x1 - 3, 0) : x2 + 3] = False  # the edge is soft, and tips are thin
        assert not changed.any()


def test_overlap():
    """By hand: 2 x 3 of 4 x 4 and 4 x 4; the same; none."""
    assert train_boxes.iou([0, 0, 4, 4], [2, 1, 6, 5]) == 6 / 26
    assert train_boxes.iou([1, 2, 3, 9], [1, 2, 3, 9]) == 1
    assert train_boxes.iou([0, 0, 4, 4], [4, 0, 8, 4]) == train_boxes.iou([0, 0, 0, 0], [0, 0, 4, 4]) == 0


def test_boxes_are_found_and_only_by_the_own_convention(adapted):
    """Oracle: the painted box. The bar is that of the issue."""
    _, model = adapted
    found = train_boxes.summary(train_boxes.ask_all(model, "test", range(FIRST, FIRST + SAMPLE)))
    assert found["mean_iou"] >= train_boxes.GOAL and found["mean_iou_in_the_other_convention"] < 0.1, found


def test_off_the_base_model_answers(adapted):
    """Oracle: the model without an adapter."""
    name, model = adapted
    plain = refvl.load(find_family(name).folder, device="cpu", progress=False)
    question = {"prompt": "What color is the circle?", "images": [DATA / "pictures/scene.png"]}
    with model.adapters.disable_adapter():
        assert model.trace(**question).token_ids == plain.trace(**question).token_ids


def test_log_and_measurement_are_of_these_weights(adapted):
    name, _ = adapted
    folder = train_boxes.folder_of(name)
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    digest = run.digest(folder, adapters.WEIGHTS)
    assert log[0]["recipe"] == asdict(train_boxes.Recipe()) and log[-1]["weights_sha256"] == digest
    [measured] = [row for row in json.loads(train_boxes.MEASUREMENTS.read_text())["models"] if row["model"] == name]
    assert measured["weights_sha256"] == digest and measured["mean_iou"] >= train_boxes.GOAL
    assert log[-1]["seconds"] <= 30 * 60
