"""Code lines per room and their budgets: `python tests/project/test_lines.py` prints the table.

A code line is one that holds more than a comment or a part of a docstring. The mean length of a line has a budget too:
a budget that is reached by denser lines is not reached.
"""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).resolve().parents[2]
# A folder of refvl, or of the repository; a plain answer imports modules with lines in them. Rooms
# that are larger than planned may not grow; `OVER` says what stands in the way
BUDGETS = {
    "refvl/*.py": 1214, "refvl/pixels": 883, "refvl/processors": 855, "refvl/encoders": 2010,
    "refvl/positions": 635, "refvl/language": 575, "refvl/graphs": 701, "refvl/serving": 1110,
    "refvl/study": 1544, "refvl/tools": 636, "refvl without viz": 10_153, "refvl/viz": 4000,
    "tests": 16_000, "benchmarks": 1100, "data": 2600, "notebooks": 1600,
    "raise in refvl without viz": 286, "an answer: modules": 60, "an answer: lines": 4500,
    "characters a line, refvl": 55.0, "characters a line, tests": 52.7,
}  # fmt: skip
OVER = {  # the plan, and why it is not met
    "refvl/*.py": (1150, "`load` has one argument for every feature; one check of finite results, files written whole"),
    "refvl/pixels": (800, "the times, rotations, parts and truncated files that PyAV leaves open"),
    "refvl/positions": (620, "a packed prompt that lacks a feature is filled or refused"),
    "refvl/graphs": (700, "one kernel fills all buffers of a replay"),
    "refvl/serving": (
        1000,
        "twelve features with public names; adapters under the names of five families; layers for a GPU",
    ),
    "refvl/study": (
        1350,
        "transformers' own processors for `compare`, warnings about float16, a reader's nine functions",
    ),
    "refvl without viz": (9900, "the rooms above"),
}
ANSWER = """
import sys, refvl
print(*sys.modules)
model = refvl.load("tiny-qwen2_5_vl", device="cpu", progress=False)
assert model.chat("What color is the circle?", images=["data/pictures/scene.png"]) == "red"
print(*sys.modules)
print(*(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "refvl"))
"""
IMPORTED = ("an answer: modules", "an answer: lines")
NEVER = {  # imported by nothing that answers a question about a picture
    "IPython", "anywidget", "av", "google", "ipywidgets", "matplotlib", "pandas", "pydantic", "pytest", "rich",
    "scipy", "sklearn", "tensorflow", "torchaudio", "typer", "webdataset",
}  # fmt: skip
OTHERS = ("refvl.viz", "refvl.tools", "refvl.serving.export", "refvl.study.boxes", "refvl.serving.parallel")


@cache
def code_lines(path: Path) -> int:
    text = path.read_text()
    docs, strings = set[int](), set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno > node.lineno:
            strings |= set(range(node.lineno, node.end_lineno + 1))
    written = {i for i, line in enumerate(text.split("\n"), 1) if line.strip() and line.strip()[0] != "#"}
    return len((written | strings) - docs)


def characters(paths: list[Path]) -> float:
    lines = [line.strip() for path in paths for line in path.read_text().splitlines()]
    lengths = [len(line) for line in lines if line and not line.startswith("#")]
    return round(sum(lengths) / len(lengths), 1)


@cache
def counted() -> dict[str, float]:
    files = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in BUDGETS if (ROOT / folder).is_dir()}
    found: dict[str, float] = {folder: sum(map(code_lines, paths)) for folder, paths in files.items()}
    found["refvl/*.py"] = sum(map(code_lines, (ROOT / "refvl").glob("*.py")))
    library = sorted((ROOT / "refvl").rglob("*.py"))
    plain = [path for path in library if path not in files["refvl/viz"]]
    found["refvl without viz"] = sum(map(code_lines, plain))
    nodes = [node for path in plain for node in ast.walk(ast.parse(path.read_text()))]
    found["raise in refvl without viz"] = sum(isinstance(node, ast.Raise) for node in nodes)
    found["characters a line, refvl"] = characters(library)
    found["characters a line, tests"] = characters(files["tests"])
    return found


def imported() -> tuple[set[str], set[str], dict[str, float]]:
    """Modules in a fresh process after `import refvl`, and after a plain answer; of refvl's, how
    many, and their lines."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ANSWER]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    first, last, files = (line.split(" ") for line in answer.stdout.splitlines())
    sizes = [code_lines(Path(file)) for file in files]
    return {*first}, {*last}, dict(zip(IMPORTED, (len(sizes), sum(sizes)), strict=True))


def test_the_budgets_hold():
    found = counted()
    assert found.keys() | {*IMPORTED} == BUDGETS.keys() and all(count > 0 for count in found.values())
    assert {name: count for name, count in found.items() if count > BUDGETS[name]} == {}


def test_imports_are_what_an_answer_needs():
    """A start imports little, because that is nearly all of a tiny model's time to its first
    answer: no package that draws, decodes videos or parses command lines, and of transformers'
    models this family's."""
    first, last, sizes = imported()
    assert {name.split(".")[0] for name in first} & {"torch", "transformers", "numpy", "PIL"} == set()
    assert {name for name in first if name.startswith("refvl")} == {"refvl"}
    assert {name.split(".")[0] for name in last} & NEVER == set()
    assert {name for name in last if name.startswith(OTHERS)} == set()
    code = {name for name in last if name.startswith("transformers.models.") and ".modeling_" in name}
    assert {name.split(".")[2] for name in code} == {"auto", "qwen2_5_vl"}
    assert {name: size for name, size in sizes.items() if not 0 < size <= BUDGETS[name]} == {}


CORE = ("pipeline.py", "encoders/qwen2_5_vl.py", "positions/windows.py", "positions/mrope.py", "positions/evs.py")


def test_the_readme_says_how_long_the_library_is():
    """Rounded to hundreds: the core in its first sentence, the whole, and what draws."""
    readme = (ROOT / "README.md").read_text()
    files = [*(ROOT / "refvl" / name for name in CORE), *(ROOT / "refvl/graphs").glob("*.py")]
    now = [sum(map(code_lines, files)), counted()["refvl without viz"], counted()["refvl/viz"]]
    said = [int(number.replace(",", "")) for number in re.findall(r"about ([\d,]+)(?= (?:lines|more))", readme)]
    assert said == [round(count, -2) for count in now]


if __name__ == "__main__":
    for name, count in (counted() | imported()[-1]).items():
        plan, reason = OVER.get(name, ("", ""))
        print(f"{name:<28}{count:>10,}{BUDGETS[name]:>10,}  {plan}  {reason}".rstrip())
