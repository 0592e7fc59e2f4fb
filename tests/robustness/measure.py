"""`python tests/robustness/measure.py --write`: as many cases as the marker `fuzz`, counted for docs/quality.md."""

import argparse
import json
import platform
import re
from datetime import date
from pathlib import Path

import torch
import transformers
from harness import ENDS, run_apart
from kinds import KINDS
from tqdm import tqdm

from refvl.paths import DATA

THOROUGH = 12_600  # cases, shared equally by the kinds
FILE = DATA / "measurements" / "robustness.json"


def measure(cases: int, names: list[str]) -> dict:
    """How the cases of each kind, or of some, ended; a crash ends a child process only."""
    kinds = [kind for kind in KINDS if kind.__name__ in names]
    reports = [run_apart(kind, range(cases // len(KINDS))) for kind in tqdm(kinds)]
    for defect in (defect for report in reports for defect in report.defects):
        print(defect)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    rows = {report.kind: {how: report.counts[how] for how in ENDS} for report in reports}
    return {"date": date.today().isoformat(), "cpu": cpu_name(), **versions, "cases": rows}


def cpu_name() -> str:
    """The processor, as Linux calls it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.is_file() else []
    return names[0] if names else platform.processor()


def table(measured: dict) -> str:
    """The rows of docs/quality.md: inputs, then how they ended, every column counted."""
    rows = {kind.replace("_", " "): [counts[how] for how in ENDS] for kind, counts in measured["cases"].items()}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    return "\n".join(
        f"| {kind} | " + " | ".join(f"{number:,}" for number in (sum(counts), *counts)) + " |"
        for kind, counts in rows.items()
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=THOROUGH)
    parser.add_argument("--kinds", nargs="+", choices=(names := [kind.__name__ for kind in KINDS]), default=names)
    parser.add_argument("--write", action="store_true", help=f"write these kinds to {FILE.name}")
    arguments = parser.parse_args()
    measured = measure(arguments.cases, arguments.kinds)
    if arguments.write:
        before = json.loads(FILE.read_text())
        rows = before["cases"] | measured["cases"]
        if len(arguments.kinds) < len(names):
            measured["date"] = before["date"]  # of the oldest row
        measured["cases"] = {name: rows[name] for name in names if name in rows}
        FILE.write_text(json.dumps(measured, indent=1) + "\n")
    print(table(measured))
