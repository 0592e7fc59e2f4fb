"""Answer a file of requests in a second file: `python -m refvl chat CHECKPOINT --jsonl FILE`.

Each answer is one line, in the order of the requests: {"line": number of the request's line, "request": digest of that
line, "inputs": digest of the model's files and the request's media, which `encode` and `compare` share, "by": digest of
the model and the settings, "answer": text}. A failed request has "error" instead of "answer"; empty lines are skipped.
Lines are written whole, as soon as their batches are done. The same command continues a run that was stopped: an
incomplete line is removed, and answered requests are not repeated. It raises an error if an image, or any file that
determines the model (`provenance.py`), has changed, because one file contains answers to one set of inputs.
"""

import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from refvl.model import VLM
from refvl.processors.messages import as_messages, media_of
from refvl.serving.batches import BATCH_TOKENS
from refvl.serving.provenance import digest_of, digest_of_files, digest_of_inputs, digests_of_media
from refvl.serving.shards import speaking_of


def answer_file(
    vlm: VLM, file: Path, out: Path, *, common: dict, batch_tokens: int = BATCH_TOKENS, progress: bool = True, **options
) -> dict[int, str]:
    """Answer every line of `file` that has no answer in `out` yet; return {line: error} for old and new failures.

    common: default `max_new_tokens` and `pruning_rate`. A line that cannot be read or answered becomes a separate
    error. Raises FileNotFoundError if there is no file, and BlockingIOError while another process writes to `out`.
    Raises ValueError if `out` contains anything but this model's answers to these requests, and OSError if it cannot be
    written.
    """
    if not file.is_file():
        raise FileNotFoundError(f"jsonl: no such file: {file}")
    lines = [(number, line) for number, line in enumerate(file.read_bytes().splitlines(), 1) if line.strip()]
    by, files = digest_of(vlm, common | options), digest_of_files(vlm.provenance)

    def asked(number: int) -> dict:
        line, request = lines[number]
        inputs = digest_of_inputs(files, _media_of_line(request))
        return {"line": line, "request": hashlib.sha256(request).hexdigest()[:16], "inputs": inputs, "by": by}

    with speaking_of(out), _held(out) as answers:
        done = _read_answers(answers, out, asked, len(lines))
        begun = deque[dict]()  # the requests whose media are being read; each one is identified before it is read

        def todo() -> Iterator[dict | Exception]:
            for number in range(len(done), len(lines)):
                begun.append(asked(number))
                yield _parse(lines[number][1])

        bar = tqdm(total=len(lines), initial=len(done), desc="answer", unit="request", disable=not progress)
        with bar:
            for answer in vlm.answer_each(todo(), common, batch_tokens=batch_tokens, **options):
                failed = isinstance(answer, Exception)
                said = {"error": str(answer) or type(answer).__name__} if failed else {"answer": answer}
                done.append(begun.popleft() | said)
                answers.write(json.dumps(done[-1]).encode() + b"\n")
                answers.flush()
                bar.update()
            os.fsync(answers.fileno())
    return {entry["line"]: entry["error"] for entry in done if "error" in entry}


def _media_of_line(line: bytes) -> list[str]:
    """Return the digests of a request's media files, including frames of a video given as a list."""
    request: Any = _parse(line)
    digests = list[str]()
    with suppress(AttributeError, TypeError, ValueError, OSError):  # the error then becomes the answer
        messages = as_messages(*(request.get(key, ()) for key in ("prompt", "images", "videos")))
        digests += digests_of_media(_files(source for _, source, _ in media_of(messages)))
    return digests


def _files(media: Iterable) -> Iterator[str]:
    """Yield the files among the media of a request, including frames of a video given as a list."""
    for medium in media:
        if isinstance(medium, list):
            yield from _files(medium)
        elif isinstance(medium, str) and os.path.isfile(medium):
            yield medium


def _parse(line: bytes) -> dict | Exception:
    """Return the request in a line, or the reason why it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"the line is not valid JSON ({error})")


@contextmanager
def _held(out: Path) -> Iterator[BufferedRandom]:
    """Open the file of answers, locked for this process."""
    if out.exists() and not out.is_file():  # a device may never end
        raise OSError(f"out: {out} is not a regular file")
    with open(out, "a+b") as answers:
        try:
            fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"out: {out} is being written by another process; wait for it to finish") from None
        yield answers


def _read_answers(answers: BufferedRandom, out: Path, asked: Callable[[int], dict], count: int) -> list[dict]:
    """Return the existing answers; remove only an incomplete last line from the file."""
    answers.seek(0)
    *whole, cut = answers.read().split(b"\n")
    done = list[dict]()
    for line in whole:
        try:
            entry = json.loads(line)
            wanted = asked(len(done)) if len(done) < count else {"line": None}
            differing = {key for key, value in wanted.items() if entry.get(key) != value}
        except (ValueError, AttributeError):
            raise _not_ours(out, len(done)) from None
        if differing:
            raise _not_ours(out, len(done), by_another="by" in differing and "request" not in differing)
        done.append(entry)
    begin = json.dumps(asked(len(done)))[:-1].encode() if cut and len(done) < count else b""
    if cut and (not begin or cut[: len(begin)] != begin[: len(cut)]):
        raise _not_ours(out, len(done))
    answers.truncate(sum(len(line) + 1 for line in whole))
    return done


def _not_ours(out: Path, number: int, by_another: bool = False) -> ValueError:
    other = "was answered by a different model or with different settings"
    what = other if by_another else "does not answer that line of the requests, or its media have changed"
    return ValueError(f"out: {out}, line {number + 1}: {what}; move the file away")
