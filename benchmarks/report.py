"""Functions that measurements share, for the machine, versions and date, and for tables and timing."""

import datetime
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import torch.nn.attention.varlen  # defines `torch_attn`
import transformers
import typer
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from refvl.attention import available_backends
from refvl.paths import DATA
from refvl.serving.linear import FusedSwiGLU, SwiGLU
from refvl.tools.check_gpu import describe_backend

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1")]
Repeats = Annotated[int, typer.Option(help="timed calls; every figure is their median")]
Write = Annotated[bool, typer.Option(help="keep the result under data/measurements")]

COUNTED_TOO: dict = {  # counters for operations that torch's own counter lacks in some releases
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.mkldnn._linear_pointwise: lambda x, weight, *_, **__: 2 * math.prod(x) * weight[0],
}


def varlen_operations(q, k, v, cu_seq_q, cu_seq_k, *_, **__) -> int:
    """Count the operations of attention within segments, whose lengths are read back from the device."""
    pairs = (cu_seq_q.diff() * cu_seq_k.diff()).sum().item()
    return 2 * pairs * q.shape[1] * (q.shape[2] + v.shape[2])


varlen_operations._get_raw = True  # type: ignore[attr-defined]  # torch's counter passes tensors, not shapes
COUNTED_TOO[torch.ops.torch_attn._varlen_attn] = varlen_operations


def count_operations(call: Callable) -> int:
    """Count the multiplications and additions of a call with torch's counter, without the padding of fused MLPs."""
    counter = FlopCounterMode(display=False, custom_mapping=COUNTED_TOO)
    # in inference mode, a layer is one operation
    with patch.object(FusedSwiGLU, "forward", SwiGLU.forward), torch.inference_mode(False), torch.no_grad(), counter:
        call()
    return counter.get_total_flops()


def check_operations(what: str, call: Callable, expected: int) -> None:
    """Raise ArithmeticError unless a call executes as many operations as `expected`."""
    if (counted := count_operations(call)) != expected:
        raise ArithmeticError(f"{what}: expected {expected:,} operations from its sizes, got {counted:,}")


def announce(name: str, what: str, calls: int) -> None:
    """Print a description of the run, and estimate the time of its calls from the saved measurement `name`.

    calls: the number of calls of each row and way, including the warm-up. The saved numbers are either the median
    milliseconds of one call or the seconds of all calls.
    """
    print(what, flush=True)
    path = DATA / "measurements" / f"{name}.json"
    if not path.is_file():
        return print(f"the time is unknown, because there is no {path.name} yet", flush=True)
    kept = json.loads(path.read_text())
    if (seconds := kept.get("seconds")) is None:
        times = ((key, value) for row in kept["rows"] for key, value in row.items() if key.endswith("_ms"))
        seconds = calls * sum(value for key, value in times if not key.endswith(("p99_ms", "floor_ms"))) / 1e3
    print(f"about {seconds:.0f} s on the machine of {path.name} ({kept['device']}), plus building", flush=True)


class PrintedTable:
    """A table that is printed row by row as results arrive, so a long run shows its progress.

    columns: a dict from name to the format of its cells, as in an f-string: ">8" is eight characters wide, aligned
        right.
    """

    def __init__(self, title: str, columns: dict[str, str]):
        self.formats = list(columns.values())
        print(f"\n{title}")
        self.add(*columns)

    def add(self, *cells) -> None:
        line = "  ".join(format(str(cell), spec) for cell, spec in zip(cells, self.formats, strict=True))
        print(line.rstrip(), flush=True)


def processor_seconds(call: Callable) -> float:
    """Return the CPU time of a call in this thread, in seconds; time in other threads does not count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median in ms, and the spread: the interquartile range as a share of the median."""
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else 3 * seconds
    return {"ms": median * 1e3, "spread": (high - low) / median}


def side_by_side(ways: dict[str, Callable], repeats: int) -> dict[str, dict[str, float]]:
    """Return the `summary` and ratio of each way; the ways alternate after a warm-up.

    The ratio is the speed-up over the first way, as the median over the rounds; each round compares calls that ran
    right after each other.
    """
    rounds = [{name: processor_seconds(call) for name, call in ways.items()} for _ in range(repeats + 1)][1:]
    first = next(iter(ways))
    return {
        name: summary([times[name] for times in rounds])
        | {"ratio": statistics.median(times[first] / times[name] for times in rounds)}
        for name in ways
    }


def resolve_device(device: str) -> str:
    """Return the kind of device to measure on, "cpu" or "cuda"; "auto" is CUDA if there is one.

    For "cuda:1", device 1 becomes the current device. On a CPU, torch uses one thread from here on, because several
    threads wait for each other on a busy machine, which makes ratios noisy. Raises ValueError for an unknown device.
    """
    if not (found := re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", device)):
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:1, got {device!r}")
    if index := found[1]:
        if int(index) >= (count := torch.cuda.device_count()):
            raise ValueError(f"device: expected one of the {count} CUDA devices of this machine, got {device!r}")
        torch.cuda.set_device(int(index))
        device = "cuda"
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device == "cpu":
        torch.set_num_threads(1)
    return device


def environment(device: str) -> dict:
    """Return device, versions, threads and date; on CUDA also the attention backend of a tower in bfloat16."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    best = available_backends(device, torch.bfloat16)[0]
    return {
        "device": name,
        **({"attention": describe_backend(best)} if device == "cuda" else {}),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }


def write_measurement(name: str, result: dict) -> Path:
    """Write data/measurements/NAME.json atomically, and print its path; names of timings contain the device."""
    path = DATA / "measurements" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(path)
    print(f"written to {path.relative_to(DATA.parent)}")
    return path
