"""Notebooks as they are committed: executed, in order, light, and defining nothing. Oracle: the file format itself.

That they still run is shown by `make test`, which executes each one.
"""

import copy
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
EXPECTED = [
    "00_image_to_text", "01_patches_and_windows", "02_mrope", "03_evs", "04_graph_capture", "05_graph_budgets",
    "06_glm", "07_minicpmv", "08_step3", "09_data_parallel", "10_four_encoders", "12_qwen3_vl", "13_adapt",
]  # fmt: skip
PATHS = sorted(FOLDER.glob("[0-9]*.ipynb"))
MAX_BYTES = 300_000
MAX_STATE_BYTES = 250_000
WIDGETS = "application/vnd.jupyter.widget-state+json"
VIEW = "application/vnd.jupyter.widget-view+json"
INSTALL_LOG = re.compile(r"Successfully installed|Requirement already satisfied|Collecting \S+|Downloading \S+\.whl")

each_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def read(path: Path):
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


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")


def test_the_expected_notebooks_are_there():
    assert set(EXPECTED) <= {path.stem for path in PATHS}


@each_notebook
def test_format_is_valid_and_light(path):
    """An explorer's still picture, and its state, which are a table and a module, come on top."""
    notebook = read(path)
    nbformat.validate(notebook)
    state = len(nbformat.writes(notebook)) - len(nbformat.writes(without_explorers(notebook)))
    assert path.stat().st_size - state <= MAX_BYTES and state <= MAX_STATE_BYTES


@each_notebook
def test_metadata_holds_a_kernel_and_the_state_of_explorers_only(path):
    """Code hosts refuse to render widgets without the key "state"; views need explorers, not ipywidgets' own."""
    metadata = read(path).metadata
    assert metadata.kernelspec.name == "python3"
    saved = metadata.get("widgets", {WIDGETS: {"state": {}}})[WIDGETS]["state"]
    assert all("_esm" in entry["state"] for entry in saved.values() if entry["model_module"] == "anywidget")


@each_notebook
def test_executed_once_from_top_to_bottom(path):
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))


@each_notebook
def test_outputs_hold_no_error_and_no_install_log(path):
    cells = code_cells(path)
    assert [o.ename for cell in cells for o in cell.outputs if o.output_type == "error"] == []
    assert [text for cell in cells if INSTALL_LOG.search(text := printed(cell))] == []
    assert any(cell.outputs for cell in cells)


@each_notebook
def test_length_is_a_lesson(path):
    assert 12 <= len(code_cells(path)) <= 20


@each_notebook
def test_no_cell_is_empty(path):
    assert all(cell.source.strip() for cell in read(path).cells)


@each_notebook
def test_nothing_is_defined_but_exercises(path):
    """Model code belongs in the library; only a stub that the reader fills in may define something."""
    defining = re.compile(r"^\s*(?:async\s+def|def|class)\s", re.M)
    assert [cell.source for cell in code_cells(path) if defining.search(cell.source) and not is_exercise(cell)] == []


@each_notebook
def test_two_exercises_with_their_checks(path):
    exercises = [cell for cell in code_cells(path) if is_exercise(cell)]
    assert len(exercises) == 2
    assert all("check_" in cell.source for cell in exercises)


@each_notebook
def test_first_cell_asks_and_last_cell_leads_on(path):
    """Markdown at both ends; the last cell links the next notebook, if there is one."""
    first, *_, last = read(path).cells
    assert first.cell_type == last.cell_type == "markdown"
    assert first.source.startswith("# ")
    following = PATHS[PATHS.index(path) + 1 :][:1]
    assert all(f"]({notebook.name})" in last.source for notebook in following)


@each_notebook
def test_no_machine_path_is_printed(path):
    assert re.findall(r"/(?:home|root|tmp|Users|work)/\w+", path.read_text()) == []


def test_the_index_leads_to_every_notebook():
    [cell] = read(FOLDER / "index.ipynb").cells
    assert re.findall(r"\]\((.*?)\)", cell.source) == [path.name for path in PATHS]
