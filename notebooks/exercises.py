"""The notebooks' exercises: each check runs a reader's function on a few cases and reports the result in one line.

    not yet   the function is still the stub: its body is `...`
    wrong     the first case that differs: the place, the expected value and the reader's value; both also as images
    right     the number of cases

Some exercises are repairs: the stub contains a mistake, and a small model answers questions with it (`ask`). Every
other verdict than "right" offers three hints. No check raises an error, and endless loops are stopped, so a notebook
runs to its end even if exercises are unsolved. Solved exercises are recorded in a folder next to the notebooks
(`progress`), and an exercise is removed from it if a later attempt is wrong.
"""

import contextlib
import ctypes
import dis
import functools
import html
import inspect
import json
import os
import re
import statistics
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import refvl
from refvl.attention import attend, group_segments, varlen_attention
from refvl.encoders.resampler import group_segment_pairs
from refvl.graphs import Batch, TraceGraph
from refvl.merge import merge_embeddings
from refvl.paths import DATA
from refvl.pixels.by_hand import count_tokens, patch_rows
from refvl.pixels.crops import plan_crops
from refvl.pixels.media import Video, load_image
from refvl.pixels.patches import Levels, PatchConfig, level_table
from refvl.pixels.slices import SliceConfig, plan_slices, slice_grid, slice_rows
from refvl.positions import (
    MediaSpan,
    compute_retention_mask,
    get_mrope_input_positions,
    get_window_index,
    interpolate_position_table,
    mrope_axis_of_pairs,
    restrict_positions,
)
from refvl.positions.mrope import grid_positions
from refvl.positions.timestamps import sample_video_frames
from refvl.processors.qwen3_vl import seconds_of_steps
from refvl.serving.adapters import GRIDS
from refvl.serving.parallel import get_load_balance_assignment, restore_order
from refvl.study.costs import kv_cache_bytes_per_token, set_pixel_limits

sys.path.insert(0, str(DATA.parent))  # for data/training: the scenes that a repaired model is asked about
from data.training import pages, scenes
from data.training.evaluate_tiny import requests_for

Said = tuple[str, str, str]  # a question, the model's answer, the correct answer
PICTURE = "{} x {} px (width x height)"  # names of cases
POSITIONS = ("positions", "delta")
NOTEBOOKS = Path(__file__).resolve().parent
DEVICE = os.environ.get("REFVL_DEVICE", "cpu")  # of the notebooks' models; the reader's code runs on the CPU
DONE = NOTEBOOKS / ".progress"  # an empty file for every solved exercise
MARKS = {"not yet": "\N{WHITE CIRCLE}", "wrong": "\N{BALLOT X}", "right": "\N{CHECK MARK}"}
LIMIT = 10.0  # seconds that one call of a reader's function may take
CELLS = 6, 16  # rows and columns of an image
MOVES, EMPTY = {"RESUME", "NOP", "RETURN_VALUE"}, {"LOAD_CONST", "RETURN_CONST"}  # of a body that is only `...`: None


class Wrong(Exception):
    """The first difference, and an image of it."""

    picture = ""


class TooLong(BaseException):
    """The reader's function took longer than LIMIT; not an Exception, which the function might catch."""


@dataclass(frozen=True)
class Verdict:
    """The result of an exercise, shown as one line; unless it is right, with an image and three hints to open."""

    status: str  # one of MARKS
    line: str
    hints: tuple[str, ...] = ()
    picture: str = ""  # HTML

    def __repr__(self) -> str:
        return f"{MARKS[self.status]} {self.status}: {self.line}"

    def _repr_html_(self) -> str:
        said = f"<b>{MARKS[self.status]} {self.status}</b>: <code>{html.escape(self.line)}</code>"
        hints = ""
        for number, hint in reversed(list(enumerate(self.hints, 1))):
            hints = f"<details><summary>hint {number}</summary>{html.escape(hint)}{hints}</details>"
        return said + self.picture + hints * (self.status != "right")


def exercise(ask: Callable[[Callable], list[Said]] | None = None) -> Callable:
    """Decorate a check, which returns a line of praise or raises `Wrong`, so that it returns a `Verdict`.

    The check's docstring says what the function has to do, then gives hints, from a nudge to nearly the solution.
    ask: asks a small model that runs with the reader's function.
    """

    def decorate(check: Callable[[Callable], str]) -> Callable[[Callable], Verdict]:
        wanted, _, listed = str(inspect.getdoc(check)).partition("\n\n")
        hints = [" ".join(hint.split()) for hint in re.split("^- ", listed, flags=re.M)[1:]]

        @functools.wraps(check)
        def judged(function: Callable) -> Verdict:
            verdict = replace(_judge(check, ask, function), hints=tuple(hints))
            with contextlib.suppress(OSError):  # if the folder cannot be written, nothing is recorded
                if verdict.status == "right":
                    DONE.mkdir(exist_ok=True)
                    (DONE / check.__name__).touch()
                else:
                    (DONE / check.__name__).unlink(missing_ok=True)
            return verdict

        judged.__doc__ = wanted  # `help` gives no hint away
        return judged

    return decorate


def _judge(check: Callable, ask: Callable[[Callable], list[Said]] | None, function: Callable) -> Verdict:
    if hasattr(function, "__code__") and all(
        step.opname in MOVES or (step.opname in EMPTY and step.argval is None)
        for step in dis.get_instructions(function)
    ):
        return Verdict("not yet", f"write the body of {function.__name__}")
    picture, limited = "", _limited(function)
    try:
        status, line = "right", check(limited)
    except Wrong as error:
        status, line, picture = "wrong", str(error), error.picture
    except TooLong as error:
        late = f"{function.__name__} took longer than {LIMIT:.0f} seconds"
        return Verdict("wrong", late + _failing_line(function, error))
    except Exception as error:  # any error in the reader's code: one line is enough
        raised = f"{function.__name__} raised {type(error).__name__}: {error}"
        return Verdict("wrong", raised.splitlines()[0] + _failing_line(function, error))
    if ask is None:
        return Verdict(status, line, picture=picture)
    try:
        said = ask(limited)
    except (Exception, TooLong) as error:  # likewise, but in the model, which may fail on the function's result
        raised = f"{line}; a model with it raised {type(error).__name__}: {error}"
        return Verdict("wrong", raised.splitlines()[0], picture=picture)
    question, answer, truth = next((row for row in said if row[1] != row[2]), said[0])
    if answer != truth:
        wrong = f'{line}; asked "{question}", the model answers "{answer}"; correct is "{truth}"'
        return Verdict("wrong", wrong, picture=picture)
    return Verdict(
        status, f'{line}; asked "{question}", the model answers "{answer}", which is correct', picture=picture
    )


def _limited(function: Callable) -> Callable:
    """Wrap a function so that it raises TooLong after LIMIT seconds, which stops loops in Python on any system."""
    raise_in, thread = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident())

    @functools.wraps(function)
    def limited(*args, **kwargs):
        running, lock = [True], threading.Lock()

        def stop():
            with lock:  # either before the function has ended, or not at all
                if running:
                    raise_in(thread, ctypes.py_object(TooLong))

        timer = threading.Timer(LIMIT, stop)
        timer.start()
        try:
            return function(*args, **kwargs)
        finally:
            timer.cancel()
            with lock:
                running.clear()

    return limited


