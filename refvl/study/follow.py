"""One request, line by line: the functions that the request calls, in call order, and their line counts.

    journey = follow(model, "What color is the circle?", images=["data/pictures/scene.png"])
    journey.numbers    # Numbers(functions=..., file_changes=..., ...)
    print(journey)     # every function in call order, with executed lines marked and checks folded

follow    a request -> `Journey`: its functions by stage, its numbers, and the `Trace` of the same request
record    a call -> the functions of a folder that the call enters, and the lines that it executes
measure   functions -> `Numbers`
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import unwrap
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from refvl.study.report import Trace
from refvl.study.source import Source, source_of

LIBRARY = Path(__file__).resolve().parents[1]
ASK = "ask"  # the name of the part that runs before the first stage
SENTENCES = {
    ASK: "The caller's arguments become a request. They are checked once, here, and the stages trust them.",
    "decode media": "Files and arrays become RGB images. A video becomes the frames that are sampled from it.",
    "patchify": "Each image is resized and cut into patches. Each patch is a row of numbers; a layout describes the "
    "order of the rows.",
    "plan": "From the layout alone, without a pixel, the encoder computes positions, the order of the rows, and which "
    "rows attend to each other.",
    "encode": "The vision tower turns patch rows into embeddings that the language model can read.",
    "prune": "If the caller sets a pruning rate, the video tokens that add the least are dropped.",
    "tokenize": "The prompt becomes token ids, with a placeholder for every embedding.",
    "merge": "The prompt becomes token ids, and the embeddings replace its placeholders.",
    "positions": "Every token gets a position on each of three axes: time, height and width.",
    "prefill": "The language model reads the whole prompt and scores every entry of its vocabulary as the next token.",
    "decode tokens": "The best token is appended and read in turn, until the model ends its answer.",
    "generate": "Prefill and decoding are one stage, because beams are compared as they grow.",
}


class Numbers(NamedTuple):
    """The size of one answer's code path.

    Code lines exclude blank lines, comments and docstrings.
    """

    functions: int  # entered
    file_changes: int  # changes of file from one function to the next, in the order of first entry
    files: int
    lines: int  # the code lines of the functions entered
    check_lines: int  # the lines in those functions that only check arguments
    whole_files: int  # the code lines of all files that contain these functions


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the request entered. Line numbers refer to its file and start at 1."""

    path: Path
    file: str  # the path inside the recorded folder: "positions/mrope.py"
    name: str  # qualified: "VLM.read"
    first: int  # the first line of the function, including decorators
    calls: int  # each resumption of a generator counts as a call
    stage: str  # the stage in which it was first entered
    caller: tuple[str, int] | None  # the file and line of its first call
    ran: frozenset[int]  # the lines of its file that were executed

    @property
    def source(self) -> Source:
        return source_of(self.path)

    @property
    def lines(self) -> range:
        """The line numbers of the function, including decorators."""
        node = self.source.functions.get(self.first)
        return range(self.first, ((node and node.end_lineno) or self.first) + 1)

    @property
    def docstring(self) -> str:
        """The function's docstring without indentation, or "" if there is none."""
        node = self.source.functions.get(self.first)
        return (node and ast.get_docstring(node)) or ""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Journey:
    """One answer and the functions called for it, in the order of first entry;
    `trace` records a repetition of the request.
    """

    question: str
    functions: list[Function]
    numbers: Numbers
    trace: Trace
    scores: list[Tensor]  # per new token, the (vocabulary,) scores that chose the token; empty with beams
    decode: Callable[[Sequence[int]], str]  # token ids -> text

    @property
    def stages(self) -> list[tuple[str, list[Function]]]:
        """The stages in order, each with its functions.

        A stage that runs in several parts appears again if it enters new functions.
        """
        return [(stage, list(functions)) for stage, functions in groupby(self.functions, lambda f: f.stage)]

    def number_of(self, place: tuple[str, int] | None) -> int | None:
        """Return the index (from 0) of the innermost function that contains a (file, line),
        or None if no function does.
        """
        around = [i for i, f in enumerate(self.functions) if place and f.file == place[0] and place[1] in f.lines]
        return min(around, key=lambda i: len(self.functions[i].lines), default=None)

    def __str__(self) -> str:
        """Return the code of every function in call order; "|" marks executed lines,
        and lines that only check arguments are folded.
        """
        n = self.numbers
        made = shapes(self)
        text = [
            f"{self.question} -> {self.trace.text}",
            f"{n.functions} functions in {n.files} files, {n.file_changes} file changes; {n.lines} lines, of which "
            f"{n.check_lines} check; the files have {n.whole_files}. | marks lines that ran.",
        ]
        number = 0
        for stage, functions in self.stages:
            text += ["", f"== {stage} ==  {made.get(stage, '')}".rstrip(), SENTENCES.get(stage, "")]
            for function in functions:
                number += 1
                text += ["", f"{number}. {function.file}:{function.first} {function.name}{self._called(function)}"]
                text += [f"{'':8}{line}" for line in function.docstring.splitlines()[:1]]
                text += [_row(function, *piece) for piece in pieces(function)]
        return "\n".join(text)

    def _called(self, function: Function) -> str:
        times = "" if function.calls == 1 else f", {function.calls} times"
        number = self.number_of(function.caller)
        origin = "" if number is None else f", from {number + 1}. {self.functions[number].name}"
        return f"{origin}{times}"


