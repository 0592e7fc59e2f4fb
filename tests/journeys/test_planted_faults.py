"""Faults of one line, planted one at a time, and the verdict of `refvl.compare` on each.

Oracle: transformers' model with the same weights on the same request, which a run without a fault equals. For Qwen2.5's
clip it is refvl without the fault, as transformers puts the text after it elsewhere. Causes are tried with a third
model, which has no fault.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from PIL import Image
from shipped import shipped

import refvl
from refvl.paths import DATA
from refvl.pixels import patches
from refvl.study import releases
from refvl.study.recording import record_transformers

PICTURES, CLIP = DATA / "pictures", DATA / "clips" / "scene.mp4"
QWEN, QWEN3, GLM = "tiny-qwen2_5_vl", "tiny-qwen3_vl", "tiny-glm4v"
PHOTO = Image.open(PICTURES / "coffee.jpg").convert("RGB")
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
    if (name, request) == (QWEN, "clip"):
        return trace(vlm, request).stages
    return record_transformers(str(DATA / "checkpoints" / name), vlm, trace(vlm, request), max_new_tokens=4)


# --- faults of the text model -----------------------------------------------------------------------------------------


def theta(vlm, patch) -> None:
    rotary = vlm.language_model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq ** (math.log(7) / math.log(5))


def scaled_angles(vlm, patch) -> None:
    vlm.language_model.model.rotary_emb.inv_freq *= 1.02


def section(vlm, patch) -> None:
    vlm.language_model.model.rotary_emb.mrope_section.reverse()


def not_interleaved(vlm, patch) -> None:
    rotary = vlm.language_model.model.rotary_emb

    def in_runs(angles):
        axes = enumerate(angles.split(rotary.mrope_section, dim=-1))
        return torch.cat([part[axis] for axis, part in axes] * 2, dim=-1)

    patch.setattr(rotary, "recomposition_frequencies", in_runs)


def axis_order(vlm, patch) -> None:
    rotary = vlm.language_model.model.rotary_emb
    forward = rotary.forward
    patch.setattr(rotary, "forward", lambda x, position_ids: forward(x, position_ids[[0, 2, 1]]))


def deepstack_left_out(vlm, patch) -> None:
    text = vlm.language_model
    forward = text.forward
    patch.setattr(text, "forward", lambda *args, deepstack_embeds=None, **kwargs: forward(*args, **kwargs))


def deepstack_late(vlm, patch) -> None:
    text = vlm.language_model.model
    forward = text.forward

    def late(deepstack_visual_embeds=None, **kwargs):
        if deepstack_visual_embeds:
            first, *others = deepstack_visual_embeds
            deepstack_visual_embeds = [torch.zeros_like(first), first, *others]
        return forward(deepstack_visual_embeds=deepstack_visual_embeds, **kwargs)

    patch.setattr(text, "forward", late)


def epsilon(vlm, patch) -> None:
    for module in vlm.language_model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-4


def half_norms(vlm, patch) -> None:
    for module in vlm.language_model.modules():
        if hasattr(module, "variance_epsilon"):

            def forward(x, norm=module):
                y = x.bfloat16()
                y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
                return (norm.weight.bfloat16() * y).to(x.dtype)

            patch.setattr(module, "forward", forward)


def half_text(vlm, patch) -> None:
    vlm.language_model.to(torch.bfloat16)


def no_final_norm(vlm, patch) -> None:
    vlm.language_model.model.norm = torch.nn.Identity()


def one_weight(vlm, patch) -> None:
    with torch.no_grad():
        vlm.language_model.model.layers[2].mlp.down_proj.weight[0, 0] += 0.5


def late_answer(vlm, patch) -> None:
    text = vlm.language_model
    forward = text.forward

    def late(position_ids=None, inputs_embeds=None, **kwargs):
        is_step = inputs_embeds is None
        return forward(position_ids=position_ids + 3 * is_step, inputs_embeds=inputs_embeds, **kwargs)

    patch.setattr(text, "forward", late)


# --- faults of the tower ----------------------------------------------------------------------------------------------


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
whole_frames = replan(
    cu_window_seqlens=lambda plan: plan.cu_seqlens,
    window_groups=lambda plan: plan.groups,
    max_window_seqlen=lambda plan: plan.max_seqlen,
)
joined_frames = replan(
    cu_seqlens=lambda plan: plan.cu_seqlens[[0, -1]],
    groups=lambda plan: None,
    max_seqlen=lambda plan: int(plan.cu_seqlens[-1]),
)
tower_axes = replan(positions=lambda plan: plan.positions.flip(1))


def stale_buffer(vlm, patch) -> None:
    """As a graph whose positions are copied at its first replay only."""
    plan, first = vlm.encoder.plan_checked, []

    def stale(layouts):
        plans = [plan([layout]) for layout in layouts]
        first.append(plans[0].positions)
        metadata = plan(layouts)
        positions = torch.cat([first[0]] * len(plans))
        return replace(metadata, positions=positions)

    patch.setattr(vlm.encoder, "plan_checked", stale)


def tower_epsilon(vlm, patch) -> None:
    for module in vlm.encoder.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-2


# --- faults before and between ----------------------------------------------------------------------------------------


def merge_order(vlm, patch) -> None:
    cut_rows = patches.cut_rows

    def line_by_line(*args, **kwargs):
        rows, (t, h, w) = cut_rows(*args, **kwargs)
        return rows.unflatten(0, (t, h // 2, w // 2, 2, 2)).transpose(2, 3).flatten(0, 4), (t, h, w)

    patch.setattr(patches, "cut_rows", line_by_line)


def image_mean(vlm, patch) -> None:
    vlm.processor.image_config = replace(vlm.processor.image_config, image_mean=(0.5, 0.5, 0.5))


def bilinear(vlm, patch) -> None:
    def resize_image(image, config):
        height, width = config.target_size(image.height, image.width)
        return image.resize((width, height), Image.Resampling.BILINEAR)

    patch.setattr(patches, "resize_image", resize_image)


def frame_rate(vlm, patch) -> None:
    vlm.config.vision_config.tokens_per_second *= 3


def release(vlm, patch) -> None:
    wrong = releases.larger_side_positions
    patch.setattr(vlm.language_model, "positions", lambda ids, spans: wrong(len(ids), spans)[0])


def position_axes(vlm, patch) -> None:
    positions = vlm.language_model.positions
    patch.setattr(vlm.language_model, "positions", lambda ids, spans: positions(ids, spans)[[0, 2, 1]])


def other_choice(vlm, patch) -> None:
    first = int(theirs(QWEN, "pictures").tensors["decode tokens/token_ids"][0])
    vlm.language_model.generation_config.suppress_tokens = [first]


class Planted(NamedTuple):
    fault: Callable
    stage: str  # of the first difference
    verdict: str  # how its cause begins
    name: str = QWEN
    request: str = "pictures"


FAULTS = (
    Planted(theta, "prefill/last_states", "layer 0: rotary, theta 7 instead of 5, in a"),
    Planted(theta, "prefill/last_states", "layer 0: rotary, theta 7 instead of 5, in a", GLM),
    Planted(section, "prefill/last_states", "layer 0: rotary, mrope_section [6, 6, 4] contiguous, in a"),
    Planted(section, "prefill/last_states", "layer 0: rotary, mrope_section [3, 3, 2] contiguous, in a", GLM),
    Planted(not_interleaved, "prefill/last_states", "layer 0: rotary, mrope_section [6, 5, 5] contiguous, in a", QWEN3),
    Planted(axis_order, "prefill/last_states", "layer 0: rotary, h and w exchanged, in a"),
    Planted(axis_order, "prefill/last_states", "layer 0: rotary, h and w exchanged, in a", QWEN3),
    Planted(axis_order, "prefill/last_states", "layer 0: rotary, h and w exchanged, in a", GLM, "clip"),
    Planted(scaled_angles, "prefill/last_states", "layer 0: rotary, angles 1.02 times as large, in a"),
    Planted(deepstack_left_out, "prefill/last_states", "layer 0: deepstack, left out, in a", QWEN3),
    Planted(deepstack_late, "prefill/last_states", "layer 0: deepstack, one layer late, in a", QWEN3),
    Planted(epsilon, "prefill/last_states", "layer 0: norms, epsilon 0.0001, in a"),
    Planted(half_norms, "prefill/last_states", "layer 0: norms, computed in bfloat16, in a"),
    Planted(half_text, "merge/inputs_embeds", "precision: bfloat16 against float32"),
    Planted(no_final_norm, "prefill/first_logits", "head: final norm left out, in a"),
    Planted(one_weight, "prefill/last_states", "layer 2: its norms, rotary, attention or weights; in a"),
    Planted(late_answer, "decode tokens/token_ids", "decoding: positions of new tokens, or their cache"),
    Planted(other_choice, "decode tokens/token_ids", "decoding: the same logits, a different choice"),
    Planted(merge_order, "patchify/0", "order: the patch rows"),
    Planted(image_mean, "patchify/0", "normalisation: mean, std or scale of a channel"),
    Planted(bilinear, "patchify/0", "resize: different filter", QWEN, "photograph"),
    Planted(frame_rate, "positions/ids", "positions: seconds between frames", QWEN, "clip"),
    Planted(release, "positions/ids", "positions: how far an item moves the text after it", QWEN, "clip"),
    Planted(position_axes, "positions/ids", "positions: order of the axes (t, w, h instead of t, h, w)"),
    Planted(window_order, "encode/0", "tower: window order not undone (reverse_index), in a"),
    Planted(whole_frames, "encode/0", "tower: every block attends to whole frames (cu_window_seqlens), in a"),
    Planted(joined_frames, "encode/0", "tower: attention across the frames of a video (cu_seqlens), in a", GLM, "clip"),
    Planted(tower_axes, "encode/0", "tower: rotary, rows and columns exchanged, in a", QWEN3),
    Planted(tower_epsilon, "encode/0", "tower: norms, epsilon 0.01, in a", GLM),
    Planted(stale_buffer, "encode/1", "tower: positions of item 1 (a buffer that was not refilled), in a"),
)


@pytest.mark.parametrize("planted", FAULTS, ids=lambda p: f"{p.fault.__name__}-{p.name}-{p.request}")
def test_a_planted_fault_is_named(planted, monkeypatch):
    name, request = planted.name, planted.request
    expected = theirs(name, request)
    vlm = refvl.load(DATA / "checkpoints" / name, device="cpu", progress=False)
    with monkeypatch.context() as patch:
        planted.fault(vlm, patch)
        run = trace(vlm, request)
    first = refvl.compare(run, expected, model=shipped(name)).first
    assert first is not None, "not seen"
    assert (first.name, first.cause[: len(planted.verdict)]) == (planted.stage, planted.verdict)


@pytest.mark.parametrize(
    ("name", "request_"),
    [(name, request) for name in (QWEN, QWEN3, GLM) for request in REQUESTS if (name, request) != (QWEN, "clip")],
)
def test_without_a_fault_both_are_the_same(name, request_):
    compared = refvl.compare(trace(shipped(name), request_), theirs(name, request_), model=shipped(name))
    assert compared.verdict == "no difference in the stages that both recorded"
    assert {"prefill/last_states", "prefill/first_logits", "decode tokens/margins"} <= {r.name for r in compared.rows}


@pytest.mark.parametrize("name", ["tiny-minicpmv-4_5", "tiny-step3"])
def test_without_a_fault_two_ways_of_one_model_are_the_same(name):
    """Oracle, for families that transformers does not have: the prompt read in chunks, by other kernels' shapes."""
    whole, pieces = (trace(shipped(name), "pictures", prefill_chunk=chunk) for chunk in (None, 7))
    assert refvl.compare(whole, pieces, model=shipped(name)).verdict == "no difference in the stages that both recorded"
