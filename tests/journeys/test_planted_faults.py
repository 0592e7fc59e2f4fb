"""Faults of one line, planted one at a time, and what `refvl.compare` says about each.

Oracle: transformers' model with the same weights on the same request, which a run without a fault
equals. For Qwen2.5's clip it is refvl without the fault, as transformers puts the text after it
elsewhere. Causes are proven with a third model, which has no fault; for other faults, only the
first stage and the first row are named.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from PIL import Image
from shipped import shipped

import refvl
from refvl.paths import DATA
from refvl.pixels import patches
from refvl.pixels.images import resize
from refvl.study import releases
from refvl.study.recording import record_transformers

CLIP = DATA / "clips" / "scene.mp4"
QWEN, QWEN3, GLM = "tiny-qwen2_5_vl", "tiny-qwen3_vl", "tiny-glm4v"
PHOTO = Image.open(DATA / "pictures" / "coffee.jpg").convert("RGB")
REQUESTS = {  # the photographs' grids are (1, 6, 8) and (1, 8, 6): plans of one shape
    "pictures": {"images": [PHOTO.resize((112, 84)), PHOTO.resize((84, 112))]},
    "photograph": {"images": [PHOTO]},
    "clip": {"videos": [CLIP]},
}
pytestmark = pytest.mark.thorough


def trace(vlm: refvl.VLM, request: str, **options) -> refvl.Trace:
    return vlm.trace("What color is the circle?", **REQUESTS[request], max_new_tokens=4, **options)


@cache
def theirs(name: str, request: str):
    vlm = shipped(name)
    if request == "clip":  # clips beside transformers: tests/contracts/test_their_processors.py
        return trace(vlm, request).stages
    return record_transformers(str(DATA / "checkpoints" / name), vlm, trace(vlm, request), max_new_tokens=4)


# --- faults that a recomputation proves -------------------------------------------------------------------------------


def theta(vlm, patch) -> None:
    rotary = vlm.language_model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq ** (math.log(1e6) / math.log(5))


def axis_order(vlm, patch) -> None:
    rotary = vlm.language_model.model.rotary_emb
    forward = rotary.forward
    patch.setattr(rotary, "forward", lambda x, position_ids: forward(x, position_ids[[0, 2, 1]]))


def replan(**changes: Callable) -> Callable:
    """A fault: fields of every plan made by functions of the plan."""

    def fault(vlm, patch) -> None:
        plan = vlm.encoder.plan_checked

        def changed(layouts):
            metadata = plan(layouts)
            return replace(metadata, **{name: change(metadata) for name, change in changes.items()})

        patch.setattr(vlm.encoder, "plan_checked", changed)

    return fault


window_order = replan(reverse_index=lambda plan: torch.arange(len(plan.reverse_index)))
tower_axes = replan(positions=lambda plan: plan.positions.flip(1))


def bilinear(vlm, patch) -> None:
    patch.setattr(patches, "resize", partial(resize, resampling=Image.Resampling.BILINEAR))


def release(vlm, patch) -> None:
    wrong = releases.larger_side_positions
    patch.setattr(vlm.language_model, "positions", lambda ids, spans: wrong(len(ids), spans)[0])


# --- other faults -----------------------------------------------------------------------------------------------------


def one_weight(vlm, patch) -> None:
    with torch.no_grad():
        vlm.language_model.model.layers[2].mlp.down_proj.weight[0, 0] += 0.5


def image_mean(vlm, patch) -> None:
    vlm.processor.image_config = replace(vlm.processor.image_config, image_mean=(0.5, 0.5, 0.5))


class Planted(NamedTuple):
    fault: Callable
    stage: str  # of the first difference
    name: str = QWEN
    request: str = "pictures"
    cause: str = ""  # how the proven cause begins, if one is proven
    where: str = ""  # of the first row


THETA = "rotary: theta 1e+06 instead of 5, in a"
AXES = "rotary: axes in the order t, w, h, in a"
STATES = "prefill/last_states"
FAULTS = (
    Planted(theta, STATES, cause=THETA, where="after layer 0"),
    Planted(theta, STATES, GLM, cause=THETA),
    Planted(axis_order, STATES, QWEN3, cause=AXES),
    Planted(axis_order, STATES, GLM, "clip", AXES),
    Planted(window_order, "encode/0", cause="window order not undone, in a"),
    Planted(tower_axes, "encode/0", QWEN3, cause="rotary: rows and columns exchanged, in a"),
    Planted(bilinear, "patchify/0", QWEN, "photograph", "resize filter: bilinear in one call, in a"),
    Planted(release, "positions/ids", QWEN, "clip", "larger_side_positions (releases), in a"),
    Planted(image_mean, "patchify/0", where="48 of 48 rows, the first at item 1, patch (t 0, row 0, column 0)"),
    Planted(one_weight, STATES, where="after layer 2"),
)


@pytest.mark.parametrize("planted", FAULTS, ids=lambda p: f"{p.fault.__name__}-{p.name}-{p.request}")
def test_a_planted_fault_is_found(planted, monkeypatch):
    name, request = planted.name, planted.request
    expected = theirs(name, request)
    vlm = refvl.load(DATA / "checkpoints" / name, device="cpu", progress=False)
    with monkeypatch.context() as patch:
        planted.fault(vlm, patch)
        run = trace(vlm, request)
    for model, cause in ((None, ""), (shipped(name), planted.cause)):
        first = refvl.compare(run, expected, model=model).first
        assert first is not None, "not seen"
        assert first.name == planted.stage and planted.where in first.beyond, first
        assert first.cause.startswith(cause), first.cause
        assert bool(first.cause) == bool(cause), first.cause
