"""Measure the accuracy of tiny models on pruned videos: `python -m benchmarks.pruning_accuracy`.

Questions about held-out scenes ask in which direction an object moves and when it changes colour, at rates from 0 to
0.9, with every rule. All tiny models are measured that were trained on such videos and whose video tokens have fixed
positions in a frame. For a second table, the questions are asked again at the EVS rates 0 and 0.5, with closed-up
positions (`refvl.study.releases.closed_up_positions`) instead of each model's own. With --write the results are written
to data/measurements/pruning_accuracy.json, which keeps the results of models that were not measured.
"""

import json
import math
from dataclasses import replace
from typing import Annotated

import typer

import refvl
from benchmarks.report import PrintedTable, Write, environment, resolve_device, write_measurement
from data.training.evaluate_tiny import evaluate, interval, requests_for, share
from data.training.tiny_family import TinyFamily, family_names, find_family
from refvl.paths import DATA
from refvl.positions import PRUNERS
from refvl.study.releases import closed_up_positions

RATES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
COLUMNS = {
    "model": "16",
    "question": "9",
    "rule": "8",
    "q": ">4",
    "tokens": ">6",
    "right": ">6",
    "95 % interval": ">16",
}

CLOSED_UP_COLUMNS = {"model": "16", "question": "9", "q": ">4", "changed": ">7", "right": ">6"}


def prunable() -> list[TinyFamily]:
    """Return the families of shipped checkpoints that can be pruned."""
    families = map(find_family, family_names())
    return [family for family in families if family.prunable and (family.folder / "model.safetensors").is_file()]


def measure(families: list[TinyFamily], count: int, table: PrintedTable) -> list[dict]:
    """Return one row per model, kind of question, rule and rate; rate 0 is measured once for all rules."""
    rows = []
    for family in families:
        model = refvl.load(family.folder, device="cpu", progress=False)
        for kind in family.clips:
            thw = model.trace(**requests_for(kind, 1)[0].arguments, max_new_tokens=1).patches[0].media_tokens.thw
            for rule, q in [("", 0.0), *((rule, q) for rule in PRUNERS for q in RATES if q)]:
                right = share(evaluate(model, kind, count, q=q, pruning=rule or "evs"))
                tokens = PRUNERS[rule].count(thw[1] * thw[2], thw[0], q) if q else math.prod(thw)
                row = {"model": family.folder.name, "question": kind, "pruning": rule, "q": q, "video_tokens": tokens}
                rows.append(row | {"accuracy": right})
                low, high = interval(right, count)
                table.add(*row.values(), f"{right:.1%}", f"{low:.1%} - {high:.1%}")
    return rows


def close_up(families: list[TinyFamily], count: int, table: PrintedTable) -> list[dict]:
    """Count the answers that change, and those that are correct, if the kept tokens are numbered without gaps."""
    rows = []
    for family in families:
        model = refvl.load(family.folder, device="cpu", progress=False)
        for kind, q in ((kind, q) for kind in family.clips for q in (0.0, 0.5)):
            asked = requests_for(kind, count)
            runs = [model.trace(**request.arguments, pruning_rate=q, max_new_tokens=32) for request in asked]
            closed = [replace(run, positions=closed_up_positions(len(run.input_ids))[0]) for run in runs]
            answers = model.answers(closed, max_new_tokens=32)
            changed = sum(said != run.text for said, run in zip(answers, runs, strict=True))
            right = sum(said == request.question.answer for said, request in zip(answers, asked, strict=True))
            rows.append({"model": family.folder.name, "question": kind, "q": q, "changed": changed, "right": right})
            table.add(*rows[-1].values())
    return rows


def run(
    count: Annotated[int, typer.Option(help="scenes of each kind")] = 200,
    model: Annotated[str, typer.Option(help="only the model whose folder name contains this")] = "",
    write: Write = False,
) -> None:
    """Measure accuracy on held-out videos at each pruning rate, for every rule."""
    device, families = resolve_device("cpu"), [family for family in prunable() if model in family.folder.name]
    table = PrintedTable(f"{count} videos of each kind, held out", COLUMNS)
    measured = {"rows": measure(families, count, table)}
    table = PrintedTable(f"Closed-up positions, {count} videos of each kind", CLOSED_UP_COLUMNS)
    measured["closed_up"] = close_up(families, count, table)
    if write:
        file, asked = DATA / "measurements" / "pruning_accuracy.json", {row["model"] for row in measured["rows"]}
        kept = json.loads(file.read_text()) if file.is_file() else {"n": count}
        if kept["n"] != count:
            raise SystemExit(
                f"--count: expected {kept['n']}, as in {file.name}, got {count}; pass that count, or remove the file"
            )
        for name, rows in measured.items():
            rows += [row for row in kept.get(name, []) if row["model"] not in asked]
            rows.sort(key=lambda row: row["model"])  # stable
        write_measurement("pruning_accuracy", environment(device) | {"n": count, "split": "test"} | measured)


if __name__ == "__main__":
    typer.run(run)
