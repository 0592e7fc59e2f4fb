"""Nine functions for the reader to write, and a trained model that answers with them; nothing is
retrained.

    track.check(window_index)               correct, or the first difference, on named and 200 random cases
    track.run(window_index, predicted=...)  a scoreboard: correct answers with yours, with the library's, by chance
    track.run("window_index", mistake=...)  the same with a planted mistake
    track.finish()                          the end: do all answers equal the library's?

mine.py contains the nine tasks. `check` writes each correct function into that file, so later notebooks run with it.
If a function is not written yet, the library's runs. tasks.toml contains the hints and the planted mistakes.
"""

import ast
import contextlib
import html
import inspect
import json
import linecache
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

import checking
import mine
import solutions
import torch
from cases import LIBRARY, PARTS, cases, with_buffers
from checking import DEVICE, DONE, NOTEBOOKS, Board, Picture, Row, Verdict, is_stub, judge

import refvl
from data.training import relations, scenes
from data.training.evaluate_tiny import requests_for
from refvl.paths import DATA, write_whole
from refvl.pipeline import Request

TASKS = tomllib.loads((NOTEBOOKS / "tasks.toml").read_text(encoding="utf-8"))
NAMES = tuple(LIBRARY)  # in the order of the path
KINDS = {  # kinds of questions that need a function (see data/measurements/ablations.json), and one that does not
    "target_size": ("color, other sizes",),
    "patch_rows": ("color", "neighbour", "motion, five frames"),
    "window_index": ("window", "place", "color", "color, after another image"),
    "rotate": ("neighbour", "window", "color", "neighbour, 168 px"),
    "attend": ("window", "neighbour", "color"),
    "fold": ("shape", "place", "neighbour"),
    "mrope": ("place", "motion", "what is there", "motion, 4.2 frames a second"),
    "evs": ("motion", "motion, five frames", "motion, nothing moves"),
    "replay": ("place", "place, 168 px", "window"),
}
CHANCE = {"color": 1 / 6, "shape": 1 / 5, "place": 1 / 9, "motion": 1 / 4, "neighbour": 1 / 4, "window": 1 / 4}
PLACEHOLDERS = "placeholders of 200 sizes"  # a row of the scoreboard of `target_size`
RATE = 0.5  # the pruning rate of EVS, for the questions of `evs`
OWN = ("color", "shape", "place", "neighbour", "window")  # the kinds of questions about the reader's scene
DRAWN, PREDICTED = DONE / "scene.json", DONE / "predictions.json"
SCENE = {"middle left": "red circle", "center": "blue star", "top right": "green cross"}  # until the reader draws one
KEPT = "stored in mine.py"


# ------------------------------------------------------------------------------------------------------- the functions


def written() -> dict[str, Callable]:
    """Return the functions of mine.py that are no longer stubs; read the file again if it has changed."""
    text = Path(mine.__file__).read_text(encoding="utf-8")
    if text != vars(mine).setdefault("TEXT", text):
        linecache.checkcache(mine.__file__)
        exec(compile(text + "\n", mine.__file__, "exec"), vars(mine))
        vars(mine)["TEXT"] = text
    return {name: getattr(mine, name) for name in NAMES if not is_stub(getattr(mine, name))}


@cache
def planted(name: str, mistake: str) -> Callable:
    """Return the correct version of a function with one mistake in it."""
    if mistake not in TASKS[name]["mistakes"]:
        raise ValueError(f"mistake: expected one of {list(TASKS[name]['mistakes'])}, got {mistake!r}")
    source = inspect.getsource(getattr(solutions, name))
    for old, new in TASKS[name]["mistakes"][mistake]["edits"]:
        if old not in source:
            raise ValueError(f"{name}, {mistake}: not in solutions.py: {old}")
        source = source.replace(old, new)
    space = dict(vars(solutions))
    exec(source, space)
    return space[name]


def check(function: Callable, count: int = 200) -> Verdict:
    """Compare a function with the expected results; store it in mine.py if it is correct, and name a known mistake."""
    name = getattr(function, "__name__", function)
    if not callable(function) or name not in NAMES:
        raise ValueError(f"check: expected a function named {', '.join(NAMES)}, got {name!r}")
    own = function.__module__ == "mine"
    written()  # reads mine.py again if it has changed
    function = getattr(mine, name) if own else function
    shown = {"hints": tuple(TASKS[name]["hints"]), "task": inspect.getdoc(getattr(mine, name))}
    verdict = _judged(name, function, count, **shown)
    if verdict.status == "wrong" and "took longer" not in verdict.line and (known := _known(name, function)):
        verdict = replace(verdict, line=f"{verdict.line}. On every case, it behaves like this mistake: {known}")
    if verdict.status == "right" and not own:
        verdict = replace(verdict, line=f"{verdict.line}; {_keep(name, function)}")
    if own or verdict.line.endswith(KEPT):  # the page of `finish` shows the date
        checking.record(name, verdict)
    return verdict


