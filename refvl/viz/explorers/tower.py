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
    """The path of each patch of an image, state by state of the tower.

    Colours are the first three principal components of all patches' states, over all images and blocks, so a colour
    means the same everywhere; the tokens, which are wider, have their own. Items are patches, numbered like the rows of
    the tower's input.
    """

    _esm = module("tower")
    title = "One patch through the tower"
    asks = "What becomes of a patch on its way through the tower?"
    action = "Choose a patch of the red circle, then move on from block to block."
    takeaway = (
        "A patch starts as a row of pixel values, reads other patches block by block, and ends as a quarter of a token."
    )

    def _table(self, questions: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        watched = self.watch(questions)
        blocks = [_name(i, watched[0].segments(i)) for i in range(len(watched[0].trace.tower_attentions))]
        stages = ["patch embedding", *blocks]
        colors = project_colors([torch.stack(w.trace.tower_hidden_states) for w in watched])
        token_colors = project_colors([w.trace.embeds[0] for w in watched])
        return {
            "controls": [
                Control("picture", "image", list(questions), kind="menu"),
                Control("stage", "after", stages),
            ],
            "shared": {
                "pictures": [self._shown(*each) for each in zip(watched, colors, token_colors, strict=True)],
                "merge": watched[0].merge,
            },
            "start": (next(iter(questions)), stages[len(stages) // 2]),
        }

    def _shown(self, w: Watched, colors: np.ndarray, token_colors: np.ndarray) -> dict[str, Any]:
        """Return the data that all states of one image draw."""
        trace, config = w.trace, self.model.processor.image_config
        [frame, *_] = unpatchify(trace.patches[0].pixel_values, (1, *w.grid), config)
        size = config.patch_size
        tiles = frame.reshape(w.grid[0], size, w.grid[1], size, 3).transpose(0, 2, 1, 3, 4)
        looked = media_attention(trace).mean(1)[-1]  # (M,) of the first new token in the last layer, all heads
        return {
            "photo": photo(w.picture), "grid": w.grid, "patches": w.patches, "prompt": w.prompt, "answer": trace.text,
            "word": w.answer[0], "colors": colors,  # (stages, N, 3)
            "norms": torch.stack([state.float().norm(dim=-1) for state in trace.tower_hidden_states]),
            "segments": torch.stack([torch.zeros(len(w.patches)), *map(w.segments, range(len(colors) - 1))]).int(),
            "pixels": tiles[tuple(w.patches.T.numpy())].transpose(0, 3, 1, 2),  # (N, 3, P, P)
            "values": config.patch_values, "offset": trace.spans[0].offset, "tokens": token_colors,
            "looked": in_steps(looked, FINE),
        }  # fmt: skip

    def row(self, index: int) -> dict[str, Any]:
        picture, stage = self.states[index]
        number, after = list(self.watched).index(picture), self.controls[1]["options"].index(stage)
        shown = self.shared["pictures"][number]
        return {"picture": number, "stage": after} | {
            name: shown[name][after] for name in ("colors", "norms", "segments")
        }

    def figure(self) -> Figure:
        w, row = self.watched[self.options["picture"]], self.row(self.index)
        patch = max(self.selected, 0)
        place = tuple(w.patches[patch].tolist())
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3.6), layout="constrained")
        plot_states(np.asarray(w.picture), title=w.prompt, ax=left)
        colors, segments = w.on_grid(torch.from_numpy(row["colors"])).numpy(), w.on_grid(row["segments"])
        plot_states(colors, segments_HW=segments, patch=place, title=f"after {self.options['stage']}", ax=middle)
        names = self.controls[1]["options"]
        norms = self.shared["pictures"][row["picture"]]["norms"]
        right.plot(norms.numpy(force=True), color="0.8", lw=1)
        right.plot(norms[:, patch].numpy(force=True), color=HIGHLIGHT, lw=3, label=f"patch {patch}")
        right.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
        right.set(title="norm of each patch's state", ylabel="norm")
        right.legend(fontsize=8)
        return figure

    def describe(self) -> str:
        w, norms = self.watched[self.options["picture"]], self.row(self.index)["norms"]
        return (
            f'The {len(norms)} patches of the image asked "{w.prompt}" (answer: {w.trace.text}), after '
            f"{self.options['stage']}: their states have norms of {float(norms.min()):.1f} to {float(norms.max()):.1f}."
        )


def _name(block: int, segments: Tensor) -> str:
    return f"block {block} ({'windows' if segments.any() else 'whole image'})"


def project_colors(states: list[Tensor]) -> list[np.ndarray]:
    """Project (..., E) states to (..., 3) uint8: red, green and blue are the first three principal components."""
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
