"""Measure the time to the first token at each pruning rate, with EVS and VidCom2: `python -m benchmarks.evs_ttft`.

A video of ten frames, whose tokens dominate the prompt, runs through a random model with the width of Qwen2.5-VL-3B and
few layers (all layers on CUDA). Times depend on shapes and not on contents. Rules and rates alternate within a run, and
figures are medians. The time to the first token includes the encoder, which processes the whole video at every rate.
With --write the results are written to data/measurements/evs_ttft_<cpu|cuda>.json.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

import refvl
from benchmarks.report import Device, Repeats, Write, announce, environment, resolve_device, write_measurement
from refvl.paths import DATA
from refvl.pixels.media import load_video
from refvl.positions import PRUNERS
from refvl.trace import synchronized_time

RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
CPU_LAYERS = 4  # layers of tower and language model on a CPU; CUDA uses all of them
CONFIG = DATA / "configs" / "Qwen2.5-VL-3B-Instruct.json"


def build(device: str, layers: int | None) -> refvl.VLM:
    """Build a random model of the 3B's width; `layers` limits the depth of tower and language model."""
    config = json.loads(CONFIG.read_text())
    if layers:
        config["num_hidden_layers"] = layers
        config["vision_config"] |= {"depth": layers, "fullatt_block_indexes": [layers - 1]}
    return refvl.load(config, weights="random", device=device)


def prompt_ids(vlm: refvl.VLM, tokens: int) -> torch.Tensor:
    """Return a prompt of a few words, the video, and a few words, (1, L)."""
    c = vlm.config
    clip = [c.vision_start_token_id, *[c.video_token_id] * tokens, c.vision_end_token_id]
    return torch.tensor([[*range(100, 115), *clip, *range(200, 215)]])


def measure(vlm: refvl.VLM, repeats: int) -> list[dict]:
    """Return one row per rule and rate: prompt tokens kept, and the median seconds of the mask and to the first token.

    The encoder processes the whole video at every rate, so its time is measured once and added to all rows.
    """
    frames = np.random.default_rng(0).integers(0, 256, (10, 252, 448, 3), dtype=np.uint8)
    (patches,) = vlm.processor.patchify([load_video(frames)])
    ids = prompt_ids(vlm, patches.media_tokens.num_tokens).to(vlm.device)
    pixel_values, (t, h, w) = patches.pixel_values.to(vlm.device), patches.media_tokens.thw
    ways = [("", 0.0), *((rule, q) for rule in PRUNERS for q in RATES if q)]
    times: dict[tuple, list[float]] = {(what, way): [] for what in ("encode", "mask", "rest") for way in ways}
    for i in tqdm(range(repeats + 1), desc="rounds", leave=False):  # rows are complete only after the last round
        with torch.inference_mode():
            encode, embeds = timed(vlm, lambda: vlm.encoder(pixel_values, [patches.layout]))
        for rule, q in ways:
            mask = partial(PRUNERS[rule].mask, embeds, (t, h, w), 1, q) if q else lambda: None
            rest = partial(
                vlm.generate, ids, video_embeds=embeds, video_grid_thw=[patches.layout], max_new_tokens=1,
                second_per_grid_ts=[1.0], pruning_rate=q, pruning=rule or "evs",
            )  # fmt: skip
            seconds = {"encode": encode, "mask": timed(vlm, mask)[0], "rest": timed(vlm, rest)[0]}
            for what in seconds if i else ():  # the first round is a warm-up
                times[what, (rule, q)].append(seconds[what])
    text, median = (
        ids.shape[1] - patches.media_tokens.num_tokens,
        {key: statistics.median(s) for key, s in times.items()},
    )
    rows = [
        {
            "pruning": rule,
            "q": q,
            "prompt_tokens": text + (PRUNERS[rule].count(h * w, t, q) if q else t * h * w),
            "mask_ms": median["mask", (rule, q)] * 1e3,
            "mask_relative_to_prefill_at_q0": median["mask", (rule, q)] / median["rest", ways[0]],
            "ttft_ms": (median["encode", (rule, q)] + median["rest", (rule, q)]) * 1e3,
        }
        for rule, q in ways
    ]
    return [row | {"relative_to_q0": row["ttft_ms"] / rows[0]["ttft_ms"]} for row in rows]


def timed(vlm: refvl.VLM, call: Callable) -> tuple[float, Any]:
    """Return the seconds and the result of a call; the device is synchronised before and after it."""
    start = synchronized_time(vlm.device)
    result = call()
    return synchronized_time(vlm.device) - start, result


def run(device: Device = "auto", repeats: Repeats = 5, write: Write = False) -> None:
    """Measure the time to the first token at each pruning rate, and how much of it the mask takes."""
    device = resolve_device(device)
    layers = CPU_LAYERS if device == "cpu" else None
    announce(f"evs_ttft_{device}", f"a video at pruning rates {RATES}, {repeats} rounds", repeats + 1)
    rows = measure(build(device, layers), repeats)
    table = Table("rule", "q", "prompt tokens", "mask", "of a full prefill", "first token after", "relative to q = 0")
    for row in rows:
        mask = f"{row['mask_ms']:.1f} ms", f"{row['mask_relative_to_prefill_at_q0']:.2%}"
        ttft = f"{row['ttft_ms']:.0f} ms", f"{row['relative_to_q0']:.2f}"
        table.add_row(row["pruning"], f"{row['q']}", f"{row['prompt_tokens']}", *mask, *ttft)
    Console().print(table)
    if write:
        result = environment(device) | {"layers": layers or "all", "repeats": repeats, "rows": rows}
        write_measurement(f"evs_ttft_{device}", result)


if __name__ == "__main__":
    typer.run(run)
