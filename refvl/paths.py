"""Paths to images, videos, tiny checkpoints, configs and notebooks, in a clone or inside an installed package."""

import os
import shutil
import tempfile
from pathlib import Path

from refvl.checks import nearest

CLONE = Path(__file__).resolve().parents[1]
# setup.py writes the folder refvl/course
ROOT = CLONE if (CLONE / "pyproject.toml").is_file() else CLONE / "refvl/course"
DATA = ROOT / "data"
SHIPPED = {file.name: file for files in ("pictures/*", "clips/*.mp4", "configs/*.json") for file in DATA.glob(files)}
REPOSITORY = "https://github.com/refvl/refvl"  # as in pyproject.toml


def data(name: str | os.PathLike, *, kind: str = "name") -> Path:
    """Return the path of a shipped image, video or config by its file name, such as "scene.png".

    Functions that accept a path also accept such a name; an existing file takes
    precedence.

    kind: the name of the caller's argument, for the error. Raises FileNotFoundError,
    suggesting the most similar name.
    """
    if (name := os.fspath(name)) not in SHIPPED:
        raise FileNotFoundError(f"{kind}: no such file: {name}{nearest(os.path.basename(name), SHIPPED)}")
    return SHIPPED[name]


def write_whole(target: Path, content: bytes) -> None:
    """Write a file under a temporary name, and rename it once it is complete."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, target)


def copy_course(folder: Path) -> Path:
    """Copy the notebooks and their data into `folder`. Return the folder of the notebooks.

    In the copies, links to files that were not copied lead to the repository. The two folders get
    their names once both are complete. Raises FileExistsError if `folder` is a file or already
    contains one of the two, and OSError with the first reason if a file cannot be copied.
    """
    for path in (folder / "notebooks", folder / "data", *([] if folder.is_dir() else [folder])):
        if os.path.lexists(path):
            raise FileExistsError(f"folder: {path} already exists; choose a different folder")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".refvl-", dir=folder) as partial:
        for name in ("notebooks", "data"):
            ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".progress", "mine.html")
            try:
                shutil.copytree(ROOT / name, Path(partial, name), ignore=ignored)
            except shutil.Error as error:  # the error's text lists every file
                raise OSError(f"folder: {error.args[0][0][2]}") from error
        for path in Path(partial, "notebooks").glob("*.ipynb"):
            path.write_bytes(path.read_bytes().replace(b"](../", f"]({REPOSITORY}/blob/main/".encode()))
        for name in ("data", "notebooks"):
            os.rename(Path(partial, name), folder / name)
    return folder / "notebooks"
