"""Judge the reader's code: strictly, within a time limit, and without raising an exception.

    not yet   the function is still the stub: its body is `...`
    wrong     the first case that differs: the index, and the expected value beside the reader's value
    right     the number of cases

`compare` rejects a different type, dtype, shape or device, and a changed argument. Solved tasks
are recorded in a folder next to the notebooks; a task is removed from this folder if a later
attempt is wrong.
"""

import contextlib
import ctypes
import dis
import functools
import html
import inspect
import math
import os
import sys
import threading
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from refvl.paths import DATA

sys.path.insert(0, str(DATA.parent))  # for data/training: the scenes that a model is asked about
NOTEBOOKS = Path(__file__).resolve().parent
DONE = NOTEBOOKS / ".progress"  # an empty file for each solved task
DEVICE = os.environ.get("REFVL_DEVICE", "cpu")  # for the models of notebooks; the reader's code runs on the CPU
MARKS = {"not yet": "\N{WHITE CIRCLE}", "wrong": "\N{BALLOT X}", "right": "\N{CHECK MARK}"}
LIMIT = 10.0  # seconds that one call of a reader's function may take
COLORS = "#b2182b", "#1b7837"  # wrong, right
CELLS = 6, 16  # rows and columns of an image
MOVES, EMPTY = {"RESUME", "NOP", "RETURN_VALUE"}, {"LOAD_CONST", "RETURN_CONST"}  # in a body that is only `...`
SCALARS = int | float | str | bool | None

Case = tuple[str, Sequence, Any]  # a name, the arguments, the expected result


class Wrong(Exception):
    """The first difference, with the two values that are drawn side by side, if there are any."""

    def __init__(self, line: str, want: Any = None, got: Any = None):
        super().__init__(line)
        self.want, self.got = want, got


class TooLong(BaseException):
    """The error of a function that took longer than LIMIT; not an Exception, because the function might catch it."""


class Printed(StringIO):
    """The output that the reader's functions print; its first three lines are shown."""

    def write(self, text: str) -> int:
        return super().write(text) if self.tell() < 2000 else len(text)

    def __str__(self) -> str:
        lines = self.getvalue().splitlines()
        return "\n".join(["\nprinted by your code:", *lines[:3], "..." * (len(lines) > 3)]).rstrip() * bool(lines)


@dataclass(frozen=True)
class Close:
    """An expected float64 tensor, the dtype in which it is wanted, and the largest error allowed in each element."""

    want: Tensor
    dtype: torch.dtype
    allowed: Tensor


@dataclass(frozen=True)
class Picture:
    """An image, (H, W, 3) uint8, shown with the grid of its 28 px tokens."""

    pixels: np.ndarray = field(repr=False)
    alt: str = ""

    def _repr_html_(self) -> str:
        pixels = self.pixels.copy()
        pixels[27::28], pixels[:, 27::28] = 255, 255
        file = BytesIO()
        Image.fromarray(pixels).resize((168, 168), Image.Resampling.NEAREST).quantize(16).save(file, "PNG")
        return f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{b64encode(file.getvalue()).decode()}">'


@dataclass(frozen=True)
class Verdict:
    """The result of a check, shown as a line; below it, unless it is right, both values and
    three hints to open.
    """

    status: str  # a key of MARKS
    line: str
    hints: tuple[str, ...] = ()
    want: Any = None
    got: Any = None
    case: Sequence = ()  # the arguments for which `want` is expected
    task: str = ""  # the function's task, shown until the function is written
    printed: Any = ""

    def __repr__(self) -> str:
        said = f"{MARKS[self.status]} {self.status}: {self.line}"
        return said + as_text(self.want, self.got) + f"\n\n{self.task}" * bool(self.task) + str(self.printed)

    def _repr_html_(self) -> str:
        said = f"<b>{MARKS[self.status]} {self.status}</b>: <code>{html.escape(self.line)}</code>"
        task = "".join(f"<pre>{html.escape(text)}</pre>" for text in (self.task, str(self.printed)) if text)
        hints = ""
        for number, hint in reversed(list(enumerate(self.hints, 1))):
            hints = f"<details><summary>hint {number}</summary>{html.escape(hint)}{hints}</details>"
        return said + beside(self.want, self.got) + task + hints * (self.status != "right")


