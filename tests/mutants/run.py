"""Which mutants do the tests kill? A process is forked for each, with everything but refvl imported already.

    python tests/mutants/run.py map TREE MAP [--tier quick]    once: which lines each test reaches (an hour)
    python tests/mutants/run.py judge TREE MAP LIST OUT        then: the mutants of LIST (generate.py), verdicts in OUT
    python tests/mutants/run.py tell OUT                       shares, and who survived

The map of the quick tier takes five minutes. TREE is a working tree of refvl with its own tests; nothing is written to
it. `judge` goes on where it was stopped.

Tests that reach the mutated line come first, the most special of them at the very front; then those that reach its
file. They run until one fails (killed), none is left, or `--seconds` of processor time are spent (survived).
"""

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEVER = "not slow and not gpu and not fuzz and not browser and not shapes and not claims"
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "addopts=--strict-markers", "-m", NEVER]
FIRST_FILES = 4  # of tests, before all others: most mutants die there, and each file costs an import
PAUSE = 0.05  # seconds between two looks at a child
WAITED = 240.0  # seconds for one test, and four times what it took: then the mutant runs forever


def environment(tree: Path) -> dict[str, str]:
    paths = [str(tree), str(HERE)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COVERAGE_CORE": "ctrace"}


def python(tree: Path) -> str:
    own = tree / ".venv/bin/python"
    return str(own) if own.exists() else sys.executable


def record_map(tree: Path, folder: Path, tier: str) -> int:
    """Run the suite, or its quick tier, once and keep the lines that each test reaches in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("lines.*"), *folder.glob("tests.*")]:
        path.unlink()
    command = [python(tree), "-m", "pytest", "-p", "lines", "-n", "2", "--dist", "worksteal", *OPTIONS, "tests"]
    command += ["--tier", tier] if tier != "all" else []
    given = environment(tree) | {"MUTANTS_MAP": str(folder.resolve())}
    return subprocess.run(command, cwd=tree, env=given).returncode


class Map:
    """Which tests reach what. Tests that failed without a mutant are left out."""

    def __init__(self, folder: Path):
        from coverage import CoverageData

        self.seconds: dict[str, float] = {}
        for path in folder.glob("tests.*.json"):
            told = json.loads(path.read_text())
            self.seconds |= {name: test["seconds"] for name, test in told.items() if test["passed"]}
        self.of_line: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.reach: Counter = Counter()
        for path in folder.glob("lines.*"):
            data = CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                name = file[file.rindex("/refvl/") + 1 :]
                for line, tests in data.contexts_by_lineno(file).items():
                    known = [test for test in tests if test in self.seconds]
                    self.of_line[name][line].update(known)
                    self.reach.update(known)

    def in_order(self, mutant: dict, distrusted: set[str]) -> list[list[str]]:
        """The tests of a mutant, in the groups in which they run."""
        file, stem = mutant["file"], Path(mutant["file"]).stem
        lines = self.of_line[file]
        reach_line = lines.get(mutant["line"], set())
        reach_file = set().union(*lines.values()) if lines else set()
        named = {test for test in self.seconds if stem in Path(test.split("::")[0]).stem}
        groups: list[list[str]] = []
        used = set(distrusted)
        for chosen in (reach_line, reach_file | named):
            left = chosen - used
            used |= left
            groups += self._split(left)
        return [group for group in groups if group]

    def _split(self, tests: set[str]) -> list[list[str]]:
        """One case of each function in the most special files, one of each in the others, then all other cases."""
        cases = defaultdict(list)
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            cases[test.split("[")[0]].append(test)
        one_each = [found[0] for found in cases.values()]
        reach = defaultdict(list)
        for test in tests:
            reach[test.split("::")[0]].append(self.reach[test])
        special = sorted(reach, key=lambda file: (min(reach[file]), file))
        first = set(special[:FIRST_FILES])
        near = [test for test in one_each if test.split("::")[0] in first]
        far = [test for test in one_each if test.split("::")[0] not in first]
        rest = sorted(tests - set(one_each), key=lambda test: (self.seconds[test], test))
        close = [test for test in rest if test.split("::")[0] in first]
        return [near, close, far, [test for test in rest if test.split("::")[0] not in first]]


class Judge:
    """A pytest plugin: the tests of a group in their order, until one fails or the time is up."""

    def __init__(self, tests: list[str], tell, until: float, whole: bool = False):
        self.places = {test: place for place, test in enumerate(tests)}
        self.tell, self.until, self.whole = tell, until, whole
        self.count, self.killer, self.failed = 0, None, []

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda i: self.places[i.nodeid])

    def pytest_collectreport(self, report):
        if report.failed:
            self.killer = f"{report.nodeid} (import)"

    def pytest_runtest_protocol(self, item, nextitem):
        self.tell({"runs": item.nodeid})
        self.count += 1

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)
            self.killer = self.killer or report.nodeid

    def pytest_runtest_logfinish(self, nodeid):
        if not self.whole and (self.killer or used_seconds() > self.until):
            import pytest

            pytest.exit("enough")


def used_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    return sum(os.times()[:4])


def run_group(tests: list[str], tell, until: float, scratch: Path, whole: bool = False) -> Judge:
    import pytest

    judge = Judge(tests, tell, until, whole)
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    arguments = [*OPTIONS, "--hypothesis-seed=0", f"--basetemp={scratch}", "--tb=no", "--no-header", *files]
    with contextlib.suppress(SystemExit):
        pytest.main(arguments, plugins=[judge])
    return judge


def in_child(pipe: int, tree: Path, groups: list[list[str]], seconds: float, scratch: Path, whole: bool) -> None:
    """In the forked process: run the groups and tell the parent through the pipe."""
    os.setsid()
    os.chdir(tree)
    os.environ.update(environment(tree))
    sys.path[:0] = [str(tree)]
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    sys.stdin = io.StringIO()

    def tell(row: dict) -> None:
        os.write(pipe, (json.dumps(row) + "\n").encode())

    count, until, failed = 0, used_seconds() + seconds, []
    result, killer = "survived", None
    for group in groups:
        judge = run_group(group, tell, until, scratch, whole)
        count += judge.count
        failed += judge.failed
        if judge.killer and not whole:
            result, killer = "killed", judge.killer
            break
        if used_seconds() > until and not whole:
            break
    tell({"result": result, "by": killer, "tests": count, "cpu": round(used_seconds(), 1), "failed": failed})


def judged(tree: Path, groups: list[list[str]], expected: dict, seconds: float, scratch: Path, whole=False) -> dict:
    """Fork, and wait for the verdict; a test that does not come back is a kill, too."""
    scratch.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            in_child(writing, tree, groups, seconds, scratch, whole)
        finally:
            os._exit(0)
    os.close(writing)
    os.set_blocking(reading, False)
    told, text, running, waited = {}, "", None, 0.0
    while "result" not in told:
        try:
            chunk = os.read(reading, 1 << 16)
        except BlockingIOError:
            waited += PAUSE  # counted, not looked up: a machine that stops everything stops this, too
            if waited > WAITED + 4 * expected.get(running, 0.0):
                told = {"result": "timeout", "by": running or "import", "tests": None, "cpu": None}
                break
            time.sleep(PAUSE)
            continue
        if not chunk:  # the process is gone: a crash kills as well
            told = {"result": "killed", "by": f"{running} (crash)", "tests": None, "cpu": None}
            break
        waited = 0.0
        *lines, text = (text + chunk.decode()).split("\n")
        for row in map(json.loads, lines):
            running = row.get("runs", running)
            if "result" in row:
                told = row
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shutil.rmtree(scratch, ignore_errors=True)
    return told


def copy_of(tree: Path, place: Path) -> Path:
    """A tree of its own for one worker; the environment is shared."""
    ignored = shutil.ignore_patterns(
        ".venv*", "__pycache__", ".hypothesis", "outputs", "site", ".mypy_cache", ".ruff_cache"
    )
    shutil.copytree(tree, place, ignore=ignored, symlinks=True)
    os.symlink((tree / ".venv").resolve(), place / ".venv")
    subprocess.run([python(tree), "-m", "compileall", "-q", "refvl", "data", "tests"], cwd=place, check=False)
    return place


@contextlib.contextmanager
def mutated(tree: Path, mutant: dict, stamp: int):
    """The mutant in its place; times of the file differ each time, so that no old bytecode is taken."""
    path = tree / mutant["file"]
    source, times = path.read_text(), path.stat().st_mtime
    lines = source.splitlines(keepends=True)
    row = lines[mutant["line"] - 1]
    assert row.strip() == mutant["before"], f"{path}:{mutant['line']} is another line now"
    indent = row[: len(row) - len(row.lstrip())]
    lines[mutant["line"] - 1] = indent + mutant["after"] + "\n"
    try:
        path.write_text("".join(lines))
        os.utime(path, (stamp, stamp))
        yield
    finally:
        path.write_text(source)
        os.utime(path, (times, times))


def preload(tree: Path) -> None:
    """Import what the tests import, but for refvl and what lies in the tree: children inherit it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python(tree), "-m", "pytest", "-p", "lines", "--collect-only", *OPTIONS, "tests"]
        given = environment(tree) | {"MUTANTS_MAP": folder}
        subprocess.run(command, cwd=tree, env=given, stdout=subprocess.DEVNULL, check=False)
        names = json.loads((Path(folder) / "modules.json").read_text())
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    assert "refvl" not in sys.modules


