"""The eager tower against the replay of graphs, by image size and batch: `python -m benchmarks.graphs`.

Four ways to encode the same pictures take turns, with new random pixels every time, so that a busy machine slows all:

- eager     the encoder as it is called without graphs
- planned   the encoder with its plan at hand: what is left is the forward
- doubling  replay, budgets that double (`EncoderGraphManager`'s own), plans at hand after the first call
- fitted    replay, one budget for each size of picture: no padding, for those who know what arrives

Outputs are compared before anything is timed. On CUDA the 7B tower's shape in bfloat16; on a CPU, where replaying shows
semantics and no speed, the tiny tower and small pictures. Results go to data/measurements/graphs_<cpu|cuda>.json.
"""

import random
import statistics
import time

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.report import Device, Repeats, Write, environment, resolve_device, write_measurement
from benchmarks.tower import seconds_of
from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import EncoderGraphManager, generate_budgets, padding_waste, plan_batches

SIZES = {"cpu": (112, 168, 224, 336), "cuda": (112, 224, 336, 448, 560, 672, 784, 896, 1036)}  # px, multiples of 28
BATCHES = (1, 4)
MIN_BUDGET = {"cpu": 16, "cuda": 64}
WARM_UP = 3
PEAK = {"H100": 989e12, "H200": 989e12}  # dense bfloat16 operations per second, from the data sheets (SXM)


def build(device: str) -> Qwen2_5_VisionTransformer:
    """The tower with random weights: times depend on shapes alone."""
    torch.manual_seed(0)
    config = Qwen2_5_VisionConfig() if device == "cuda" else Qwen2_5_VisionConfig.tiny()
    with torch.device(device):
        encoder = Qwen2_5_VisionTransformer(config).eval()
    return encoder.to(torch.bfloat16 if device == "cuda" else torch.float32)


def grids_of(size: int, images: int, config: Qwen2_5_VisionConfig) -> list[tuple[int, int, int]]:
    """So many square pictures of `size` px, in patches."""
    side = size // config.patch_size
    return [(1, side, side)] * images


