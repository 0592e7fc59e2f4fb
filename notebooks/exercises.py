"""The exercises of the elective notebooks, and the progress in all notebooks.

An exercise is a function that the reader writes. A check compares the function with the
library, or with a slow form, on the cases of a generator in this file. The cases are named or
random, and the same every time (see checking.py).
"""

import functools
import html
import inspect
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mine
import numpy as np
import torch
from checking import DEVICE, DONE, MARKS, NOTEBOOKS, Case, Verdict, is_stub, judge, record
from heads import ROUTE, in_order
from torch import Tensor

import refvl
from data.training import scenes
from refvl.pixels.slices import SliceConfig, slice_grid
from refvl.positions import interpolate_position_table
from refvl.serving.parallel import get_load_balance_assignment

__all__ = ["DEVICE"]  # the device of the notebooks' models
UNITS = {"target_size": 10, "patch_rows": 15, "window_index": 15, "rotate": 15, "attend": 10, "fold": 5, "mrope": 20,
         "evs": 20, "replay": 20}  # minutes to write each of the nine functions  # fmt: skip
COUNT = 200  # random cases


def exercise(*names: str, call: Callable[[Callable], Callable] | None = None) -> Callable:
    """Turn a generator of cases into a check of the reader's function; names: the names of its result's parts.

    call: turns the reader's function into one that accepts the cases' arguments; None if it already does.

    The generator's docstring states the task, then gives hints, from a nudge to almost the full
    solution.
    """

    def decorate(cases: Callable[[random.Random], Iterator[Case]]) -> Callable[[Callable], Verdict]:
        wanted, _, listed = str(inspect.getdoc(cases)).partition("\n\n")
        hints = tuple(" ".join(hint.split()) for hint in re.split("^- ", listed, flags=re.M)[1:])

        @functools.wraps(cases)
        def check(function: Callable) -> Verdict:
            direct = call is None or is_stub(function)
            run = function if direct else functools.wraps(function)(call(function))
            found = judge(run, cases(random.Random(0)), names, hints=hints, task=wanted)
            return record(cases.__name__, found)

        check.__doc__ = wanted  # `help` gives no hint away
        return check

    return decorate


@dataclass(frozen=True)
class Chapter:
    """A notebook of the course, with its minutes and its solved exercises."""

    name: str  # the name of the file, without its suffix
    title: str
    minutes: int
    exercises: dict[str, bool]

    @classmethod
    def read(cls, path: Path) -> "Chapter":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        cells = [cell for cell in cells if "head" not in cell["metadata"].get("tags", ())]  # see heads.py
        texts = {kind: ["".join(c["source"]) for c in cells if c["cell_type"] == kind] for kind in ("markdown", "code")}
        source = "\n".join(texts["code"])
        names = dict.fromkeys(re.findall(r"exercises\.(check_\w+)\(|track\.check\((\w+)\)", source))
        done = {one or nine: (DONE / one).exists() if one else not is_stub(getattr(mine, nine)) for one, nine in names}
        title = texts["markdown"][0].splitlines()[0].lstrip("# ")
        stubs = ["".join(c["source"]) for c in cells if "exercise" in c["metadata"].get("tags", ())]
        code = [source for source in texts["code"] if source not in stubs]  # a stub is part of its exercise
        writing = sum(UNITS.get(name, 10) for name in done)
        shown = {name.removeprefix("check_").replace("_", " "): is_done for name, is_done in done.items()}
        return cls(path.stem, title, minutes_of(texts["markdown"], code, writing), shown)


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
        table = "<tr><th>notebook</th><th>minutes</th><th>what you write</th></tr>"
        for title, part in (("the route", True), ("electives", False)):
            chapters = [chapter for chapter in self.chapters if (chapter.name[:2] in ROUTE) is part]
            hours, minutes = divmod(sum(chapter.minutes for chapter in chapters), 60)
            done = [is_done for chapter in chapters for is_done in chapter.exercises.values()]
            score = f"{sum(done)} of {len(done)} done"
            table += f"<tr><th>{title}</th><th>{hours} h {minutes:02} min</th><th>{score}</th></tr>"
            for chapter in chapters:
                link = f"<a href='{chapter.name}.ipynb'>{html.escape(chapter.title)}</a>"
                cells = "".join(f"<td>{text}</td>" for text in (chapter.minutes, self._marks(chapter)))
                table += f"<tr><td style='text-align:left'>{link}</td>{cells}</tr>"
        return f"<table>{table}</table>"

    @staticmethod
    def _marks(chapter: Chapter) -> str:
        marks = [f"{MARKS['right' if done else 'not yet']} {name}" for name, done in chapter.exercises.items()]
        return ", ".join(marks)


def progress() -> Progress:
    """Return the notebooks in this folder and the progress in them."""
    return Progress([Chapter.read(path) for path in in_order(NOTEBOOKS.glob("[0-9]*.ipynb"))])


