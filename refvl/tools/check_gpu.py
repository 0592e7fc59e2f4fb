"""`python -m refvl check-gpu`: report which checks pass on this GPU, and how close its times are to the lower bound.

    environment   refvl, torch, driver, GPUs; if nothing can run, also the reason
    checks        run one by one (`refvl.tools.gpu_checks`) until the time is up; an error ends only its own check
    result        a JSON file, rewritten after every row, and a zip of it, a table and logs, to attach to an issue

If the process dies, the JSON names the check that was running and contains all results so far; the run does not pass.
"""

import io
import json
import os
import platform
import re
import subprocess
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import refvl
from refvl.attention import available_backends
from refvl.paths import CLONE, ROOT
from refvl.tools import gpu_checks
from refvl.tools.gpu_checks import HEAD_DIMS, Bench, Skipped

GIT = ("git", "-C", str(CLONE))
SECONDS = {False: 60, True: 600}  # time limits of a quick run, and of a run with all checks
FORMAT = 1  # the version of the JSON's layout
GOOD = ("passed", "skipped")  # a check in one of these states does not fail a run


def describe_backend(backend: str) -> str:
    """Return the name of a backend's kernel and the version of its package, for tables."""
    if backend == "varlen":
        return f"varlen: flash-attn 2 of torch {torch.__version__}"
    return f"{backend}: scaled_dot_product_attention of torch {torch.__version__}"


def check_gpu(
    device: str | torch.device = "cuda",
    out: str | Path = "check-gpu.json",
    *,
    thorough: bool = False,
    bench: Bench | None = None,
    checks: Mapping[str, Callable[[Bench], Iterator[dict]]] | None = None,
    seconds: float | None = None,
) -> dict:
    """Run all checks on a CUDA device. Returns the contents of `out`; "passed" is True if nothing failed.

    out: the JSON; a zip of the same name is written next to it. thorough: run every check, in at most ten minutes;
    otherwise run those that fit in a minute. bench, checks, seconds: the work, the checks and the time limit; only
    tests set them. Raises ValueError if `device` is not a CUDA device. If the device cannot run anything, "problem"
    contains the reason.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected the name of a CUDA device, got {device!r}") from error
    if device.type != "cuda":
        raise ValueError(f"device: expected the name of a CUDA device, got {str(device)!r}")
    device = torch.device("cuda", device.index or 0)
    bench = bench or Bench(device, tower=gpu_checks.SEVEN_B if thorough else gpu_checks.TWO_BLOCKS)
    checks = checks or (gpu_checks.ALL if thorough else gpu_checks.QUICK)
    limit = time.monotonic() + (SECONDS[thorough] if seconds is None else seconds)
    result: dict[str, Any] = {
        "format": FORMAT, "thorough": thorough, "passed": False, "problem": "", "environment": describe_machine(),
        "checks": {name: {"state": "not reached", "rows": []} for name in checks},
    }  # fmt: skip
    report = Report(Path(out), result, bench.attachments)
    report.save()
    try:
        result["problem"] = find_problem(device, result["environment"]["nvidia_smi"])
        if not result["problem"]:
            result["environment"] |= describe_device(device)
            with torch.cuda.device(device):
                for name, check in checks.items():
                    _run(check, replace(bench, device=device), result["checks"][name], report, limit)
            result["passed"] = all(entry["state"] in GOOD for entry in result["checks"].values())
    except Exception as error:
        result["problem"] = f"{type(error).__name__}: {error}"
    finally:
        report.save(zipped=True)
    return result


def _run(check: Callable, bench: Bench, entry: dict, report: "Report", limit: float) -> None:
    """Run one check and record its rows, state and seconds. Only interrupts propagate."""
    entry["state"], start = "running", time.monotonic()
    report.save(zipped=True)
    try:
        for row in check(bench):
            entry["rows"].append(row)
            report.save()
            if time.monotonic() > limit:
                raise Skipped(f"the time limit was reached after {len(entry['rows'])} rows")
        entry["state"] = "passed"
    except Skipped as reason:
        entry |= {"state": "skipped", "reason": str(reason)}
    except Exception as error:
        entry |= {"state": "error", "reason": f"{type(error).__name__}: {error}", "traceback": _traceback()}
    except BaseException:
        entry["state"] = "stopped"
        raise
    finally:
        if not all(row["passed"] for row in entry["rows"]) and entry["state"] in GOOD:
            entry["state"] = "failed"
        entry["seconds"] = round(time.monotonic() - start, 1)
        report.save(zipped=True)


def _traceback() -> str:
    return traceback.format_exc().replace(os.path.expanduser("~"), "~")


class Report:
    """The files of a run; each write replaces a whole file."""

    def __init__(self, path: Path, result: dict, attachments: dict[str, str]):
        self.path, self.result, self.attachments = path, result, attachments
        self.zip_path = path.with_suffix(".zip")

    def save(self, *, zipped: bool = False) -> None:
        """Write the JSON; if `zipped`, also write the zip, with the table and the attachments."""
        text = json.dumps(self.result, indent=1) + "\n"
        _write(self.path, text.encode())
        if zipped:
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in {self.path.name: text, "table.txt": self.table(), **self.attachments}.items():
                    archive.writestr(name, content)
            _write(self.zip_path, packed.getvalue())

    def table(self) -> str:
        console = Console(file=io.StringIO(), width=120, markup=False, emoji=False)
        for table in tables(self.result):
            console.print(table)
        return f"{console.file.getvalue()}{verdict(self.result)}\n"  # type: ignore[attr-defined]  # it is a StringIO


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


# --- environment ------------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """Return the versions and the GPUs without using torch.cuda, so it works on every machine."""
    return {
        "refvl": refvl.__version__,
        "commit": _say(*GIT, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") if ROOT == CLONE else "",
        "python": platform.python_version(),
        "os": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "nvidia_smi": _say("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return the GPU's name, capability and memory, torch's architectures, and a half-precision tower's attention."""
    properties = torch.cuda.get_device_properties(device)
    kernels = {
        f"head dimension {K}": describe_backend(available_backends(device, torch.float16, K)[0]) for K in HEAD_DIMS
    }
    return {
        "device": str(device),
        "name": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "gpus": torch.cuda.device_count(),
        "built_for": torch.cuda.get_arch_list(),
        "cudnn": torch.backends.cudnn.version(),
        "attention": kernels,
    }


