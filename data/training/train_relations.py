"""Train a tiny Qwen2.5-VL whose answers need its tower's rotary angles and windows: `python -m
data.training.train_relations --out FOLDER`.

No weights of this experiment are shipped. Of 64 held-out scenes, 76 % of the questions about neighbours and 80 % of
those about windows were answered correctly after 600 steps. The shipped models answer all
of their questions without the rotary angles and with windows of any tokens. Rotary angles encode only how far apart two
patches are, and windows only which tokens are together, so two kinds of questions are added:

- "What is right of the red circle?" The answer is the object in the next cell, or "no object". In most batches the
  nine tokens exchange their rows and columns in the tower, and the answers follow this exchange. M-RoPE is exchanged
  separately, so the language model cannot find the neighbour.
- "What is with the red circle?" The answer is the only other object in its window. In most batches the windows contain
  other tokens, and the answers follow.

A probe on the tower's output asks every cell for its four neighbours, and for the colours and shapes of the others in
its window.

`python -m data.training.train_relations --measure FOLDER` asks held-out questions of a trained model, unchanged and
with the mechanisms removed or exchanged (`RUNS`).
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

import refvl
from benchmarks.ablations import full_attention
from data.training import evaluate_tiny, run, scenes, train_tiny
from data.training.tiny_qwen2_5_vl import FAMILY as QWEN
from data.training.tiny_qwen2_5_vl import TinyQwen2_5_VL
from data.training.train_tiny import SHUFFLED

CELLS = len(scenes.PLACES)
WAYS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}  # (rows, columns)
NOTHING = "no object"
WINDOWS = ((0, 1, 3, 4), (2, 5), (6, 7), (8,))  # the tokens of the four windows of an image of 3 x 3 tokens
KINDS = {"neighbour": "next to", "window": "with"}


class TinyQwen2_5_VLTower(TinyQwen2_5_VL):
    name = "qwen2_5_vl_tower"
    release = "qwen2_5_vl-tower"
    recipe = {  # noqa: RUF012
        "begin_with": "9520365ce2b5da71cefe1d825c535d758782c4da317c9e9418f906b2a46141db", "seed": 2, "steps": 600,
        "see": 150, "warmup": 30, "pictures": 12, "clips": 2, "asides": 2, "photos": 4, "lr": 1.2e-3, "muon_lr": 2e-3,
        "measure_every": 100, "measure_on": 64,
    }  # fmt: skip

    @property
    def begins_in(self) -> Path:
        return QWEN.folder

    def train_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the first checkpoint: the words of the new questions take several of its tokens."""
        return Tokenizer.from_file(str(QWEN.folder / "tokenizer.json"))


FAMILY = TinyQwen2_5_VLTower()


@dataclass(frozen=True)
class Arrangement:
    """What the tower is told of the nine tokens: token i has the row and column of place coordinates[i], and stands in
    the windows where token windows[i] of an unchanged image stands.
    """

    coordinates: np.ndarray
    windows: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Arrangement":
        orders = [rng.permutation(CELLS) if rng.random() < SHUFFLED else np.arange(CELLS) for _ in range(2)]
        return cls(*orders)

    def __call__(self, plan: Any) -> Any:
        """Return the plan of images of 3 x 3 tokens with exchanged coordinates and windows."""
        at, block = plan.window_index, len(plan.positions) // len(plan.window_index)
        order = torch.as_tensor(self.coordinates)
        members = torch.as_tensor(np.argsort(self.windows))  # the token that stands where each token stood
        positions = plan.positions.unflatten(0, (-1, block))[plan.reverse_index].unflatten(0, (-1, CELLS))
        at = at - at % CELLS + members[at % CELLS]
        positions = positions[:, order].flatten(0, 1)[at].flatten(0, 1)
        return replace(plan, positions=positions, window_index=at, reverse_index=at.argsort())

    def neighbour(self, cell: int, way: str) -> int | None:
        """Return the cell whose coordinates are those of the next cell in this direction, None at the edge."""
        row, column = divmod(int(self.coordinates[cell]), 3)
        row, column = row + WAYS[way][0], column + WAYS[way][1]
        inside = 0 <= row < 3 and 0 <= column < 3
        return int(np.argsort(self.coordinates)[3 * row + column]) if inside else None

    def others(self, cell: int) -> list[int]:
        """Return the other cells in the window of a cell."""
        [window] = [tokens for tokens in WINDOWS if self.windows[cell] in tokens]
        return [other for other in range(CELLS) if other != cell and self.windows[other] in window]


AS_IT_IS = Arrangement(np.arange(CELLS), np.arange(CELLS))


