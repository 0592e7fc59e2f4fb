"""Nine functions that a reader writes, and that a trained model then answers with; nothing is trained again.

    track.check(window_index)               right, or the first difference, on named and 200 random cases
    track.run(window_index, predicted=...)  a scoreboard: the model with yours, with the library's, by chance
    track.run("window_index", mistake=...)  the same with somebody's mistake
    track.finish()                          the last moment: are all answers the library's?

mine.py has the nine tasks and keeps what is right: `check` writes it there, so that later notebooks run with it. A
function that is not written yet is the library's. tasks.toml has the hints and the planted mistakes.
"""

import html
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib import reload
from typing import Any

import mine
import numpy as np
import solutions
import torch
from cases import LIBRARY, PARTS, cases, with_buffers
from checking import DONE, NOTEBOOKS, TooLong, Verdict, Wrong, compare, is_stub, judge, limited, record
from exercises import DEVICE, picture_tag

import refvl
from data.training import relations, scenes
from data.training.evaluate_tiny import requests_for
from refvl.paths import DATA, write_whole
from refvl.pipeline import Request
from refvl.pixels.media import Video

TASKS = tomllib.loads((NOTEBOOKS / "tasks.toml").read_text(encoding="utf-8"))
NAMES = tuple(LIBRARY)  # in the order of the path
KINDS = {  # the questions that need a function, by data/measurements/ablations.json, and one that does not
    "target_size": ("color, other sizes",),
    "patch_rows": ("color", "neighbour", "motion, five frames"),
    "window_index": ("window", "place", "color"),
    "rotate": ("neighbour", "window", "color"),
    "attend": ("window", "neighbour", "color"),
    "fold": ("shape", "place", "neighbour"),
    "mrope": ("place", "motion", "color"),
    "evs": ("motion",),
    "replay": ("color, other sizes", "place", "window"),
}
CHANCE = {"color": 1 / 6, "shape": 1 / 5, "place": 1 / 9, "motion": 1 / 4, "neighbour": 1 / 4, "window": 1 / 4}
RATE = 0.5  # of EVS, in the questions of `evs`
FIRST = 5000  # the first scene that is asked about; the model was trained on another split
SCENE = {"middle left": "red circle", "center": "blue star", "top right": "green cross"}  # until the reader draws one
GREEN, RED, GREY = "#1b7837", "#b2182b", "#777"


# ------------------------------------------------------------------------------------------------------- the functions


def written() -> dict[str, Callable]:
    """Return the functions of mine.py that are not stubs any more."""
    return {name: getattr(mine, name) for name in NAMES if not is_stub(getattr(mine, name))}


@cache
def mistake(name: str, planted: str) -> Callable:
    """Return the right version of a function with one mistake in it."""
    source = inspect.getsource(getattr(solutions, name))
    for old, new in TASKS[name]["mistakes"][planted]["edits"]:
        if old not in source:
            raise ValueError(f"{name}, {planted}: not in solutions.py: {old}")
        source = source.replace(old, new)
    space = dict(vars(solutions))
    exec(source, space)
    return space[name]


def check(function: Callable, count: int = 200) -> Verdict:
    """Compare a function with what is expected; keep it in mine.py if it is right, and name a known mistake."""
    name = function.__name__
    if name not in NAMES:
        raise ValueError(f"check: expected a function named {', '.join(NAMES)}, got {name!r}")
    shown = {"hints": tuple(TASKS[name]["hints"]), "task": inspect.getdoc(getattr(mine, name))}
    verdict = _judged(name, function, count, **shown)
    if verdict.status == "wrong" and (known := _known(name, function)):
        verdict = replace(verdict, line=f"{verdict.line}. On every case, it does what this mistake does: {known}")
    if verdict.status == "right" and function is not getattr(mine, name):
        verdict = replace(verdict, line=f"{verdict.line}; {_keep(name, function)}")
    return record(name, verdict)


def _judged(name: str, function: Callable, count: int, **shown: Any) -> Verdict:
    call = with_buffers(function) if name == "replay" and not is_stub(function) else function
    return judge(call, cases(name, count), PARTS.get(name, ()), **shown)


def _known(name: str, function: Callable) -> str:
    """Return the planted mistake with whose results the function agrees on 50 random cases, if there is one."""
    for planted in TASKS[name]["mistakes"]:
        other = mistake(name, planted)
        try:
            pairs = ((label, arguments, other(*arguments)) for label, arguments, _ in cases(name, 50))
            if name != "replay" and judge(function, pairs, PARTS.get(name, ())).status == "right":
                return planted
        except Exception:
            continue
    return ""


def _keep(name: str, function: Callable) -> str:
    """Write a right function into mine.py, where it has to work with the names of that file; say what became of it."""
    path = NOTEBOOKS / "mine.py"
    try:
        body = textwrap.dedent(inspect.getsource(function)).split(":\n", 1)[1]
        stub = inspect.getsource(getattr(mine, name))
        text = path.read_text(encoding="utf-8")
        new = text.replace(stub, f"{stub[: stub.rindex('    ...')]}{body.rstrip()}\n") if stub in text else text
        space: dict[str, Any] = {}
        exec(compile(new, "mine.py", "exec"), space)
        if _judged(name, space[name], 20).status != "right":
            return "mine.py does not keep it, because it uses names from outside: put them into the function"
        write_whole(path, new.encode())
        reload(mine)
    except (OSError, ValueError, IndexError, SyntaxError):
        return "it could not be written into mine.py"
    return "mine.py keeps it"


# ----------------------------------------------------------------------------------------------------------- the model


@cache
def _model(graphs: bool) -> refvl.VLM:
    folder = DATA / "checkpoints/tiny-qwen2_5_vl"
    return refvl.load(folder, device=DEVICE, progress=False, graphs={"budgets": [16, 64]} if graphs else None)


@torch.inference_mode()
def answers(model: refvl.VLM, asked: Sequence[dict], rate: float = 0.0) -> list[tuple[str, list[int]]]:
    """Return the text and the token ids of each answer; all are decoded together."""
    text = model.language_model
    read = [model.read(Request(**a, pruning_rate=rate if "videos" in a else 0.0)) for a in asked]
    end = text.generation_config.eos_token_id
    ends = set(end) if isinstance(end, list) else {end}
    rows = model.decode(read, 16).sequences.tolist()
    rows = [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in rows]
    return [(model.processor.text(row), row) for row in rows]


@cache
def questions(kind: str, count: int, first: int = FIRST) -> list:
    """Return held-out questions of a kind."""
    base, _, how = kind.partition(", ")
    found = requests_for(kind if how == "other sizes" else base, count, split="test", first=first)
    return [replace(r, arguments=CHANGES[how](r.arguments)) for r in found] if how in CHANGES else found


def _video(change: Callable[[np.ndarray], np.ndarray], fps: float = 2.0) -> Callable[[dict], dict]:
    return lambda a: a | {"videos": [Video(change(np.asarray(video)), fps) for video in a["videos"]]}


CHANGES = {"five frames": _video(lambda frames: frames[:5])}


@cache
def _library(kind: str, count: int, rate: float) -> list[tuple[str, list[int]]]:
    return answers(_model(False), [r.arguments for r in questions(kind, count)], rate)