def find_problem(device: torch.device, cards: str) -> str:
    """Return the reason why nothing can run on `device`, or "" if it can.

    cards: the GPUs listed by nvidia-smi, one per line.
    """
    listed = f"nvidia-smi lists {cards.splitlines()[0]}" if cards else "nvidia-smi lists no GPU"
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            do = "install a CUDA build of torch (https://pytorch.org)" if cards else "a GPU and a CUDA build are needed"
            return f"CPU wheel: torch {torch.__version__} is built without CUDA, and {listed}; {do}"
        if not cards:
            return f"no GPU: {listed}, or there is no nvidia-smi; torch {torch.__version__} is a CUDA build"
        try:
            torch.cuda.init()
            said = "torch gives no reason"
        except (RuntimeError, AssertionError) as error:
            said = str(error).split("\n")[0]
        if "too old" in said:
            need = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
            return f"old driver: {need}, and {listed}; update the driver, or install a torch for an older CUDA"
        return f"no GPU that torch can use: {said}; {listed}"
    if (index := device.index or 0) >= torch.cuda.device_count():
        return f"no such GPU: expected a GPU for {device}, but torch sees {torch.cuda.device_count()}, counted from 0"
    capability = torch.cuda.get_device_capability(index)
    if not has_kernels(capability, built_for := torch.cuda.get_arch_list()):
        card = f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}"
        age = "new" if capability > max(map(_capability, built_for)) else "old"
        return f"GPU too {age}: {card}, but torch {torch.__version__} has kernels only for {', '.join(built_for)}"
    return ""


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Return whether a build of torch runs on a GPU. built_for: the return value of `torch.cuda.get_arch_list()`.

    Kernels (sm_86) run on GPUs with the same major capability and an equal or higher minor one. Kernels with an "a" run
    only on exactly their capability. Code for the driver's compiler (compute_90) runs on all later capabilities.
    """
    for name in built_for:
        wanted = _capability(name)
        if name.startswith("compute_") and capability >= wanted:
            return True
        if capability == wanted or (not name.endswith("a") and capability[0] == wanted[0] and capability > wanted):
            return True
    return False


def _capability(name: str) -> tuple[int, int]:
    """Return the capability in a name: sm_120 gives (12, 0)."""
    number = re.sub(r"\D", "", name)
    return int(number[:-1]), int(number[-1])


def _say(*command: str) -> str:
    """Return the output of a command, or "" if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# --- what is printed --------------------------------------------------------------------------------------------------


def tables(result: dict) -> Iterator[Table]:
    """Yield three tables: every check with the row closest to its limit, every failed row, and every time."""
    if result["problem"]:
        return
    table = Table("check", "state", "rows", "s", "closest to its limit, or why not", title="check-gpu")
    for name, entry in result["checks"].items():
        cells = [entry["state"], str(len(entry["rows"])), str(entry.get("seconds", "")), _remark(entry)]
        table.add_row(name, *cells)
    yield table
    rows = [(name, row) for name, entry in result["checks"].items() for row in entry["rows"]]
    for title, wanted in (
        ("failed", lambda row: not row["passed"]),
        ("measured", lambda row: row["allowed"] is None),
    ):
        if chosen := [(name, row) for name, row in rows if wanted(row)]:
            table = Table("check", "what", "measured", "allowed", title=title)
            for name, row in chosen:
                allowed = "" if row["allowed"] is None else f"{row['allowed']:.2g}"
                table.add_row(name, row["check"], f"{float(row['measured']):.3g} {row['unit']}", allowed)
            yield table


def _remark(entry: dict) -> str:
    if "reason" in entry:
        return entry["reason"]
    limited = [row for row in entry["rows"] if row["allowed"]]
    if not limited:
        return ""
    row = max(limited, key=lambda row: float(row["measured"]) / row["allowed"])
    return f"{row['check']}: {float(row['measured']):.2g} of {row['allowed']:.2g}"


def verdict(result: dict) -> str:
    """Return the result of a run in one line."""
    if result["problem"]:
        return f"check-gpu: {result['problem']}"
    where = result["environment"]
    name = f"{where['name']} ({where['capability']}), torch {where['torch']}" if "name" in where else "nothing ran"
    states = [entry["state"] for entry in result["checks"].values()]
    bad = [f"{key} ({entry['state']})" for key, entry in result["checks"].items() if entry["state"] not in GOOD]
    skipped = f"; {states.count('skipped')} skipped" if "skipped" in states else ""
    if bad:
        return f"check-gpu: {len(bad)} of {len(states)} checks did not pass on {name}: {', '.join(bad)}{skipped}"
    return f"check-gpu: {name} passes {states.count('passed')} checks{skipped}"
