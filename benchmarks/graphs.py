"""Compare the eager tower with replayed graphs, by image size and batch: `python -m benchmarks.graphs`.

Four ways to encode the same images alternate, so a busy machine slows all of them equally. Each round draws new random
pixels. The ways are:

- eager     the encoder without graphs, including its plan
- planned   the encoder with an existing plan, so only the forward is timed
- doubling  replay with budgets that double (`EncoderGraphManager`'s default); plans are cached after the first call
- fitted    replay with one budget per image size, so without padding, for users who know their input sizes

After the timed calls, outputs are compared. On CUDA, the towers have their released shapes, in bfloat16. On a CPU,
towers and images are tiny, because a replay there tests correctness, not speed. With --write, the results are written
to data/measurements/graphs_<tower>_<cpu|cuda>.json.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import typer
from PIL import Image

from benchmarks.report import (
    Device,
    PrintedTable,
    Repeats,
    Write,
    announce,
    check_operations,
    environment,
    resolve_device,
    write_measurement,
)
from benchmarks.tower import seconds_of
from refvl.families import find_family, read_config
from refvl.graphs import EncoderGraphManager, generate_budgets, padding_waste, plan_batches
from refvl.loading import random_encoder
from refvl.paths import DATA
from refvl.study.costs import encoder_operations

TOWERS = {  # the shapes to measure on a CPU and on CUDA
    "qwen2_5_vl": ("checkpoints/tiny-qwen2_5_vl/config.json", "configs/Qwen2.5-VL-7B-Instruct.json"),
    "glm4v": ("checkpoints/tiny-glm4v/config.json", "configs/GLM-4.1V-9B-Thinking.json"),
    "minicpmv": ("checkpoints/tiny-minicpmv-4_5/config.json", "configs/MiniCPM-V-4_5.json"),
    "step3": ("checkpoints/tiny-step3/config.json", "configs/Step3.json"),
}
SIZES = {"cpu": (112, 168, 224, 336), "cuda": (112, 224, 336, 448, 560, 672, 784, 896, 1036)}  # px, multiples of 28
BATCHES = (1, 4)
MIN_BUDGET = {"cpu": 16, "cuda": 64}
WARM_UP = 3
PEAK = {"H100": 989e12, "H200": 989e12}  # dense bfloat16 operations per second, from the data sheets (SXM)


def build(tower: str, device: str):
    """Return an encoder with random weights, and a function from the side of a square image in px to its layout."""
    config = read_config(DATA / TOWERS[tower][device == "cuda"])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    family = find_family(config)
    encoder, processor = random_encoder(config, dtype=dtype, device=device, attention="auto"), family.processor(config)
    return encoder, lambda size: processor.layout_of(Image.new("RGB", (size, size)))


def count_rows(encoder, layouts: list) -> int:
    return sum(encoder.item_size(layout)[0] for layout in layouts)


def values_per_row(encoder) -> int:
    return encoder.config.patch_values


def fitted_budgets(encoder, layouts: list):
    """Return the distinct budgets that fit these images exactly, by path for encoders with several paths."""
    if not hasattr(encoder, "paths"):
        return sorted({encoder.item_size(layout)[1] for layout in layouts})
    parts = [encoder.path_layouts(layout) for layout in layouts]
    return {
        name: sorted({path.item_size(part[name])[1] for part in parts if part[name]} or {path.tokens})
        for name, path in encoder.paths.items()
    }


def capture(manager: EncoderGraphManager) -> dict:
    """Capture the manager's graphs and return their cost."""
    seconds = seconds_of(manager.capture, manager.encoder.device.type)
    limits = manager.limits.values()
    return {
        "seconds": seconds,
        "memory_mib": manager.memory_bytes() / 2**20,
        "budgets": [budget for of_path in limits for budget in of_path.budgets],
        "max_items": min(of_path.max_items for of_path in limits),
    }


def one_call(encoder, layouts: list) -> Callable:
    """Draw random pixels, and return a call of the eager encoder on them."""
    x = torch.randn(count_rows(encoder, layouts), values_per_row(encoder), device=encoder.device, dtype=encoder.dtype)
    return partial(encoder, x, layouts)


@torch.inference_mode()
def measure(encoder, managers: dict, layouts: list, repeats: int) -> dict:
    """Return median and 99th percentile of each way in ms, the managers' budgets, and differences of outputs."""
    device, patches = encoder.device, count_rows(encoder, layouts)
    plan = encoder.plan(layouts)
    ways = {
        "eager": lambda x: encoder(x, metadata=encoder.plan(layouts)),
        "planned": lambda x: encoder(x, metadata=plan),
        **{name: partial(manager.execute, layouts=layouts) for name, manager in managers.items()},
    }
    row: dict[str, Any] = {}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(WARM_UP + repeats):
        x = torch.randn(patches, values_per_row(encoder), device=device, dtype=encoder.dtype)
        for name, way in ways.items():
            seconds = seconds_of(lambda way=way, x=x: way(x), device.type)
            samples[name] += [seconds] if i >= WARM_UP else []
    want = encoder(x, layouts).float()
    for name, manager in managers.items():
        got = torch.cat(manager.execute(x, layouts)).float()
        row[f"{name}_budgets"] = [batch.budget for batch in manager.last_batches]
        row[f"{name}_waste"] = padding_waste(manager.last_batches)
        row[f"{name}_difference"] = ((got - want).norm() / want.norm()).item()
    for name, times in samples.items():
        row[f"{name}_ms"] = statistics.median(times) * 1e3
        row[f"{name}_p99_ms"] = float(np.percentile(times, 99)) * 1e3
    return row


