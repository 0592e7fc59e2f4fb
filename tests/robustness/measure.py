"""`python tests/robustness/measure.py --write`: as many cases as the marker `fuzz` tries, counted for the README."""

import argparse
import json
from datetime import date

import torch
import transformers
from harness import run_kind
from kinds import KINDS
from tqdm import tqdm

from refvl.paths import DATA

THOROUGH = 10_080  # cases, shared equally by the kinds
FILE = DATA / "measurements" / "robustness.json"


def measure(cases: int) -> dict:
    """Right results, clear errors and anything else, for each kind."""
    reports = [run_kind(kind, range(cases // len(KINDS))) for kind in tqdm(KINDS)]
    for defect in (defect for report in reports for defect in report.defects):
        print(defect)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    rows = {r.kind: {how: r.counts[how] for how in ("right", "clear", "else")} for r in reports}
    return {"date": date.today().isoformat(), **versions, "cases": rows}


def table(measured: dict) -> str:
    """The README's rows."""
    rows = [(kind.replace("_", " "), *counts.values()) for kind, counts in measured["cases"].items()]
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    return "\n".join(
        f"| {kind} | {right + clear + other:,} | {clear:,} | {other:,} |" for kind, right, clear, other in rows
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=THOROUGH)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    measured = measure(arguments.cases)
    if arguments.write:
        FILE.write_text(json.dumps(measured, indent=1) + "\n")
    print(table(measured))