class Recorder:
    """A trace function for `sys.settrace` that records calls and executed lines in the files of a
    folder.

    `stage`: the stage of the functions being entered; None: the next stage, which has not begun
    yet.
    """

    def __init__(self, folder: Path):
        self.root = f"{folder}/"
        self.stage: str | None = ASK
        self.stages: list[str | None] = []  # the stage of each function
        self.calls = Counter[tuple[str, str, int]]()  # keys: (file, name, first line), in the order of first entry
        self.callers: list[tuple[str, int] | None] = []  # the caller of each function
        self.events = defaultdict[str, set[int]](set)  # executed lines by file
        self.is_timed = False  # whether a stage that `Trace` times is in progress

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Record the entry of a function; return the trace function for its lines."""
        if not (file := self._file(frame)):
            return None
        if frame.f_code is STAGE:  # a generator, entered when a stage begins and resumed when it ends
            self.is_timed = not self.is_timed
            self.stage = frame.f_locals["name"] if self.is_timed else None
        if not frame.f_code.co_name.startswith("<"):  # a lambda or a comprehension belongs to the enclosing function
            self._enter(file, frame)
        lines = self.events[file]
        lines.add(frame.f_code.co_firstlineno)

        def keep(inner: FrameType, event: str, arg: Any) -> Any:
            lines.add(inner.f_lineno)
            return keep

        return keep

    def _file(self, frame: FrameType) -> str:
        """Return the frame's file as a path inside the folder;
        "" for other files and for this one.
        """
        file = frame.f_code.co_filename
        return file.removeprefix(self.root) if file.startswith(self.root) and file != __file__ else ""

    def _enter(self, file: str, frame: FrameType) -> None:
        key = file, frame.f_code.co_qualname, frame.f_code.co_firstlineno
        if key not in self.calls:
            self.stages.append(self.stage)
            self.callers.append(self._caller(frame.f_back))
        self.calls[key] += 1

    def _caller(self, frame: FrameType | None) -> tuple[str, int] | None:
        """Return the file and line of the nearest calling frame in the folder;
        frames of other libraries are skipped.
        """
        while frame is not None and not self._file(frame):
            frame = frame.f_back
        return frame and (self._file(frame), frame.f_lineno)

    def forward(self, *_: Any) -> None:
        """Set the stage of a language model's call, after the last stage that `Trace` times.

        The first such call is the prefill; the others decode tokens.
        """
        if not self.is_timed:
            self.stage = "prefill" if self.stage is None else "decode tokens"

    def functions(self) -> list[Function]:
        """Return the recorded functions.

        A function entered between two stages belongs to the later stage.
        """
        stages = list(self.stages)
        following = self.stage or next(filter(None, reversed(stages)), ASK)
        for i in reversed(range(len(stages))):
            following = stages[i] = stages[i] or following
        paths = {file: Path(self.root + file) for file in self.events}
        ran = {file: source_of(paths[file]).whole(events) for file, events in self.events.items()}
        found = zip(self.calls.items(), stages, self.callers, strict=True)
        return [
            Function(paths[file], file, name, first, calls, stage or ASK, caller, ran[file])
            for ((file, name, first), calls), stage, caller in found
        ]


STAGE: CodeType = unwrap(Trace.stage).__code__


def record(call: Callable[[], Any], folder: Path = LIBRARY, text: Any = None) -> list[Function]:
    """Return the functions in a folder's files that `call()` enters in this thread,
    in the order of first entry.

    Lambdas and comprehensions do not count as functions; a class counts only if it defines
    `__init__`. text: the language model that `call` runs; its forwards are the last stages.
    """
    recorder = Recorder(folder)
    before = sys.gettrace()  # the trace function of a debugger or of coverage
    hook = text.register_forward_pre_hook(recorder.forward) if text else nullcontext()
    with hook:
        sys.settrace(recorder)
        try:
            call()
        finally:
            sys.settrace(before)
    return recorder.functions()


def measure(functions: Sequence[Function]) -> Numbers:
    """Return the size of a call's code path: see `Numbers`."""
    files = {function.path for function in functions}
    lines = {(f.path, line) for f in functions for line in f.source.code_of(f.first)}
    checks = sum(line in source_of(path).checks for path, line in lines)
    whole = sum(len(source_of(path).code) for path in files)
    changes = sum(one.file != other.file for one, other in pairwise(functions))
    return Numbers(len(functions), changes, len(files), len(lines), checks, whole)


