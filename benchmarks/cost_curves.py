"""Measure how costs grow with pixels, frames, items and prompt tokens: `python -m benchmarks.cost_curves`.

Configs are tiny and run on one CPU thread, because exponents do not depend on the width. Each point is measured in CPU
time. If torch can count the multiplications and additions, the counts, which have no noise, are printed next to the
times. An exponent is the slope of a straight line fitted to the largest sizes of a curve on logarithmic axes. With
--write the results are written to data/measurements/cost_curves_cpu.json.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import typer
from PIL import Image
from transformers import DynamicCache

import refvl
from benchmarks.report import (
    PrintedTable,
    Repeats,
    Write,
    announce,
    check_operations,
    environment,
    processor_seconds,
    resolve_device,
    summary,
    write_measurement,
)
from refvl.attention import Segments
from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import generate_budgets, plan_batches
from refvl.paths import DATA
from refvl.pixels.by_hand import patchify_image
from refvl.pixels.patches import PatchConfig
from refvl.positions import MediaSpan, compute_retention_mask, get_mrope_input_positions
from refvl.study.costs import encoder_operations, prefill_operations

NAME = "cost_curves_cpu"
FITTED = 4  # an exponent is fitted to this many of the largest sizes, because fixed costs dominate smaller ones
SIDES = (112, 196, 336, 588, 1036, 1540, 2044)  # px
FRAMES = (2, 8, 32, 80, 160, 320, 640)
ITEMS = (1, 4, 16, 32, 64, 128, 256)
TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CONFIG = Qwen2_5_VisionConfig.tiny()
WINDOWS_ONLY = replace(CONFIG, fullatt_block_indexes=())
PICTURES_PER_REPLAY = 8


@dataclass(frozen=True)
class Curve:
    """A cost as a function of x: patches, frames, ...

    prepare: a function from a size to (x, a call, its operations as computed from sizes). The operations of the call
    are also counted, and the two numbers must agree.
    """

    name: str
    x: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], tuple[int, Callable, int]]
    expected: int = 1


def picture(side: int) -> list[tuple[int, int, int]]:
    return [(1, side // CONFIG.patch_size, side // CONFIG.patch_size)]


def tower_on(grids: list, config: Qwen2_5_VisionConfig = WINDOWS_ONLY) -> tuple[Callable, int]:
    """Return the forward of a random tower, including its plan, and its operations."""
    torch.manual_seed(0)
    tower = Qwen2_5_VisionTransformer(config).eval()
    x = torch.randn(sum(math.prod(grid) for grid in grids), config.patch_values)
    return lambda: tower(x, metadata=tower.plan(grids)), encoder_operations(tower, grids)


def attention_on(side: int, windows: bool) -> tuple[int, Callable, int]:
    """Return the attention of one layer, windowed or over whole frames, with the operations of its two matmuls."""
    plan = Qwen2_5_VisionTransformer(CONFIG).plan(picture(side))
    segments: Segments = plan
    if windows:
        segments = Segments(plan.cu_window_seqlens, plan.window_groups, plan.max_window_seqlen)
    patches = math.prod(picture(side)[0])
    q, k, v = torch.randn(3, patches, CONFIG.num_heads, CONFIG.hidden_size // CONFIG.num_heads)
    pairs = int(segments.cu_seqlens.diff().square().sum())
    return patches, partial(segments.attend, q, k, v, "sdpa"), 4 * pairs * CONFIG.hidden_size


def rows_on(side: int) -> tuple[int, Callable, int]:
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return side * side, partial(patchify_image, Image.fromarray(pixels), PatchConfig(max_pixels=2**24)), 0


def plan_on(side: int) -> tuple[int, Callable, int]:
    return math.prod(picture(side)[0]), partial(Qwen2_5_VisionTransformer(CONFIG).plan, picture(side)), 0


def clip(frames: int) -> tuple[int, int, int]:
    return frames // 2, 6, 6


def evs_on(frames: int) -> tuple[int, Callable, int]:
    t, h, w = clip(frames)
    return frames, partial(compute_retention_mask, torch.randn(t * h * w // 4, 128), (t, h, w), 2, 0.5), 0


def packing_on(items: int) -> tuple[int, Callable, int]:
    tokens = np.random.default_rng(0).integers(16, 1369, items).tolist()
    return items, partial(plan_batches, tokens, generate_budgets(64, 4096), PICTURES_PER_REPLAY), 0


def positions_on(tokens: int) -> tuple[int, Callable, int]:
    """Build a prompt that consists mostly of an image."""
    side = math.isqrt(tokens)
    return tokens, partial(get_mrope_input_positions, tokens, [MediaSpan(0, 1, side, side)]), 0


def text_model():
    """Load the text model of a shipped checkpoint; its answers are not used."""
    model = refvl.load(DATA / "checkpoints" / "tiny-qwen2_5_vl", device="cpu", progress=False).language_model
    model.config.max_position_embeddings = 2**16
    return model


def prefill_on(model, tokens: int, chunk: int | None = None) -> tuple[int, Callable, int]:
    """Prefill the whole prompt or, with `chunk`, only that many tokens at its end, which read all keys and values."""
    new = chunk or tokens
    embeds, positions = torch.randn(1, new, model.config.hidden_size), torch.arange(tokens)[-new:].expand(3, 1, -1)

    def call():
        cache = DynamicCache(config=model.config)
        if chunk:
            for layer in range(model.config.num_hidden_layers):
                cache.update(kept, kept, layer)
        model(inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)

    head_dim = model.config.hidden_size // model.config.num_attention_heads
    kept = torch.zeros(1, model.config.num_key_value_heads, tokens - new, head_dim)
    head = 2 * model.lm_head.weight.numel()
    return tokens, call, prefill_operations(model, tokens, cached=tokens - new) + head


def curves() -> list[Curve]:
    """Return all curves. The expected exponent is 2 for attention over whole frames and whole prompts, otherwise 1."""
    model = text_model()
    tower = lambda side: (math.prod(picture(side)[0]), *tower_on(picture(side)))  # noqa: E731
    return [
        Curve("pixels to patch rows", "pixels", SIDES, rows_on),
        Curve("plan", "patches", SIDES, plan_on),
        Curve("attention in windows", "patches", SIDES, partial(attention_on, windows=True)),
        Curve("attention over full frames", "patches", SIDES[:-1], partial(attention_on, windows=False), 2),
        Curve("tower, windows only", "patches", SIDES, tower),
        Curve("tower, by frames of a video", "frames", FRAMES, lambda n: (n, *tower_on([clip(n)], CONFIG))),
        Curve("EVS mask", "frames", FRAMES, evs_on),
        Curve("tower, by items of a batch", "items", ITEMS, lambda n: (n, *tower_on([(1, 6, 6)] * n, CONFIG))),
        Curve("packing into graphs", "items", ITEMS, packing_on),
        Curve("M-RoPE positions", "prompt tokens", TOKENS, positions_on),
        Curve("decode step", "prompt tokens", TOKENS, partial(prefill_on, model, chunk=1)),
        Curve("prefill", "prompt tokens", TOKENS, partial(prefill_on, model), 2),
    ]


def exponent(xs: list[float], ys: list[float]) -> float:
    """Return the slope of a line fitted to the largest sizes on logarithmic axes."""
    return float(np.polyfit(np.log(xs[-FITTED:]), np.log(ys[-FITTED:]), 1)[0])


@torch.no_grad()
def measure(curve: Curve, repeats: int) -> dict:
    """Return the points of a curve, and the exponents of time and, if they can be counted, of operations."""
    points = []
    for size in curve.sizes:
        x, call, operations = curve.prepare(size)
        check_operations(f"{curve.name}, {x} {curve.x}", call, operations)  # also the warm-up
        times = summary([processor_seconds(call) for _ in range(repeats)])
        points.append({"size": size, "x": x, "operations": operations} | times)
    fit = {"time_exponent": exponent([p["x"] for p in points], [p["ms"] for p in points])}
    if points[-1]["operations"]:
        fit["operations_exponent"] = exponent([p["x"] for p in points], [p["operations"] for p in points])
    return {"curve": curve.name, "x": curve.x, "expected": curve.expected} | fit | {"points": points}


def run(repeats: Repeats = 3, write: Write = False) -> None:
    """Print the exponents of cost against pixels, frames, items and prompt tokens."""
    device = resolve_device("cpu")
    announce(NAME, "costs by pixels, frames, items and prompt tokens", repeats + 1)
    columns = {"cost": "<28", "of": "<14", "expected": ">8", "time": ">6", "operations": ">10", "largest": ">12"}
    table, rows = PrintedTable("fitted exponents, tiny configs, one thread", columns), []
    for curve in curves():
        rows.append(row := measure(curve, repeats))
        counted = f"{row['operations_exponent']:.2f}" if "operations_exponent" in row else "-"
        largest = max(point["ms"] for point in row["points"])
        table.add(curve.name, curve.x, curve.expected, f"{row['time_exponent']:.2f}", counted, f"{largest:.1f} ms")
    if write:
        write_measurement(
            NAME,
            environment(device) | {"repeats": repeats, "seconds": time.process_time(), "fitted": FITTED, "rows": rows},
        )


if __name__ == "__main__":
    typer.run(run)
