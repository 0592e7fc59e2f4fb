"""EVS with the answer: the video tokens kept at every pruning rate, their positions,
and the model's answer.
"""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from refvl.checks import Grid
from refvl.positions import (
    MediaSpan,
    compute_retention_mask,
    get_mrope_input_positions,
    restrict_positions,
)
from refvl.study.watch import probabilities
from refvl.viz.evs import plot_keep_mask
from refvl.viz.explorers.base import Control, Explorer, module, photo

RATES = [round(0.05 * i, 2) for i in range(20)]
WORDS = 4  # the number of first words of an answer whose probabilities are drawn


class EvsExplorer(Explorer):
    """The explorer of videos at every pruning rate that changes the result.

    Items are the video's tokens, in row-major order.
    """

    _esm = module("evs")

    def __init__(self, clips: list[dict[str, Any]], *, model=None, q: float = 0.5):
        """Fill the table. clips: results of `clip_asked` or `clip_of_embeddings`, each with a name."""
        self.model = model
        super().__init__(**self._table(clips, q))
        self.selected = self._moved()

    def ask(self, clips: Mapping[str, tuple[str, Any]], *, q: float = 0.5) -> None:
        """Ask the model new questions, name -> (prompt, video), and show the answers instead."""
        if self.model is None:
            raise ValueError("model: this explorer has no model to ask; use viz.explore_evs with a model")
        self.fill(**self._table([clip_asked(self.model, name, *clip) for name, clip in clips.items()], q))
        self.selected = self._moved()

    def _moved(self) -> int:
        """Return the index of the last token that was kept because it changed, after step 0; 0 if there is none."""
        row = self.row(self.index)
        _, h, w = self.clips[row["clip"]]["shared"]["thw"]
        later = row["keep"][h * w :].nonzero().flatten()
        return h * w + int(later[-1]) if len(later) else 0

    def _table(self, clips: list[dict[str, Any]], q: float) -> dict[str, Any]:
        self.clips = clips
        states = {
            (clip["name"], rate): row | {"clip": number}
            for number, clip in enumerate(clips)
            for rate, row in clip["rows"].items()
        }
        start = min(
            (state for state in states if state[0] == clips[0]["name"]),
            key=lambda state: abs(state[1] - q),
        )
        controls = [
            Control("clip", "question", [clip["name"] for clip in clips], kind="menu"),
            Control(
                "q",
                "pruning rate q",
                sorted({rate for _, rate in states}),
                kind="player",
                plays="prune more",
            ),
        ]
        first = len(clips) == 1  # then there is no video to choose
        return {
            "controls": controls[first:], "rows": {state[first:]: row for state, row in states.items()},
            "shared": {"clips": [clip["shared"] for clip in clips]}, "start": start[first:],
        }  # fmt: skip

    def figure(self) -> Figure:
        row = self.row(self.index)
        clip = self.clips[row["clip"]]
        title = f"{clip['shared']['prompt']} {row['answer']}; q = {self.options['q']:g}".lstrip("; ")
        t, h, w = clip["shared"]["thw"]
        figure, axes = plt.subplots(1, t, figsize=(min(11, 2.4 * t), 2.9), layout="constrained", squeeze=False)
        plot_keep_mask(clip["frames"], row["keep"], (t, h, w), title=title, ax=axes)
        return figure

    def describe(self) -> str:
        row = self.row(self.index)
        shared = self.clips[row["clip"]]["shared"]
        said = f' Asked "{shared["prompt"]}", the model answers "{row["answer"]}".' if shared["words"] else ""
        kept = f"{int(row['keep'].sum())} of the video's {len(row['keep'])} tokens"
        rate, tokens = self.options["q"], row["tokens"]
        return f"At pruning rate {rate:g}, EVS keeps {kept}, so the prompt has {tokens} tokens.{said}"


def distinct_masks(embeds_MD: Tensor, merged_thw: Grid) -> dict[float, Tensor]:
    """Return the distinct masks, (M,) bool, each under the smallest of `RATES` that produces it."""
    masks: dict[tuple, tuple[float, Tensor]] = {}
    for rate in RATES:
        keep_M = compute_retention_mask(embeds_MD, merged_thw, 1, rate)
        masks.setdefault(tuple(keep_M.tolist()), (rate, keep_M.cpu()))
    return dict(masks.values())


def clip_of_embeddings(frames: np.ndarray, embeds_MD: Tensor, merged_thw: Grid) -> dict[str, Any]:
    """Return the data of a video without a prompt; its positions begin at 0."""
    positions, _ = get_mrope_input_positions(len(embeds_MD), [MediaSpan(0, *merged_thw)])
    rows = {
        rate: _row(keep_M, keep_M, positions) | {"answer": "", "chances": []}
        for rate, keep_M in distinct_masks(embeds_MD, merged_thw).items()
    }
    is_clip = torch.ones(len(embeds_MD), dtype=torch.bool)
    return _clip("clip", frames, merged_thw, positions, is_clip, rows, prompt="", words=[])


def clip_asked(model, name: str, prompt: str, clip) -> dict[str, Any]:
    """Return the data of a video: the answer to one question at every rate,
    and the probabilities of its first word.
    """
    [video] = model.processor.decode(model.processor.messages("", (), [clip]))
    full = model.trace(prompt, videos=[video], hidden_states=True)
    thw, firsts = full.patches[0].media_tokens.thw, {}
    rows: dict[float, dict[str, Any]] = {}
    for rate, keep_M in distinct_masks(full.embeds[0], thw).items():
        trace = model.trace(prompt, videos=[video], pruning_rate=rate, hidden_states=True) if rate else full
        firsts[rate] = probabilities(model.language_model, trace)[0]
        rows[rate] = _row(keep_M, trace.keep, full.full_positions) | {"answer": trace.text}
    likely = torch.stack(list(firsts.values())).amax(0).topk(WORDS).indices
    for rate, row in rows.items():
        row["chances"] = [round(float(p), 4) for p in firsts[rate][likely]]
    is_clip = torch.zeros(len(full.full_ids), dtype=torch.bool)
    for span in full.spans:
        is_clip[span.offset : span.offset + span.num_tokens] = True
    words = [model.processor.tokenizer.decode([token]).replace(" ", "␣") for token in likely.tolist()]
    clip = _clip(name, video.frames, thw, full.full_positions, is_clip, rows, prompt=prompt, words=words)
    return clip | {"video": video}


def _row(keep_M: Tensor, keep_L: Tensor, full_positions: Tensor) -> dict[str, Any]:
    positions, delta = restrict_positions(full_positions, keep_L)
    return {
        "keep": keep_M,
        "kept": keep_L,
        "positions": positions,
        "delta": delta,
        "tokens": positions.shape[1],
    }


def _clip(
    name: str,
    frames: np.ndarray,
    thw: Grid,
    positions,
    is_clip,
    rows: dict,
    *,
    prompt: str,
    words: list,
) -> dict:
    per_step = -(-len(frames) // thw[0])
    shared = {
        "prompt": prompt, "thw": thw, "words": words, "positions": positions, "is_clip": is_clip,
        "frames": [photo(Image.fromarray(frame), side=160) for frame in frames[::per_step]],
        "rates": list(rows), "curves": [row["chances"] for row in rows.values()],
    }  # fmt: skip
    return {"name": name, "frames": frames, "rows": rows, "shared": shared}
