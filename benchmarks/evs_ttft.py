"""Time to the first token against the pruning rate: `python -m benchmarks.evs_ttft`.

A clip of ten frames whose tokens dominate the prompt, through a random model with the width of Qwen2.5-VL-3B and few
layers (all of them on CUDA): times depend on shapes, not on contents. Rates alternate in one run; every figure is a
median of patch rows to first token, so the encoder, which sees the whole clip at every rate, is in it. With
--write the results go to data/measurements/evs_ttft_<cpu|cuda>.json.
"""

import json
import statistics

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
from refvl.positions import compute_retained_tokens_count
from refvl.trace import synchronized_time

RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
CPU_LAYERS = 4  # of tower and language model; on CUDA all of them
CONFIG = DATA / "configs" / "Qwen2.5-VL-3B-Instruct.json"


def build(device: str, layers: int | None) -> refvl.VLM:
    """A random model of the 3B's width; `layers` cuts tower and language model."""
    config = json.loads(CONFIG.read_text())
    if layers:
        config["num_hidden_layers"] = layers
        config["vision_config"] |= {"depth": layers, "fullatt_block_indexes": [layers - 1]}
    return refvl.load(config, weights="random", device=device)


def prompt_ids(vlm: refvl.VLM, tokens: int) -> torch.Tensor:
    """(1, L): a few words, the clip, a few words."""
    c = vlm.config
    clip = [c.vision_start_token_id, *[c.video_token_id] * tokens, c.vision_end_token_id]
    return torch.tensor([[*range(100, 115), *clip, *range(200, 215)]])


def measure(vlm: refvl.VLM, repeats: int) -> list[dict]:
    """One row per rate: prompt tokens kept, and the median seconds from patch rows to the first token."""
    frames = np.random.default_rng(0).integers(0, 256, (10, 252, 448, 3), dtype=np.uint8)
    (patches,) = vlm.processor.patchify([load_video(frames)])
    ids = prompt_ids(vlm, patches.merged.num_tokens).to(vlm.device)
    seconds: dict[float, list[float]] = {q: [] for q in RATES}
    for i in tqdm(range(repeats + 1), desc="rounds", leave=False):  # rates take turns: no row is ready before the last
        for q in RATES:
            start = synchronized_time(vlm.device)
            vlm.generate(
                ids, pixel_values_videos=patches.pixel_values, video_grid_thw=[patches.layout], max_new_tokens=1,
                second_per_grid_ts=[1.0], pruning_rate=q,
            )  # fmt: skip
            if i:  # the first round warms up
                seconds[q].append(synchronized_time(vlm.device) - start)
    t, h, w = patches.merged.thw
    text = ids.shape[1] - patches.merged.num_tokens
    medians = {q: statistics.median(s) for q, s in seconds.items()}
    return [
        {
            "q": q,
            "prompt_tokens": text + compute_retained_tokens_count(h * w, t, q),
            "ttft_ms": medians[q] * 1e3,
            "relative_to_q0": medians[q] / medians[0.0],
        }
        for q in RATES
    ]


def run(device: Device = "auto", repeats: Repeats = 5, write: Write = False) -> None:
    """Time to the first token against the pruning rate."""
    device = resolve_device(device)
    layers = CPU_LAYERS if device == "cpu" else None
    announce(f"evs_ttft_{device}", f"a clip at pruning rates {RATES}, {repeats} rounds", repeats + 1)
    rows = measure(build(device, layers), repeats)
    table = Table("q", "prompt tokens", "first token after", "relative to q = 0")
    for row in rows:
        cells = f"{row['ttft_ms']:.0f} ms", f"{row['relative_to_q0']:.2f}"
        table.add_row(f"{row['q']}", f"{row['prompt_tokens']}", *cells)
    Console().print(table)
    if write:
        result = environment(device) | {"layers": layers or "all", "repeats": repeats, "rows": rows}
        write_measurement(f"evs_ttft_{device}", result)


if __name__ == "__main__":
    typer.run(run)
