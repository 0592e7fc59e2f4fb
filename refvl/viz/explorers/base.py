"""The base of all explorers: states, a table that is sent to the browser,
and an image for use without scripts.
"""

import base64
import io
import itertools
import re
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anywidget
import matplotlib.pyplot as plt
import numpy as np
import traitlets
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import Tensor

from refvl.pixels.media import load_image
from refvl.viz.style import SEQUENCE_CMAP, SEQUENCE_RANGES, THEMES, png_of

FOLDER = Path(__file__).parent


def palette() -> dict[str, dict]:
    """Return the colours of each theme, including a ramp of 32 colours for sequences,
    from first to last.
    """
    ramp = {name: plt.get_cmap(SEQUENCE_CMAP)(np.linspace(*limits, 32)) for name, limits in SEQUENCE_RANGES.items()}
    return {name: colors | {"sequence": [to_hex(c) for c in ramp[name]]} for name, colors in THEMES.items()}


def module(name: str) -> str:
    """Return the source of `name`.js as one ES module, with `shared.js` in place of its import."""
    shared = re.sub(r"^export ", "", (FOLDER / "shared.js").read_text(), flags=re.M)
    own = (FOLDER / f"{name}.js").read_text()
    return re.sub(r'^import .* from "\./shared\.js";\n', lambda _: shared, own, count=1, flags=re.M)


def words(name: str) -> dict[str, str]:
    """Return the text of an explorer's page, by part, from `words.toml`; it is empty for a name without a table."""
    table = tomllib.loads((FOLDER / "words.toml").read_text(encoding="utf-8")).get(name, {})
    return {part: " ".join(text.split()) for part, text in table.items()}


def photo(image, *, side: int = 400) -> str:
    """Return an image as a `data:` URL for the table:
    a WebP whose longer side has at most `side` pixels.
    """
    picture = load_image(image).convert("RGB")
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, "webp", quality=70, method=6)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True, slots=True)
class Control:
    """A slider, a menu (`kind="menu"`), or a slider that can also play (`kind="player"`),
    over a list of options.

    options: numbers or strings, in order, without repetition. label: the text before the
    control, with the unit. plays: the text on the button of a player, which names the
    change. rare: whether the control is folded away.
    """

    name: str
    label: str
    options: Sequence
    kind: str = "slider"
    plays: str = "play"
    rare: bool = False


