"""Where the repository keeps its data: pictures, clips, the tiny checkpoints, configs, measurements."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"


def check_clone(what: str) -> None:
    """Raise FileNotFoundError where the package is installed without the repository around it."""
    if not (DATA.parent / "pyproject.toml").is_file():
        raise FileNotFoundError(f"{what} needs a clone of the repository, whose data an installed package is without")