def key(mutant: dict) -> tuple:
    return tuple(mutant[name] for name in ("file", "line", "operator", "after"))


def worker(number: int, tree: Path, place: Path, map_: Map, queue, out: Path, seconds: float) -> None:
    own = copy_of(tree, place / f"tree{number}")
    while (item := queue.get()) is not None:
        index, mutant, distrusted = item
        groups = map_.in_order(mutant, set(distrusted))
        told = {"result": "survived", "by": None, "tests": 0, "cpu": 0.0}
        if groups:
            with mutated(own, mutant, 1_000_000_000 + 10 * index + number):
                told = judged(own, groups, map_.seconds, seconds, place / f"scratch{number}")
        told.pop("failed", None)
        with out.open("a") as file:
            file.write(json.dumps(mutant | told) + "\n")
        print(f"{told['result']:>8} {mutant['file']}:{mutant['line']} {mutant['after'][:70]}", flush=True)


def work(tree: Path, place: Path, map_: Map, mutants: list, out: Path, seconds: float, workers: int) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    for item in [*mutants, *[None] * workers]:
        queue.put(item)
    given = (tree, place, map_, queue, out, seconds)
    processes = [context.Process(target=worker, args=(number, *given)) for number in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for number in range(workers):
        shutil.rmtree(place / f"tree{number}", ignore_errors=True)


def judge(tree: Path, folder: Path, list_: Path, out: Path, seconds: float, workers: int) -> None:
    map_ = Map(folder)
    mutants = [json.loads(line) for line in list_.read_text().splitlines()]
    done = {key(row) for row in rows_of(out)}
    preload(tree)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        place = Path(name)
        todo = [(index, mutant, []) for index, mutant in enumerate(mutants) if key(mutant) not in done]
        work(tree, place, map_, todo, out, seconds, workers)

        # A test that fails without a mutant, too, kills nothing
        killers = sorted({row["by"] for row in rows_of(out) if row["result"] == "killed" and row["by"] in map_.seconds})
        clean = copy_of(tree, place / "clean")
        bad = set(judged(clean, [killers], map_.seconds, 1e9, place / "scratch", whole=True).get("failed", []))
        print(f"{len(killers)} tests kill; {len(bad)} of them fail without a mutant: {sorted(bad)}")
        if bad:
            kept = [row for row in rows_of(out) if row["by"] not in bad]
            again = {key(row) for row in rows_of(out)} - {key(row) for row in kept}
            out.write_text("".join(json.dumps(row) + "\n" for row in kept))
            todo = [(index, mutant, sorted(bad)) for index, mutant in enumerate(mutants) if key(mutant) in again]
            work(tree, place, map_, todo, out, seconds, workers)
    tell(out)


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def tell(out: Path) -> None:
    rows = rows_of(out)
    room = {row["file"]: "/".join(row["file"].split("/")[1:2]) for row in rows}
    counts = {name: [row for row in rows if room[row["file"]] == name] for name in sorted(set(room.values()))}
    for name, found in [*counts.items(), ("all", rows)]:
        dead = sum(row["result"] != "survived" for row in found)
        print(f"{name:>20}: {dead} of {len(found)} killed, {100 * dead / len(found):.1f} %")
    print("\nsurvived:")
    for row in sorted((row for row in rows if row["result"] == "survived"), key=key):
        print(f"{row['file']}:{row['line']} [{row['tests']} tests]\n    - {row['before']}\n    + {row['after']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("map")
    first.add_argument("tree", type=Path)
    first.add_argument("map", type=Path)
    first.add_argument(
        "--tier", default="all", choices=("all", "quick", "rest"), help="quick: only what `make test` runs"
    )
    second = commands.add_parser("judge")
    for name in ("tree", "map", "list", "out"):
        second.add_argument(name, type=Path)
    second.add_argument("--seconds", type=float, default=40.0, help="processor time that a survivor costs at most")
    second.add_argument("--workers", type=int, default=2)
    commands.add_parser("tell").add_argument("out", type=Path)
    given = parser.parse_args()
    if given.command == "map":
        sys.exit(record_map(given.tree.resolve(), given.map, given.tier))
    elif given.command == "judge":
        os.environ |= {"OMP_NUM_THREADS": "1"}
        judge(given.tree.resolve(), given.map, given.list, given.out, given.seconds, given.workers)
    else:
        tell(given.out)


if __name__ == "__main__":
    main()