class Explorer(anywidget.AnyWidget):
    """A table of states and a script that draws it; see `refvl.viz.explorers` for how to write one.

    index: the number of the current state. selected: the item that the reader chose, -1 for none;
    each subclass defines its items. The reader and Python can set both. Raises ValueError if there
    is not one row per state, or if `start` is not a state. title, asks, terms, action, takeaway:
    the texts of the page, from `words.toml`.
    """

    title = asks = terms = action = takeaway = "Explorer"

    index = traitlets.Int(0).tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    controls: traitlets.List = traitlets.List().tag(sync=True)
    table = traitlets.Dict().tag(sync=True)
    palette = traitlets.Dict().tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for part, text in words(cls.__module__.rpartition(".")[2]).items():
            setattr(cls, part, text)

    def __init__(self, controls: Sequence[Control], rows: Any = (), **table: Any):
        super().__init__(palette=palette(), name=self.title)
        self.fill(controls, rows, **table)

    def fill(self, controls, rows=(), *, shared=None, states=None, start=None, selected=-1) -> None:
        """Replace the table and redraw the explorer; the arguments are those of the class.

        rows: one per state in order, or a dict of state -> row, whose keys are the `states`.
        """
        if isinstance(rows, Mapping):
            states, rows = list(rows), list(rows.values())
        offered = [list(control.options) for control in controls]
        every = list(itertools.product(*offered)) if states is None else [tuple(state) for state in states]
        if rows and len(rows) != len(every):
            raise ValueError(f"rows: expected one row for each of {len(every)} states, got {len(rows)}")
        start = every[len(every) // 2] if start is None else tuple(start)
        if start not in every:
            raise ValueError(f"start: expected one of the states {every[0]} to {every[-1]}, got {start}")
        table = Packed()
        packed = {"rows": [table.pack(dict(row)) for row in rows], "shared": table.pack(dict(shared or {}))}
        places = [[option.index(value) for option, value in zip(offered, state, strict=True)] for state in every]
        self._states, self._rows, self._shared = every, list(rows), dict(shared or {})
        with self.hold_sync(), self.hold_trait_notifications():
            self.selected, self.index = selected, every.index(start)
            self.controls = [asdict(c) | {"options": o} for c, o in zip(controls, offered, strict=True)]
            self.table = packed | {
                "arrays": table.arrays(), "data": table.data(), "states": None if states is None else places
            }  # fmt: skip

    @traitlets.validate("index")
    def _check_index(self, proposal) -> int:
        if not 0 <= proposal["value"] < len(self._states):
            raise traitlets.TraitError(f"index: expected 0 to {len(self._states) - 1}, got {proposal['value']}")
        return proposal["value"]

    @property
    def states(self) -> list[tuple]:
        """The options of every state, one per control."""
        return self._states

    @property
    def options(self) -> dict[str, Any]:
        """The current options, by control name."""
        return {c["name"]: option for c, option in zip(self.controls, self._states[self.index], strict=True)}

    @property
    def shared(self) -> dict[str, Any]:
        """The data shared by all states."""
        return self._shared

    def row(self, index: int) -> dict[str, Any]:
        """Return the data to draw for state number `index`."""
        return dict(self._rows[index])

    def figure(self) -> Figure:
        """Return the current state as a figure that needs no script."""
        raise NotImplementedError(f"{type(self).__name__}.figure")

    def still(self) -> bytes:
        """Return the current figure as a PNG."""
        figure = self.figure()
        picture = png_of(figure)
        plt.close(figure)
        return picture

    def describe(self) -> str:
        """Describe the current state in plain text."""
        return f"{self.title}: " + ", ".join(f"{c['label']} {self.options[c['name']]}" for c in self.controls) + "."

    def _repr_mimebundle_(self, **kwargs):
        """Return the widget, a figure for front ends that cannot run it,
        and a text for front ends without images.
        """
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        picture = base64.b64encode(self.still()).decode()
        text = self.describe()
        return data | {"image/png": picture, "text/plain": text}, metadata | {"image/png": {"alt": text}}


class Packed:
    """Nested values for the browser, in which arrays become {"array": number};
    arrays are compressed, and equal ones are stored once.
    """

    def __init__(self):
        self._arrays: dict[tuple, int] = {}  # maps (dtype, shape, bytes) to the number of the array

    def pack(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self.pack(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.pack(item) for item in value]
        if isinstance(value, Tensor):
            value = value.numpy(force=True)
        if isinstance(value, np.ndarray) and value.ndim:
            value = value.astype(_dtype(value))
            key = (value.dtype.str[1:], value.shape, value.tobytes())
            return {"array": self._arrays.setdefault(key, len(self._arrays))}
        return value.item() if isinstance(value, np.generic | np.ndarray) else value

    def arrays(self) -> list[dict]:
        return [{"dtype": dtype, "shape": shape} for dtype, shape, _ in self._arrays]

    def data(self) -> bytes:
        """Return the arrays, concatenated at multiples of four bytes and compressed."""
        return zlib.compress(b"".join(data + bytes(-len(data) % 4) for _, _, data in self._arrays), 9)


def _dtype(value: np.ndarray) -> str:
    """Return the smallest dtype of a JavaScript typed array that fits the values;
    floats become float32.
    """
    if value.dtype.kind == "f":
        return "<f4"
    low, high = (int(value.min()), int(value.max())) if value.size else (0, 0)
    for dtype in ("<u1", "<i2", "<u2", "<i4"):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return dtype
    raise ValueError(f"table: expected 32-bit integers, got {low} to {high}")