def questions(scene: scenes.Scene, seen: Arrangement) -> list[scenes.Question]:
    """Return the questions about neighbours and windows: those about no object are marked by their answer."""
    at, found = {thing.place: thing for thing in scene.things}, []
    name = lambda thing: f"{thing.color} {thing.shape}"  # noqa: E731
    for cell, thing in at.items():
        for way in WAYS:
            other = at.get(seen.neighbour(cell, way))
            answer = f"a {name(other)}" if other else NOTHING
            found.append(scenes.Question("neighbour", f"What is {way} the {name(thing)}?", answer))
        others = [at[other] for other in seen.others(cell) if other in at]
        if len(others) < 2:
            answer = f"a {name(others[0])}" if others else NOTHING
            found.append(scenes.Question("window", f"What is with the {name(thing)}?", answer))
    return found


def draw_question(scene: scenes.Scene, seen: Arrangement, kind: str, rng: np.random.Generator) -> scenes.Question:
    """Draw a question of a kind; three in four are about an object that exists, if there is one."""
    pool = [q for q in questions(scene, seen) if q.kind == kind] or questions(scene, seen)
    about = [q for q in pool if q.answer != NOTHING]
    pool = about if about and rng.random() < 0.75 else pool
    return pool[int(rng.integers(len(pool)))]


def labels_of(scene: scenes.Scene, seen: Arrangement) -> tuple[np.ndarray, np.ndarray]:
    """Return (9, 4, 2) shape and colour of each cell's neighbours, 0 for none, and (9, 11) whether each shape and each
    colour is among the others in its window.
    """
    names, others = np.zeros((CELLS, len(WAYS), 2), int), np.zeros((CELLS, len(scenes.SHAPES) + len(scenes.COLORS)))
    own = {t.place: (scenes.SHAPES.index(t.shape), list(scenes.COLORS).index(t.color)) for t in scene.things}
    for cell in range(CELLS):
        for i, way in enumerate(WAYS):
            if (other := seen.neighbour(cell, way)) in own:
                names[cell, i] = 1 + own[other][0], 1 + own[other][1]
        for shape, color in (own[other] for other in seen.others(cell) if other in own):
            others[cell, [shape, len(scenes.SHAPES) + color]] = 1
    return names, others


