"""The shipped models, each loaded once in a process. A test that changes a model loads one of its own."""

from functools import cache

from random_models import HAS_5_23

import refvl
from data.training import tiny_family
from refvl.paths import DATA

# Folders that differ from the one of another family in their weights alone
VARIANTS = {tiny_family.find_family(name).folder.name for name in tiny_family.VARIANTS}


def is_read_here(name: str) -> bool:
    """Whether this transformers has the config of a folder in data/checkpoints."""
    return HAS_5_23 or name != "tiny-minicpmv-4_7"


@cache
def shipped(name: str) -> refvl.VLM:
    """name: of a folder in data/checkpoints."""
    return refvl.load(DATA / "checkpoints" / name, device="cpu", progress=False)
