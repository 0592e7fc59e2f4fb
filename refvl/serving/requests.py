"""Answer a file of requests in a second file: `python -m refvl chat CHECKPOINT --jsonl FILE`.

    {"id": "a", "prompt": "What is it?", "images": ["cat.jpg"]}  ->  {"id": "a", "answer": "a cat"}

A request without an id gets the number of its line as its id. Answers are appended as soon as their
batches are done. The same command continues a run that was stopped: it skips ids that have an
answer and repeats those that have an error.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from refvl.checks import blame


def answer_file(vlm: Any, file: Path, out: Path, *, common: dict, progress: bool = True) -> dict[Any, str]:
    """Append an answer to `out` for every unanswered request in `file`; return {id: error} of the failed requests.

    common: default `max_new_tokens`, `pruning_rate` and `pruning`. Raises ValueError, naming the
    line, for a line that is not a JSON object, and for an id that occurs twice.
    """
    requests = dict[Any, dict]()
    for number, request in _objects(file):
        if (name := request.pop("id", number)) in requests:
            raise ValueError(f"{file}, line {number}: expected a new id, got {name!r}, which an earlier line has")
        requests[name] = request
    answered = set()
    for number, said in _objects(out) if out.exists() else ():
        if said.keys() not in ({"id", "answer"}, {"id", "error"}):
            raise ValueError(f"out: {out}, line {number}: expected keys id and answer, or id and error")
        if "answer" in said:
            answered.add(said["id"])
    todo = {name: request for name, request in requests.items() if name not in answered}
    errors = dict[Any, str]()
    answers = vlm.answer_each(todo.values(), common)
    with open(out, "a", encoding="utf-8") as lines:
        for name, answer in zip(todo, tqdm(answers, total=len(todo), disable=not progress), strict=True):
            if isinstance(answer, Exception):
                errors[name] = str(answer) or type(answer).__name__
            said = {"error": errors[name]} if name in errors else {"answer": answer}
            lines.write(json.dumps({"id": name} | said) + "\n")
            lines.flush()
    return errors


def _objects(file: Path) -> Iterator[tuple[int, dict]]:
    """Yield the number and the object of every line that is not empty."""
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                with blame(f"{file}, line {number}"):
                    found = json.loads(line)
                if not isinstance(found, dict):
                    raise ValueError(f"{file}, line {number}: expected a JSON object, got {line.strip()[:40]}")
                yield number, found
