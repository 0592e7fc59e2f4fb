"""The notebooks' claims under other parameters: `make test-claims`.

A notebook may have a cell of code tagged `parameters` (papermill's convention), with one assignment
a line:

    first = 0  # the first scene; tried: 100, 200, 300; range: 0..100000

Set i takes the i-th value that was tried of each parameter, and every assertion of the notebook has
to hold; so it has to with values drawn from the ranges (`make falsify`). The cell's metadata lists
values that break a claim, so that a reader can guess first: `"breaks": {"first": "7"}`. With such a
value, and the others as they are, an assertion has to fail: "Try to break it" says which.
"""

import ast
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SETS = 3  # beside the one that is committed


@dataclass(frozen=True)
class Parameters:
    """name -> value as committed, values that were tried, values at which a claim breaks."""

    committed: dict[str, Any] = field(default_factory=dict)
    tried: dict[str, tuple] = field(default_factory=dict)
    breaks: dict[str, tuple] = field(default_factory=dict)
    ranges: dict[str, tuple] = field(default_factory=dict)

    @classmethod
    def read(cls, notebook: Path) -> "Parameters | None":
        """Those of a notebook, None if it has no such cell."""
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", ())]
        return cls.parse("".join(tagged[0]["source"]), tagged[0]["metadata"].get("breaks", {})) if tagged else None

    @classmethod
    def parse(cls, source: str, breaks: dict[str, str]) -> "Parameters":
        """
        >>> Parameters.parse("first = 0  # a scene; tried: 1, 2, 3", {"first": "7"}).breaks
        {'first': (7,)}
        """
        parameters = cls(breaks={name: ast.literal_eval(f"({values},)") for name, values in breaks.items()})
        for line in source.splitlines():
            name, value, comment = re.fullmatch(r"(\w+) = (.+?)  # (.+)", line).groups()
            parameters.committed[name] = ast.literal_eval(value)
            if found := re.search(r"; tried: ([^;]+)", comment):
                parameters.tried[name] = ast.literal_eval(f"({found[1]},)")
            if found := re.search(r"; range: (\S+?)\.\.([^\s;]+)", comment):
                parameters.ranges[name] = tuple(map(ast.literal_eval, found.groups()))
        return parameters

    def sets(self) -> list[dict[str, Any]]:
        return [{name: values[i] for name, values in self.tried.items()} for i in range(SETS)]

    def drawn(self, seed: str) -> dict[str, Any]:
        """Values drawn uniformly from the ranges, with three decimals, and of the others, values that
        were tried.

        >>> Parameters.parse("first = 0  # a scene; tried: 1; range: 4..4", {}).drawn("2027-01-01")
        {'first': 4}
        """
        rng, values = random.Random(seed), dict[str, Any]()
        for name in self.tried:
            low, high = self.ranges.get(name, (0, 0.0))
            inside = rng.randint(low, high) if type(high) is int else round(rng.uniform(low, high), 3)
            values[name] = inside if name in self.ranges else rng.choice((self.committed[name], *self.tried[name]))
        return values

    def breaking(self) -> list[dict[str, Any]]:
        return [{name: value} for name, values in self.breaks.items() for value in values]