def _judged(name: str, function: Callable, count: int, **shown: Any) -> Verdict:
    call = with_buffers(function) if name == "replay" and not is_stub(function) else function
    return judge(call, cases(name, count), PARTS.get(name, ()), **shown)


def _known(name: str, function: Callable) -> str:
    """Return the planted mistake with the same results, or errors, as the function on 50 cases;
    "" if there is none.
    """
    if name == "replay":  # its cases are states of a recording
        return ""
    drawn = [(label, arguments) for label, arguments, _ in cases(name, 50)]
    for mistake in TASKS[name]["mistakes"]:
        other = _outcome(planted(name, mistake))
        pairs = ((label, arguments, other(*arguments)) for label, arguments in drawn)
        if judge(_outcome(function), pairs, PARTS.get(name, ())).status == "right":
            return mistake
    return ""


def _outcome(function: Callable) -> Callable:
    def outcome(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            return type(error).__name__

    return outcome


def _keep(name: str, function: Callable) -> str:
    """Write a correct function into mine.py if it works with the names defined there; return a line on the result."""
    path = Path(mine.__file__)
    try:
        stub, source = inspect.getsource(getattr(mine, name)), textwrap.dedent(inspect.getsource(function))
        if ":\n" not in source or "\t" in source:
            source = ast.unparse(ast.parse(source))
        head, _, body = source.partition(":\n")
        task = stub[stub.index(":\n") : stub.index('"""', stub.index('"""') + 3) + 4]  # it stays above the code
        new = path.read_text(encoding="utf-8").replace(stub, f"{head}{task}{body.rstrip()}\n")
        exec(compile(new, path, "exec"), space := {"__name__": "mine"})
        if _judged(name, space[name], 20).status != "right":
            code, known = function.__code__, function.__globals__.keys() - space.keys()
            used = ", ".join(n for n in (*code.co_names, *code.co_freevars) if n in known | {*code.co_freevars})
            return f"not stored in mine.py: the function uses {used or 'names'} from outside; define them inside it"
        write_whole(path, new.encode())
    except (OSError, ValueError, SyntaxError) as error:
        return f"the function could not be written into mine.py: {error}"
    return KEPT


# ----------------------------------------------------------------------------------------------------------- the model


@cache
def load_model(graphs: bool) -> refvl.VLM:
    more = {"graphs": {"budgets": [16, 64]}, "media_cache": 2**14} if graphs else {}
    return refvl.load(DATA / "checkpoints/tiny-qwen2_5_vl", device=DEVICE, progress=False, **more)


@torch.inference_mode()
def answers(model: refvl.VLM, asked: Sequence[dict], rate: float = 0.0) -> list[tuple[str, list[int]]]:
    """Return the text and the token ids of each answer; all are decoded together and, with
    graphs, encoded together.
    """
    if model.graphs:  # in one call; `read` then finds the embeddings in the cache
        model.encode(*([item for a in asked for item in a.get(media, ())] for media in ("images", "videos")))
    read = [model.read(Request(**a, pruning_rate=rate if "videos" in a else 0.0)) for a in asked]
    end = model.language_model.generation_config.eos_token_id
    ends = {*end} if isinstance(end, list) else {end}
    rows = [list(takewhile(lambda token: token not in ends, row)) for row in model.decode(read, 24).sequences.tolist()]
    return [(model.processor.text(row), row) for row in rows]


@cache
def questions(kind: str, count: int, first: int = 5000) -> list:
    """Return questions about test scenes, on which the model was not trained."""
    return requests_for(kind, count, split="test", first=first)


@cache
def _library(kind: str, count: int, rate: float) -> list[tuple[str, list[int]]]:
    return answers(load_model(False), [r.arguments for r in questions(kind, count)], rate)


# ------------------------------------------------------------------------------------------------------ the scoreboard


def run(*functions: Callable | str, mistake: str = "", predicted: dict | None = None, count: int = 24) -> Board:
    """Ask the trained model the questions that need the named functions.

    functions: the reader's functions, or names of the nine; they run with those of mine.py. The
    library's functions replace stubs. With `mistake`, a planted mistake of the one named
    function runs alone. predicted: kind of question -> how many of `count` will be correct; a
    prediction is stored, and a board without it is folded. Errors in the reader's code become a note.
    """
    names = [f if isinstance(f, str) else f.__name__ for f in functions] or list(written())
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"run: expected functions named {', '.join(NAMES)}, got {unknown[0]!r}")
    given = {f.__name__: f for f in functions if not isinstance(f, str) and not is_stub(f)}
    yours = {names[0]: planted(names[0], mistake)} if mistake else written() | given
    kinds = list(dict.fromkeys(kind for name in names for kind in KINDS[name])) or ["color", "place"]
    if odd := [kind for kind in predicted or () if kind not in [*kinds, PLACEHOLDERS]]:
        raise ValueError(f"predicted: expected kinds of questions, {[*kinds, PLACEHOLDERS]}, got {odd[0]!r}")
    if guesses := {kind: guess for kind, guess in (predicted or {}).items() if guess is not None}:
        _remember(f"{', '.join(names)} {mistake}".strip(), guesses)
    whose = f"{names[0]}, {mistake}" if mistake else f"yours: {', '.join(yours) or 'none yet, so this is the library'}"
    board = Board(whose, folded=predicted is not None and len(guesses) < len(predicted))
    _ask(board, kinds, names, yours, count, guesses)
    silent = not board.note and all(row.same == row.count for row in board.rows)
    if wrong := [name for name in names if name in yours and _judged(name, yours[name], 200).status == "wrong"]:
        known = mistake or (_known(wrong[0], yours[wrong[0]]) if silent else "")
        why = TASKS[wrong[0]]["mistakes"][known].get("why", "") if known else ""
        found = ["No answer changes."] * silent + [why, board.note, f"The check says: {', '.join(wrong)} is wrong."]
        board.note = " ".join(filter(None, found))
    return board


