"""The eager tower against the replay of graphs, by image size and batch: `python -m benchmarks.graphs`.

Four ways to encode the same pictures take turns, with new random pixels every time, so that a busy machine slows all:

- eager     the encoder as it is called without graphs
- planned   the encoder with its plan at hand: what is left is the forward
- doubling  replay, budgets that double (`EncoderGraphManager`'s own), plans at hand after the first call
- fitted    replay, one budget for each size of picture: no padding, for those who know what arrives

Outputs are compared before anything is timed. On CUDA the true shapes in bfloat16; on a CPU, where replaying shows
semantics and no speed, tiny towers and small pictures. Results go to data/measurements/graphs_<tower>_<cpu|cuda>.json.
"""

import random
import statistics
import time

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.report import Device, Repeats, Write, environment, resolve_device, write_measurement
from benchmarks.tower import seconds_of
from refvl.encoders import Glm4vVisionConfig, Glm4vVisionTransformer, Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import EncoderGraphManager, generate_budgets, padding_waste, plan_batches

TOWERS = {
    "qwen2_5_vl": (Qwen2_5_VisionTransformer, {"cpu": Qwen2_5_VisionConfig.tiny(), "cuda": Qwen2_5_VisionConfig()}),
    "glm4v": (Glm4vVisionTransformer, {"cpu": Glm4vVisionConfig.tiny(), "cuda": Glm4vVisionConfig()}),
}
SIZES = {"cpu": (112, 168, 224, 336), "cuda": (112, 224, 336, 448, 560, 672, 784, 896, 1036)}  # px, multiples of 28
BATCHES = (1, 4)
MIN_BUDGET = {"cpu": 16, "cuda": 64}
WARM_UP = 3
PEAK = {"H100": 989e12, "H200": 989e12}  # dense bfloat16 operations per second, from the data sheets (SXM)


def build(tower: str, device: str):
    """The tower with random weights: times depend on shapes alone."""
    torch.manual_seed(0)
    encoder_class, configs = TOWERS[tower]
    with torch.device(device):
        encoder = encoder_class(configs[device]).eval()
    return encoder.to(torch.bfloat16 if device == "cuda" else torch.float32)


def grids_of(size: int, images: int, config) -> list[tuple[int, int, int]]:
    """So many square pictures of `size` px, in patches."""
    side = size // config.patch_size
    return [(1, side, side)] * images


def operations(encoder, grids: list) -> int:
    """Multiplications and additions of one forward without padding, counted by torch without computing anything."""
    with torch.device("meta"):
        shadow = type(encoder)(encoder.config, attention="sdpa")
        rows = torch.empty(sum(t * h * w for t, h, w in grids), encoder.config.patch_values)
    with FlopCounterMode(display=False) as counter:
        shadow(rows, grids)
    return counter.get_total_flops()


def capture(encoder, **limits) -> tuple[EncoderGraphManager, dict]:
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


def as_table(tower: str, device: str, rows: list[dict]) -> Table:
    """Medians, and how many times as fast as eager; the floor is the arithmetic at the device's peak, where known."""
    table = Table(title=f"one call of the {tower} tower on {device}, median ms")
    for name in ("px", "images", "tokens", "eager", "planned", "doubling", "fitted", "floor"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = [f"{row[name]}" for name in ("px", "images", "tokens")]
        eager, ways = row["eager_ms"], [row[f"{name}_ms"] for name in ("planned", "doubling", "fitted")]
        floor = f"{row['floor_ms']:.2f}" if row["floor_ms"] else "-"
        table.add_row(*sizes, f"{eager:.2f}", *(f"{ms:.2f} {eager / ms:.1f}x" for ms in ways), floor)
    return table


def run(device: Device = "auto", repeats: Repeats = 50, write: Write = True) -> None:
    """The eager vision towers against replayed graphs, by image size and batch."""
    device = resolve_device(device)
    for tower in TOWERS:
        run_tower(tower, device, repeats, write)


def run_tower(tower: str, device: str, repeats: int, write: bool) -> None:
    """One tower's table and file."""
    encoder = build(tower, device)
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
            work = operations(encoder, grids)
            row |= {"teraoperations": work / 1e12, "floor_ms": work / peak * 1e3 if peak else None}
            rows.append(row | measure(encoder, managers, grids, repeats))
    Console().print(as_table(tower, device, rows))
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
