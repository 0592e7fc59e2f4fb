"""A small fuzz harness: hostile input made from a seed, one case at a time, each within seconds and memory.

A case ends in one of six ways. *right*: it returned, and what it returned holds its kind's invariant, or equals what an
independent program made of the same input. *clear*: refvl refused it, that is, the exception was raised by a `raise`
statement of refvl itself, as ValueError, TypeError or FileNotFoundError, in a sentence that names an argument (or the
attempt says so: a command line exits with a status and a line). The others are defects. *unclear*: an error that
escaped from a library, or a lack of memory. *wrong*: another result. *hang*: too much time. *crash*: the process
died, which `run_apart` counts. A seed makes the same case again.
"""

import json
import linecache
import os
import resource
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import refvl

SECONDS = 20  # of processor time, so that a busy machine fails nothing
PATIENCE = 300  # seconds on the clock, for what waits instead of working
MEMORY = 3 * 2**30  # bytes of address space beyond what the process holds when a case begins
LIBRARY = str(Path(refvl.__file__).parent)
ENDS = ("right", "clear", "unclear", "wrong", "hang", "crash")
CLEAR = (ValueError, TypeError, FileNotFoundError)

Case = tuple[str, Callable[[], object]]  # what is tried, in words; and the attempt, which asserts its invariant
Kind = Callable[[np.random.Generator, Path], Case]


class TooLong(BaseException):
    """Not an Exception, so that no handler of the library takes it for a damaged file."""


@dataclass
class Report:
    """How the cases of one kind ended."""

    kind: str
    counts: Counter = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)

    def add(self, seed: int, what: str, outcome: str) -> None:
        beginnings = {"took": "hang", "wrong": "wrong", "crash": "crash"}
        self.counts[outcome if outcome in ENDS else beginnings.get(outcome.split()[0].rstrip(":"), "unclear")] += 1
        if outcome not in ("right", "clear"):
            self.defects.append(f"{self.kind}, seed {seed}: {what[:300]}\n    {outcome}")


def run_kind(kind: Kind, seeds: range) -> Report:
    """Try every seed; the case of a seed depends on the kind and the seed alone."""
    report = Report(kind.__name__)
    for seed in seeds:
        report.add(seed, *run_case(kind, seed))
    return report


def run_case(kind: Kind, seed: int) -> tuple[str, str]:
    """What was tried, in words, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        what, attempt = kind(np.random.default_rng([seed, *kind.__name__.encode()]), Path(folder))
        return what, outcome_of(attempt)


def run_apart(kind: Kind, seeds: range) -> Report:
    """The same in a child process, so that a crash is counted: the case at which a child dies; the next goes on."""
    report = Report(kind.__name__)
    while seeds:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            with os.fdopen(write, "w", encoding="utf-8", errors="backslashreplace") as pipe:
                for seed in seeds:
                    pipe.write(json.dumps([seed, *run_case(kind, seed)]) + "\n")
                    pipe.flush()
            os._exit(0)
        os.close(write)
        with os.fdopen(read, encoding="utf-8") as pipe:
            for seed, what, outcome in map(json.loads, pipe):
                report.add(seed, what, outcome)
                seeds = range(seed + 1, seeds.stop)
        _, status = os.waitpid(child, 0)
        if seeds:
            report.add(seeds.start, "not known", f"crash: the process ended with status {status}")
            seeds = seeds[1:]
    return report


def outcome_of(attempt: Callable[[], object], seconds: float = SECONDS) -> str:
    """ "right", "clear", or what went wrong; an attempt may take this much processor time."""
    try:
        with limits(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "clear" if attempt() == "clear" else "right"
    except TooLong as error:
        return f"took {error}"
    except AssertionError as error:
        return f"wrong: {error}"
    except Exception as error:
        return "clear" if is_clear(error) else f"{type(error).__name__}: {str(error)[:300]} ({raised_at(error)})"


def is_clear(error: Exception) -> bool:
    """Whether refvl itself raised the error, in a sentence that names what it is about."""
    filename, line, message = raised_at(error)
    deliberate = filename.startswith(LIBRARY) and line.startswith("raise")
    return isinstance(error, CLEAR) and deliberate and ": " in message and len(message) < 2000


def raised_at(error: BaseException) -> tuple[str, str, str]:
    """(file, source line, message) of the innermost frame."""
    traceback = error.__traceback__
    while traceback.tb_next:
        traceback = traceback.tb_next
    filename = traceback.tb_frame.f_code.co_filename
    return filename, linecache.getline(filename, traceback.tb_lineno).strip(), str(error)


@contextmanager
def limits(seconds: float):
    """Processor seconds, seconds on the clock and address space; the limits before come back afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def stop(number, frame):
        raise TooLong(f"more than {seconds} s of processor time or {PATIENCE} s on the clock")

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGVTALRM, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