class Row(NamedTuple):
    """One kind of question: the correct answers with the reader's functions, with the
    library's, and by chance.
    """

    kind: str
    count: int
    yours: int
    library: int
    chance: str
    same: int  # answers with the library's token ids
    guess: Any = None

    @property
    def cells(self) -> tuple:
        """The cells of the row, ending with the prediction."""
        off = "" if not isinstance(self.guess, int) else f"{self.guess} ({abs(self.guess - self.yours)} off)"
        return self.kind, f"{self.yours} of {self.count}", self.library, self.chance, self.same, off


@dataclass
class Board:
    """Answers to held-out questions; a notebook folds them until there is a prediction."""

    whose: str
    rows: list[Row] = field(default_factory=list)
    scene: Picture | None = None  # the reader's scene
    own: list[tuple[str, str, str]] = field(default_factory=list)  # about that scene: question, answer, truth
    note: str = ""
    printed: Any = ""
    folded: bool = False

    HEAD = ("question", "right", "library", "chance", "same ids", "predicted")

    def __repr__(self) -> str:
        shown = (self.HEAD, *(row.cells for row in self.rows))
        lines = [f"{a:34}{b:>11}{c:>9}{d:>8}{e:>10}  {f}".rstrip() for a, b, c, d, e, f in shown]
        said = [f"your scene: {q} {said!r}; true: {truth!r}" for q, said, truth in self.own]
        parts = [self.whose, *(lines if self.rows else []), *said, *([self.note] if self.note else [])]
        return "\n".join(parts) + str(self.printed)

    def _repr_html_(self) -> str:
        table = "".join(f"<th>{name}</th>" for name in self.HEAD)
        for row in self.rows:
            kind, right, *rest = row.cells
            color, width = COLORS[row.same == row.count], 100 * row.yours // row.count
            bar = f"<hr style='border:3px solid {color};width:{width}px;margin:2px 0'>"
            cells = "".join(f"<td>{cell}</td>" for cell in rest)
            table += f"<tr><td style='text-align:left'>{kind}</td><td>{right}{bar}</td>{cells}</tr>"
        shown = f"<p>{html.escape(self.whose)}</p>" + f"<table>{table}</table>" * bool(self.rows)
        if self.own:
            shown += self.scene._repr_html_()
        for question, said, truth in self.own:
            told = f"<b style='color:{COLORS[said == truth]}'>{html.escape(said)}</b>"
            shown += f"<p>Your scene: <i>{question}</i> {told}{f' (true: {truth})' * (said != truth)}</p>"
        shown += f"<p>{html.escape(self.note)}</p>" + f"<pre>{html.escape(str(self.printed))}</pre>" * bool(
            self.printed
        )
        summary = "<summary>No prediction yet: guess first, then open.</summary>"
        return f"<details>{summary}{shown}</details>" if self.folded else shown


def is_stub(function: Callable) -> bool:
    """Return whether a function's body is only a docstring and `...`."""
    return hasattr(function, "__code__") and all(
        step.opname in MOVES or (step.opname in EMPTY and step.argval is None)
        for step in dis.get_instructions(function)
    )


def judge(function: Callable, cases: Iterable[Case], names: Sequence[str] = (), **shown) -> Verdict:
    """Compare the function's results with the expected ones, case by case, until the first difference.

    names: the names of the result's parts, if the result is a tuple. shown: further fields of
    the verdict.
    """
    if is_stub(function):
        return Verdict("not yet", f"write the body of {function.__name__}", **shown)
    printed = Printed()
    shown |= {"task": "", "printed": printed}
    run, count = limited(function, printed=printed), 0
    case, given = "", ()
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters)
        for case, arguments, want in cases:
            given = deepcopy(arguments)
            compare(case, run(*given), want, names)
            compare(f"{case}: your function changed its argument", given, arguments, parameters)
            count += 1
    except Wrong as error:
        return Verdict("wrong", str(error), want=error.want, got=error.got, case=given, **shown)
    except TooLong as error:
        late = f"{function.__name__} took longer than {LIMIT:.0f} seconds"
        return Verdict("wrong", late + failing_line(function, error), case=given, **shown)
    except (Exception, SystemExit) as error:  # any error in the reader's code: one line is enough
        raised = f"{case}: {function.__name__} raised {type(error).__name__}: {error}".splitlines()[0]
        return Verdict("wrong", raised + failing_line(function, error), case=given, **shown)
    return Verdict("right", f"in {count} cases", **shown)


