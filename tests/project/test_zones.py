"""The zones of the library: stages in the middle, what builds on them beside. Oracle: every import of every module."""

import ast
import graphlib
from functools import cache
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "refvl"
BESIDE = ("serving", "study", "viz", "tools")  # they build on the stages, and no stage knows of them
DOORS = {  # names that callers import: behind them stands a model with everything, or a module that has moved
    "refvl", "refvl.__main__", "refvl.loading", "refvl.model",
}  # fmt: skip
STAGES = ("pixels", "processors", "encoders", "positions", "language", "graphs")
SHARED = ("pipeline", "merge", "attention", "trace", "checks", "families", "checkpoints")


def modules_of(library: Path) -> dict[str, Path]:
    """Every module by its dotted name; a package is named by its folder."""
    found = {}
    for path in library.rglob("*.py"):
        parts = (library.name, *path.relative_to(library).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imports_of(library: Path) -> dict[str, set[str]]:
    """For each module the others that it imports, also inside functions and for type checkers alone."""
    modules = modules_of(library)
    return {name: imported(name, path, modules) for name, path in modules.items()}


def imported(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """`from a.b import c` is the module a.b.c where there is one, and a.b otherwise; relative imports are resolved."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {nearest(alias.name, modules) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            origin = (base + (node.module or "")).strip(".")
            found |= {nearest(f"{origin}.{alias.name}", modules) for alias in node.names}
    return found - {"", name}


def nearest(name: str, modules: dict[str, Path]) -> str:
    """The module itself, or the one that holds the name; "" for other libraries."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def zone_of(name: str) -> str:
    """The folder or file of the library: "viz" for refvl.viz.style."""
    return f"{name}.".split(".")[1]


def is_beside(name: str) -> bool:
    return zone_of(name) in BESIDE


def test_no_import_goes_in_a_circle():
    """Oracle: Python's own sorter, whose error names the circle."""
    graphlib.TopologicalSorter(imports_of(LIBRARY)).prepare()


def test_pipeline_and_stages_import_nothing_that_stands_beside_them():
    imports = imports_of(LIBRARY)
    core = {name for name in imports if name not in DOORS and not is_beside(name)}
    assert {f"refvl.{name}" for name in STAGES + SHARED} <= core
    assert [f"{name} -> {other}" for name in sorted(core) for other in sorted(imports[name]) if is_beside(other)] == []


@pytest.mark.parametrize(
    ("zone", "closed"), [("serving", ("viz", "tools")), ("study", ("viz", "tools")), ("viz", ("tools",))]
)
def test_zones_beside_the_stages_import_in_one_direction(zone, closed):
    """Figures draw what study found, and the command line uses all of them."""
    inside = {name: others for name, others in imports_of(LIBRARY).items() if zone_of(name) == zone}
    crossed = {f"{name} -> {other}" for name in inside for other in inside[name] if zone_of(other) in closed}
    assert inside and crossed == set()
