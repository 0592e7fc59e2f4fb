"""Compare the CPU benchmarks of this tree and of other commits in one run: `python -m benchmarks.against COMMIT ...`.

Each commit is checked out into a separate folder, and a separate process measures it with that commit's own
`benchmarks`. The rows are those of `bench tower` and `bench performance`. For each row, the processes take
turns, so a busy machine slows all of them. In each round, the time of a row is the shortest of several calls.
The ratio of a row is this tree's CPU time divided by the commit's CPU time, as the median over the rounds. With
--write, the results are written to data/measurements/against_cpu.json.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

from benchmarks.report import PrintedTable, Repeats, Write, environment, resolve_device, write_measurement

ROOT = Path(__file__).resolve().parents[1]
AT_LEAST = 0.03  # seconds: short calls are repeated until they take this long in total
ANSWER = "measured: "  # the prefix of answers, which sets them apart from lines that libraries print

# --- in the process of a tree -----------------------------------------------------------------------------------------


def groups_of_tree() -> dict[str, Callable[[], dict[str, Callable]]]:
    """Return, by group, functions that build the calls of both benchmarks of the tree on `sys.path`, by row."""
    from benchmarks import performance, tower

    performance.side_by_side = lambda ways, repeats: ways  # return the calls instead of their times
    groups = {f"tower: {name}": partial(rows_of_tower, tower, name) for name in tower.TOWERS["cpu"]}
    for name in ("linear", "towers", "gains", "pixels", "decode", "evs"):
        groups[name] = partial(rows_of_performance, getattr(performance, f"measure_{name}"), name)
    return groups | {"stages": partial(rows_of_answers, performance)}


def rows_of_tower(tower: Any, name: str) -> dict[str, Callable]:
    """Return float32 calls: the whole encoder, and separately its plan, its forward with a plan, and its attention."""
    rows: dict[str, Callable] = {}
    torch.manual_seed(0)
    _, ours = tower.build_pair(tower.TOWERS["cpu"][name], "cpu", torch.float32)
    for what, grid in tower.INPUTS["cpu"].items():
        x = torch.randn(sum(t * h * w for t, h, w in grid), ours.config.patch_values)
        row = f"tower: {name}, {what}"
        rows[f"{row}: refvl"] = partial(ours, x, grid)
        rows[f"{row}: plan"] = partial(ours.plan, grid)
        rows[f"{row}: forward"] = partial(ours, x, metadata=ours.plan(grid))
        rows[f"{row}: attention"] = attention_of(ours, x, grid)
    return rows


def rows_of_performance(measure: Callable, name: str) -> dict[str, Callable]:
    rows: dict[str, Callable] = {}
    found = measure(1)
    for row in found if isinstance(found, list) else [found]:
        label = ", ".join([str(value) for value in row.values() if isinstance(value, int | str)][:2])
        rows |= {f"{name}: {label}: {way}": call for way, call in row.items() if callable(call)}
    return rows


def rows_of_answers(performance: Any) -> dict[str, Callable]:
    model = performance.refvl.load(performance.CHECKPOINT, device="cpu", progress=False)
    return {f"stages: {name}": partial(model.trace, **asked) for name, asked in performance.QUESTIONS.items()}


def attention_of(encoder: Any, x: torch.Tensor, grid: list) -> Callable:
    """Return a call that repeats one forward's attention in all blocks, on the recorded queries, keys and values."""
    from refvl.attention import Segments

    attend, given = Segments.attend, list[tuple]()

    def kept(*args):
        given.append(args)
        return attend(*args)

    with patch.object(Segments, "attend", kept), torch.inference_mode():
        encoder(x, grid)
    return lambda: [attend(*args) for args in given]


def serve() -> None:
    """Answer each request, one line on stdin, until stdin is closed.

    For the request "kernel", the answer is the kernel of the tree's towers; for "groups", the
    answer is the names of all groups. For a group's name, the answer is the group's rows; for a
    row's name, the answer is the row's shortest CPU time.
    """
    from benchmarks.tower import choose_linear

    torch.set_num_threads(1)
    groups, rows = groups_of_tree(), dict[str, Callable]()
    for line in sys.stdin:
        name = line.strip()
        answer: Any
        if name == "kernel":
            answer = choose_linear("auto", torch.device("cpu"), torch.float32)
        elif name == "groups":
            answer = list(groups)
        elif name in groups:
            rows = {}  # frees the memory of the previous group
            rows = groups[name]()
            answer = list(rows)
        else:
            answer = least_seconds(rows[name])
        print(ANSWER + json.dumps(answer), flush=True)


