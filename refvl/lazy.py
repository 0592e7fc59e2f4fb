"""The public names of a folder, imported from their files on first use, so importing the folder costs nothing."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, files: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    files: file of the package -> the public names that it defines, separated by spaces.
    """
    homes = {name: file for file, names in files.items() for name in (file, *names.split())}

    def find_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        return module if name in files else getattr(module, name)

    return find_name, lambda: list(homes), " ".join(files.values()).split()
