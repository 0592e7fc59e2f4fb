"""Notebooks as they are committed: executed, in order, light, and defining nothing. Oracle: the file format itself.

That they still run, and each within its time (`notebooks/conftest.py`), is shown by `make test`,
which executes them.
"""

import copy
import functools
import re
import tomllib
from pathlib import Path

import checking
import exercises
import heads
import pytest

from refvl.paths import REPOSITORY, copy_course

nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
PROJECT = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PATHS = heads.in_order(FOLDER.glob("[0-9]*.ipynb"))
MAX_BYTES = 300_000
MAX_STATE_BYTES = 320_000  # of three explorers; what a page may weigh is held by test_site
VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
INSTALL_LOG = re.compile(r"Successfully installed|Requirement already satisfied|Collecting \S+|Downloading \S+\.whl")

SOLUTION = re.compile(r"```python\n((?:(?!```).)*?)exercises\.(check_\w+)\(", re.S)
CLAIM = re.compile(r"(?<!\*)\*Claims?:\s")
each_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


@functools.cache
def read(path: Path):
    """No test changes what it gets."""
    return nbformat.read(path, as_version=4)


def without_explorers(notebook):
    """Neither their saved state nor their still pictures."""
    rest = copy.deepcopy(notebook)
    rest.metadata.pop("widgets", None)
    for cell in rest.cells:
        cell["outputs"] = [output for output in cell.get("outputs", ()) if VIEW not in output.get("data", ())]
    return rest


def code_cells(path: Path) -> list:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def is_exercise(cell) -> bool:
    return "exercise" in cell.metadata.get("tags", [])


def is_bare(text: str) -> bool:
    """A tuple, list, dict, set, tensor or number, or an object without a repr."""
    return bool(re.match(r"[(\[{\d-]|torch\.|tensor\(|array\(|<.* at 0x", text))


@each_notebook
def test_format_is_valid_and_light(path):
    """An explorer's still picture, and its state, which are a table and a module, come on top."""
    notebook = read(path)
    nbformat.validate(notebook)
    state = len(nbformat.writes(notebook)) - len(nbformat.writes(without_explorers(notebook)))
    assert path.stat().st_size - state <= MAX_BYTES and state <= MAX_STATE_BYTES


@each_notebook
def test_outputs_are_sentences_tables_or_figures(path):
    """No container of Python alone, no address of an object, no widget without a picture beside it."""
    outputs = [output for cell in code_cells(path) for output in cell.outputs if "data" in output]
    alone = [output.data["text/plain"] for output in outputs if set(output.data) == {"text/plain"}]
    assert list(filter(is_bare, alone)) == []
    assert [o.data["text/plain"] for o in outputs if VIEW in o.data and "image/png" not in o.data] == []


@each_notebook
def test_saved_explorers_are_drawn_by_the_modules_of_today(path):
    """Oracle: the JavaScript files. `make notebooks` saves a changed one."""
    from refvl.viz.explorers import base

    modules = {base.module(file.stem) for file in base.FOLDER.glob("*.js")}
    widgets = read(path).metadata.get("widgets", {}).get(STATE, {"state": {}})
    states = [widget["state"] for widget in widgets["state"].values()]
    assert {state["_esm"] for state in states if "controls" in state} <= modules


@each_notebook
def test_executed_once_from_top_to_bottom(path):
    """Without an error, an install log, or a path of the machine."""
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and [o.ename for o in outputs if o.output_type == "error"] == []
    assert [o.text for o in outputs if o.output_type == "stream" and INSTALL_LOG.search(o.text)] == []
    assert re.findall(r"/(?:home|root|tmp|Users|work)/\w+", path.read_text()) == []


@each_notebook
def test_nothing_is_defined_but_exercises(path):
    """Model code belongs in the library; only a stub that the reader fills in may define something."""
    defining = re.compile(r"^\s*(?:async\s+def|def|class)\s", re.M)
    assert [cell.source for cell in code_cells(path) if defining.search(cell.source) and not is_exercise(cell)] == []


@each_notebook
def test_what_the_reader_writes_starts_as_a_stub(path):
    """And shows its task, with hints to open; its cell calls the check."""
    for cell in filter(is_exercise, code_cells(path)):
        [output] = cell.outputs
        assert output.data["text/plain"].startswith(exercises.MARKS["not yet"]), cell.source
        assert "hint 3" in output.data["text/html"] and re.search(r"\bcheck(_\w+)?\(\w+\)$", cell.source)


