"""Wheel and sdist, tried where no clone is: in a fresh environment, started from an empty folder.

Nothing is downloaded: the environment finds the installed dependencies through a .pth file, but not this clone, whose
editable install is a .pth file too, and those are read only in an environment's own folder.
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
CHECKPOINT, SCENE = ROOT / "data/checkpoints/tiny-qwen2_5_vl", ROOT / "data/pictures/scene.png"


def run(command: list, folder: Path) -> subprocess.CompletedProcess:
    """`command` in `folder`, with no trace of the clone in the environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    environment["OMP_NUM_THREADS"] = "1"
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
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, source)
    for name in ("refvl", "tests", "benchmarks", "data/configs", "data/training"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    return build("sdist", source, folder)


@pytest.fixture(scope="module")
def wheel(sdist) -> Path:
    """Built from the unpacked sdist, which shows that the sdist is complete."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent / "unpacked", filter="data")
    [source] = (sdist.parent / "unpacked").iterdir()
    return build("wheel", source, sdist.parent)


@pytest.fixture(scope="module")
def scripts(wheel) -> Path:
    """The folder of `python` and `refvl` in a fresh environment that holds the wheel."""
    venv = wheel.parent / "venv"
    made = run([sys.executable, "-m", "venv", "--without-pip", venv], wheel.parent)
    assert made.returncode == 0, made.stderr
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "--disable-pip-version-check"]
    installed = run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], wheel.parent)
    assert installed.returncode == 0, installed.stderr
    [packages] = venv.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    return venv / "bin"


def test_wheel_holds_the_package_and_nothing_else(wheel):
    """Every module of refvl, `py.typed` and the licence; no tests, no data, no benchmarks."""
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "refvl").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "refvl/py.typed" in names and any(name.endswith("/licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"refvl"}


def test_installed_package_is_the_one_that_answers(scripts, tmp_path):
    """`refvl chat` and `refvl info` work from an empty folder, with the installed files and not the clone's."""
    where = run([scripts / "python", "-c", "import refvl; print(refvl.__file__)"], tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(scripts.parent), where.stdout + where.stderr
    answer = run([scripts / "refvl", "chat", CHECKPOINT, "What color is the circle?", "--image", SCENE], tmp_path)
    assert (answer.returncode, answer.stdout.strip()) == (0, "red"), answer.stderr
    facts = run([scripts / "refvl", "info", CHECKPOINT / "config.json", "--image", SCENE], tmp_path)
    assert facts.returncode == 0 and "vision tower" in facts.stdout, facts.stderr


@pytest.mark.parametrize("command", [["python", "-m", "refvl.tools.demo"], ["refvl", "bench", "tower"]], ids=" ".join)
def test_what_needs_a_clone_says_so_in_one_line(command, scripts, tmp_path):
    program, *arguments = command
    done = run([scripts / program, *arguments], tmp_path)
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert "clone" in line
