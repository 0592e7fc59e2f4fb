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
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, source)
    for name in ("refvl", "tests", "benchmarks", "data", "notebooks"):
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
    """The folder of `python` and `refvl` in a fresh environment that finds the dependencies and holds the wheel."""
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
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "refvl").rglob("*.py")}
    assert {name for name in names if name.endswith(".py") and not name.startswith("refvl/course/")} == modules
    assert "refvl/py.typed" in names and {name.split("/")[0] for name in names} == {"refvl"}
    kept = [p for name in ("data", "notebooks") for p in (ROOT / name).rglob("*") if p.is_file()]
    course = {
        f"refvl/course/{p.relative_to(ROOT)}" for p in kept if not {"__pycache__", ".ipynb_checkpoints"} & {*p.parts}
    }
    assert {name for name in names if name.startswith("refvl/course/")} == course
    assert wheel.stat().st_size <= 25e6


def test_installed_package_is_the_one_that_answers(scripts, tmp_path):
    """`refvl` works offline from an empty folder, with the installed files and models and not the clone's."""
    listed = run([scripts / "python", "-m", "refvl", "--help"], tmp_path)
    assert listed.returncode == 0 and "chat" in listed.stdout, listed.stderr
    shown = run([scripts / "refvl", "demo", "--out", tmp_path / "figures"], tmp_path)
    assert shown.returncode == 0 and "What color is the circle? red" in shown.stdout, shown.stderr
    assert (tmp_path / "figures/overview.jpg").is_file()


@pytest.mark.slow
def test_installed_package_finds_every_shipped_model(scripts, tmp_path):
    """`load` accepts each name offline, from an empty folder, and no file is the clone's."""
    names = sorted(path.name for path in (ROOT / "data/checkpoints").glob("tiny-*"))
    code = (
        "import sys, refvl, refvl.paths as p; print(p.__file__, p.DATA)\n"
        "for name in sys.argv[1:]: print(refvl.load(name).chat('Hi', max_new_tokens=1))"
    )
    loaded = run([scripts / "python", "-c", code, *names], tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    places, *answers = loaded.stdout.splitlines()
    assert all(Path(place).is_relative_to(scripts.parent) for place in places.split()), places
    assert len(answers) == len(names) >= 6
