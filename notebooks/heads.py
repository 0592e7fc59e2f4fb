"""The head of every notebook: a line of links below the title, then a cell that installs refvl if it is missing.

`python notebooks/heads.py` writes both, using the address in pyproject.toml, and numbers the cells; it runs no
notebook.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# notebooks from pixels to an answer, and on the five families; all others are electives
ROUTE = ("00", "01", "02", "03", "04", "05", "17")
HEAD = "head"  # the tag of cells that are not part of the lesson
COLAB = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({})"
BINDER = "[![Open in Binder](https://mybinder.org/badge_logo.svg)]({})"
INSTALL = """\
import importlib.util
import sys

if importlib.util.find_spec("exercises") is None:  # not in its folder, for example on Colab
    if importlib.util.find_spec("refvl") is None:
        get_ipython().run_line_magic("pip", "install --quiet 'refvl[notebooks] @ git+{}'")
    from refvl.paths import ROOT

    sys.path.append(str(ROOT / "notebooks"))"""


def repository() -> str:
    """Return the public address of the repository, from pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Return notebooks in the order of the course: the route, then the electives."""
    return sorted(paths, key=lambda path: (path.stem[:2] not in ROUTE, path.stem))


def chapters() -> list[Path]:
    """Return the notebooks in the order of the course, the index last."""
    return [*in_order((ROOT / "notebooks").glob("[0-9]*.ipynb")), ROOT / "notebooks/index.ipynb"]


def line(path: Path) -> str:
    """Return Markdown links to the contents, to the notebooks before and after, and to services that run this one."""
    *course, index = chapters()
    place = course.index(path) if path in course else -1
    neighbours = [] if path == index else [f"[Contents]({index.name})"]
    if place > 0:
        neighbours.append(f"[← {course[place - 1].name[:2]}]({course[place - 1].name})")
    if place + 1 < len(course):
        neighbours.append(f"[{course[place + 1].name[:2]} →]({course[place + 1].name})")
    owner = repository().removeprefix("https://github.com/")
    colab = COLAB.format(f"https://colab.research.google.com/github/{owner}/blob/main/notebooks/{path.name}")
    binder = BINDER.format(f"https://mybinder.org/v2/gh/{owner}/main?urlpath=lab/tree/notebooks/{path.name}")
    return " · ".join([*neighbours, f"{colab} {binder}"])


def write_head(notebook: Any, path: Path) -> None:
    """Put the head of the notebook at `path` into `notebook`, replacing an old one, and number its code cells."""
    from nbformat.v4 import new_code_cell, new_markdown_cell

    links = new_markdown_cell(line(path), id="head-links", metadata={"tags": [HEAD]})
    hidden = {"tags": [HEAD, "remove-cell"], "jupyter": {"source_hidden": True}}
    install = new_code_cell(INSTALL.format(repository()), id="head-install", metadata=hidden)
    title, *rest = [cell for cell in notebook.cells if HEAD not in cell.metadata.get("tags", ())]
    notebook.cells = [title, links, install, *rest]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, 1):
        for place in (cell, *(output for output in cell.outputs if output.output_type == "execute_result")):
            place.execution_count = count


def main() -> None:
    """Write the head of every notebook."""
    import nbformat

    for path in chapters():
        notebook = nbformat.read(path, as_version=4)
        write_head(notebook, path)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
