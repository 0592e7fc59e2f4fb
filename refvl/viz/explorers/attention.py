"""Where the model looks: the attention of each new token to the prompt,
and of each patch to the image.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from refvl.study.watch import media_attention
from refvl.viz.attention import plot_attention
from refvl.viz.explorers.base import Control, module, photo
from refvl.viz.explorers.watched import (
    FINE,
    Watched,
    WatchedExplorer,
    dense,
    in_steps,
    mean_first,
    word_of,
)

LABELS = {"question": "question", "token": "word of the answer", "layer": "layer", "head": "head"}


class AttentionExplorer(WatchedExplorer):
    """The explorer of attention: the answer's attention to the image by head, and each patch's attention in the tower.

    Items are patches, numbered like the rows of the tower's input.
    """

    _esm = module("attention")

    def _table(self, questions: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        watched = self.watch(questions)
        first, text = watched[0].trace, self.model.language_model.config
        offered: dict[str, list[Any]] = {
            "question": list(questions),
            "token": list(range(1, max(len(w.answer) for w in watched) + 1)),
            "layer": [i for i, weights in enumerate(first.attentions) if weights is not None],
            "head": ["mean", *range(text.num_attention_heads)],
        }
        controls = [
            Control(
                name,
                LABELS[name],
                options,
                kind="slider" if name == "layer" else "menu",
                rare=name == "token",
            )
            for name, options in offered.items()
        ]
        every = itertools.product(*offered.values())
        layer = offered["layer"][len(offered["layer"]) // 2]
        shorter = min(len(w.answer) for w in watched) < offered["token"][-1]
        return {
            "controls": controls,
            "shared": {"questions": [self._shown(w) for w in watched], "merge": watched[0].merge},
            "states": [s for s in every if s[1] <= len(self.watched[s[0]].answer)] if shorter else None,
            "start": (next(iter(questions)), 1, layer, _finder(watched[0], layer)),
        }

    def _shown(self, w: Watched) -> dict[str, Any]:
        """Return the data shared by all states of one question, with shares as integers."""
        trace, [span] = w.trace, w.trace.spans
        before = len(trace.input_ids) - 1
        some = next(weights for weights in trace.attentions if weights is not None)
        every = (torch.zeros_like(some) if weights is None else weights for weights in trace.attentions)
        rows_LHTQ = torch.stack([weights[:, before:] for weights in every])
        read = [*trace.input_ids.tolist(), *trace.token_ids[:-1]]
        return {
            "photo": photo(w.picture), "grid": w.grid, "patches": w.patches, "prompt": w.prompt, "text": trace.text,
            "answer": w.answer, "chances": w.chances, "span": [span.offset, span.num_tokens], "length": before + 1,
            "words": ["" if span.offset <= i < span.offset + span.num_tokens else word_of(self.model, token)
                      for i, token in enumerate(read)],
            # (T, layers, 1 + H, Q)
            "language": in_steps(mean_first(rows_LHTQ.transpose(0, 1)).permute(2, 1, 0, 3), FINE),
            # (blocks, N, N)
            "tower": in_steps(torch.stack([dense(block).mean(0) for block in trace.tower_attentions])),
            "segments": torch.stack([w.segments(block) for block in range(len(trace.tower_attentions))]),
        }  # fmt: skip

    def row(self, index: int) -> dict[str, Any]:
        question, token, layer, head = self.states[index]
        number = list(self.watched).index(question)
        shown = self.shared["questions"][number]
        return {
            "question": number, "token": token - 1, "layer": layer, "head": _place(head),
            "weights": shown["language"][token - 1, layer, _place(head), : shown["length"] + token - 1],
            "tower": shown["tower"], "segments": shown["segments"],
        }  # fmt: skip

    def figure(self) -> Figure:
        o, w = self.options, self.watched[self.options["question"]]
        h, width = (side // w.merge for side in w.grid)
        looked = mean_first(media_attention(w.trace, token=o["token"] - 1)[o["layer"]])[_place(o["head"])]
        blocks = range(len(w.trace.tower_attentions))
        figure = plt.figure(figsize=(8.4, 4.4), layout="constrained")
        halves: Any = figure.subfigures(1, 2)
        left, right = halves
        title = f'{w.prompt}\n"{w.answer[o["token"] - 1]}": layer {o["layer"]}, {_named(o["head"])}'
        plot_attention(w.picture, looked.reshape(h, width), title=title, ax=left.subplots())
        patch = max(self.selected, 0)
        maps = right.subplots(-(-len(blocks) // 2), 2, squeeze=False).flat
        for block, ax in zip(blocks, maps, strict=False):
            weights = w.on_grid(dense(w.trace.tower_attentions[block]).mean(0)[patch])
            segments = w.segments(block)
            plot_attention(
                w.picture, weights, patch=tuple(w.patches[patch].tolist()), segments_HW=w.on_grid(segments),
                title=f"block {block}: {'windows' if segments.any() else 'full'}", ax=ax,
            )  # fmt: skip
        return figure

    def describe(self) -> str:
        o, w = self.options, self.watched[self.options["question"]]
        looked = mean_first(media_attention(w.trace, token=o["token"] - 1)[o["layer"]])[_place(o["head"])]
        return (
            f'Asked "{w.prompt}", the model answers "{w.trace.text}". When it chose "{w.answer[o["token"] - 1]}", '
            f"{_named(o['head'])} of layer {o['layer']} gave {float(looked.sum()):.0%} of its attention to the image, "
            f"and at most {float(looked.max()):.0%} to a single one of the image's {len(looked)} tokens."
        )


def _finder(w: Watched, layer: int) -> int:
    """Return the head of a layer that gives the most attention to a single image token."""
    return int(media_attention(w.trace)[layer].amax(-1).argmax())


def _named(head: str | int) -> str:
    """Return a noun phrase for a head."""
    return "the average head" if head == "mean" else f"head {head}"


def _place(head: str | int) -> int:
    """Return the index of a head in the result of `mean_first`."""
    return 0 if head == "mean" else int(head) + 1
