"""The shipped models, each loaded once in a process. A test that changes a model loads one of its own."""

from functools import cache

import refvl
from refvl.paths import DATA


@cache
def shipped(name: str) -> refvl.VLM:
    """name: of a folder in data/checkpoints."""
    return refvl.load(DATA / "checkpoints" / name, device="cpu", progress=False)