def follow(model: Any, question: str | Sequence[dict], **options) -> Journey:
    """Run a request three times: to warm up, to record the functions that `model.chat` calls,
    and to trace it.

    question, options: as in `VLM.chat`. Only functions of this thread are recorded. Raises the
    errors of `VLM.trace`.
    """
    model.chat(question, **options)

    functions = record(lambda: model.chat(question, **options), text=model.language_model)
    kept = list[Tensor]()

    def keep(input_ids: Tensor, scores: Tensor) -> Tensor:
        kept.extend(scores.detach().float().cpu())
        return scores

    trace = model.trace(question, **options, logits_processor=[keep])
    chosen = kept if len(kept) == len(trace.token_ids) else []
    return Journey(str(question), functions, measure(functions), trace, chosen, model.processor.tokenizer.decode)


def shapes(journey: Journey) -> dict[str, str]:
    """Return a short description of each stage's result."""
    return {stage: text for stage, text, _ in journey.trace.rows()}


def _row(function: Function, checks: bool, lines: range) -> str:
    if checks:
        return f"{'':8}... {count_checks(function, lines)}"
    [number] = lines
    return f"{number:5} {'|' if number in function.ran else ' '} {function.source.lines[number]}".rstrip()


def count_checks(function: Function, lines: range) -> str:
    """Return a label such as "6 lines check" for lines that only check arguments."""
    count = len(function.source.code.intersection(lines))
    return "1 line checks" if count == 1 else f"{count} lines check"


def pieces(function: Function) -> list[tuple[bool, range]]:
    """Split a function, without its docstring, into parts in order:
    (False, one line) or (True, lines that only check arguments).

    Comments and blank lines between two lines that only check arguments belong to the same part
    as these lines.
    """
    parsed = function.source
    shown = [line for line in function.lines if line not in parsed.docstrings]
    found: list[tuple[bool, range]] = []
    for i, line in enumerate(shown):
        if found and line in found[-1][1]:
            continue
        if line in parsed.checks:
            between = takewhile(lambda n: n in parsed.checks or n not in parsed.code, shown[i:])
            last = max(n for n in between if n in parsed.checks)
            found.append((True, range(line, last + 1)))
        else:
            found.append((False, range(line, line + 1)))
    return found
