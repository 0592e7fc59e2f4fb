"""Questions whose answers depend on the tower's coordinates and windows, and false coordinates
and windows for the tower.

Rotary angles encode only the distance between two patches, and windows determine only which
tokens are together. So questions about single objects need neither. Two kinds of questions need
them:

- "What is right of the red circle?" The answer is the object in the next cell, or "no object".
- "What is with the red circle?" The answer is the only other object in its window.

A tower with a position table should use the table to find neighbours; a tower without one should use rotary angles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.training import scenes

CELLS = len(scenes.PLACES)
EXCHANGED = 0.7  # the share of image batches whose tokens exchange coordinates, and of those with different windows
WAYS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}  # (rows, columns)
NOTHING = "no object"
WINDOWS = ((0, 1, 3, 4), (2, 5), (6, 7), (8,))  # the tokens of the four windows of an image of 3 x 3 tokens
KINDS = ("neighbour", "window")


@dataclass(frozen=True)
class Arrangement:
    """The coordinates and windows that the tower is given for the nine tokens. Token i has the row and column
    of place coordinates[i], and takes the position in the windows that token windows[i] has in an unchanged
    image.
    """

    coordinates: np.ndarray
    windows: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, family: Any) -> "Arrangement":
        orders = [rng.permutation(CELLS) if rng.random() < EXCHANGED else np.arange(CELLS) for _ in range(2)]
        return cls(orders[0], orders[1] if family.reads_windows else np.arange(CELLS))

    def __call__(self, plan: Any) -> Any:
        """Return the plan of images of 3 x 3 tokens with exchanged coordinates and windows.

        If the tower has a position table, its vectors are exchanged instead of the rotary coordinates.
        """
        if hasattr(plan, "position_embeds"):
            return exchange_vectors(plan, np.add.outer(4 * self.coordinates, range(4)).flatten())
        at, block = plan.window_index, len(plan.positions) // len(plan.window_index)
        order = torch.as_tensor(self.coordinates)
        members = torch.as_tensor(np.argsort(self.windows))  # the token that takes each token's position
        positions = plan.positions.unflatten(0, (-1, block))[plan.reverse_index].unflatten(0, (-1, CELLS))
        at = at - at % CELLS + members[at % CELLS]
        positions = positions[:, order].flatten(0, 1)[at].flatten(0, 1)
        return replace(plan, positions=positions, window_index=at, reverse_index=at.argsort())

    def neighbour(self, cell: int, way: str) -> int | None:
        """Return the cell whose coordinates are those of the next cell in this direction, or None at the edge."""
        row, column = divmod(int(self.coordinates[cell]), 3)
        row, column = row + WAYS[way][0], column + WAYS[way][1]
        inside = 0 <= row < 3 and 0 <= column < 3
        return int(np.argsort(self.coordinates)[3 * row + column]) if inside else None

    def others(self, cell: int) -> list[int]:
        """Return the other cells in the window of a cell."""
        [window] = [tokens for tokens in WINDOWS if self.windows[cell] in tokens]
        return [other for other in range(CELLS) if other != cell and self.windows[other] in window]


AS_IT_IS = Arrangement(np.arange(CELLS), np.arange(CELLS))
TRANSPOSED = replace(AS_IT_IS, coordinates=scenes.TRANSPOSED)
OTHER_WINDOWS = replace(AS_IT_IS, windows=np.arange(CELLS)[::-1].copy())  # the tokens in reverse order


def exchange_vectors(plan: Any, table: Sequence[int] | np.ndarray) -> Any:
    """Return the plan of items of one size in which patch i gets the vector of patch table[i] in the position table."""
    items = plan.position_embeds.unflatten(0, (-1, len(table)))
    return replace(plan, position_embeds=items[:, torch.as_tensor(table)].flatten(0, 1))


def kinds_of(family: Any) -> tuple[str, ...]:
    """Return the kinds of these questions that a family is asked."""
    return KINDS[: family.reads_neighbours + family.reads_windows]


def questions(scene: scenes.Scene, seen: Arrangement) -> list[scenes.Question]:
    """Return the questions about neighbours and windows; the answer to some of them is "no object"."""
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


def answer_to(text: str, scene: scenes.Scene, seen: Arrangement) -> str | None:
    """Return the answer to a question under a different arrangement, or None if the question has no answer there."""
    return next((question.answer for question in questions(scene, seen) if question.text == text), None)


def draw_question(scene: scenes.Scene, seen: Arrangement, kind: str, rng: np.random.Generator) -> scenes.Question:
    """Draw a question of a kind; three in four are about an object that exists, if there is one."""
    pool = [q for q in questions(scene, seen) if q.kind == kind] or questions(scene, seen)
    about = [q for q in pool if q.answer != NOTHING]
    pool = about if about and rng.random() < 0.75 else pool
    return pool[int(rng.integers(len(pool)))]


def sizes(family: Any) -> list[int]:
    """Return the number of answers to each question of a probe: neighbours' shapes and colours, and the window's."""
    around = len(scenes.SHAPES) + len(scenes.COLORS) if family.reads_windows else 0
    return [1 + len(scenes.SHAPES), 1 + len(scenes.COLORS)] * len(WAYS) + [around]


def labels_of(drawn: list[scenes.Scene], seen: Arrangement) -> tuple[Tensor, Tensor]:
    """Return two tensors. The first, (B * 9, 4, 2), contains the shape and colour of each cell's
    neighbours, 0 for none. The second, (B * 9, 11), contains whether each shape and each colour is
    among the other objects in the cell's window.
    """
    pairs = [_labels(scene, seen) for scene in drawn]
    names, others = (torch.from_numpy(np.concatenate(x)) for x in zip(*pairs, strict=True))
    return names, others.float()


def _labels(scene: scenes.Scene, seen: Arrangement) -> tuple[np.ndarray, np.ndarray]:
    names, others = np.zeros((CELLS, len(WAYS), 2), int), np.zeros((CELLS, len(scenes.SHAPES) + len(scenes.COLORS)))
    own = {t.place: (scenes.SHAPES.index(t.shape), list(scenes.COLORS).index(t.color)) for t in scene.things}
    for cell in range(CELLS):
        for i, way in enumerate(WAYS):
            if (other := seen.neighbour(cell, way)) in own:
                names[cell, i] = 1 + own[other][0], 1 + own[other][1]
        for shape, color in (own[other] for other in seen.others(cell) if other in own):
            others[cell, [shape, len(scenes.SHAPES) + color]] = 1
    return names, others
