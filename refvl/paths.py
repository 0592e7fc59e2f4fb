"""Paths to images, videos, tiny checkpoints, configs and notebooks, in a clone or inside an installed package."""

import shutil
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CLONE = PACKAGE.parent
ROOT = CLONE if (CLONE / "pyproject.toml").is_file() else PACKAGE / "course"  # setup.py writes this folder
DATA = ROOT / "data"


def check_clone(what: str) -> None:
    """Raise FileNotFoundError if the package is installed without the repository."""
    if ROOT != CLONE:
        raise FileNotFoundError(f"{what} needs a clone of the repository: an installed package contains no benchmarks")


def copy_course(folder: Path) -> Path:
    """Copy the notebooks and their data into `folder`. Return the folder of the notebooks.

    Raises FileExistsError if `folder` already contains one of them.
    """
    for name in ("notebooks", "data"):
        if (folder / name).exists():
            raise FileExistsError(f"folder: {folder / name} already exists; choose a different folder")
    for name in ("notebooks", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    return folder / "notebooks"
