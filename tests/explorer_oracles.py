"""What every explorer of the gallery has to show in a state, computed again by refvl's functions without its table."""

import json
import math
from copy import copy
from functools import cache as kept

import numpy as np
import torch
from PIL import Image

from benchmarks.families import load_released
from refvl.encoders.resampler import attention_weights
from refvl.graphs import generate_budgets, padding_waste, plan_batches, replay_stale
from refvl.paths import DATA
from refvl.pixels.crops import plan_crops
from refvl.pixels.media import load_image
from refvl.pixels.patches import plan_grid
from refvl.pixels.slices import SliceConfig, plan_slices
from refvl.positions import get_window_index, merge_block_coordinates
from refvl.tools.costs import (
    blank_clip,
    count_positions,
    encoder_activation_bytes,
    kv_cache_bytes_per_token,
    plan_media,
)
from refvl.viz.explorers.slices import fit
from refvl.viz.patches import with_token_budget


def windows(explorer, state: tuple) -> dict:
    name, budget, size = state
    picture = load_image(explorer.images[name])
    grid = plan_grid(picture.height, picture.width, with_token_budget(explorer.config, budget))
    index, lengths = get_window_index([grid], window_size=size)
    return {
        "photo": list(explorer.images).index(name), "grid": grid[1:], "patches": merge_block_coordinates([grid]),
        "window_index": index, "cu_window_seqlens": lengths,
    }  # fmt: skip


def graph(explorer, state: tuple) -> dict:
    """The buffers are filled by hand, and the graph is replayed whole; the model answers from a merged prompt."""
    [stale] = state
    model, captured, run = explorer.model, explorer.captured, explorer.run
    filled = [(trace.patches[0].pixel_values, model.encoder.plan(trace.layouts)) for trace in (explorer.first, run)]
    captured.fill(*filled[0])
    left = {name: buffer.clone() for name, buffer in captured.buffers.items()}
    captured.fill(*filled[1])
    if stale in left:
        captured.buffers[stale].copy_(left[stale])
    embeds = captured.graph.replay()[: len(run.embeds[0])].clone()
    changed = copy(run)
    changed.inputs_embeds = run.inputs_embeds.clone()
    changed.inputs_embeds[run.spans[0].offset :][: len(embeds)] = embeds
    with torch.inference_mode():
        logits = model.language_model(
            inputs_embeds=changed.inputs_embeds[None], position_ids=run.positions[:, None], logits_to_keep=1
        ).logits
    errors = replay_stale(captured, *filled)["" if stale == "none" else stale].errors
    return {
        "operations": [0 if e == 0 else level(255 + 254 * math.log10(max(e, 1e-3)) / 3) for e in errors],
        "tokens": ((embeds - run.embeds[0]).norm(dim=1) / run.embeds[0].norm(dim=1)).view(3, 3),
        "answer": model.answers([changed], max_new_tokens=16)[0],
        "probability": round(float(logits.softmax(-1).max()), 3),
    }


def level(value: float) -> int:
    """1 to 255, truncated."""
    return int(min(255, max(1, value)))


def packing(explorer, state: tuple) -> dict:
    name, graphs, arrived, policy = state
    tokens, budgets = explorer.arrivals[name][:arrived], generate_budgets(64, 512)[-graphs:]
    plans = {p: plan_batches(tokens, budgets, max_items=8, policy=p) for p in ("greedy", "optimal")}
    assert (policy == "either") == (plans["greedy"] == plans["optimal"])
    batches = plans["greedy" if policy == "either" else policy]
    return {
        "tokens": tokens,
        "budgets": budgets,
        "replays": [
            {"items": b.indices, "tokens": sum(tokens[i] for i in b.indices), "budget": b.budget or 0} for b in batches
        ],
        "waste": round(padding_waste(batches, tokens), 4),
    }


def slices(explorer, state: tuple) -> dict:
    """Both plans, and the small model once more."""
    (a, b), side = map(int, state[0].split(" : ")), state[1]
    width, height = side * a // max(a, b), side * b // max(a, b)
    cut, crops, model = plan_slices(width, height, SliceConfig()), plan_crops(width, height), explorer.model
    columns, rows = cut.grid or (0, 0)
    scale = 448 // model.processor.image_config.scale_resolution
    photo = fit(explorer.image, (width, height)).resize((width // scale, height // scale), Image.Resampling.BICUBIC)
    run = model.trace(explorer.question, images=[photo], max_new_tokens=16)
    assert len(run.layouts[0]) == 1 + columns * rows  # cut alike
    with torch.inference_mode():
        plan = model.encoder.plan(run.layouts)
        seen = model.encoder.vpm.encode(run.patches[0].pixel_values, plan.vision)
        weights = [w.mean(0) for w in attention_weights(model.encoder.resampler, seen, plan.resampler)]
    heat = [w.view(len(w), *group.slices[0]).numpy() for w, group in zip(weights, run.layouts[0], strict=True)]
    in_steps = [np.round(255 * np.stack(part) / np.stack(part).max()) for part in (heat[:1], heat[1:]) if part]
    return {
        "size": (width, height),
        "slices": {
            "grid": (columns, rows), "cell": cut.cell or (0, 0), "overview": cut.overview,
            "tokens": 64 * len(heat), "of_slice": 64,
        },
        "crops": {
            "canvas": crops.canvas, "window": crops.window, "grid": crops.layout,
            "tokens": 81 * crops.layout.crops + 169, "of_crop": 81, "of_overview": 169,
            "marks": 2 * (crops.layout.crops + 1) + crops.layout.newlines,
        },
        "overview_heat": in_steps[0].astype(int), "slice_heat": in_steps[1].astype(int) if columns else [],
        "answer": run.text,
    }  # fmt: skip


released = kept(load_released)


def families(explorer, state: tuple) -> dict:
    """The released models at their true sizes; the arithmetic as it was counted (`tests/tools/test_arithmetic.py`)."""
    kind, shown = state
    size, counted, costs = int(shown.split()[0]), json.loads((DATA / "measurements/families.json").read_text()), {}
    for entry in counted["rows"]:
        if (entry["kind"], entry["size"]) != (kind, size):
            continue
        model = released(entry["family"])
        medium = Image.new("L", (size, size)) if kind == "image" else blank_clip(model, size, 640, 360)
        plan = plan_media(model, medium)
        cache = plan.tokens * kv_cache_bytes_per_token(model.language_model.config, torch.bfloat16)
        costs[entry["family"]] = {
            "patches": plan.patches, "tokens": plan.tokens, "positions": count_positions(model, medium),
            "cache": cache, "bytes": cache + encoder_activation_bytes(model.encoder, plan.patches),
            "seconds": (entry["tower"] + entry["prefill"]) / 989e12,
        }  # fmt: skip
    return {"size": size, "families": costs}


ORACLES = {"windows": windows, "graph": graph, "packing": packing, "slices": slices, "families": families}
