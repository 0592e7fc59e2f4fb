"""`python -m refvl check-gpu`: report which checks pass on this GPU, and how close its times are to the lower bound.

    environment   refvl, torch, driver, GPUs; if nothing can run, also the reason
    checks        run one by one (`refvl.tools.gpu_checks`) until the time is up; an error ends only its own check
    result        a JSON file, rewritten after every row, to attach to an issue

If the process dies, the JSON names the check that was running and contains all results so far; the
run does not pass.
"""

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from torch.utils import collect_env

import refvl
from refvl.attention import available_backends
from refvl.paths import CLONE, ROOT, write_whole
from refvl.tools import gpu_checks
from refvl.tools.gpu_checks import Skipped

SECONDS = {False: 60, True: 600}  # time limits of a quick run, and of a run with all checks
GOOD = ("passed", "skipped")  # checks in these states do not fail a run


def describe_backend(backend: str) -> str:
    """Return the name of a backend's kernel and the version of its package, for tables."""
    kernel = "flash-attn 2" if backend == "varlen" else "scaled_dot_product_attention"
    return f"{backend}: {kernel} of torch {torch.__version__}"


def check_gpu(
    device: str | torch.device = "cuda", out: str | Path = "check-gpu.json", *, thorough: bool = False
) -> dict:
    """Run all checks on a CUDA device. Returns the contents of `out`; "passed" is True if nothing failed.

    out: the path of a new JSON file. thorough: run every check, in at most ten minutes;
    otherwise run those that fit in a minute. Raises ValueError if `device` is not a CUDA
    device, and FileExistsError if `out` exists. If the device cannot run anything, "problem"
    contains the reason.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device: expected the name of a CUDA device, got {str(device)!r}")
    device = torch.device("cuda", device.index or 0)
    checks = gpu_checks.ALL if thorough else gpu_checks.QUICK
    if Path(out).exists():
        raise FileExistsError(f"out: {out} already exists; choose a different file")
    limit = time.monotonic() + SECONDS[thorough]
    result: dict[str, Any] = {
        "format": 1, "thorough": thorough, "passed": False, "problem": "", "environment": describe_machine(),
        "checks": {name: {"state": "not reached", "rows": []} for name in checks},
    }  # fmt: skip

    def save() -> None:
        write_whole(Path(out), (json.dumps(result, indent=1) + "\n").encode())

    try:
        result["environment"] |= describe_device(device)
        with torch.cuda.device(device):
            for name, check in checks.items():
                if time.monotonic() < limit:
                    _run(check, device, result["checks"][name], save, limit)
        result["passed"] = all(entry["state"] in GOOD for entry in result["checks"].values())
    except Exception as error:
        result["problem"] = f"{type(error).__name__}: {error}"
    finally:
        save()
    return result


def _run(check: Callable, device: torch.device, entry: dict, save: Callable, limit: float) -> None:
    """Run one check and record its rows, state and seconds. Only interrupts propagate."""
    entry["state"], start = "running", time.monotonic()
    save()
    try:
        for row in check(device):
            entry["rows"].append(row)
            save()
            if time.monotonic() > limit:
                raise TimeoutError(f"the time limit was reached after {len(entry['rows'])} rows")
        entry["state"] = "passed"
    except (Skipped, TimeoutError) as reason:
        entry |= {"state": "skipped" if isinstance(reason, Skipped) else "unfinished", "reason": str(reason)}
    except Exception as error:
        entry |= {"state": "error", "reason": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        if not all(row["passed"] for row in entry["rows"]) and entry["state"] in GOOD:
            entry["state"] = "failed"
        entry["seconds"] = round(time.monotonic() - start, 1)
        save()


# --- environment ------------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """Return the versions and GPUs, in the form that torch requests in its own issue reports."""
    commit = f'git -C "{CLONE}" describe --always --dirty --abbrev=12 --exclude="*"'
    return collect_env.get_env_info()._asdict() | {
        "refvl": refvl.__version__,
        "commit": collect_env.run(commit)[1] if ROOT == CLONE else "",
        "transformers": transformers.__version__,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return the GPU's name, capability and memory, torch's architectures, and the attention
    backend of a half-precision tower.

    Raises torch's errors if torch is built without CUDA or finds no GPU, and ValueError if there is
    no GPU with this index.
    """
    torch.cuda.init()
    if device.index >= (count := torch.cuda.device_count()):
        raise ValueError(f"device: expected one of the {count} GPUs that torch sees, counted from 0, got {device}")
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "built_for": torch.cuda.get_arch_list(),
        "attention": describe_backend(available_backends(device, torch.float16)[0]),
    }


# --- what is printed --------------------------------------------------------------------------------------------------


def table(result: dict) -> Table:
    """Return a table of every check and, below it, the rows that failed or have no limit, such as times."""
    table = Table("check", "what", "measured", "allowed", title="check-gpu")
    for name, entry in result["checks"].items():
        table.add_row(name, f"{entry['state']} {entry.get('reason', '')}", f"{entry.get('seconds', 0)} s", "")
        for row in entry["rows"]:
            if not row["passed"] or row["allowed"] is None:
                allowed = "" if row["allowed"] is None else f"{row['allowed']:.2g}"
                table.add_row("", row["check"], f"{float(row['measured']):.3g} {row['unit']}", allowed)
    return table


def verdict(result: dict) -> str:
    """Return the result of a run in one line."""
    where = result["environment"]
    if result["problem"]:
        return f"check-gpu: {result['problem']}; nvidia-smi lists {where['nvidia_gpu_models'] or 'no GPU'}"
    states = {key: entry["state"] for key, entry in result["checks"].items()}
    bad = [f"{key} ({state})" for key, state in states.items() if state not in GOOD]
    name = f"{where['name']} ({where['capability']}), torch {torch.__version__}"
    if bad:
        return f"check-gpu: {len(bad)} of {len(states)} checks did not pass on {name}: {', '.join(bad)}"
    skipped = [key for key, state in states.items() if state == "skipped"]
    passed = f"check-gpu: {name} passes {len(states) - len(skipped)} checks"
    return passed + f"; skipped: {', '.join(skipped)}" * bool(skipped)