@torch.inference_mode()
def least_seconds(call: Callable) -> float:
    times = list[float]()
    while sum(times) < AT_LEAST and len(times) < 50:
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


# --- in the process that compares -------------------------------------------------------------------------------------


class Tree:
    """A checked-out commit and the process that measures it."""

    def __init__(self, folder: Path):
        code = f"import runpy; runpy.run_path({__file__!r}, run_name='measured_tree')"
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-W", "ignore", "-c", code]  # -P: import `benchmarks` from `folder`
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)

    def ask(self, what: str) -> Any:
        """Send a request to the process and return its answer; raise RuntimeError if the process has ended."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"{what}: the measuring process ended with status {self.process.wait()}")


def compare(trees: dict[str, Tree], repeats: int) -> Iterator[dict]:
    """Yield each row that all trees have: medians in ms, and the ratio of the last tree's time to each other time."""
    if len(kernels := {tree.ask("kernel") for tree in trees.values()}) > 1:
        raise RuntimeError(f"kernel: expected all trees to choose the same kernel, got {kernels}; measure again")
    groups = {name: tree.ask("groups") for name, tree in trees.items()}
    for group in common(groups):
        rows = {name: tree.ask(group) for name, tree in trees.items()}
        for row in common(rows):
            yield {"row": row} | compare_row(trees, row, repeats)


def common(names: dict[str, list[str]]) -> list[str]:
    """Return the names that all trees have, in the last tree's order."""
    *others, last = names.values()
    return [name for name in last if all(name in other for other in others)]


def compare_row(trees: dict[str, Tree], row: str, repeats: int) -> dict[str, float]:
    rounds = []
    for i in range(repeats + 1):  # the first round is a warm-up; the order alternates between rounds
        order = list(trees)[:: 1 if i % 2 else -1]
        rounds.append({name: trees[name].ask(row) for name in order})
    del rounds[0]
    *others, last = trees
    found = {f"{name} ms": statistics.median(times[name] for times in rounds) * 1e3 for name in trees}
    for name in others:
        found[f"ratio to {name}"] = statistics.median(times[last] / times[name] for times in rounds)
        found[f"ratio of the least to {name}"] = min(t[last] for t in rounds) / min(t[name] for t in rounds)
    return found


def run(
    commits: Annotated[list[str], typer.Argument(help="commits to compare this tree with")],
    repeats: Repeats = 9,
    write: Write = False,
) -> None:
    """Compare the CPU benchmarks of this tree with those of other commits, in one run."""
    resolve_device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        trees = {}
        try:
            for commit in commits:
                subprocess.run(
                    ["git", "worktree", "add", "--detach", f"{folder}/{commit}", commit], cwd=ROOT, check=True
                )
                trees[commit] = Tree(Path(folder, commit))
            trees["this tree"] = Tree(ROOT)
            columns = {"row": "<60"} | dict.fromkeys(commits, ">8")
            table, rows = PrintedTable("this tree's time / the commit's", columns), []
            for row in compare(trees, repeats):
                rows.append(row)
                table.add(row["row"], *(f"{row[f'ratio to {commit}']:.3f}" for commit in commits))
        finally:
            for tree in trees.values():
                tree.process.kill()
            for commit in commits:
                subprocess.run(["git", "worktree", "remove", "--force", f"{folder}/{commit}"], cwd=ROOT, check=False)
    if write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        about = {"commit": commit.stdout.strip(), "cpu": processor_name(), "repeats": repeats}
        write_measurement("against_cpu", environment("cpu") | about | {"seconds": time.process_time(), "rows": rows})


def processor_name() -> str:
    """Return the processor's name as Linux reports it, or else a generic name."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", file.read_text()) if file.is_file() else []
    return names[0] if names else platform.processor()


if __name__ == "measured_tree":
    serve()
if __name__ == "__main__":
    typer.run(run)
