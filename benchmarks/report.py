"""What every measurement carries: where, with what, and when."""

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from refvl.paths import DATA

Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Repeats = Annotated[int, typer.Option(help="timed calls; every figure is their median")]
Write = Annotated[bool, typer.Option(help="keep the result under data/measurements")]


def resolve_device(device: str) -> str:
    """The device to measure on; "auto" is CUDA where there is one. On a CPU one thread is used from here on.

    Several threads wait for each other on a busy machine, and ratios blur. Raises ValueError for an unknown device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device == "cpu":
        torch.set_num_threads(1)
    return device


def environment(device: str) -> dict:
    """Device, versions, threads and date."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }


def write_measurement(name: str, result: dict) -> Path:
    """Write data/measurements/NAME.json whole or not at all, and say so; the device is part of a timing's name."""
    path = DATA / "measurements" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(path)
    print(f"written to {path.relative_to(DATA.parent)}")
    return path