def beside(want: Any, got: Any) -> str:
    """Return HTML: both values as grids of cells, from just before the first difference; cells that differ are framed.

    Numbers, and tensors or lists of numbers, are shown; in more than two dimensions, the last one runs to the right.
    """
    grids = []
    for value in (want, got):
        try:
            value = torch.as_tensor(value, dtype=torch.float64).detach()
        except (TypeError, ValueError, RuntimeError):
            return ""
        grids.append(value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value.reshape(1, -1))
    if not all(grid.numel() for grid in grids):
        return ""
    rows, columns = (min(a, b) for a, b in zip(*(grid.shape for grid in grids), strict=True))
    equal = torch.isclose(*(grid[:rows, :columns] for grid in grids), rtol=1e-5, atol=1e-6)
    first = (~equal).nonzero()[0].tolist() if not equal.all() else [0, 0]
    starts = [max(0, min(at - 2, most - shown)) for at, most, shown in zip(first, (rows, columns), CELLS, strict=True)]
    parts = [grid[starts[0] :, starts[1] :][: CELLS[0], : CELLS[1]] for grid in grids]
    low, high = min(part.min().item() for part in parts), max(part.max().item() for part in parts)
    side, gap = 24, 16 + 24 * max(2, *(part.shape[1] for part in parts))
    drawn, different = [], 0
    for number, (title, part) in enumerate(zip(("expected", "yours"), parts, strict=True)):
        drawn.append(f"<text x='{number * gap}' y='11'>{title}</text>")
        for place, value in np.ndenumerate(part.numpy()):
            y, x = 16 + side * place[0], number * gap + side * place[1]
            there = [at + start for at, start in zip(place, starts, strict=True)]
            differs = there[0] >= rows or there[1] >= columns or not equal[tuple(there)]
            different += bool(number and differs)
            share = 0.0 if high == low or not np.isfinite(value) else (value - low) / (high - low)
            fill = "#{:02x}{:02x}{:02x}".format(*(round(235 + share * (dark - 235)) for dark in (0, 114, 178)))
            frame = " stroke='#d95f02' stroke-width='3'" if differs else ""
            drawn.append(f"<path d='M{x + 2} {y + 2}h20v20h-20z' fill='{fill}'{frame}/>")
            ink = "#fff" if share > 0.6 else "#1c1c1c"
            if abs(value) < 9999:
                drawn.append(f"<text x='{x + 12}' y='{y + 16}' class='n' fill='{ink}'>{value:.4g}</text>")
    width, height = 2 * gap, 18 + side * max(len(part) for part in parts)
    style = "text{font:11px sans-serif}.n{font-size:9px;text-anchor:middle}"
    svg = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}'><style>{style}</style>"
    data = quote(f"{svg}{''.join(drawn)}</svg>", safe=" '/:=.,{}()-")
    where = f" from [{', '.join(map(str, starts))}]" if any(starts) else ""
    alt = f"Expected beside yours{where}: {different} of the {parts[1].numel()} cells shown differ."
    return f'<br><img alt="{alt}" src="data:image/svg+xml,{data}">'


def _failing_line(function: Callable, error: BaseException) -> str:
    """Return the last line of the reader's code in an exception's traceback, if there is one."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file and frame.line]
    return f"; in the line: {lines[-1]}" if lines else ""


@dataclass(frozen=True)
class Chapter:
    """A notebook of the course, with its minutes and its solved exercises."""

    name: str  # of the file, without its suffix
    title: str
    minutes: int
    exercises: dict[str, bool]

    @classmethod
    def read(cls, path: Path) -> "Chapter":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        cells = [cell for cell in cells if "head" not in cell["metadata"].get("tags", ())]  # see heads.py
        texts = {kind: ["".join(c["source"]) for c in cells if c["cell_type"] == kind] for kind in ("markdown", "code")}
        names = dict.fromkeys(re.findall(r"exercises\.check_(\w+)\(", "\n".join(texts["code"])))
        done = {name.replace("_", " "): (DONE / f"check_{name}").exists() for name in names}
        title = texts["markdown"][0].splitlines()[0].lstrip("# ")
        stubs = ["".join(c["source"]) for c in cells if "exercise" in c["metadata"].get("tags", ())]
        code = [source for source in texts["code"] if source not in stubs]  # a stub is part of its exercise
        return cls(path.stem, title, minutes_of(texts["markdown"], code, len(done)), done)


@dataclass(frozen=True)
class Progress:
    """The notebooks in order, with the minutes and the solved exercises of each; shown as a table."""

    chapters: list[Chapter]

    def __repr__(self) -> str:
        return "\n".join(
            f"{MARKS['right' if done else 'not yet']} {chapter.name}: {name}"
            for chapter in self.chapters
            for name, done in chapter.exercises.items()
        )

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><td style='text-align:left'><a href='{chapter.name}.ipynb'>{html.escape(chapter.title)}</a></td>"
            f"<td>{chapter.minutes}</td><td style='text-align:left'>{self._marks(chapter)}</td></tr>"
            for chapter in self.chapters
        ]
        done, count = (sum(f(chapter.exercises) for chapter in self.chapters) for f in (lambda e: sum(e.values()), len))
        hours, minutes = divmod(sum(chapter.minutes for chapter in self.chapters), 60)
        total = f"<tr><th>together</th><th>{hours} h {minutes:02} min</th><th>{done} of {count} done</th></tr>"
        head = "<tr><th>notebook</th><th>minutes</th><th>exercises</th></tr>"
        return f"<table>{head}{''.join(rows)}{total}</table>"

    @staticmethod
    def _marks(chapter: Chapter) -> str:
        marks = [f"{MARKS['right' if done else 'not yet']} {name}" for name, done in chapter.exercises.items()]
        return ", ".join(marks)


def progress() -> Progress:
    """Return the notebooks in this folder and the progress in them."""
    return Progress([Chapter.read(path) for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))])


def minutes_of(markdown: Sequence[str], code: Sequence[str], exercises: int) -> int:
    """Return a learner's minutes: 200 words or six lines of code a minute, and ten minutes for each exercise.

    Collapsed text, tables and addresses of links do not count; neither do imports, comments and blank lines.
    """
    prose = re.sub(r"<details>.*?</details>|```.*?```|^\|.*?$|\]\([^)]*\)", "", "\n".join(markdown), flags=re.S | re.M)
    lines = re.sub(r"^(?:from [\w.]+ )?import (?:\([^)]*\)|.*)$|^\s*#.*$", "", "\n".join(code), flags=re.M)
    return round(len(prose.split()) / 200 + sum(map(bool, map(str.strip, lines.splitlines()))) / 6 + 10 * exercises)


@functools.cache
def _tiny(name: str) -> refvl.VLM:
    return refvl.load(DATA / f"checkpoints/tiny-{name}", device="cpu", progress=False)


def _paired(requests: Sequence, said: Iterable[str]) -> list[Said]:
    """Return each request's question, the model's answer, and the correct answer."""
    return [(r.question.text, text, r.question.answer) for r, text in zip(requests, said, strict=True)]


def _asked(model: refvl.VLM, requests: Sequence) -> list[Said]:
    """Ask all requests in one batch."""
    said = model.chat_batch([r.arguments for r in requests], max_new_tokens=16, progress=False)
    return _paired(requests, said)


def _circles(count: int) -> tuple[refvl.VLM, list]:
    """Return a model and its traces of `count` scenes, each asked for the circle's colour."""
    model = _tiny("qwen2_5_vl")
    drawn = [scenes.render(scenes.draw_scene("demo", i)) for i in range(4, 4 + count)]
    return model, [model.trace("What color is the circle?", images=[scene]) for scene in drawn]


def _asked_about_circles(model: refvl.VLM, runs: Sequence, embeds: Sequence[Tensor]) -> list[Said]:
    """Ask the same questions with different embeddings of the images."""
    changed = [
        replace(run, inputs_embeds=merge_embeddings(run.inputs_embeds, run.spans, [rows]))
        for run, rows in zip(runs, embeds, strict=True)
    ]
    said = model.answers(changed, max_new_tokens=16)
    return [("What color is the circle?", text, run.text) for text, run in zip(said, runs, strict=True)]


def plant_fault(vlm: refvl.VLM, number: int) -> None:
    """Change one line of a Qwen3-VL text model, for part 7 of notebook 12; guess before you read which one."""

    def late(module, args: tuple, kwargs: dict) -> tuple:
        features = kwargs.get("deepstack_visual_embeds")
        return args, kwargs | ({"deepstack_visual_embeds": [0 * features[0], *features]} if features else {})

    text = vlm.language_model.model
    if number == 1:
        text.register_forward_pre_hook(late, with_kwargs=True)
    else:
        text.rotary_emb.register_forward_pre_hook(lambda module, args: (args[0], args[1][[0, 2, 1]]))


def _run(
    function: Callable, ours: Callable, cases: Mapping[str, Sequence], results: Sequence[str] = (), given: str = ""
) -> str:
    """Compare both functions on each case, the reader's on copied arguments.

    results: the names of a tuple's parts. given: a name of the first argument, if it must not change.
    """
    for case, arguments in cases.items():
        own = deepcopy(arguments)
        _check(case, function(*own), ours(*arguments), results)
        if given:
            first, unchanged = torch.as_tensor(own[0]), torch.as_tensor(arguments[0])
            _check(f"{case}: {given} changed in place", first, unchanged)
    return f"in {len(cases)} cases"


