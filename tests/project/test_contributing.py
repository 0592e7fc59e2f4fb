"""CONTRIBUTING.md and CHANGELOG.md tell the truth. Oracles: files, the Makefile, the imports of the library."""

import ast
import importlib.util
import inspect
import io
import re
import shlex
import tokenize
from pathlib import Path

import pytest

from refvl.pixels.patch_configs import Qwen3VLPatchConfig, Qwen3VLVideoPatchConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", TEXT, flags=re.S | re.M)
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.S | re.M)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]
STAGES = ("processors", "encoders", "language")  # in which every family has a file
WALK_THROUGH = re.search(r"^## Add a family\n(.*?)^## ", TEXT, re.S | re.M).group(1)


def named_files(text: str) -> set[str]:
    """What stands between backticks and begins with a folder or file of the repository; * matches any name."""
    words = re.findall(r"`([\w./*-]+)`", text)
    return {word for word in words if (ROOT / word.split("/")[0]).exists() and not word.startswith(".venv/")}


def test_named_files_exist():
    assert [name for name in named_files(TEXT) if not list(ROOT.glob(name))] == []


def test_walk_through_names_one_file_per_stage():
    """A family's file in each stage that it needs, the table of families and both contract suites."""
    stages = {f"refvl/{stage}/step3_vl.py" for stage in STAGES}
    suites = {f"tests/contracts/test_{kind}.py" for kind in ("encoders", "processors")}
    assert stages | suites | {"refvl/families.py", "CHANGELOG.md"} <= named_files(WALK_THROUGH)


def test_line_counts_are_those_of_the_files():
    """Rounded to tens in the table; they may be off by a tenth before the table has to be written again."""
    cells = re.findall(r"`(refvl/[\w/]+\.py)`[^|]*\| (\d+) \|", WALK_THROUGH)
    counts = {name: (int(said), len((ROOT / name).read_text().splitlines())) for name, said in cells}
    assert len(counts) == 10 and {n for n, (said, now) in counts.items() if abs(said - now) > 5 + now / 10} == set()


def code_lines(source: str) -> int:
    """Lines that hold more than a docstring or a comment."""
    lines, begins = set[int](), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            lines |= set() if begins and token.type == tokenize.STRING else set(range(token.start[0], token.end[0] + 1))
            begins = False
    return len(lines)


def test_code_without_prose_is_counted():
    """The row below the files; Qwen3-VL was promised in 450 at most."""
    [row] = re.findall(r"\| code alone \|[^|]*\| (\d+) \|[^|]*\| (\d+) \|", WALK_THROUGH)
    files = ([ROOT / f"refvl/{stage}/{name}_vl.py" for stage in STAGES] for name in ("step3", "qwen3"))
    step3, qwen3 = ([path.read_text() for path in paths] for paths in files)
    beside = ("pixels/crops.py", "pixels/strips.py", "language/step3_config.py")
    step3 += [(ROOT / "refvl" / name).read_text() for name in beside]
    qwen3 += map(inspect.getsource, (Qwen3VLPatchConfig, Qwen3VLVideoPatchConfig))
    counts = [sum(map(code_lines, texts)) for texts in (step3, qwen3)]
    assert all(abs(int(said) - now) <= 5 + now / 10 for said, now in zip(row, counts, strict=True)) and counts[1] <= 450


def test_line_counts_come_from_a_command():
    """No other number of lines, files or tests stands in the text; the command that counts matches files."""
    [count] = [command for command in COMMANDS if command[:2] == ["wc", "-l"]]
    assert all(list(ROOT.glob(pattern)) for pattern in count[2:])
    assert all(len(list(ROOT.glob(f"refvl/*/{family}_vl.py"))) >= 3 for family in ("step3", "qwen3"))
    assert re.findall(r"\b\d[\d,]* (?:lines|files|tests|notebooks|functions)\b", PROSE) == []


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z-]+)", PROSE)) | {command[1] for command in COMMANDS if command[0] == "make"}
    assert {"demo", "test", "test-slow", "notebooks"} <= named <= targets


def modules_that_import(*, inside: str) -> dict[str, set[str]]:
    """For each module of a stage, the modules of refvl that it imports."""
    found = {}
    for path in sorted((ROOT / "refvl" / inside).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found[path.name] = {name for name in names if name.split(".")[0] == "refvl"}
    return found


BORDERS = [
    ("pixels", ("processors", "encoders", "graphs", "language", "pipeline", "viz", "tools")),
    ("positions", ("pixels", "processors", "encoders", "graphs", "language", "pipeline", "viz", "tools")),
    ("encoders", ("processors", "graphs", "language", "pipeline", "viz", "tools")),
    ("processors", ("graphs", "language.model", "pipeline", "viz", "tools")),
    ("graphs", ("processors", "encoders", "language", "pipeline", "viz", "tools")),
    ("language", ("pixels", "processors", "encoders", "graphs", "pipeline", "viz", "tools")),
    ("viz", ("tools", "loading")),
]


@pytest.mark.parametrize(("stage", "closed"), BORDERS, ids=[stage for stage, _ in BORDERS])
def test_no_import_crosses_a_border(stage, closed):
    """The rules under "Layout", as far as imports show them."""
    crossed = {
        f"{file}: {name}"
        for file, names in modules_that_import(inside=stage).items()
        for name in names
        if any(name == f"refvl.{other}" or name.startswith(f"refvl.{other}.") for other in closed)
    }
    assert crossed == set()


def test_changelog_names_modules_that_exist():
    """The right column of the table of moved modules."""
    rows = re.findall(r"^ +\| .*? \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    modules = [name for row in rows for name in re.findall(r"`(refvl\.[\w.]+)`", row)]
    assert len(modules) > 10 and [name for name in modules if importlib.util.find_spec(name) is None] == []
