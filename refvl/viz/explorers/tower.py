"""One patch through the tower: its pixels, its row, every block, the merger, its token."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from refvl.pixels.by_hand import unpatchify
from refvl.study.watch import media_attention
from refvl.viz.attention import plot_states
from refvl.viz.explorers.base import Control, module, photo
from refvl.viz.explorers.watched import FINE, Watched, WatchedExplorer, in_steps
from refvl.viz.style import HIGHLIGHT

COMMON = 0.98  # share of values within the colour range; others are clipped


class TowerExplorer(WatchedExplorer):
    """The explorer of the states of patches: how similar they are after each block,
    and the token they become.

    The similarity of two states is their cosine, after the mean state of the image is subtracted.
    Items are patches, numbered like the rows of the tower's input.
    """

    _esm = module("tower")

    def _table(self, questions: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        watched = self.watch(questions)
        blocks = [_name(i, watched[0].segments(i)) for i in range(len(watched[0].trace.tower_attentions))]
        stages = ["patch embedding", *blocks]
        return {
            "controls": [
                Control("picture", "image", list(questions), kind="menu"),
                Control("stage", "after", stages),
            ],
            "shared": {"pictures": [self._shown(w) for w in watched], "merge": watched[0].merge},
            "start": (next(iter(questions)), stages[len(stages) // 2]),
        }

    @property
    def first_patch(self) -> int:
        """The patch with the largest gain (see `gained`) in the token with the most attention."""
        first, merged, shown = self.first.looked_at_most, self.first.merge**2, self.shared["pictures"][0]
        return first + int(gained(shown["near"], shown["far"])[first : first + merged].argmax())

    def _shown(self, w: Watched) -> dict[str, Any]:
        """Return the data that all states of one image share."""
        trace, config = w.trace, self.model.processor.image_config
        [frame, *_] = unpatchify(trace.patches[0].pixel_values, (1, *w.grid), config)
        size = config.patch_size
        tiles = frame.reshape(w.grid[0], size, w.grid[1], size, 3).transpose(0, 2, 1, 3, 4)
        alike = torch.stack([likeness(state) for state in trace.tower_hidden_states])
        near, far = mean_of_the_others(alike, w.merge**2), mean_of_the_rest(alike, w.merge**2)
        looked = media_attention(trace).mean(1)[-1]  # (M,) of the first new token in the last layer, all heads
        return {
            "photo": photo(w.picture), "grid": w.grid, "patches": w.patches, "prompt": w.prompt, "answer": trace.text,
            "word": w.answer[0], "alike": in_steps(alike.clamp(min=0)),  # (stages, N, N)
            "near": near, "far": far,
            "segments": torch.stack([torch.zeros(len(w.patches)), *map(w.segments, range(len(alike) - 1))]).int(),
            "pixels": tiles[tuple(w.patches.T.numpy())].transpose(0, 3, 1, 2),  # (N, 3, P, P)
            "values": config.patch_values, "offset": trace.spans[0].offset,
            "looked": in_steps(looked, FINE), "closer": int((gained(near, far) > 0).sum()),
        }  # fmt: skip

    def row(self, index: int) -> dict[str, Any]:
        picture, stage = self.states[index]
        number, after = list(self.watched).index(picture), self.controls[1]["options"].index(stage)
        shown = self.shared["pictures"][number]
        return {"picture": number, "stage": after} | {
            name: shown[name][after] for name in ("alike", "near", "far", "segments")
        }

    def figure(self) -> Figure:
        w, row = self.watched[self.options["picture"]], self.row(self.index)
        patch = max(self.selected, 0)
        place = tuple(w.patches[patch].tolist())
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3.6), layout="constrained")
        plot_states(np.asarray(w.picture), title="the image", ax=left)
        alike, segments = w.on_grid(torch.from_numpy(row["alike"][patch])), w.on_grid(row["segments"])
        gray = alike.to(torch.uint8)[..., None].expand(-1, -1, 3).numpy()
        title = f"cosine with the framed patch (white: 1)\nafter {self.options['stage']}"
        plot_states(gray, segments_HW=segments, patch=place, title=title, ax=middle)
        names = self.controls[1]["options"]
        near = self.shared["pictures"][row["picture"]]["near"]
        far = self.shared["pictures"][row["picture"]]["far"]
        right.plot(near[:, patch].numpy(force=True), color=HIGHLIGHT, lw=3, label="the rest of its token")
        right.plot(far[:, patch].numpy(force=True), color="0.5", lw=3, label="all other patches")
        right.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
        right.set(title="cosine of the framed patch with", ylabel="mean cosine")
        right.legend(fontsize=8)
        return figure

    def describe(self) -> str:
        w, row, patch = self.watched[self.options["picture"]], self.row(self.index), max(self.selected, 0)
        return (
            f'Asked "{w.prompt}", the model answers "{w.trace.text}". After {self.options["stage"]}, the mean cosine '
            f"between patch {patch} of {len(row['near'])} and the rest of its token is {float(row['near'][patch]):.2f}."
        )


def _name(block: int, segments: Tensor) -> str:
    return f"block {block} ({'windows' if segments.any() else 'full attention'})"


def likeness(state_NE: Tensor) -> Tensor:
    """Return the (N, N) cosines between the patches' states after their mean is subtracted."""
    own_NE = state_NE.double() - state_NE.double().mean(0)
    own_NE = own_NE / own_NE.norm(dim=1, keepdim=True)
    return own_NE @ own_NE.T


def mean_of_the_others(alike: Tensor, block: int) -> Tensor:
    """Return each patch's mean similarity to the rest of its merge block, (stages, N)."""
    stages, count, _ = alike.shape
    blocks = alike.view(stages, count // block, block, count // block, block)
    own = torch.stack([blocks[:, i, :, i] for i in range(count // block)], 1)  # (stages, M, block, block)
    return ((own.sum(-1) - 1) / (block - 1)).flatten(1).float()


def mean_of_the_rest(alike: Tensor, block: int) -> Tensor:
    """Return each patch's mean similarity to the patches of all other merge blocks, (stages, N)."""
    _, count, _ = alike.shape
    own = mean_of_the_others(alike, block) * (block - 1) + 1  # (stages, N), the sum over its merge block
    return ((alike.sum(-1) - own) / (count - block)).float()


def gained(near: Tensor, far: Tensor) -> Tensor:
    """Return how much more the tower raises a patch's similarity to its merge block than to all
    others, (N,).
    """
    return (near[-1] - far[-1]) - (near[0] - far[0])


def project_colors(states: list[Tensor]) -> list[np.ndarray]:
    """Project (..., E) states to (..., 3) uint8: red,
    green and blue are the first three principal components.
    """
    all_NE = torch.cat([state.flatten(0, -2) for state in states]).double()
    mean = all_NE.mean(0)
    directions = torch.linalg.eigh((all_NE - mean).T @ (all_NE - mean)).eigenvectors[:, -3:].flip(1)  # (E, 3)
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * largest.sign()  # of the two possible signs, make the largest entry positive
    low, high = torch.quantile((all_NE - mean) @ directions, mean.new_tensor([1 - COMMON, COMMON]), dim=0)
    return [
        (((state.double() - mean) @ directions - low) / (high - low).clamp(min=1e-9)).clamp(0, 1).mul(255).round()
        .to(torch.uint8).numpy(force=True)
        for state in states
    ]  # fmt: skip