def record(name: str, verdict: Verdict) -> Verdict:
    """Remember whether `name` is done; if the folder cannot be written, nothing is recorded."""
    with contextlib.suppress(OSError):
        if verdict.status == "right":
            DONE.mkdir(exist_ok=True)
            (DONE / name).touch()
        else:
            (DONE / name).unlink(missing_ok=True)
    return verdict


def compare(case: str, got: Any, want: Any, names: Sequence[str] = ()) -> None:
    """Raise `Wrong` at the first difference in type, dtype, device, shape or value.
    names: the names of a tuple's parts.
    """
    if isinstance(want, Tensor | Close):
        _compare_tensors(case, got, want)
    elif isinstance(want, SCALARS):
        close = isinstance(want, float) and isinstance(got, float) and math.isclose(got, want, rel_tol=1e-6)
        if not close and (type(got) is not type(want) or got != want):
            raise Wrong(f"{case}: should be {want!r}, got {_say(got)}", want, got)
    elif isinstance(want, dict):
        for name, part in want.items():
            compare(f"{case}: {name}", got[name], part)
    elif isinstance(want, list | tuple):
        wanted = f"({', '.join(names)})" if names else f"a {type(want).__name__} of {len(want)}"
        if type(got) is not type(want) or (len(got) != len(want) and not all(isinstance(e, int) for e in want)):
            raise Wrong(f"{case}: should be {wanted}, got {_say(got)}")
        for i, (part, wanted_part) in enumerate(zip(got, want, strict=False)):
            name = names[i] if i < len(names) else f"element [{i}]"
            try:
                compare(f"{case}: {name}", part, wanted_part)
            except Wrong as error:
                drawn = (error.want, error.got) if isinstance(wanted_part, Tensor | Close | list) else (want, got)
                raise Wrong(str(error), *drawn) from None
        if len(got) != len(want):
            raise Wrong(f"{case}: should have {len(want)} elements, got {len(got)}", want, got)
    elif not callable(want) and got != want:
        raise Wrong(f"{case}: should be {want}, got {got}")


def _compare_tensors(case: str, got: Any, want: Tensor | Close) -> None:
    right, dtype = (want.want, want.dtype) if isinstance(want, Close) else (want, want.dtype)
    if not isinstance(got, Tensor):
        raise Wrong(f"{case}: should be a tensor, got {_say(got)}")
    for what, theirs, ours in (("dtype", got.dtype, dtype), ("device", got.device, right.device)):
        if theirs != ours:
            raise Wrong(f"{case}: should have {what} {ours}, got {theirs}".replace("torch.", ""))
    if got.shape != right.shape:
        raise Wrong(f"{case}: should have shape {tuple(right.shape)}, got {tuple(got.shape)}", right, got)
    wrong = ~torch.isclose(got.double(), right.double(), rtol=1e-5, atol=1e-6, equal_nan=True)
    if isinstance(want, Close):
        wrong = ~((got.double() - right).abs() <= want.allowed)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        values = f"should be {right[place].item():.6g}, got {got[place].item():.6g}"
        share = f"{int(wrong.sum())} of {wrong.numel()} differ; " if wrong.numel() > 1 else ""
        raise Wrong(f"{case}: {share}element {list(place)} {values}", right, got)


def _say(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}".replace("torch.", "")
    return repr(value) if isinstance(value, SCALARS) else f"a {type(value).__name__}"


def limited(function: Callable, times: float = 1.0, printed: Printed | None = None) -> Callable:
    """Wrap a function so that it prints into `printed`, and raises TooLong after `times` times LIMIT.

    The limit stops loops in Python code on any system.
    """
    raise_in, thread = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident())

    @functools.wraps(function)
    def run(*args, **kwargs):
        running, lock = [True], threading.Lock()

        def stop():
            with lock:  # raise before the function has ended, or not at all
                if running:
                    raise_in(thread, ctypes.py_object(TooLong))

        timer = threading.Timer(times * LIMIT, stop)
        timer.start()
        try:
            with contextlib.redirect_stdout(printed):
                return function(*args, **kwargs)
        finally:
            timer.cancel()
            with lock:
                running.clear()

    return run


