"""Wheel and sdist, tried where no clone is: in a fresh environment, started from an empty folder.

Nothing is downloaded: the environment finds the installed dependencies through a .pth file, but not
this clone, whose editable install is a .pth file too, and those are read only in an environment's
own folder.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]).strip())"


def run(command: list, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """`command` in `folder`, with no trace of the clone in the environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([str(c) for c in command], cwd=folder, env=environment, text=True, capture_output=True)


def build(kind: str, source: Path, into: Path) -> Path:
    """`kind` is "wheel" or "sdist"; its path."""
    into.mkdir(exist_ok=True)
    done = run([sys.executable, "-c", BUILD, f"build_{kind}", into], source)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the clone."""
    folder = tmp_path_factory.mktemp("dist")
    left_out = (".*", "__pycache__", "golden", "outputs", "site", "build", "dist", "*.egg-info")
    source = shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*left_out))
    return build("sdist", source, folder)


def test_sdist_holds_the_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = {f"tests/{path.relative_to(ROOT / 'tests')}" for path in (ROOT / "tests").rglob("*.py")}
    assert kept | {"Makefile", "constraints.txt", "docs/use.md", "benchmarks/tower.py"} <= names


@pytest.fixture(scope="module")
def wheel(sdist) -> Path:
    """Built from the unpacked sdist, which shows that the sdist is complete."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent / "unpacked", filter="data")
    [source] = (sdist.parent / "unpacked").iterdir()
    return build("wheel", source, sdist.parent)


@pytest.fixture(scope="module")
def scripts(wheel) -> Path:
    """The folder of `python` and `refvl` in a fresh environment, which holds the wheel.

    It finds the dependencies.
    """
    venv = wheel.parent / "venv"
    made = run([sys.executable, "-m", "venv", "--without-pip", venv], wheel.parent)
    assert made.returncode == 0, made.stderr
    [packages] = venv.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "--disable-pip-version-check"]
    installed = run([*pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", wheel], wheel.parent)
    assert installed.returncode == 0, installed.stderr
    return venv / "bin"


def test_wheel_holds_the_package_and_the_course(wheel):
    """Every module of refvl, `py.typed`, the licence, and under refvl/course what git has in data/ and notebooks/."""
    every = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/licenses/")[2] for name in every} - {""} == {"LICENSE", "data/README.md"}
    names = {name for name in every if ".dist-info/" not in name}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "refvl").rglob("*.py")}
    assert {name for name in names if name.endswith(".py") and not name.startswith("refvl/course/")} == modules
    assert "refvl/py.typed" in names and {name.split("/")[0] for name in names} == {"refvl"}
    kept = [p for name in ("data", "notebooks") for p in (ROOT / name).rglob("*") if p.is_file()]
    left_out = {"__pycache__", ".ipynb_checkpoints", ".progress"}
    course = {f"refvl/course/{p.relative_to(ROOT)}" for p in kept if not left_out & {*p.parts}}
    assert {name for name in names if name.startswith("refvl/course/")} == course
    assert wheel.stat().st_size <= 25e6


def test_snippets_run_after_an_installation(scripts, tmp_path):
    """Those of README and docs, from empty folders; no file is the clone's."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    done = run([scripts / "python", ROOT / "tests/project/snippets.py", *pages], tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    *_, count, data = done.stdout.split()
    assert int(count) > 30 and Path(data).is_relative_to(scripts.parent) and (scripts / "refvl").is_file()