def minutes_of(markdown: Sequence[str], code: Sequence[str], writing: int) -> int:
    """Return the minutes that a learner needs, at 200 words or six lines of code a minute, plus
    `writing`, the minutes for writing functions.

    Collapsed text, tables and addresses of links do not count; neither do imports, comments and blank lines.
    """
    prose = re.sub(r"<details>.*?</details>|```.*?```|^\|.*?$|\]\([^)]*\)", "", "\n".join(markdown), flags=re.S | re.M)
    lines = re.sub(r"^(?:from [\w.]+ )?import (?:\([^)]*\)|.*)$|^\s*#.*$", "", "\n".join(code), flags=re.M)
    return round(len(prose.split()) / 200 + sum(map(bool, map(str.strip, lines.splitlines()))) / 6 + writing)


def plant_fault(vlm: refvl.VLM, number: int) -> None:
    """Change one line of a Qwen3-VL text model, for part 7 of notebook 12; guess which one
    before you read on.
    """

    def late(module, args: tuple, kwargs: dict) -> tuple:
        features = kwargs.get("deepstack_visual_embeds")
        return args, kwargs | ({"deepstack_visual_embeds": [0 * features[0], *features]} if features else {})

    text = vlm.language_model.model
    if number == 1:
        text.register_forward_pre_hook(late, with_kwargs=True)
    else:
        text.rotary_emb.register_forward_pre_hook(lambda module, args: (args[0], args[1][[0, 2, 1]]))