def failing_line(function: Callable, error: BaseException) -> str:
    """Return the last line of the reader's code in an exception's traceback, if there is one."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file and frame.line]
    return f"; in the line: {lines[-1]}" if lines else ""


def _corners(want: Any, got: Any) -> tuple[list[np.ndarray], list[np.ndarray], list[int]] | None:
    """Return both values as grids from just before the first difference, masks of the differing
    cells, and the start.

    Only numbers, and tensors or lists of numbers, have grids; others return None. If there are more than two
    dimensions, the last one becomes the columns, and the others are flattened into rows.
    """
    grids = []
    for value in (want, got):
        try:
            value = torch.as_tensor(value, dtype=torch.float64).detach()
        except (TypeError, ValueError, RuntimeError):
            return None
        grids.append(value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value.reshape(1, -1))
    if not all(grid.numel() for grid in grids):
        return None
    shape = [min(a, b) for a, b in zip(*(grid.shape for grid in grids), strict=True)]
    equal = torch.isclose(*(grid[: shape[0], : shape[1]] for grid in grids), rtol=1e-5, atol=1e-6)
    first = (~equal).nonzero()[0].tolist() if not equal.all() else [0, 0]
    starts = [max(0, min(at - 2, most - shown)) for at, most, shown in zip(first, shape, CELLS, strict=True)]
    parts, differs = [], []
    for grid in grids:
        wrong = torch.ones(grid.shape, dtype=torch.bool)
        wrong[: shape[0], : shape[1]] = ~equal
        cut = [x[starts[0] :, starts[1] :][: CELLS[0], : CELLS[1]].numpy() for x in (grid, wrong)]
        parts, differs = [*parts, cut[0]], [*differs, cut[1]]
    return parts, differs, starts


def as_text(want: Any, got: Any) -> str:
    """Return both values as lines of numbers; a star marks each number that differs."""
    corners = _corners(want, got)
    if corners is None:
        return ""
    lines = []
    for title, part, wrong in zip(("expected", "yours"), *corners[:2], strict=True):
        lines.append(f"{title}, from {corners[2]}:" if any(corners[2]) else f"{title}:")
        for row, marks in zip(part, wrong, strict=True):
            lines.append("".join(f"{v:.4g}{'*' if mark else ' '}".rjust(8) for v, mark in zip(row, marks, strict=True)))
    return "\n" + "\n".join(lines)


def beside(want: Any, got: Any) -> str:
    """Return both values as HTML grids of coloured cells, in which cells that differ are framed."""
    corners = _corners(want, got)
    if corners is None:
        return ""
    parts, differs, starts = corners
    low, high = min(part.min() for part in parts), max(part.max() for part in parts)
    side, gap = 24, 16 + 24 * max(2, *(part.shape[1] for part in parts))
    drawn = []
    for number, (title, part, wrong) in enumerate(zip(("expected", "yours"), parts, differs, strict=True)):
        drawn.append(f"<text x='{number * gap}' y='11'>{title}</text>")
        for place, value in np.ndenumerate(part):
            y, x = 16 + side * place[0], number * gap + side * place[1]
            share = 0.0 if high == low or not np.isfinite(value) else (value - low) / (high - low)
            fill = "#{:02x}{:02x}{:02x}".format(*(round(235 + share * (dark - 235)) for dark in (0, 114, 178)))
            frame = " stroke='#d95f02' stroke-width='3'" if wrong[place] else ""
            drawn.append(f"<path d='M{x + 2} {y + 2}h20v20h-20z' fill='{fill}'{frame}/>")
            ink = "#fff" if share > 0.6 else "#1c1c1c"
            if abs(value) < 9999:
                drawn.append(f"<text x='{x + 12}' y='{y + 16}' class='n' fill='{ink}'>{value:.4g}</text>")
    width, height = 2 * gap, 18 + side * max(len(part) for part in parts)
    style = "text{font:11px sans-serif}.n{font-size:9px;text-anchor:middle}"
    svg = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}'><style>{style}</style>"
    data = quote(f"{svg}{''.join(drawn)}</svg>", safe=" '/:=.,{}()-")
    where = f" from [{', '.join(map(str, starts))}]" if any(starts) else ""
    alt = f"Expected beside yours{where}: {differs[1].sum()} of the {parts[1].size} cells shown differ."
    return f'<br><img alt="{alt}" src="data:image/svg+xml,{data}">'