def operations(config: Qwen2_5_VisionConfig, grids: list) -> float:
    """Multiplications and additions of one forward, without padding."""
    c, unit = config, config.spatial_merge_size**2
    block = 4 * c.hidden_size**2 + 3 * c.hidden_size * c.intermediate_size
    merger = unit * c.hidden_size**2 + c.hidden_size * c.out_hidden_size  # per patch
    per_patch = c.patch_values * c.hidden_size + c.depth * block + merger
    full, window = len(c.fullatt_block_indexes), (c.window_size // c.patch_size) ** 2
    attended = sum(t * h * w * (full * h * w + (c.depth - full) * min(window, h * w)) for t, h, w in grids)
    return 2 * per_patch * sum(t * h * w for t, h, w in grids) + 4 * c.hidden_size * attended


def capture(encoder: Qwen2_5_VisionTransformer, **limits) -> tuple[EncoderGraphManager, dict]:
    """A manager with its graphs, and what they cost."""
    manager = EncoderGraphManager(encoder, **limits)
    seconds = seconds_of(manager.capture, encoder.device.type)
    cost = {"seconds": seconds, "memory_mib": manager.memory_bytes() / 2**20}
    return manager, {"budgets": list(manager.limits.budgets), "max_items": manager.limits.max_items} | cost


@torch.inference_mode()
def measure(encoder, managers: dict[str, EncoderGraphManager], grids: list, repeats: int) -> dict:
    """Median and 99th percentile of each way in ms, the budgets that the managers chose, and how far outputs differ."""
    device, patches = encoder.device, sum(t * h * w for t, h, w in grids)
    plan = encoder.plan(grids)
    ways = {
        "eager": lambda x: encoder(x, grids),
        "planned": lambda x: encoder(x, metadata=plan),
        **{name: lambda x, manager=manager: manager.execute(x, grids) for name, manager in managers.items()},
    }
    row, samples = {}, {name: [] for name in ways}
    for i in range(WARM_UP + repeats):
        x = torch.randn(patches, encoder.config.patch_values, device=device, dtype=encoder.dtype)
        for name, way in ways.items():
            seconds = seconds_of(lambda way=way, x=x: way(x), device.type)
            samples[name] += [seconds] if i >= WARM_UP else []
    want = encoder(x, grids).float()
    for name, manager in managers.items():
        got = torch.cat(manager.execute(x, grids)).float()
        tokens = [t * h * w // encoder.config.spatial_merge_size**2 for t, h, w in grids]
        row[f"{name}_budgets"] = [batch.budget for batch in manager.last_batches]
        row[f"{name}_waste"] = padding_waste(manager.last_batches, tokens)
        row[f"{name}_difference"] = ((got - want).norm() / want.norm()).item()
    for name, seconds in samples.items():
        row[f"{name}_ms"] = statistics.median(seconds) * 1e3
        row[f"{name}_p99_ms"] = float(np.percentile(seconds, 99)) * 1e3
    return row


def measure_packing(items: int = 64, repeats: int = 50) -> dict:
    """Both policies on the same random items: milliseconds on the CPU, and the summed budgets."""
    generator, budgets = random.Random(0), generate_budgets(64, 4096)
    result = {"items": items}
    tokens = [generator.randint(16, 1369) for _ in range(items)]
    for policy in ("greedy", "optimal"):
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            batches = plan_batches(tokens, budgets, items, policy=policy)
            seconds.append(time.perf_counter() - start)
        result[f"{policy}_ms"] = statistics.median(seconds) * 1e3
        result[f"{policy}_budget_tokens"] = sum(batch.budget for batch in batches)
    return result | {"time_ratio": result["optimal_ms"] / result["greedy_ms"]}


def as_table(device: str, rows: list[dict]) -> Table:
    """Medians, and how many times as fast as eager; the floor is the arithmetic at the device's peak, where known."""
    table = Table(title=f"one call of the vision tower on {device}, median ms")
    for name in ("px", "images", "tokens", "eager", "planned", "doubling", "fitted", "floor"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = [f"{row[name]}" for name in ("px", "images", "tokens")]
        eager, ways = row["eager_ms"], [row[f"{name}_ms"] for name in ("planned", "doubling", "fitted")]
        floor = f"{row['floor_ms']:.2f}" if row["floor_ms"] else "-"
        table.add_row(*sizes, f"{eager:.2f}", *(f"{ms:.2f} {eager / ms:.1f}x" for ms in ways), floor)
    return table


def run(device: Device = "auto", repeats: Repeats = 50, write: Write = True) -> None:
    """The eager vision tower against replayed graphs, by image size and batch."""
    device = resolve_device(device)
    encoder = build(device)
    config, sizes = encoder.config, SIZES[device]
    merged = config.patch_size * config.spatial_merge_size
    fitted = [(size // merged) ** 2 for size in sizes]
    managers, costs = {}, {}
    for name, limits in {"doubling": {"min_budget": MIN_BUDGET[device]}, "fitted": {"budgets": fitted}}.items():
        managers[name], costs[name] = capture(encoder, **limits)
    where = environment(device)
    peak = next((peak for name, peak in PEAK.items() if name in where["device"]), None)
    rows = []
    for size in sizes:
        for images in BATCHES:
            grids = grids_of(size, images, config)
            row = {"px": size, "images": images, "tokens": images * (size // merged) ** 2}
            work = operations(config, grids)
            row |= {"teraoperations": work / 1e12, "floor_ms": work / peak * 1e3 if peak else None}
            rows.append(row | measure(encoder, managers, grids, repeats))
    Console().print(as_table(device, rows))
    for name, cost in costs.items():
        print(f"{name}: {len(cost['budgets'])} graphs in {cost['seconds']:.1f} s, {cost['memory_mib']:.0f} MiB")
    packing = measure_packing()
    times = [f"{policy} {packing[f'{policy}_ms']:.2f} ms" for policy in ("greedy", "optimal")]
    print(f"packing {packing['items']} items: {', '.join(times)}, {packing['time_ratio']:.1f} times as long")
    if write:
        tower = "7B" if device == "cuda" else "tiny"
        head = {"tower": tower, "dtype": str(encoder.dtype).removeprefix("torch."), "repeats": repeats}
        write_measurement(f"graphs_{device}", where | head | {"capture": costs, "packing": packing, "rows": rows})


if __name__ == "__main__":
    typer.run(run)
