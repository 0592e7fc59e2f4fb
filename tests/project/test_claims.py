"""Every claim holds under three other sets of parameters, and breaks where a notebook says so.

Oracle: the notebook's own assertions, run by papermill. `make test-claims`; NB=12 runs one notebook. `make falsify`
draws SETS others from the ranges; the names of the tests begin with the seed, which is the day.
"""

import datetime
import os
from pathlib import Path

import pytest
from claims import Parameters

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("[0-9]*.ipynb"))
FOUND = {path: parameters for path in NOTEBOOKS if (parameters := Parameters.read(path))}
WANTED = {path: p for path, p in FOUND.items() if path.stem.startswith(os.environ.get("NB", ""))}
HELD = [(path, values) for path, p in WANTED.items() for values in p.sets()]
SEED, SETS = os.environ.get("SEED") or str(datetime.date.today()), int(os.environ.get("SETS") or 0)
DRAWN = [(path, f"{SEED}/{i}") for path in WANTED for i in range(SETS)]
BROKEN = [(path, values) for path, p in WANTED.items() for values in p.breaking()]


def named(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{n}={v}" for n, v in value.items())
    return value.stem if isinstance(value, Path) else value


def run(path: Path, values: dict, out: Path) -> None:
    papermill = pytest.importorskip("papermill")
    how = {"cwd": path.parent, "progress_bar": False, "kernel_name": "python3"}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    papermill.execute_notebook(path, out / path.name, values, **how)  # which would write a tuple as a string


@pytest.mark.parametrize("path", FOUND, ids=named)
def test_a_claim_breaks_where_the_notebook_says(path):
    """Its text names each value that breaks one, as it is written in the cell."""
    text = path.read_text(encoding="utf-8")
    assert FOUND[path].breaking() and "Try to break it" in text
    for [(name, value)] in map(dict.items, FOUND[path].breaking()):
        assert f"`{name} = {value!r}`".replace("'", '"') in text.replace('\\"', '"'), name


@pytest.mark.claims
@pytest.mark.parametrize(("path", "values"), HELD, ids=named)
def test_the_claims_hold(path, values, tmp_path):
    run(path, values, tmp_path)


@pytest.mark.claims
@pytest.mark.parametrize(("path", "seed"), DRAWN, ids=named)
def test_no_drawn_parameters_break_a_claim(path, seed, tmp_path):
    """What breaks one is an error of the claim, or a bound that the notebook has to state."""
    values = FOUND[path].drawn(f"{seed} {path.stem}")
    print(path.stem, seed, values)
    run(path, values, tmp_path)


@pytest.mark.claims
@pytest.mark.parametrize(("path", "values"), BROKEN, ids=named)
def test_a_claim_breaks(path, values, tmp_path):
    """In an assertion, and not because a cell cannot run."""
    papermill = pytest.importorskip("papermill")
    with pytest.raises(papermill.exceptions.PapermillExecutionError) as caught:
        run(path, values, tmp_path)
    assert caught.value.ename == "AssertionError", caught.value