def _ask(board: Board, kinds: list[str], names: Sequence[str], yours: dict, count: int, guesses: dict) -> None:
    """Fill the rows of a board; an error in the reader's code becomes the board's note."""
    rate, printed = RATE if "evs" in names else 0.0, checking.Printed()
    mixed = [r.arguments for group in zip(*(questions(kind, count) for kind in kinds), strict=True) for r in group]
    limits = {name: checking.limited(function, 6, printed) for name, function in yours.items()}
    try:
        model = load_model("replay" in names).with_stages(**limits)
        said = answers(model, mixed, rate)  # in one batch: sizes and kinds alternate
        if "target_size" in yours:
            board.rows.append(_placeholders(limits["target_size"])._replace(guess=guesses.get(PLACEHOLDERS)))
        _tell(board, model, [kind for kind in kinds if kind in OWN])
    except (Exception, checking.TooLong) as error:
        what = "it took too long" if isinstance(error, checking.TooLong) else f"{type(error).__name__}: {error}"
        board.note = f"The model gave no answer: {what}".splitlines()[0]
        said = [("", [-1])] * len(mixed)
    board.rows += [_row(kind, said[i :: len(kinds)], rate, guesses.get(kind)) for i, kind in enumerate(kinds)]
    board.printed = printed


def _row(kind: str, said: list, rate: float, guess: Any = None, path: str = "") -> Row:
    count = len(said)
    theirs, truth = _library(kind, count, rate), [r.question.answer for r in questions(kind, count)]
    right = [sum(text == true for (text, _), true in zip(x, truth, strict=True)) for x in (said, theirs)]
    chance = f"{count * CHANCE[kind.split(',')[0]]:.0f}" if kind.split(",")[0] in CHANCE else ""
    same = sum(a == b for (_, a), (_, b) in zip(said, theirs, strict=True))
    return Row(kind + path, count, *right, chance, same, guess)


def _placeholders(function: Callable) -> Row:
    """Count the sizes for which a prompt gets the placeholders that a server expects."""
    sizes = [(_outcome(function)(*arguments), want) for _, arguments, want in cases("target_size")][-200:]
    same = sum(isinstance(got, tuple) and prod(got) == prod(want) for got, want in sizes)
    return Row(PLACEHOLDERS, 200, same, 200, "", same)


