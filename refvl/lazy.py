"""The public names of a folder, imported from their files on first use, so importing the folder costs nothing."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def find_name(package: str, files: Mapping[str, str], name: str) -> Any:
    """Return the object `name` of a package, for its `__getattr__`.

    files: file of the package -> the public names that it defines, separated by spaces.
    """
    for file, names in files.items():
        if name in names.split():
            return getattr(import_module(f"{package}.{file}"), name)
    if name in files:
        return import_module(f"{package}.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