def measure_packing(items: int = 64, repeats: int = 50) -> dict:
    """Time both policies on the same random items; return milliseconds on the CPU and the summed budgets."""
    generator, budgets = random.Random(0), generate_budgets(64, 4096)
    result: dict[str, float] = {"items": items}
    tokens = [generator.randint(16, 1369) for _ in range(items)]
    for policy in ("greedy", "optimal"):
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            batches = plan_batches(tokens, budgets, items, policy=policy)
            seconds.append(time.perf_counter() - start)
        result[f"{policy}_ms"] = statistics.median(seconds) * 1e3
        result[f"{policy}_budget_tokens"] = sum(batch.budget or 0 for batch in batches)
    return result | {"time_ratio": result["optimal_ms"] / result["greedy_ms"]}


def make_table(tower: str, device: str) -> PrintedTable:
    """Return an empty table; its floor column is the time of the arithmetic at the device's peak rate, if known."""
    columns = {"px": ">5", "images": ">6", "tokens": ">6", "eager": ">9"}
    columns |= dict.fromkeys(("planned", "doubling", "fitted"), ">14") | {"floor": ">8"}
    return PrintedTable(f"one call of the {tower} tower on {device}, median ms", columns)


def as_cells(row: dict) -> list[str]:
    eager, ways = row["eager_ms"], [row[f"{name}_ms"] for name in ("planned", "doubling", "fitted")]
    floor = f"{row['floor_ms']:.2f}" if row["floor_ms"] else "-"
    sizes = [row[name] for name in ("px", "images", "tokens")]
    return [*sizes, f"{eager:.2f}", *(f"{ms:.2f} {eager / ms:.1f}x" for ms in ways), floor]


def run(device: Device = "auto", repeats: Repeats = 50, write: Write = False) -> None:
    """Compare the eager vision towers with replayed graphs, by image size and batch."""
    device = resolve_device(device)
    for tower in TOWERS:
        run_tower(tower, device, repeats, write)


def run_tower(tower: str, device: str, repeats: int, write: bool) -> None:
    """Measure one tower; print its table and, if `write` is set, save its file."""
    sizes, batches = ", ".join(map(str, SIZES[device])), " and ".join(map(str, BATCHES))
    what = f"the {tower} tower: images of {sizes} px, {batches} a call; timed calls: {repeats}"
    announce(f"graphs_{tower}_{device}", what, WARM_UP + repeats)
    encoder, layout_of = build(tower, device)
    layouts = {size: layout_of(size) for size in SIZES[device]}
    smallest = max(MIN_BUDGET[device], min(encoder.item_size(layout)[1] for layout in layouts.values()))
    fitted = fitted_budgets(encoder, list(layouts.values()))
    limits: dict[str, dict] = {"doubling": {"min_budget": smallest}, "fitted": {"budgets": fitted}}
    managers: dict[str, EncoderGraphManager] = {}
    costs: dict[str, dict] = {}
    for name, chosen in limits.items():
        managers[name] = EncoderGraphManager(encoder, **chosen)
        costs[name] = capture(managers[name])
    where = environment(device)
    peak = next((peak for name, peak in PEAK.items() if name in where["device"]), None)
    rows, table = [], make_table(tower, device)
    for size, layout in layouts.items():
        for images in BATCHES:
            work = encoder_operations(encoder, [layout] * images)
            check_operations(f"{tower}, {images} of {size} px", one_call(encoder, [layout] * images), work)
            row = {"px": size, "images": images, "tokens": images * encoder.item_size(layout)[1]}
            row |= {"teraoperations": work / 1e12, "floor_ms": work / peak * 1e3 if peak else None}
            rows.append(row | measure(encoder, managers, [layout] * images, repeats))
            table.add(*as_cells(rows[-1]))
    for name, cost in costs.items():
        print(f"{name}: {len(cost['budgets'])} graphs in {cost['seconds']:.1f} s, {cost['memory_mib']:.0f} MiB")
    packing = measure_packing()
    times = [f"{policy} {packing[f'{policy}_ms']:.2f} ms" for policy in ("greedy", "optimal")]
    print(f"packing {packing['items']} items: {', '.join(times)}, {packing['time_ratio']:.1f} times as long")
    if write:
        head = {
            "tower": tower + ("" if device == "cuda" else ", tiny"),
            "dtype": str(encoder.dtype).removeprefix("torch."),
            "repeats": repeats,
        }
        write_measurement(
            f"graphs_{tower}_{device}", where | head | {"capture": costs, "packing": packing, "rows": rows}
        )


if __name__ == "__main__":
    typer.run(run)
