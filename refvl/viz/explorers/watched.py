"""A question about a picture as the explorers of the model at work keep it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from refvl.pixels.media import load_image
from refvl.positions import merge_block_coordinates
from refvl.study.report import Trace
from refvl.study.watch import SegmentAttention, media_attention, probabilities
from refvl.viz.explorers.base import Explorer

COARSE, FINE = 255, 65_535  # steps of a share that is drawn, and of one that is written in per cent
MAX_PATCHES = 400  # of a picture: every patch's attention to every other one is kept


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """One answer, watched. Patches are in the order of the tower's rows, merge block by merge block."""

    prompt: str
    picture: Image.Image
    trace: Trace
    grid: tuple[int, int]  # rows, columns of patches
    merge: int  # patches along the side of a merge block
    answer: list[str]  # a word per new token
    chances: list[float]  # of each of them, where it was chosen

    @property
    def patches(self) -> Tensor:
        """(N, 2) row and column."""
        return merge_block_coordinates([(1, *self.grid)], spatial_merge_size=self.merge)

    def segments(self, block: int) -> Tensor:
        """(N,) the number of each patch's segment in a block: its window, or 0 everywhere."""
        numbers = torch.empty(len(self.patches), dtype=torch.int64)
        for number, (rows, _) in enumerate(self.trace.tower_attentions[block]):
            numbers[rows.cpu()] = number
        return numbers

    @property
    def looked_at_most(self) -> int:
        """The first patch of the token that the first new token takes most from, in the last layer."""
        return int(media_attention(self.trace)[-1].mean(0).argmax()) * self.merge**2

    def on_grid(self, values_N: Tensor) -> Tensor:
        """(rows, columns, ...) of one value per patch."""
        grid = values_N.new_empty(*self.grid, *values_N.shape[1:])
        grid[tuple(self.patches.T)] = values_N
        return grid


class WatchedExplorer(Explorer):
    """What the explorers of answers about pictures share. Not used by itself: `_table` says what is shown of them."""

    def __init__(self, model, questions: Mapping[str, tuple[str, Any]]):
        self.model = model
        super().__init__(**self._table(questions))
        self.selected = self.first.looked_at_most

    def ask(self, questions: Mapping[str, tuple[str, Any]]) -> None:
        """Ask the model again, name -> (prompt, image), and show that instead."""
        self.fill(**self._table(questions))
        self.selected = self.first.looked_at_most

    def watch(self, questions: Mapping[str, tuple[str, Any]]) -> list[Watched]:
        """Ask every question, and keep the answers in `watched` by name."""
        watched = watch_all(self.model, questions)
        self.watched = dict(zip(questions, watched, strict=True))
        return watched

    @property
    def first(self) -> Watched:
        return next(iter(self.watched.values()))

    def _table(self, questions: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        """The arguments of `Explorer.fill`."""
        raise NotImplementedError


def watch_all(model, questions: Mapping[str, tuple[str, Any]]) -> list[Watched]:
    """Every question asked; ValueError for a family without grids, more than one picture, and too many patches."""
    if not questions:
        raise ValueError("questions: expected at least one, got none")
    return [_watch(model, name, *question) for name, question in questions.items()]


def _watch(model, name: str, prompt: str, image) -> Watched:
    merge = getattr(model.encoder.config, "spatial_merge_size", None)
    if merge is None:
        raise ValueError(f"model: this explorer draws grids of patches, which {model.family.name} does not have")
    picture = load_image(image)
    grid = model.processor.layout_of(picture)[1:]
    if grid[0] * grid[1] > MAX_PATCHES:
        count = grid[0] * grid[1]
        raise ValueError(f"questions[{name!r}]: its picture has {count} patches, at most {MAX_PATCHES} are drawn")
    trace = model.trace(prompt, images=[picture], attentions=True, hidden_states=True)
    chances = probabilities(model.language_model, trace)
    answer = [word_of(model, token) for token in trace.token_ids]
    picked = [round(float(row[token]), 4) for row, token in zip(chances, trace.token_ids, strict=True)]
    return Watched(prompt, picture, trace, grid, merge, answer, picked)


def word_of(model, token: int) -> str:
    """A token as one reads it."""
    text = model.processor.tokenizer.decode([token])
    return text.strip() or repr(text)[1:-1]


def dense(segments: list[SegmentAttention]) -> Tensor:
    """(H, N, N) of a block's segments: zero between patches of different ones."""
    count = sum(len(rows) for rows, _ in segments)
    weights_HNN = torch.zeros(len(segments[0].weights), count, count, device=segments[0].weights.device)
    for rows, weights in segments:
        weights_HNN[:, rows[:, None], rows] = weights.float()
    return weights_HNN


def mean_first(weights: Tensor) -> Tensor:
    """(H, ...) -> (1 + H, ...): the mean over heads, then each."""
    return torch.cat([weights.mean(0, keepdim=True), weights])


def in_steps(shares: Tensor, steps: int = COARSE) -> np.ndarray:
    """Shares of 0 to 1 as whole numbers of 0 to `steps`."""
    return (shares * steps).round().int().numpy(force=True)