PRINTED = [found for path in PATHS for cell in read(path).cells for found in SOLUTION.findall(cell.source)]


@pytest.mark.parametrize(("source", "call"), PRINTED, ids=[call for _, call in PRINTED])
def test_a_printed_solution_passes_its_check_and_another_result_does_not(source, call, tmp_path, monkeypatch):
    """It stands alone: it imports what it uses."""
    monkeypatch.setattr(checking, "DONE", tmp_path)
    exec(source, names := {})
    verdict = getattr(exercises, call)(list(names.values())[-1])
    assert verdict.status == "right" and re.fullmatch(r"in \d+ cases", verdict.line), verdict
    assert getattr(exercises, call)(lambda *arguments: 0).status == "wrong"


def test_the_route_asks_for_the_nine_functions_and_takes_five_hours_and_a_half():
    chapters = [c for c in exercises.progress().chapters if c.name[:2] in heads.ROUTE]
    names = [name.replace(" ", "_") for chapter in chapters for name in chapter.exercises]
    assert sorted(names) == sorted(exercises.UNITS) and sum(chapter.minutes for chapter in chapters) <= 330
    for path, chapter in zip(PATHS, exercises.progress().chapters, strict=True):
        assert f"**Time.** {chapter.minutes} minutes" in read(path).cells[0].source
        assert (path.stem[:2] in heads.ROUTE) is ("Who needs this" not in read(path).cells[0].source)


@each_notebook
def test_first_cell_asks_and_last_cell_leads_on(path):
    """Markdown at both ends; the last cell links the next notebook, if there is one."""
    first, *_, last = read(path).cells
    assert first.cell_type == last.cell_type == "markdown"
    assert first.source.startswith("# ")
    following = PATHS[PATHS.index(path) + 1 :][:1]
    assert all(f"]({notebook.name})" in last.source for notebook in following)


@pytest.mark.thorough
def test_every_link_of_a_copied_course_leads_somewhere(tmp_path):
    course = copy_course(tmp_path)
    cells = [cell for path in course.glob("*.ipynb") for cell in read(path).cells if cell.cell_type == "markdown"]
    texts = "".join(cell.source for cell in cells)
    links = {link for link in re.findall(r"\]\(([^)#\s]+)", texts) if not link.startswith("https://")}
    assert links and [link for link in links if not (course / link).exists()] == []
    assert f"]({REPOSITORY}/blob/main/docs/questions.md)" in texts and heads.repository() == REPOSITORY


@pytest.mark.parametrize("path", heads.chapters(), ids=lambda path: path.stem)
def test_the_head_is_what_heads_writes(path):
    """Contents, the one before and the one after, and two badges, which link a file of this tree."""
    notebook = read(path)
    written = copy.deepcopy(notebook)
    heads.write_head(written, path)
    assert written == notebook, "run python notebooks/heads.py"
    links = re.findall(r"(?<=\]\()(?!\S+\.svg)[^)]+", notebook.cells[1].source)
    assert [link for link in links[:-2] if not (FOLDER / link).is_file()] == []
    assert all(link.endswith(f"notebooks/{path.name}") for link in links[-2:])
    assert f"git+{PROJECT['urls']['Repository']}'" in notebook.cells[2].source


@each_notebook
def test_claims_are_asserted(path):
    """Each claim is written `*Claim: ...*`, and the next cell of code asserts something."""
    claiming = False
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert not claiming or re.search(r"^\s*assert\b|assert_close", cell.source, re.M), cell.source
            claiming = False
        else:
            assert not claiming, "a claim without a cell"
            claiming = bool(CLAIM.search(cell.source))
            assert len(CLAIM.findall(cell.source)) == len(re.findall(r"\bClaims?\b", cell.source)), cell.source
    assert not claiming


def test_the_index_shows_the_course_and_leads_to_every_notebook():
    """Its table is the one of `exercises.progress`, which counts; run it again when a notebook has changed."""
    index = read(FOLDER / "index.ipynb")
    [table] = [output.data["text/html"] for cell in index.cells for output in cell.get("outputs", ())]
    chapters = exercises.progress().chapters
    shown = re.findall(r"<a href='(.*?)\.ipynb'>.*?</a></td><td>(\d+)</td>", table)
    assert shown == [(chapter.name, str(chapter.minutes)) for chapter in chapters]
    assert exercises.MARKS["right"] not in table and len(chapters) == len(PATHS)
    assert "](../docs/glossary.md)" in "".join(cell.source for cell in index.cells)