def rotate_by(axes: Tensor) -> Callable:
    """Return a forward hook for a rotary module that rotates pair i by the positions of axis `axes[i]`."""

    def hook(module: torch.nn.Module, arguments: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        angles = arguments[1][axes].float() * module.inv_freq[:, None, None]  # (pairs, B, L)
        angles = angles.permute(1, 2, 0).repeat(1, 1, 2)
        return angles.cos().to(output[0].dtype), angles.sin().to(output[0].dtype)

    return hook


@exercise()
def check_read_table(rng: random.Random) -> Iterator[Case]:
    """`function(table (S*S, D), h, w) -> (h*w, D)`: the vector of each patch's nearest cell, in merge-block order.

    - Which cell of an S x S square does the centre of patch i of a column of h patches fall into?
    - int((i + 0.5) / h * S), and likewise for columns; row * S + column is the index in the table.
    - Then the order: (h, w) -> (h / 2, 2, w / 2, 2), with the two middle axes swapped.
    """
    sizes = [(6, 6, 6), (6, 4, 10), (6, 12, 2), *((rng.randint(2, 9), 2 * rng.randint(1, 6), 2 * rng.randint(1, 6))
                                                  for _ in range(COUNT))]  # fmt: skip
    for side, h, w in sizes:
        if any((2 * i + 1) * side % (2 * n) == 0 for n in (h, w) for i in range(n)):
            continue  # a centre lies on the border of two cells
        table = torch.arange(3.0 * side**2).view(-1, 3)
        want = interpolate_position_table(table, [(1, h, w)], mode="nearest")
        yield f"table {side} x {side}, h={h}, w={w}", (table, h, w), want


@exercise()
def check_slice_grid(rng: random.Random) -> Iterator[Case]:
    """`function(width, height) -> (columns, rows)`, or None without slices: MiniCPM-V, 448 px, at most 9.

    - How many slices? Divide the area by 448 x 448 px and round up, to at most nine. If the result is one, return None.
    - Try that number, one less and one more (from 2 to 9), and all ways to write each number as columns * rows.
    - In the best grid, columns / rows is nearest to width / height, compared as logarithms.
    """
    sizes = [(int(2 ** rng.uniform(5, 12)), int(2 ** rng.uniform(5, 12))) for _ in range(COUNT)]
    for width, height in ((448, 448), (449, 448), (300, 600), (1920, 1080), (200, 3000), *sizes):
        yield f"{width} x {height} px", (width, height), slice_grid(width, height, SliceConfig())


@exercise()
def check_join_order(rng: random.Random) -> Iterator[Case]:
    """`function(counts, crop_tokens, image_tokens) -> (M,)` int64: the result has one image after another, each
    with its crops before its overview; for each of its rows, return the index in a tensor with all crops first.

    - With one image, nothing has to move. With two images, what has to be between their crops?
    - Number the rows of the input: the crops of image 0, of image 1, ..., then the overviews of images 0, 1, ...
    - Image i takes the next counts[i] * crop_tokens rows of the first kind, then the next image_tokens of the second.
    """
    drawn = [[rng.randint(0, 3) for _ in range(rng.randint(1, 5))] for _ in range(COUNT)]
    for counts in ([6], [1, 2], [0, 2], [2, 0, 3], *drawn):
        crop, image = rng.randint(1, 4), rng.randint(1, 4)
        crops = torch.arange(sum(counts) * crop).split([n * crop for n in counts])
        overviews = sum(counts) * crop + torch.arange(len(counts) * image).view(len(counts), image)
        want = torch.cat([part for pair in zip(crops, overviews, strict=True) for part in pair])
        yield f"counts={counts}, crop_tokens={crop}, image_tokens={image}", (counts, crop, image), want


@exercise("order", "counts", "loads")
def check_load_balance(rng: random.Random) -> Iterator[Case]:
    """`function(sizes, num_gpus) -> (order, counts, loads)`: the largest item goes first, to the least loaded rank.

    - sorted(range(n), key=lambda i: -sizes[i]) is stable: equal sizes keep their order.
    - Keep one list of items and one sum per rank; the next item goes to the rank with the smallest sum.
    - order is the concatenation of the ranks' lists, counts are their lengths, and loads are their sums.
    """
    for number in range(COUNT):
        sizes = [rng.randint(1, rng.choice((3, 100))) for _ in range(number % 12)]
        ranks = rng.randint(1, 5)
        yield f"sizes={sizes}, num_gpus={ranks}", (sizes, ranks), get_load_balance_assignment(sizes, ranks)


def _session(function: Callable) -> Callable:
    """Return a function of requests, (images, weights) each, that answers all of them with one cache."""

    def answer(requests: list) -> tuple[list[list[Tensor]], int, list]:
        kept, buffer, encoded, results = dict[Any, Tensor](), torch.zeros(8), [], []
        for images, weights in requests:

            def encode(image: Tensor, weights: str = weights) -> Tensor:
                encoded.append(image)
                return buffer.copy_(_embedded(image, weights))

            results.append([row.clone() for row in function(kept, [7] * len(images), images, weights, encode)])
        return results, len(encoded), [key for key in kept if not (isinstance(key, bytes | str) and len(key) >= 16)]

    return answer


def _embedded(image: Tensor, weights: str) -> Tensor:
    return torch.tensor([float(weights), len(image), *image.flatten().tolist()[:6]])


@exercise("embeddings", "times that it encoded", "keys below 16 bytes", call=_session)
def check_embeddings(rng: random.Random) -> Iterator[Case]:
    """`function(kept, ids, images, weights, encode)`: the embeddings of each image; no image is encoded twice.

    - Part 2 has five wrong caches. What do two of their requests have in common that they should not share?
    - Each image needs its own key: SHA-256, not cut, over its shape, its values and the weights. The next call of
      `encode` overwrites the tensor that the previous call returned, so keep a clone.
    - for image in images: hashlib.sha256(repr((image.shape, weights)).encode() + image.numpy().tobytes()).digest()
    """
    a, b = (torch.arange(12, dtype=torch.uint8).view(2, 2, 3) + i for i in (0, 100))
    pool = [a, b, a.reshape(1, 4, 3), a + 1]
    named = {"token ids alone": [([a], "1"), ([b], "1")], "a view of the buffer": [([a], "1"), ([b], "1"), ([a], "1")],
             "one key per request": [([a, b], "1"), ([b], "1")], "no model in the key": [([a], "1"), ([a], "2")],
             "no shape in the key": [([a], "1"), ([pool[2]], "1")]}  # fmt: skip
    for number in range(COUNT):
        draw = [(rng.choices(pool, k=rng.randint(1, 3)), rng.choice("12")) for _ in range(4)]
        named[f"requests {number}"] = draw
    for case, requests in named.items():
        want = [[_embedded(image, weights) for image in images] for images, weights in requests]
        seen = {repr((image.tolist(), weights)) for images, weights in requests for image in images}
        yield case, (requests,), (want, len(seen), [])


def split_thought(text: str) -> tuple[str, str]:
    """Split a thinking model's text into (thought, answer), without tags."""
    thought, closed, answer = text.rpartition("</think>")
    if not closed:
        thought, answer = (text, "") if text.lstrip().startswith("<think>") else ("", text)
    answer = answer.replace("<answer>", "").replace("</answer>", "")
    return thought.strip().removeprefix("<think>").strip(), answer.strip()


@exercise("thought", "answer")
def check_split_thought(rng: random.Random) -> Iterator[Case]:
    """`function(text) -> (thought, answer)`, both without tags and stripped.

    - The text before the last </think> is the thought; the text after it is the answer.
    - str.rpartition returns three parts; the middle part is empty if the tag is missing.
    - Without </think>, the text is the thought if it starts with <think>, and the answer if not. Remove tags; strip.
    """
    for number in range(32):  # all ways to write a text
        begin, end, tagged, space, thought = (number >> bit & 1 for bit in range(5))
        answer = "<answer>It is a cup.</answer>" if tagged else "It is a cup."
        parts = "<think>" * begin, "A cup, or not. " * thought, "</think>" * end, "\n\n" * space, answer
        yield repr("".join(parts)), ("".join(parts),), split_thought("".join(parts))


def circles(first: int, count: int) -> tuple[list[np.ndarray], list[str]]:
    """Return `count` scenes with one circle each, from scene `first` on, and the circles' colours."""
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
    """Ask for the circle's colour in each of `requests` (a model and indices of images), with a
    dict as the cache.

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
