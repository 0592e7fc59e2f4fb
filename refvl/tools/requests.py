"""A file of requests to a file of answers: `python -m refvl chat CHECKPOINT --jsonl FILE`.

Line n of the answers is to line n of the requests: {"line": n, "request": digest of that line, "answer": text}, or
"error" in the place of "answer". Lines are written whole, as their batches are done. A run that was stopped is
continued by the same command: a line that was cut off is removed, and what is answered is not asked again.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

from tqdm.auto import tqdm

from refvl.pipeline import BATCH_TOKENS, VLM


def answer_file(
    vlm: VLM, file: Path, out: Path, *, common: dict, batch_tokens: int = BATCH_TOKENS, progress: bool = True, **options
) -> dict[int, str]:
    """Answer every line of `file` that `out` does not hold yet; {line: error} of all that failed, also before.

    common: `max_new_tokens` and `pruning_rate` of lines that do not say. A line that cannot be read or answered is an
    error of its own. Raises FileNotFoundError without a file, BlockingIOError while another process writes to `out`,
    and ValueError where `out` holds answers to other requests.
    """
    if not file.is_file():
        raise FileNotFoundError(f"jsonl: no such file: {file}")
    lines = [line for line in file.read_bytes().splitlines() if line.strip()]
    digests = [hashlib.sha256(line).hexdigest()[:16] for line in lines]
    with _held(out) as answers:
        done = _read_answers(answers, out, digests)
        todo = (_parse(line) for line in lines[len(done) :])
        bar = tqdm(total=len(lines), initial=len(done), desc="answer", unit="request", disable=not progress)
        with bar:
            for answer in vlm.answer_each(todo, common, batch_tokens, **options):
                number = len(done)
                said = {"error": str(answer)} if isinstance(answer, Exception) else {"answer": answer}
                done.append({"line": number + 1, "request": digests[number]} | said)
                answers.write(json.dumps(done[-1]).encode() + b"\n")
                answers.flush()
                bar.update()
            os.fsync(answers.fileno())
    return {entry["line"]: entry["error"] for entry in done if "error" in entry}


def _parse(line: bytes) -> dict:
    """The request in a line; one that is no JSON becomes a request that is refused with the reason."""
    try:
        return json.loads(line)
    except ValueError as error:
        return {f"not JSON ({error})": None}


@contextmanager
def _held(out: Path) -> Iterator[BufferedRandom]:
    """The file of answers, for this process alone."""
    with open(out, "a+b") as answers:
        try:
            fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(f"out: {out} is being written by another process; wait for it to end") from None
        yield answers


def _read_answers(answers: BufferedRandom, out: Path, digests: list[str]) -> list[dict]:
    """What is answered; a last line that was cut off is removed from the file."""
    answers.seek(0)
    content = answers.read()
    answers.truncate(whole := content.rfind(b"\n") + 1)
    done = []
    for number, line in enumerate(content[:whole].splitlines()):
        try:
            entry = json.loads(line)
            same = number < len(digests) and (entry["line"], entry["request"]) == (number + 1, digests[number])
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise ValueError(f"out: {out}, line {number + 1}: is no answer to that line of the requests; move it away")
        done.append(entry)
    return done
