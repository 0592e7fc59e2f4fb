"""What every measurement carries: where, with what, and when."""

import datetime
import json
import os
import platform
from pathlib import Path

import torch
import transformers

from refvl.paths import DATA


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
    """Write data/measurements/NAME.json whole or not at all; a result of another device has another name."""
    path = DATA / "measurements" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(path)
    return path