class Learner(train_tiny.Learner):
    def __init__(self, family, config: dict, seed: int):
        super().__init__(family, config, seed)
        self.sizes = [1 + len(scenes.SHAPES), 1 + len(scenes.COLORS)] * len(WAYS)
        self.sizes += [len(scenes.SHAPES) + len(scenes.COLORS)]
        self.relation_probe = nn.Linear(self.probe.in_features, sum(self.sizes))
        nn.init.zeros_(self.relation_probe.weight)
        nn.init.zeros_(self.relation_probe.bias)

    def relation_loss(self, media_BMD: Tensor, drawn: list[scenes.Scene], seen: Arrangement) -> Tensor:
        names, others = (
            torch.from_numpy(np.concatenate(x)) for x in zip(*(labels_of(s, seen) for s in drawn), strict=True)
        )
        *near, around = self.relation_probe(media_BMD.flatten(0, 1)).split(self.sizes, -1)
        loss = sum(F.cross_entropy(x, names[:, i // 2, i % 2]) for i, x in enumerate(near))
        return loss + 4 * F.binary_cross_entropy_with_logits(around, others.float())


class Trainer(train_tiny.Trainer):
    """Images are shown with an exchanged arrangement, and three more questions are asked about each."""

    learner: Learner

    def make_learner(self) -> Learner:
        return Learner(self.family, self.config, self.recipe.seed)

    def _draw(self, sort: str, count: int, number: int, rng):
        drawn, pixels, labels, shown = super()._draw(sort, count, number, rng)
        if sort != "picture":
            return drawn, pixels, labels, shown
        return drawn, pixels, labels, shown | {"change": Arrangement.draw(rng)}

    def _see(self, sort: str, count: int, number: int, rng) -> tuple[Tensor, Tensor]:
        if sort != "picture":
            return super()._see(sort, count, number, rng)
        drawn, pixels, labels, shown = self._draw(sort, int(count * self.recipe.seeing), number, rng)
        media_BMD, learner = self.learner.vlm.encode(pixels, **shown), self.learner
        loss = learner.cell_loss(media_BMD, labels) + learner.relation_loss(media_BMD, drawn, shown["change"])
        return torch.zeros(()), loss

    def _speak(self, sort: str, count: int, number: int, rng) -> tuple[Tensor, Tensor]:
        if sort != "picture":
            return super()._speak(sort, count, number, rng)
        drawn, pixels, labels, shown = self._draw(sort, count, number, rng)
        seen, order = shown["change"], rng.permutation(CELLS) if rng.random() < SHUFFLED else np.arange(CELLS)
        told = [train_tiny.at_places(scene, order) for scene in drawn]
        asked = [train_tiny.ask(scene, train_tiny.kinds_to_ask(scene, rng), rng) for scene in told]
        for row, scene in zip(asked, drawn, strict=True):
            row += [draw_question(scene, seen, kind, rng) for kind in ("neighbour", "neighbour", "window")]
        batch = train_tiny.move_places(self.builder.batch(pixels, asked, shown=shown), order)
        logits, media_BMD, inner_BLD = self.learner.vlm(batch)
        probes = self.learner.cell_loss(media_BMD, labels) + self.learner.told_loss(batch, inner_BLD)
        probes = probes + self.learner.relation_loss(media_BMD, drawn, seen)
        return F.cross_entropy(logits, batch.targets), probes

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        shares = super().measure()
        rng, count = np.random.default_rng(self.recipe.measure_on), self.recipe.measure_on
        drawn, pixels = train_tiny.first_scenes("picture", "select", count)
        for name, seen in {"": AS_IT_IS, ", exchanged": Arrangement(rng.permutation(9), rng.permutation(9))}.items():
            asked = [[draw_question(scene, seen, kind, rng) for kind in KINDS] for scene in drawn]
            model = self.learner.vlm
            shares |= train_tiny._measure(model, self.builder, drawn, pixels, asked, name=name, shown={"change": seen})
        return shares


# ----------------------------------------------------------------------------------------------- measuring


TRANSPOSED = replace(AS_IT_IS, coordinates=scenes.TRANSPOSED)
OTHER_WINDOWS = replace(AS_IT_IS, windows=np.arange(CELLS)[::-1].copy())  # their tokens in reverse order
RUNS: dict[str, tuple[dict[str, Callable], Arrangement]] = {  # name -> `replace` of `trace`, and the tower's new world
    "as it is": ({}, AS_IT_IS),
    "no rotation": ({"frequencies": torch.zeros_like}, AS_IT_IS),
    "rows and columns exchanged in the tower": ({"plan": lambda plans: list(map(TRANSPOSED, plans))}, TRANSPOSED),
    "full attention for windows": ({"plan": lambda plans: list(map(full_attention, plans))}, AS_IT_IS),
    "windows of other tokens": ({"plan": lambda plans: list(map(OTHER_WINDOWS, plans))}, OTHER_WINDOWS),
}


def measure(folder: Path, count: int, split: str = "test") -> list[dict]:
    """Ask `count` questions of each kind; return the share that is correct, and that follows the new arrangement."""
    model, rows = refvl.load(folder, device="cpu", progress=False), []
    usual = {kind: evaluate_tiny.requests_for(kind, count, split) for kind in ("color", "shape", "place", "motion")}
    for what, (changes, seen) in RUNS.items():
        for kind in (*KINDS, *usual):
            asked, rng = [], np.random.default_rng(count)
            if kind in usual:
                asked = [(r.arguments, r.question.answer, r.question.answer) for r in usual[kind]]
            else:
                drawn = (scenes.draw_scene(split, index, objects=(3, 4)) for index in range(2 * count))
                fit = (s for s in drawn if any(q.kind == kind for q in questions(s, AS_IT_IS)))
                for scene in islice(fit, count):
                    question = draw_question(scene, AS_IT_IS, kind, rng)
                    then = {q.text: q.answer for q in questions(scene, seen)}.get(question.text, "?")
                    arguments = {"prompt": question.text, "images": [scenes.render(scene)]}
                    asked.append((arguments, question.answer, then))
            traces = [model.trace(**arguments, max_new_tokens=1, replace=changes or None) for arguments, *_ in asked]
            said = [
                answer for i in range(0, count, 50) for answer in model.answers(traces[i : i + 50], max_new_tokens=8)
            ]
            pairs = [(answer, true, then) for answer, (_, true, then) in zip(said, asked, strict=True)]
            moved = [(answer, then) for answer, true, then in pairs if then not in (true, "?")]
            row = {"run": what, "question": kind, "n": count, "right": sum(a == true for a, true, _ in pairs)}
            row |= {"follow": sum(a == then for a, then in moved), "follow_of": len(moved)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def make_trainer(recipe: train_tiny.Recipe, rank: int) -> Trainer:
    return Trainer(FAMILY, recipe, rank)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run.add_arguments(parser, train_tiny.Recipe)
    parser.add_argument("--measure", type=Path, help="ask the model in this folder instead of training")
    parser.add_argument("-n", type=int, default=100, help="questions of each kind")
    args = vars(parser.parse_args())
    out, resume, stop, folder, count = (args.pop(name) for name in ("out", "resume", "stop", "measure", "n"))
    if folder:
        measure(folder, count)
        return
    if out is None:
        parser.error("--out: expected a folder; no weights of this experiment are shipped")
    recipe = train_tiny.recipe_of(FAMILY, **{name: value for name, value in args.items() if value is not None})
    run.train(make_trainer, (recipe,), out, resume=resume, stop=stop)


if __name__ == "__main__":
    main()
