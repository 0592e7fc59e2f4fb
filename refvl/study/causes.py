"""Causes of the first difference between two runs, proven by running the stage again with a single change.

    resize       a different filter or order in Pillow, or torchvision's bicubic; needs the image of a `Trace`
    tower        a window order that was not undone; rows and columns exchanged
    positions    axes exchanged; the rules of released software (`refvl.study.releases`)
    text model   axes exchanged; the theta of a different model

A cause is named only if the changed stage reproduces one run, and the unchanged stage reproduces
the other run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from refvl.pixels.patches import PatchConfig, levels_of_frames, levels_of_image
from refvl.positions import get_mrope_input_positions
from refvl.serving.features import share_weights
from refvl.study import releases
from refvl.study.readout import last_states

LEFT = 1e-3  # the share of a difference that a cause may leave unexplained
THETAS = (1e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7, 1e8)  # the rope thetas of released text models
ORDERS = {", ".join("thw"[axis] for axis in order): list(order) for order in list(permutations(range(3)))[1:]}
Made = Iterator[tuple[str, Tensor]]  # yields ("", the correct result), then (cause, the result with this cause)


@torch.inference_mode()
def proven_cause(name: str, model: Any, a: Any, b: Any, trace: Any = None) -> str:
    """Return the cause of the first difference, and the run with this cause;
    "" if no recomputation proves a cause.

    name: the name of the tensor that differs. model: the `VLM` of one of the runs. a, b: the runs'
    `Stages`. trace: the run that is a `Trace`, with messages and media, if any.
    """
    stage, what = name.split("/", 1)
    if what == "input_ids":
        return releases.choice_behind(model, trace, [run.tensors[name].tolist() for run in (a, b)]) if trace else ""
    media = trace.media if trace else []
    runs = [run.tensors[name].float() for run in (a, b)]
    made = RECOMPUTED[stage](model, a, what, media) if stage in RECOMPUTED else iter(())
    _, right = next(made, ("", runs[0][:0]))
    if not runs[0].shape == runs[1].shape == right.shape:
        return ""
    distances = [float((right.float() - run).norm()) for run in runs]
    odd = distances.index(max(distances))
    enough = max(LEFT, 4 * distances[1 - odd] / distances[odd])  # even two correct runs differ if kernels differ
    if not enough < 0.5:
        return ""
    for cause, found in made:
        if found.shape == right.shape and float((found.float() - runs[odd]).norm()) <= enough * distances[odd]:
            return f"{cause}, in {'ab'[odd]} ({(a, b)[odd].source})"
    return ""


def _resized(model: Any, run: Any, what: str, media: Sequence) -> Made:
    config = model.processor.image_config
    if len(media) <= int(what) or not isinstance(media[int(what)], Image.Image) or not isinstance(config, PatchConfig):
        return
    image = media[int(what)]
    levels, (_, h, w) = levels_of_image(image, config)
    yield "", levels.normalize()
    for resampling in Image.Resampling:
        resized = image.resize((w * config.patch_size, h * config.patch_size), resampling)
        yield f"resize filter: {resampling.name.lower()} in one call", levels_of_image(resized, config)[0].normalize()
    yield "resize filter: torchvision's bicubic", levels_of_frames(np.asarray(image)[None], config)[0].normalize()


def _encoded(model: Any, run: Any, what: str, media: Sequence) -> Made:
    encoder, rows, grid = model.encoder, run.tensors.get(f"patchify/{what}"), run.layouts[int(what)]
    if rows is None or grid is None:
        return
    rows, plan = rows.to(encoder.device, encoder.dtype), encoder.plan([grid])
    yield "", encoder(rows, metadata=plan).cpu()
    if hasattr(plan, "window_index"):
        unchanged = torch.arange(len(plan.reverse_index), device=plan.reverse_index.device)
        yield "window order not undone", encoder(rows, metadata=replace(plan, reverse_index=unchanged)).cpu()
    exchanged = replace(plan, positions=plan.positions.flip(1))
    yield "rotary: rows and columns exchanged", encoder(rows, metadata=exchanged).cpu()


def _positioned(model: Any, run: Any, what: str, media: Sequence) -> Made:
    length = run.tensors["positions/ids"].shape[1]
    right, _ = get_mrope_input_positions(length, run.spans)
    yield "", right
    for order, axes in ORDERS.items():
        yield f"axes in the order {order}", right[axes]
    truncated = [releases.second_per_grid_truncated(span) for span in run.spans]
    yield "second_per_grid_truncated (releases)", get_mrope_input_positions(length, truncated)[0]
    for rule in (releases.larger_side_positions, releases.width_offset_positions):
        for spans in (run.spans, truncated):
            yield f"{rule.__name__} (releases)", rule(length, spans)[0]


def _read(model: Any, run: Any, what: str, media: Sequence) -> Made:
    text, given = model.language_model, run.tensors
    if what != "last_states" or not {"merge/inputs_embeds", "positions/ids"} <= given.keys():
        return
    yield "", last_states(text, given, given["positions/ids"])
    for order, axes in ORDERS.items():
        yield f"rotary: axes in the order {order}", last_states(text, given, given["positions/ids"][axes])
    theta = (getattr(text.config, "rope_parameters", None) or {}).get("rope_theta")
    rotary = getattr(text.model, "rotary_emb", None)
    if theta is None or rotary is None:
        return
    for other in THETAS:
        changed = share_weights(text)  # frequencies are theta^(-2i/K), so log(theta) scales their exponents
        changed.model.rotary_emb.inv_freq = rotary.inv_freq ** (math.log(other) / math.log(theta))
        yield f"rotary: theta {other:g} instead of {theta:g}", last_states(changed, given, given["positions/ids"])


RECOMPUTED = {"patchify": _resized, "encode": _encoded, "positions": _positioned, "prefill": _read}