def predict(question: str, guess: Any, answer: Any) -> Board:
    """Show a prediction next to the result, and store the prediction; without a prediction, the result is folded."""
    if guess is not None:
        _remember(question, guess)
    said = f"{question} You said {guess}; it is {answer}." if guess is not None else f"{question} It is {answer}."
    return Board(said, folded=guess is None)


def _remember(question: str, guess: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}
        DONE.mkdir(exist_ok=True)
        write_whole(PREDICTED, json.dumps(kept | {question: guess}, indent=1).encode())


# --------------------------------------------------------------------------------------------------- the reader's scene


def scene(objects: dict[str, str]) -> Picture:
    """Store the reader's own scene, such as {"top left": "red circle"}, and show it on its 3 x 3 tokens."""
    for place, name in objects.items():
        color, _, shape = name.partition(" ")
        if place not in scenes.PLACES or color not in scenes.COLORS or shape not in scenes.SHAPES:
            wanted = f"one of {scenes.PLACES}: a color of {tuple(scenes.COLORS)} and a shape of {scenes.SHAPES}"
            raise ValueError(f"scene: expected {wanted}, got {place!r}: {name!r}")
    with contextlib.suppress(OSError):
        DONE.mkdir(exist_ok=True)
        write_whole(DRAWN, json.dumps(objects).encode())
    return Picture(scenes.render(_scene()), ", ".join(f"{name} {place}" for place, name in objects.items()))


def _scene() -> scenes.Scene:
    """Return the reader's scene."""
    objects, things = json.loads(DRAWN.read_text()) if DRAWN.exists() else SCENE, []
    for place, name in objects.items():
        (color, shape), number = name.split(), scenes.PLACES.index(place)
        center = scenes.CELL * (number % 3 + 0.5), scenes.CELL * (number // 3 + 0.5)
        things.append(scenes.Thing(shape, color, number, center, 10.0, 0.0, tuple(map(float, scenes.COLORS[color]))))
    return scenes.Scene(tuple(things), (222.0, 222.0, 222.0), (0.0, 0.0), 1.0, 0, None)


def _tell(board: Board, model: refvl.VLM, kinds: Sequence[str]) -> None:
    """Ask a question of each kind about the reader's scene, if one fits, and put it on the board with its answer."""
    drawn = _scene()
    board.scene = Picture(scenes.render(drawn), "an image of your scene")
    for kind in kinds:
        near = [q for q in relations.questions(drawn, relations.AS_IT_IS) if q.kind == kind]
        found = [q for q in near if q.answer != relations.NOTHING] or near or scenes.all_questions(drawn).get(kind, [])
        for q in found[:1]:
            [(said, _)] = answers(model, [{"images": [board.scene.pixels], "prompt": q.text}])
            board.own.append((q.text, said, q.answer))


# ------------------------------------------------------------------------------------------------------ the last moment


def finish(count: int = 50) -> Board:
    """Ask 200 questions about scenes and 50 about videos with all functions of mine.py, eagerly
    and with graphs.

    count: the questions of each kind. Also writes mine.html: the functions, their dates, and the model's answers.
    """
    yours = written()
    missing = [name for name in NAMES if name not in yours]
    board = Board("All nine are yours." if not missing else f"Still the library's: {', '.join(missing)}.")
    for kind in ("color", "place", "neighbour", "window", "motion") if yours else ():
        rate, asked = RATE * (kind == "motion"), [r.arguments for r in questions(kind, count)]
        for path in ("", ", replayed"):
            said = answers(load_model(bool(path)).with_stages(**yours), asked, rate)
            board.rows.append(_row(kind, said, rate, path=path))
    if yours:
        _tell(board, load_model(False).with_stages(**yours), OWN)
        same, asked = sum(row.same for row in board.rows), sum(row.count for row in board.rows)
        board.note = f"{same} of {asked} answers have the library's token ids. {TASKS['remains']} {_page(board, yours)}"
    return board


def _page(board: Board, yours: dict[str, Callable]) -> str:
    parts = [f"<!doctype html><meta charset='utf-8'><title>My vision side</title>{board._repr_html_()}"]
    for name, function in yours.items():
        done = DONE / name
        since = f", {date.fromtimestamp(done.stat().st_mtime)}" if done.exists() else ""
        parts.append(f"<h2>{name}{since}</h2><pre>{html.escape(inspect.getsource(function))}</pre>")
    try:
        write_whole(Path(mine.__file__).with_suffix(".html"), "\n".join(parts).encode())
    except OSError:
        return "mine.html could not be written."
    return "mine.html contains the answers and your functions."
