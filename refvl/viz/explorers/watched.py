"""Questions about images, with the answers and traces that explorers of a running model store."""

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

COARSE, FINE = 255, 65_535  # steps of shares that are drawn, and of shares that are written as percentages
MAX_PATCHES = 400  # per image, because every patch's attention to every other patch is stored


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """One answer, with its trace.

    Patches are in the order of the tower's rows, merge block by merge block.
    """

    prompt: str
    picture: Image.Image
    trace: Trace
    grid: tuple[int, int]  # rows, columns of patches
    merge: int  # patches along the side of a merge block
    answer: list[str]  # a word per new token
    chances: list[float]  # the probability of each token when it was chosen

    @property
    def patches(self) -> Tensor:
        """The row and column of each patch, (N, 2)."""
        return merge_block_coordinates([(1, *self.grid)], spatial_merge_size=self.merge)

    def segments(self, block: int) -> Tensor:
        """Return the number of each patch's segment in a block, (N,): its window,
        or 0 with full attention.
        """
        numbers = torch.empty(len(self.patches), dtype=torch.int64)
        for number, (rows, _) in enumerate(self.trace.tower_attentions[block]):
            numbers[rows.cpu()] = number
        return numbers

    @property
    def looked_at_most(self) -> int:
        """The index of the first patch in the image token that the first new token attends to most,
        in the last layer.
        """
        return int(media_attention(self.trace)[-1].mean(0).argmax()) * self.merge**2

    def on_grid(self, values_N: Tensor) -> Tensor:
        """Arrange one value per patch as (rows, columns, ...)."""
        grid = values_N.new_empty(*self.grid, *values_N.shape[1:])
        grid[tuple(self.patches.T)] = values_N
        return grid


class WatchedExplorer(Explorer):
    """The abstract base of explorers of answers about images; a subclass defines `_table`."""

    def __init__(self, model, questions: Mapping[str, tuple[str, Any]]):
        self.model = model
        super().__init__(**self._table(questions))
        self.selected = self.first_patch

    def ask(self, questions: Mapping[str, tuple[str, Any]]) -> None:
        """Ask the model new questions, name -> (prompt, image), and show the answers instead."""
        self.fill(**self._table(questions))
        self.selected = self.first_patch

    def watch(self, questions: Mapping[str, tuple[str, Any]]) -> list[Watched]:
        """Ask every question, and store the answers in `watched` by name."""
        if not questions:
            raise ValueError("questions: expected at least one question, got none")
        self.watched = {name: _watch(self.model, name, *question) for name, question in questions.items()}
        return list(self.watched.values())

    @property
    def first(self) -> Watched:
        return next(iter(self.watched.values()))

    @property
    def first_patch(self) -> int:
        """The index of the initially selected patch."""
        return self.first.looked_at_most

    def _table(self, questions: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        """Return the arguments of `Explorer.fill`."""
        raise NotImplementedError


def _watch(model, name: str, prompt: str, image) -> Watched:
    """Ask a question; raise ValueError for a family without grids, or too many patches."""
    merge = getattr(model.encoder.config, "spatial_merge_size", None)
    if merge is None:
        raise ValueError(f"model: expected a family with grids of patches, got {model.family.name}")
    picture = load_image(image)
    grid = model.processor.layout_of(picture)[1:]
    if (count := grid[0] * grid[1]) > MAX_PATCHES:
        raise ValueError(f"questions[{name!r}]: expected an image of at most {MAX_PATCHES} patches, got {count}")
    trace = model.trace(prompt, images=[picture], attentions=True, hidden_states=True)
    chances = probabilities(model.language_model, trace)
    answer = [word_of(model, token) for token in trace.token_ids]
    picked = [round(float(row[token]), 4) for row, token in zip(chances, trace.token_ids, strict=True)]
    return Watched(prompt, picture, trace, grid, merge, answer, picked)


def word_of(model, token: int) -> str:
    """Return a token in readable form."""
    text = model.processor.tokenizer.decode([token])
    return text.strip() or repr(text)[1:-1]


def dense(segments: list[SegmentAttention]) -> Tensor:
    """Return a block's attention weights, (H, N, N), which are zero between different segments."""
    count = sum(len(rows) for rows, _ in segments)
    weights_HNN = torch.zeros(len(segments[0].weights), count, count, device=segments[0].weights.device)
    for rows, weights in segments:
        weights_HNN[:, rows[:, None], rows] = weights.float()
    return weights_HNN


def mean_first(weights: Tensor) -> Tensor:
    """Turn (H, ...) into (1 + H, ...): the mean over heads, followed by each head."""
    return torch.cat([weights.mean(0, keepdim=True), weights])


def in_steps(shares: Tensor, steps: int = COARSE) -> np.ndarray:
    """Return shares from 0 to 1 as integers from 0 to `steps`."""
    return (shares * steps).round().int().numpy(force=True)