def _named(label: str, cases: Iterable[Sequence]) -> dict[str, Sequence]:
    """Return cases that are named by their arguments."""
    return {label.format(*arguments): arguments for arguments in cases}


def _check(case: str, got, want, results: Sequence[str] = ()) -> None:
    """Raise Wrong at the first difference of `got` from `want`, with an image; results: names of a tuple's parts."""
    try:
        _compare(case, got, want, results)
    except Wrong as error:
        error.picture = error.picture or beside(want, got)
        raise


def _compare(case: str, got, want, results: Sequence[str]) -> None:
    if isinstance(want, Tensor):
        if difference := _first_difference(got, want):
            raise Wrong(f"{case}: {difference}")
    elif results:
        if not isinstance(got, tuple) or len(got) != len(results):
            raise Wrong(f"{case}: expected ({', '.join(results)}), got {type(got).__name__}")
        for name, theirs, part in zip(results, got, want, strict=True):
            _check(f"{case}: {name}", theirs, part)
    elif isinstance(want, list):
        if not isinstance(got, Iterable):
            raise Wrong(f"{case}: expected a list, got {type(got).__name__}")
        for i, (theirs, element) in enumerate(zip(got := list(got), want, strict=False)):
            (_compare if isinstance(element, int | float) else _check)(f"{case}: element [{i}]", theirs, element, ())
        _check(f"{case}: number of elements", len(got), len(want))
    elif got != want:
        raise Wrong(f"{case}: should be {want}, got {got}")


def _first_difference(got, want: Tensor) -> str | None:
    """Describe the first difference of `got` from `want`; return None if they are equal."""
    if not isinstance(got, Tensor):
        return f"expected a tensor, got {type(got).__name__}"
    if got.shape != want.shape:
        return f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    equal = torch.isclose(got.double(), want.double(), rtol=1e-5, atol=1e-6)
    if equal.all():
        return None
    place = tuple((~equal).nonzero()[0].tolist())
    where = f"element {list(place)} " if place else ""
    return f"{where}should be {want[place].item()}, got {got[place].item()}"


def _asked_with(model: refvl.VLM, requests: Sequence, stage: str, change: Callable, **options) -> list[Said]:
    """Ask each request with one stage's result replaced; change: the request's arguments -> a function of the result.

    options: further arguments of `trace`.
    """
    said = []
    for request in requests:
        given = request.arguments | {"max_new_tokens": 16} | options
        said.append(model.trace(**given, replace={stage: change(given)}).text)
    return _paired(requests, said)


def _asked_at(positions_of: Callable, kind: str, **options) -> list[Said]:
    """Ask a model four questions with its tokens at `positions_of(run)`; run: the trace with its own positions."""
    model = _tiny("qwen2_5_vl")

    def moved(given: dict) -> Callable:
        positions = positions_of(model.trace(**given))
        return lambda _: positions

    return _asked_with(model, requests_for(kind, 4, split="demo"), "positions", moved, **options)


def _ask_grid_positions(function: Callable) -> list[Said]:
    def positions_of(run: Any) -> Tensor:
        [span], positions = run.spans, run.positions.clone()
        tokens = slice(span.offset, span.offset + span.num_tokens)
        positions[:, tokens] = function(span.t, span.h, span.w, span.t_factor) + span.offset
        return positions

    return _asked_at(positions_of, "place")


@exercise(_ask_grid_positions)
def check_grid_positions(function: Callable) -> str:
    """`function(t, h, w, t_factor) -> (3, t*h*w)`: time (scaled, truncated), row and column of every merged token.

    - Three lists of t * h * w numbers: which changes slowest, which fastest?
    - torch.meshgrid of three ranges, flattened; ask for indexing="ij", or rows and columns are swapped.
    - Time is truncated after the multiplication: (torch.arange(t, dtype=torch.float64) * t_factor).long().
    """
    cases = [(1, 2, 3, 1.0), (1, 3, 2, 1.0), (3, 2, 2, 2.0), (4, 1, 2, 1.4), (5, 2, 1, 0.5)]
    return _run(function, grid_positions, _named("t={}, h={}, w={}, t_factor={}", cases))


@exercise()
def check_mrope_positions(function: Callable) -> str:
    """`function(num_tokens, spans) -> (positions (3, L), delta)`; the spans come in the order of the prompt.

    - Walk from span to span, and keep one number: the position of the next token.
    - Text advances by one on all three axes; an item gets its grid (`span.grid_positions()`) plus that number.
    - After an item, the number is its largest position on any axis + 1; delta = the largest position of all + 1 - L.
    """
    cases = {
        "text alone": (5, []),
        "a wide image": (12, [MediaSpan(2, 1, 2, 4)]),
        "a tall image": (12, [MediaSpan(2, 1, 4, 2)]),
        "a long video": (26, [MediaSpan(1, 6, 2, 2, 2.0)]),
        "an image and a video": (40, [MediaSpan(3, 1, 3, 2), MediaSpan(12, 5, 2, 2, 1.4)]),
        "an item at the end": (8, [MediaSpan(2, 1, 2, 3)]),
    }
    return _run(function, get_mrope_input_positions, cases, POSITIONS)


def rotate_by(axes: Tensor) -> Callable:
    """Return a forward hook of a rotary module, which rotates pair i by the positions of axis `axes[i]`."""

    def hook(module: torch.nn.Module, arguments: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        angles = arguments[1][axes].float() * module.inv_freq[:, None, None]  # (pairs, B, L)
        angles = angles.permute(1, 2, 0).repeat(1, 1, 2)
        return angles.cos().to(output[0].dtype), angles.sin().to(output[0].dtype)

    return hook


def _ask_mrope_axes(function: Callable) -> list[Said]:
    model, requests = _tiny("qwen3_vl"), requests_for("place", 4, split="demo")
    axes = function(model.language_model.config.rope_parameters["mrope_section"])
    runs = [model.trace(**request.arguments, max_new_tokens=1) for request in requests]
    with model.language_model.model.rotary_emb.register_forward_hook(rotate_by(axes)):
        said = model.answers(runs, max_new_tokens=16)
    return _paired(requests, said)


@exercise(_ask_mrope_axes)
def check_mrope_axes(function: Callable) -> str:
    """`function(section) -> (pairs,)`: 0, 1 or 2 for each rotary pair, interleaved.

    - Begin with every pair at t, then reassign pairs to h and to w.
    - h takes the pairs 1, 4, 7, ...; w takes 2, 5, 8, ...
    - h ends before 3 * section[1] and w before 3 * section[2]; all later pairs stay with t.
    """
    cases = _named("section={}", [([24, 20, 20],), ([11, 11, 10],), ([6, 5, 5],), ([4, 1, 2],), ([3, 0, 1],)])
    return _run(function, partial(mrope_axis_of_pairs, interleaved=True), cases)


@exercise()
def check_video_steps(function: Callable) -> str:
    """`function(timestamps, tokens) -> list` of texts, one for every two frames.

    - Two frames make a step. What happens to the last frame if their number is odd?
    - Repeat the last timestamp first; then zip(timestamps[::2], timestamps[1::2]) goes through the pairs.
    - f"<{(one + other) / 2:.1f} seconds><|vision_start|>" + tokens * "<|video_pad|>" + "<|vision_end|>"
    """

    def ours(timestamps: list[float], tokens: int) -> list[str]:
        step = f"<|vision_start|>{tokens * '<|video_pad|>'}<|vision_end|>"
        return [f"<{second:.1f} seconds>{step}" for second in seconds_of_steps(timestamps)]

    cases = [([0.0, 0.5, 1.0, 1.5], 2), ([0.0, 0.5, 1.0], 1), ([2.0], 1), ([8.0, 8.5, 3.0, 3.5, 29.0], 3)]
    return _run(function, ours, _named("timestamps={}, tokens={}", cases))


@exercise()
def check_retention_mask(function: Callable) -> str:
    """`function(video_embeds (M, D), merged_thw, q) -> (M,) bool`: True for the tokens of a video that EVS keeps.

    - Three steps: score every token, count how many are kept, and choose which.
    - The score is 1 - cosine with the token h * w rows earlier; max(h * w, int(t * h * w * (1 - q))) are kept.
    - Equal scores go to the earlier token: sort with stable=True, descending=True.
    """
    moving = torch.randn(4 * 6, 8, generator=torch.Generator().manual_seed(0))
    still = torch.eye(6).repeat(4, 1)  # unit vectors: their cosine is exactly 1, however it is computed
    cases = {
        "everything changes": (moving, (4, 2, 3), 0.5),
        "q = 0 keeps all": (moving, (4, 2, 3), 0.0),
        "the first frame is always kept": (moving, (4, 2, 3), 0.95),
        "nothing changes: ties go to the earlier token": (still, (4, 2, 3), 0.6),
        "one frame": (moving[:6], (1, 2, 3), 0.5),
    }
    return _run(function, lambda embeds, thw, q: compute_retention_mask(embeds, thw, 1, q), cases)


def _ask_restrict_positions(function: Callable) -> list[Said]:
    return _asked_at(lambda run: function(run.full_positions, run.keep)[0], "motion", pruning_rate=0.5)


@exercise(_ask_restrict_positions)
def check_restrict_positions(function: Callable) -> str:
    """`function(positions (3, L), keep (L,)) -> (positions (3, K), delta)`: the layout of a pruned prompt.

    - Which positions do the kept tokens have in the whole prompt? They keep these positions.
    - positions[:, keep] is the first result. With delta, the next token gets its position.
    - delta = the largest kept position + 1 - the number of kept tokens.
    """
    positions, _ = get_mrope_input_positions(30, [MediaSpan(3, 5, 2, 2, 2.0)])
    pruned = {
        "nothing pruned": [],
        "some tokens pruned": [8, 9, 13, 20],
        "only the first frame is kept": range(7, 23),
        "the prompt is cut inside the video": range(20, 30),
    }
    cases = {case: (positions, torch.tensor([i not in gone for i in range(30)])) for case, gone in pruned.items()}
    return _run(function, restrict_positions, cases, POSITIONS)


@exercise()
def check_count_tokens(function: Callable) -> str:
    """`function(height, width) -> int`: merged tokens of an image with the limits of `PatchConfig()`.

    - Count in blocks of 28 x 28 pixels, and check the area only after both sides are rounded.
    - Above max_pixels, both sides shrink by sqrt(max_pixels / (height * width)) and are rounded down, to at least 1.
    - Below min_pixels, they grow by sqrt(min_pixels / (height * width)) and are rounded up. Return rows * columns.
    """
    sizes = [(56, 56), (427, 640), (300, 451), (41, 43), (10, 1000), (2000, 3000), (14, 14)]
    cases = _named("tokens of {} x {} pixels (height x width)", sizes)
    return _run(function, partial(count_tokens, config=PatchConfig()), cases)


def _ask_merge_embeddings(function: Callable) -> list[Said]:
    """Ask about two images with the same prompt, whose words are looked up once."""
    model, runs = _circles(2)
    words = model.language_model.get_input_embeddings()(runs[0].input_ids).detach()
    changed = [replace(run, inputs_embeds=function(words, run.spans, run.embeds)) for run in runs]
    said = model.answers(changed, max_new_tokens=16)
    return [("What color is the circle?", text, run.text) for text, run in zip(said, runs, strict=True)]


@exercise(_ask_merge_embeddings)
def check_merge_embeddings(function: Callable) -> str:
    """`function(text_embeds (L, D), spans, media_embeds) -> (L, D)`; the given text embeddings must not change.

    - The function must not change its arguments.
    - Copy the text embeddings first, then write into the copy.
    - merged = text_embeds.clone(); span.offset and span.num_tokens define the rows that an item replaces.
    """
    spans_of = {
        "text alone": [],
        "one image": [MediaSpan(2, 1, 2, 2)],
        "two images": [MediaSpan(1, 1, 1, 2), MediaSpan(5, 1, 2, 2)],
        "the second item comes first": [MediaSpan(6, 1, 1, 3), MediaSpan(0, 2, 1, 1)],
    }
    cases = {}
    for case, spans in spans_of.items():
        media = [-torch.arange(1.0, 2 * span.num_tokens + 1).view(-1, 2) - 100 * i for i, span in enumerate(spans)]
        cases[case] = torch.arange(20.0).view(10, 2), spans, media
    return _run(function, merge_embeddings, cases, given="the text embeddings were")


def _ask_patch_rows(function: Callable) -> list[Said]:
    model = _tiny("qwen2_5_vl")
    config = model.processor.image_config
    numbered = torch.arange(2.0 * 3 * scenes.SIDE**2).view(2, 3, scenes.SIDE, scenes.SIDE)  # both frames of an image
    ours, theirs = (cut(numbered, config).flatten().long() for cut in (lambda *given: patch_rows(*given)[0], function))

    def cut_again(items: list) -> list[Tensor]:
        rows = items[0].pixel_values
        pixels = torch.empty(rows.numel(), dtype=rows.dtype)
        pixels[ours] = rows.flatten()
        return [pixels[theirs].view(rows.shape)]

    return _asked_with(model, requests_for("color", 8, split="demo"), "patchify", lambda _: cut_again)


@exercise(_ask_patch_rows)
def check_patch_rows(function: Callable) -> str:
    """`function(pixels (T, C, H, W), config) -> (N, C*Tp*P*P)` in merge-block order; T is a multiple of Tp.

    - The last axis of an image is its width: in a row of numbers, it changes fastest.
    - Split each axis: T into (t, Tp), H into (rows, m, P), W into (columns, m, P); then permute.
    - The order is t, block row, block column, row and column in the block, then channel, Tp, y, x.
    """
    cases = {
        "one block": ((2, 3, 28, 28), PatchConfig()),
        "one row of blocks": ((2, 3, 28, 84), PatchConfig()),
        "two rows of blocks": ((2, 3, 56, 84), PatchConfig()),
        "a video": ((4, 3, 56, 28), PatchConfig()),
        "small patches": ((6, 3, 24, 12), PatchConfig(patch_size=2, merge_size=3, temporal_patch_size=3)),
    }
    counted = {case: (torch.arange(float(prod(shape))).view(shape), config) for case, (shape, config) in cases.items()}
    return _run(function, lambda pixels, config: patch_rows(pixels, config)[0], counted)


@exercise()
def check_window_index(function: Callable) -> str:
    """`function(h, w, side) -> (h*w,)`: merged tokens of one frame in window order; sizes count merged tokens.

    - Number the tokens in reading order as (h, w), and cut windows out of that.
    - Windows go row by row, and so do the tokens inside each window; windows at the edge are smaller.
    - For top and left in steps of side: tokens[top : top + side, left : left + side].flatten().
    """

    def ours(h: int, w: int, side: int) -> Tensor:
        return get_window_index([(1, h, w)], window_size=side, patch_size=1, spatial_merge_size=1)[0]

    cases = [(2, 4, 2), (4, 4, 2), (2, 6, 4), (5, 7, 4), (8, 8, 4), (3, 3, 8)]
    return _run(function, ours, _named("h={}, w={}, side={}", cases))


@exercise()
def check_segment_attention(function: Callable) -> str:
    """`function(q, k, v, cu_seqlens) -> (N, H, K)`: every patch attends to its segment, as the tower's layers do.

    - Cut queries, keys and values at the borders, and attend within each part.
    - Scores are q @ k over the root of K, for each head; a softmax over the keys gives the weights of the values.
    - For each part: torch.einsum("qhk,nhk->hqn", q, k) / K**0.5, softmax(-1), einsum with v; then torch.cat.
    """
    cases = {}
    for case, borders in {
        "one segment": [0, 6],
        "two equal segments": [0, 4, 8],
        "four windows": [0, 16, 24, 32, 36],
        "segments of one patch": [0, 1, 2, 3],
    }.items():
        qkv = torch.randn(3, borders[-1], 2, 8, generator=torch.Generator().manual_seed(len(borders)))
        cases[case] = (*qkv, torch.tensor(borders, dtype=torch.int32))

    def ours(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        longest = int(cu_seqlens.diff().max())
        return varlen_attention(q, k, v, cu_seqlens, longest, backend="sdpa", groups=group_segments(cu_seqlens))

    return _run(function, ours, cases)


def _ask_rms_norm(function: Callable) -> list[Said]:
    """Return a copy of the tower in which each norm of each layer is the reader's function."""
    model = copy(_tiny("qwen2_5_vl"))
    model.encoder = deepcopy(model.encoder)
    for block in model.encoder.blocks:
        for norm in (block.norm1, block.norm2):
            norm.register_forward_hook(lambda module, given, _: function(given[0], module.weight, module.eps))
    requests = requests_for("color", 8, split="demo")
    return _asked(model, requests)


@exercise(_ask_rms_norm)
def check_rms_norm(function: Callable) -> str:
    """`function(x (N, D), weight (D,), eps) -> (N, D)`: each patch divided by the root of its mean square.

    - Each patch is divided by the root of its own mean square. What happens to the result?
    - Each number is multiplied by its weight, as it is in Qwen's files.
    - x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = 10 * torch.randn(5, 8, generator=generator), torch.rand(8, generator=generator)
    cases = {
        "one patch": (x[:1], weight, 1e-6),
        "five patches": (x, weight, 1e-6),
        "short patches": (x / 1e4, weight, 1e-6),
        "patches of zeros": (torch.zeros(2, 8), weight, 1e-6),
    }
    return _run(function, lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps), cases)


@exercise()
def check_read_table(function: Callable) -> str:
    """`function(table (S*S, D), h, w) -> (h*w, D)`: each patch's nearest place, in merge-block order (2 x 2).

    - Which cell of an S x S square does the centre of patch row i of h fall into?
    - int((i + 0.5) / h * S), and likewise for columns; row * S + column is the index in the table.
    - Then the order: (h, w) -> (h / 2, 2, w / 2, 2), with the two middle axes swapped.
    """

    def ours(table: Tensor, h: int, w: int) -> Tensor:
        return interpolate_position_table(table, [(1, h, w)], mode="nearest")

    generator = torch.Generator().manual_seed(0)
    sizes = {"a table's own size": (6, 6, 6), "wide": (6, 4, 10), "tall": (6, 12, 2), "a small table": (3, 8, 4)}
    cases = {
        f"{case}: table {side} x {side}, h={h}, w={w}": (torch.randn(side * side, 3, generator=generator), h, w)
        for case, (side, h, w) in sizes.items()
    }
    return _run(function, ours, cases)


def _ask_frame_sample(function: Callable) -> list[Said]:
    """Ask about videos of a minute at 30 frames a second: four of the sixty steps, with their timestamps."""
    model, asked, videos = _tiny("glm4v"), requests_for("change", 4, split="demo"), []
    _, seconds = function(30, 1800, 60.0)
    for request in asked:
        [clip] = request.arguments["videos"]
        told = tuple(30 * seconds[int(t)] + half for t in clip.timestamps[::2] for half in (0, 15))
        videos.append(Video(clip.frames, clip.fps, 30.0, told, 1800, 60.0))
    said = [model.chat(r.question.text, videos=[video]) for r, video in zip(asked, videos, strict=True)]
    return _paired(asked, said)


@exercise(_ask_frame_sample)
def check_frame_sample(function: Callable) -> str:
    """`function(fps, total, duration) -> (indices, timestamps)`, lists, as GLM-4.1V samples up to 300 s at 2 fps.

    - A timestamp belongs to a step of two frames, not to a frame.
    - Frames 0 and 1 are the first step, frames 2 and 3 the second: every other frame has the time of a step.
    - [int(index / fps) for index in indices[::2]]
    """

    def ours(fps: float, total: int, duration: float) -> tuple[list, list]:
        sample = sample_video_frames("glm4v", fps=fps, total_num_frames=total, duration=duration)
        return sample.indices, sample.timestamps

    clips = {
        "an even number of frames": (30, 120, 4.0),
        "an odd number": (30, 75, 2.5),
        "a rate that does not divide": (23.976, 240, 10.01),
        "fewer frames than asked for": (1.5, 8, 5.33),
        "under half a second": (30, 3, 0.1),
        "a late last frame": (10, 31, 4.0),
    }
    cases = {f"{case} (fps={c[0]}, total={c[1]}, duration={c[2]})": c for case, c in clips.items()}
    return _run(function, ours, cases, ("indices", "timestamps"))


def _ask_replay(function: Callable) -> list[Said]:
    model, runs = _circles(2)
    box, plan = runs[0].patches[0].pixel_values.clone(), model.encoder.plan(runs[0].layouts)
    graph = TraceGraph()
    output = graph.capture(lambda: model.encoder(box, metadata=plan))
    rows = [run.patches[0].pixel_values for run in runs]
    with torch.no_grad():  # as in the capture, whose outputs may be views
        return _asked_about_circles(model, runs, function(graph.operations, box, output, rows))


@exercise(_ask_replay)
def check_replay(function: Callable) -> str:
    """`function(operations, buffer, output, inputs) -> list`: the result of a recording for each input.

    - The recording reads the memory of `buffer` and writes to that of `output`. Which line here writes to either?
    - buffer.copy_(x); then call every operation again, and copy each result into that operation's output.
    - Treat a single result as a tuple of one. Keep output.clone(), because the next input overwrites `output`.
    """
    cases = {
        "two operations": lambda x: x * 2 + 1,
        "an operation with two results": lambda x: torch.add(*x.sort()),
        "an operation that works in place": lambda x: (x * 3).add_(x) * 2,
    }
    inputs = [torch.tensor([5.0, 4.0, 6.0]), torch.tensor([0.0, 9.0, 8.0])]
    for case, forward in cases.items():
        box, graph = torch.tensor([3.0, 1.0, 2.0]), TraceGraph()
        output = graph.capture(partial(forward, box))
        _check(case, function(graph.operations, box, output, deepcopy(inputs)), [forward(x) for x in inputs])
    return f"in {len(cases)} cases"


@exercise()
def check_crop_layout(function: Callable) -> str:
    """`function(width, height) -> (rows, columns)`: the crops of a Step3-VL image, (0, 0) without any.

    - Four steps: pad thin images, limit the long side, choose the window, count windows per side.
    - Below 728 px on the long side, there is a window only above a ratio of 1.5, and its side is the short side.
    - Per side: side // window, plus one if side / window - side // window > 0.2, and at least 1.
    """
    sizes = [
        (100, 100), (728, 728), (729, 729), (500, 300), (300, 450), (1024, 768), (1108, 504), (1109, 504),
        (1920, 1080), (4000, 3000), (800, 400), (300, 2000), (31, 124), (31, 200),
    ]  # fmt: skip
    return _run(function, lambda width, height: plan_crops(width, height).layout, _named(PICTURE, sizes))


@exercise()
def check_load_balance(function: Callable) -> str:
    """`function(sizes, num_gpus) -> (order, counts, loads)`: largest first, onto the least loaded rank.

    - sorted(range(n), key=lambda i: -sizes[i]) is stable: equal sizes keep their order.
    - Keep one list of items and one sum per rank; the next item goes to the rank with the smallest sum.
    - order is the concatenation of the ranks' lists, counts are their lengths, and loads are their sums.
    """
    cases = [
        ([1000, 100, 200, 50], 2),
        ([3, 3, 3, 3, 3], 3),
        ([7, 1, 6, 2, 5, 3, 4], 3),
        ([5], 4),
        ([], 2),
        ([1, 1, 1, 1, 1, 100], 2),
    ]
    named = _named("sizes={}, num_gpus={}", cases)
    return _run(function, get_load_balance_assignment, named, ("order", "counts", "loads"))


def _ask_restore_order(function: Callable) -> list[Said]:
    """Ask about three images on two ranks, whose order is 0, 2, 1."""
    model, runs = _circles(3)
    first, second, third = (run.embeds[0] for run in runs)
    gathered = torch.cat([first, third, second, torch.zeros_like(second)])
    order, counts, _ = get_load_balance_assignment(tokens := [len(first), len(second), len(third)], 2)
    return _asked_about_circles(model, runs, function(gathered, tokens, order, counts))


@exercise(_ask_restore_order)
def check_restore_order(function: Callable) -> str:
    """`function(gathered (ranks * longest, D), tokens, order, counts)`: a list of (tokens, D) in the caller's order.

    - `order` contains the item of each piece, in the order of the pieces.
    - Every rank has len(gathered) / len(counts) rows; only the first rows, as many as its items have tokens, are real.
    - Store piece k at embeds[order[k]], and return embeds in the order 0, 1, 2, ...
    """
    cases = [([2, 5, 1, 3], 2), ([5, 4, 2], 2), ([4, 4, 4], 3), ([6, 1], 4), ([3], 1)]
    named: dict[str, Sequence] = {}
    for tokens, num_gpus in cases:
        order, counts, loads = get_load_balance_assignment(tokens, num_gpus)
        ends, gathered = torch.tensor(counts).cumsum(0).tolist(), torch.full((num_gpus * max(loads), 1), torch.nan)
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True)):  # row k of item i holds i + k / 10
            rows = [i + k / 10 for i in order[end - count : end] for k in range(tokens[i])]
            gathered[rank * max(loads) : rank * max(loads) + len(rows), 0] = torch.tensor(rows)
        named[f"tokens={tokens} on {num_gpus} ranks"] = gathered, tokens, order, counts
    return _run(function, restore_order, named)


@exercise()
def check_cache_bytes(function: Callable) -> str:
    """`function(config, dtype) -> bytes`: keys and values of all layers for one token; head_dim may be None.

    - There is a key and a value per layer and per key-value head.
    - If head_dim is missing or None, it is hidden_size // num_attention_heads.
    - 2 * layers * key-value heads * head_dim * torch.finfo(dtype).bits // 8.
    """
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim", "hidden_size", "num_attention_heads")
    values = [(28, 4, None, 3584, 28), (40, 2, 128, 4096, 32), (61, 1, 256, 7168, 64), (1, 1, None, 64, 4)]
    configs = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in values]
    cases = [(config, dtype) for config in configs for dtype in (torch.bfloat16, torch.float32)]
    return _run(function, kv_cache_bytes_per_token, _named("{}, {}", cases))


@exercise()
def check_slice_grid(function: Callable) -> str:
    """`function(width, height) -> (columns, rows)`, or None without slices: MiniCPM-V, 448 px, at most 9.

    - How many slices? Divide the area by 448 x 448 px and round up, to at most nine. If that is one: None.
    - Try that number, one less and one more (2 to 9), and all ways to write each as columns * rows.
    - In the best grid, columns / rows is nearest to width / height, compared as logarithms.
    """
    sizes = [
        (448, 448), (300, 600), (449, 448), (640, 480), (480, 640), (800, 300), (1280, 720), (1920, 1080), (1080, 1920),
        (4000, 3000), (4000, 400), (200, 3000), (1000, 1000),
    ]  # fmt: skip
    return _run(function, partial(slice_grid, config=SliceConfig()), _named(PICTURE, sizes))


@exercise()
def check_read_sets(function: Callable) -> str:
    """`function(q (Q, H, K), k (N, H, K), v (N, H, K), patches_per_set) -> (sets * Q, H, K)`: the same queries read
    the patches of each set, which are concatenated.

    - The same queries read every set, so there is one result per set, one after another.
    - k.split(patches_per_set) gives the keys of each set, and likewise the values.
    - softmax(q k / sqrt(K)) over the patches of the set, then its product with the values, head by head.
    """

    def ours(q: Tensor, k: Tensor, v: Tensor, patches: list[int]) -> Tensor:
        cu_k = torch.tensor([0, *patches]).cumsum(0)
        cu_q = 5 * torch.arange(len(patches) + 1)
        groups = group_segment_pairs(cu_q, cu_k)
        return attend(q.repeat(len(patches), 1, 1), k, v, cu_q, cu_k, 5, max(patches), "sdpa", groups)

    generator = torch.Generator().manual_seed(0)
    sets = {"one slice": [6], "two slices": [4, 6], "a packed set and a short one": [12, 4], "sets alike": [3, 3, 3]}
    cases: dict[str, Any] = {
        f"{case}, patches_per_set={patches}": (
            *(torch.randn(n, 2, 8, generator=generator) for n in (5, sum(patches), sum(patches))), patches
        )
        for case, patches in sets.items()
    }  # fmt: skip
    return _run(function, ours, cases)


def _ask_run_batches(function: Callable) -> list[Said]:
    """Ask about three images in two batches, the third first; the graph returns the embeddings that it receives."""
    model, runs = _circles(3)
    batches = [Batch((2, 0), 27), Batch((1,), 18)]
    return _asked_about_circles(model, runs, function(lambda rows: rows, [run.embeds[0] for run in runs], batches))


@exercise(_ask_run_batches)
def check_run_batches(function: Callable) -> str:
    """`function(replay, items, batches) -> list`: the result for each item, in the order of arrival.

    - A graph of 8 accepts exactly 8 rows. What do you add to a batch of 5?
    - A batch's `indices` are its items, in the order of its rows. Store each result under its index.
    - Each replay writes to the same memory: clone, cut the padding off, split, and sort by index.
    """
    cases = {
        "one batch that is full": ([3, 5], [Batch((0, 1), 8)]),
        "one with padding": ([3, 2], [Batch((0, 1), 8)]),
        "smallest first": ([6, 2, 3], [Batch((1, 2), 8), Batch((0,), 8)]),
        "two graphs": ([1, 7, 2], [Batch((0, 2), 4), Batch((1,), 8)]),
        "none": ([], []),
    }
    for case, (sizes, batches) in cases.items():
        memory = {batch.budget: torch.zeros(batch.budget, 1) for batch in batches}
        budgets = iter([batch.budget for batch in batches])

        def replay(rows: Tensor, case=case, memory=memory, budgets=budgets) -> Tensor:
            budget = next(budgets)
            _check(f"{case}: number of rows for the graph of {budget}", len(rows), budget)
            return memory[budget].copy_(10 * rows + 1)

        items = [torch.arange(n)[:, None] + 100.0 * (i + 1) for i, n in enumerate(sizes)]
        _check(case, function(replay, deepcopy(items), batches), [10 * item + 1 for item in items])
    return f"in {len(cases)} cases"


def _ask_join_order(function: Callable) -> list[Said]:
    """Ask about two pages in one batch, each with 16 crops and an overview."""
    model, drawn = _tiny("step3"), [pages.draw_page("demo", i) for i in range(2)]
    runs = [[model.trace(f"Where is the {box.color} box?", images=[pages.render(page)]) for box in page.boxes]
            for page in drawn]  # fmt: skip
    [layout] = runs[0][0].layouts
    config, both = model.encoder.config, [layout, layout]
    plan = replace(
        model.encoder.plan(both), order=function([layout.crops] * 2, config.crop_tokens, config.image_tokens)
    )
    with torch.inference_mode():
        rows = model.encoder(torch.cat([page[0].patches[0].pixel_values for page in runs]), metadata=plan)
    changed, truths = [], [box.place for page in drawn for box in page.boxes]
    for page, embeds in zip(runs, rows.chunk(2), strict=True):
        for run in page:
            pieces = embeds.split([span.num_tokens for span in run.spans])
            changed.append(replace(run, inputs_embeds=merge_embeddings(run.inputs_embeds, run.spans, pieces)))
    questions = [f"Where is the {box.color} box?" for page in drawn for box in page.boxes]
    said = model.answers(changed, max_new_tokens=16)
    return list(zip(questions, said, truths, strict=True))


@exercise(_ask_join_order)
def check_join_order(function: Callable) -> str:
    """`function(counts, crop_tokens, image_tokens) -> (M,)` int64: for each row of the result, image by image, crops
    before the overview, where it is in a tensor with all crops first.

    - With one image, nothing has to move. With two, what has to be between their crops?
    - Number the rows as they come: the crops of image 0, of image 1, ..., then the overviews, 0, 1, ...
    - Image i takes the next counts[i] * crop_tokens rows of the first kind, then the next image_tokens of the second.
    """

    def ours(counts: list[int], crop_tokens: int, image_tokens: int) -> Tensor:
        crops = torch.arange(sum(counts) * crop_tokens).split([n * crop_tokens for n in counts])
        overviews = sum(counts) * crop_tokens + torch.arange(len(counts) * image_tokens).view(len(counts), image_tokens)
        return torch.cat([part for pair in zip(crops, overviews, strict=True) for part in pair])

    cases = [([6], 81, 169), ([1, 2], 1, 2), ([0, 2], 1, 4), ([2, 0, 3], 2, 3)]
    return _run(function, ours, _named("counts={}, crop_tokens={}, image_tokens={}", cases))


def _ask_slice_boxes(function: Callable) -> list[Said]:
    model = _tiny("minicpmv-4_5")
    config = model.processor.image_config

    def cut_again(given: dict) -> Callable:
        image = load_image(given["images"][0])
        plan = plan_slices(*image.size, config)
        (columns, rows), (width, height) = plan.grid, plan.cell
        enlarged = image.resize((columns * width, rows * height), Image.Resampling.BICUBIC)
        overview = image.resize(plan.overview, Image.Resampling.BICUBIC)
        parts = [overview, *(enlarged.crop(box) for box in function(columns, rows, width, height))]
        pixels = [torch.from_numpy(np.array(part)).permute(2, 0, 1) for part in parts]
        cut = torch.cat([slice_rows(part, plan.patch_size) for part in pixels])
        normalized = Levels(cut.unflatten(1, (3, 1, -1)), level_table(config)).normalize()
        return lambda _: [normalized]

    return _asked_with(model, requests_for("place", 4, split="demo"), "patchify", cut_again)


@exercise(_ask_slice_boxes)
def check_slice_boxes(function: Callable) -> str:
    """`function(columns, rows, width, height) -> list` of (left, top, right, bottom), row by row; sizes of a slice.

    - Read the slices as you read a page: does the row or the column change faster?
    - Pillow's boxes begin with x, and x grows with the column.
    - for r in range(rows), for c in range(columns): (c * width, r * height, (c + 1) * width, (r + 1) * height).
    """
    cases = {
        (2, 1, 4, 3): [(0, 0, 4, 3), (4, 0, 8, 3)],
        (2, 2, 4, 3): [(0, 0, 4, 3), (4, 0, 8, 3), (0, 3, 4, 6), (4, 3, 8, 6)],
        (1, 3, 2, 2): [(0, 0, 2, 2), (0, 2, 2, 4), (0, 4, 2, 6)],
    }
    named = _named("columns={}, rows={}, width={}, height={}", cases)
    return _run(function, lambda *case: cases[case], named)


def _ask_rgb_frame(function: Callable) -> list[Said]:
    model, requests = _tiny("qwen2_5_vl"), requests_for("color", 8, split="demo")
    asked = [(r.question, np.asarray(r.arguments["images"][0])) for r in requests]
    said = [model.chat(question.text, images=[function(frame[..., ::-1].copy())]) for question, frame in asked]
    return [(question.text, text, question.answer) for text, (question, _) in zip(said, asked, strict=True)]


@exercise(_ask_rgb_frame)
def check_rgb_frame(function: Callable) -> str:
    """`function(frame (H, W, 3) uint8, blue first) -> (H, W, 3) uint8, red first`; the given frame must not change.

    - A red object is called blue: which axis of the array is reversed?
    - OpenCV's frames are (H, W, 3) with the channels blue, green, red. Height and width are correct.
    - frame[..., ::-1] is a view with a negative stride, which torch rejects: copy it.
    """
    sizes = {"a pixel": (1, 1), "a frame": (2, 3), "a square": (3, 3)}
    frames = {case: np.arange(h * w * 3, dtype=np.uint8).reshape(h, w, 3) for case, (h, w) in sizes.items()}
    return _run(
        lambda frame: torch.as_tensor(function(frame)),
        lambda frame: torch.tensor(frame[..., ::-1].copy()),
        {case: (frame,) for case, frame in frames.items()},
        given="the frame was",
    )


@exercise()
def check_exponent(function: Callable) -> str:
    """`function(sizes, seconds) -> float`: the slope through the four largest sizes, on logarithmic axes.

    - A power law is a straight line on logarithmic axes, and its exponent is the slope.
    - Small sizes pay a fixed cost, which bends the line: use only the four largest.
    - Fit by least squares, with x = log(size) and y = log(seconds): sum((x - mean x) * y) / sum((x - mean x)^2).
    """

    def ours(sizes: list[float], seconds: list[float]) -> Tensor:
        x, y = (torch.tensor(values[-4:], dtype=torch.float64).log() for values in (sizes, seconds))
        return ((x - x.mean()) * y).sum() / (x - x.mean()).square().sum()

    sizes = [64, 256, 1024, 4096, 16384]
    cases: dict[str, Sequence] = {
        "linear": (sizes, [n / 1e6 for n in sizes]),
        "quadratic": (sizes[:4], [(n / 1e4) ** 2 for n in sizes[:4]]),
        "linear behind a fixed cost": (sizes, [1e-3 + n / 1e6 for n in sizes]),
        "linear, and in the end quadratic": (sizes, [n / 1e6 + (n / 1e5) ** 2 for n in sizes]),
        "with noise": (
            sizes,
            [n**1.5 / 1e6 * factor for n, factor in zip(sizes, (9, 1.1, 0.9, 1.2, 1.0), strict=True)],
        ),
    }
    return _run(_as_number(function), ours, cases)


@exercise()
def check_times_as_fast(function: Callable) -> str:
    """`function(theirs, ours) -> float`: seconds of rounds, the first a warm-up; how many times as fast ours is.

    - The first round is a warm-up: leave it out on both sides.
    - A disturbance slows both programs in a round: divide within each round first.
    - The median of theirs / ours over the remaining rounds.
    """

    def ratio(theirs: list[float], ours: list[float]) -> Tensor:
        return torch.tensor(statistics.median(a / b for a, b in zip(theirs[1:], ours[1:], strict=True)))

    cases: dict[str, Sequence] = {
        "a quiet machine": ([9.0, 2.0, 2.0, 2.0], [3.0, 1.0, 1.0, 1.0]),
        "a slow warm-up": ([50.0, 3.0, 3.0, 3.3], [1.0, 2.0, 2.0, 2.2]),
        "one slow moment": ([1.0, 2.0, 2.0, 2.0, 40.0, 2.0], [1.0, 1.0, 1.0, 1.0, 20.0, 1.0]),
        "it meets one side": ([1.0, 3.0, 3.0, 3.0, 3.0, 3.0], [1.0, 2.0, 2.0, 30.0, 2.0, 2.0]),
        "rounds unlike each other": ([9.0, 10.0, 2.0, 10.0, 10.0], [9.0, 10.0, 1.0, 5.0, 20.0]),
        "busier all the time": ([1.0, 1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 0.8, 1.6, 3.2, 6.4, 12.8]),
    }
    return _run(_as_number(function), ratio, cases)


def _as_number(function: Callable) -> Callable:
    """Return the function's number as a tensor, because tensors are compared up to rounding."""
    return lambda *arguments: torch.tensor(float(function(*arguments)))


def _ask_merged_weight(function: Callable) -> list[Said]:
    """Ask a model with an adapter merged into its head, which swaps the words red and blue."""
    model = _tiny("qwen2_5_vl")
    head = model.language_model.lm_head
    weight = head.weight.detach().clone()
    [red], [blue] = (model.processor.tokenizer.encode(word, add_special_tokens=False) for word in ("red", "blue"))
    a, b = torch.zeros(2, weight.shape[1]), torch.zeros(len(weight), 2)
    a[0], b[red, 0], b[blue, 0] = (weight[blue] - weight[red]) / 4, 1, -1
    asked = [r for r in requests_for("color", 40, split="demo") if r.question.answer in ("red", "blue")][:6]
    other = {"red": "blue", "blue": "red"}
    try:
        with torch.no_grad():
            head.weight.copy_(function(weight.clone(), a, b, 8, 2))
        said = model.chat_batch([r.arguments for r in asked], max_new_tokens=16, progress=False)
    finally:
        with torch.no_grad():
            head.weight.copy_(weight)
    return [(r.question.text, text, other[r.question.answer]) for r, text in zip(asked, said, strict=True)]


@exercise(_ask_merged_weight)
def check_merged_weight(function: Callable) -> str:
    """`function(weight (m, n), a (r, n), b (m, r), lora_alpha, rank) -> (m, n)`: the weight after PEFT's merge.

    - The product of the two narrow matrices is as large as the weight: which of them comes first?
    - B is (m, r) and A is (r, n): B @ A is (m, n). And lora_alpha sets the strength, whatever the rank.
    - weight + lora_alpha / rank * b @ a
    """
    generator = torch.Generator().manual_seed(0)
    cases: dict[str, Any] = {}
    for m, n, rank, lora_alpha in [(3, 3, 1, 1), (4, 6, 2, 8), (6, 4, 4, 2)]:
        shapes = ((m, n), (rank, n), (m, rank))
        weight, a, b = (torch.randint(-3, 4, shape, generator=generator).float() for shape in shapes)
        cases[f"{m} x {n}, lora_alpha={lora_alpha}, rank={rank}"] = weight, a, b, lora_alpha, rank
    return _run(function, lambda weight, a, b, lora_alpha, rank: weight + (b @ a) * (lora_alpha / rank), cases)


@exercise()
def check_adapter_name(function: Callable) -> str:
    """`function(old) -> new`: a layer of a Qwen or GLM model as transformers calls it since 4.52.

    - `model.layers` and `model.visual` both begin with `model.`: look at the part after it.
    - Three cases: `visual.` gets the prefix `model.`; `model.` becomes `model.language_model.`; the rest stays.
    - Check for `model.visual.` and `model.language_model.` before you replace `model.`, and replace it only once.
    """
    layers = ("layers.0.self_attn.q_proj", "blocks.3.attn.qkv", "merger.mlp.0")
    text, tower, connector = (
        [f"model.{layers[0]}", f"model.language_model.{layers[0]}"],
        [f"visual.{layers[1]}", f"model.visual.{layers[1]}"],
        [f"visual.{layers[2]}", f"model.visual.{layers[2]}"],
    )
    return _run(function, GRIDS.rename, _named("{!r}", [(name,) for name in (*text, *tower, *connector, "lm_head")]))


def circles(first: int, count: int) -> tuple[list[np.ndarray], list[str]]:
    """Return `count` scenes with one circle, from scene `first` on, all of one size; and the circles' colours."""
    images, colors, index = list[np.ndarray](), list[str](), first
    while len(images) < count:
        scene = scenes.draw_scene("demo", index)
        found = [thing.color for thing in scene.things if thing.shape == "circle"]
        if len(found) == 1:
            images, colors = [*images, scenes.render(scene)], [*colors, *found]
        index += 1
    return images, colors


def serve(
    images: Sequence[np.ndarray],
    requests: Iterable[tuple[refvl.VLM, list[int]]],
    keys_of: Callable[[refvl.VLM, list], list],
    *,
    view: bool = False,
) -> list[str]:
    """Ask for the circle's colour, once for each model and indices of images in `requests`, with a dict as the cache.

    keys_of: the model and the request's patches -> a key for each image. view: the tower writes all embeddings into one
    buffer, and the cache stores views of it.
    """
    kept, answers = dict[Any, Tensor](), list[str]()
    for model, indices in requests:
        arguments = {"prompt": "What color is the circle?", "images": [images[i] for i in indices]}
        patches = model.trace(**arguments, max_new_tokens=1).patches
        keys = keys_of(model, patches)

        def look_up(made: list[Tensor], keys: list = keys) -> list[Tensor]:
            for key, embeds in zip(keys, made, strict=True):
                if key not in kept:
                    memory = next(iter(kept.values())) if view and kept else torch.empty_like(embeds)
                    kept[key] = memory.copy_(embeds)
            return [kept[key] for key in keys]

        answers.append(model.trace(**arguments, max_new_tokens=8, replace={"embeds": look_up}).text)
    return answers


def _ask_embeddings(function: Callable) -> list[Said]:
    """Ask about two scenes of one size, then about the first again; the tower writes into one buffer."""
    model, runs = _circles(2)
    kept, buffer = {}, torch.empty_like(runs[0].embeds[0])
    pixels = [torch.from_numpy(np.array(run.media[0])) for run in runs]

    def encode(image: Tensor) -> Tensor:
        return buffer.copy_(runs[next(i for i, other in enumerate(pixels) if image.equal(other))].embeds[0])

    asked = [0, 1, 0]
    ids = [runs[i].full_ids.tolist() for i in asked]
    embeds = [function(kept, ids[n], [pixels[i].clone()], "2 billion", encode)[0].clone() for n, i in enumerate(asked)]
    return _asked_about_circles(model, [runs[i] for i in asked], embeds)


def _embedded(image: Tensor, weights: str) -> Tensor:
    """Return (14,) numbers in place of a tower's embedding of an image of twelve values."""
    return torch.tensor([float(weights), len(image), *image.flatten().tolist()])


@exercise(_ask_embeddings)
def check_embeddings(function: Callable) -> str:
    """`function(kept, ids, images, weights, encode)`: the embeddings of each image; no image is encoded twice.

    - All five bugs of part 2 are in these four lines. What do two requests have in common that they should not share?
    - Each image needs a key of its own: SHA-256, not cut, over its shape, its values and the weights. What `encode`
      returns changes with its next call, so keep a clone.
    - for image in images: hashlib.sha256(repr((image.shape, weights)).encode() + image.numpy().tobytes()).digest()
    """
    a, b = (torch.arange(12, dtype=torch.uint8).view(2, 2, 3) + i for i in (0, 100))
    cases = {  # requests: images, weights
        "token ids alone": [([a], "1"), ([b], "1")],
        "a view of the buffer": [([a], "1"), ([b], "1"), ([a], "1")],
        "one key per request": [([a, b], "1"), ([b], "1")],
        "no model in the key": [([a], "1"), ([a], "2")],
        "no shape in the key": [([a], "1"), ([a.reshape(1, 4, 3)], "1")],
        "a hash cut short": [([a * (1 + i // 100) + i % 100], "1") for i in range(300)],
    }
    for case, requests in cases.items():
        kept, buffer, encoded, seen = {}, torch.zeros(14), list[str](), set[str]()

        def encode(image: Tensor) -> Tensor:
            encoded.append(repr(image.tolist()))  # noqa: B023 (called in the same round)
            return buffer.copy_(_embedded(image, weights))  # noqa: B023

        for images, weights in requests:
            got = function(kept, [7] * 9 * len(images), [image.clone() for image in images], weights, encode)
            _check(case, got, [_embedded(image, weights) for image in images])
            seen |= {repr((image.tolist(), weights)) for image in images}
        if len(encoded) > len(seen):
            raise Wrong(f"{case}: encoded {len(encoded)} times, should be {len(seen)}")
        if short := [key for key in kept if isinstance(key, int) or (isinstance(key, bytes | str) and len(key) < 16)]:
            raise Wrong(f"a hash cut short: a key is {short[0]!r}, should have 16 bytes at least")
    return f"in {len(cases)} cases"


def _ask_max_pixels(function: Callable) -> list[Said]:
    """Ask about scenes of 84 x 84 px; the pixel limit is the result of the reader's function for nine tokens."""
    folder, requests = DATA / "checkpoints/tiny-qwen2_5_vl", requests_for("color", 6, split="demo")
    model = refvl.load(folder, device="cpu", progress=False)
    config = model.processor.image_config
    most = function(9, config.patch_size, config.merge_size)
    set_pixel_limits(model.processor, min_pixels=min(most, config.min_pixels), max_pixels=most)
    return _asked(model, requests)


@exercise(_ask_max_pixels)
def check_max_pixels(function: Callable) -> str:
    """`function(tokens, patch_size, merge_size) -> int`: the area in pixels that so many tokens cover.

    - A patch is a square of patch_size px. How many patches become one token?
    - A token is a block of merge_size x merge_size patches.
    - tokens * (patch_size * merge_size) ** 2
    """
    cases = _named("tokens={}, patch_size={}, merge_size={}", [(9, 14, 2), (1280, 14, 2), (1280, 16, 2), (64, 14, 4)])
    return _run(function, lambda tokens, patch, merge: tokens * (patch * merge) ** 2, cases)


def split_thought(text: str) -> tuple[str, str]:
    """Split a thinking model's text into (thought, answer), without tags."""
    thought, closed, answer = text.rpartition("</think>")
    if not closed:
        thought, answer = (text, "") if text.lstrip().startswith("<think>") else ("", text)
    answer = answer.replace("<answer>", "").replace("</answer>", "")
    return thought.strip().removeprefix("<think>").strip(), answer.strip()


@exercise()
def check_split_thought(function: Callable) -> str:
    """`function(text) -> (thought, answer)`, both without tags and stripped.

    - The text before the last </think> is the thought; the text after it is the answer.
    - str.rpartition returns three parts; the middle part is empty if the tag is missing.
    - Without </think>, all is thought if the text starts with <think>, else answer. Then remove the tags, and strip.
    """
    cases = {
        "both tags": ("<think>\nA cup.\n</think>\n\nIt is a cup.",),
        "the template opened it": ("A cup.</think>It is a cup.",),
        "with <answer>": ("<think>A cup.</think><answer>It is a cup.</answer>",),
        "the budget ran out": ("<think>A cup, or perhaps",),
        "no thought": (" It is a cup.",),
    }
    return _run(function, split_thought, cases, ("thought", "answer"))
