"""Positions: a real prompt with an image and a video, its positions on three axes,
and the positions in released software.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor

from refvl.merge import FramewiseMedia, find_media_spans
from refvl.pixels.media import load_image, load_video
from refvl.positions import MediaSpan, get_mrope_input_positions, mrope_delta
from refvl.processors.chat import ChatProcessor
from refvl.study.releases import (
    bfloat16_position_channels,
    larger_side_positions,
    second_per_grid_truncated,
    width_offset_positions,
)
from refvl.viz.explorers.base import Control, Explorer, module, photo
from refvl.viz.positions import plot_positions

# shapes, in merged tokens before the budget of each family rescales them
IMAGE_SIZES = {"3 : 2": (6, 4), "1 : 2": (3, 6)}
CLIP_SIZES = {"1 : 1": (2, 2), "4 : 3": (4, 3)}
SECONDS, RATES = (2, 4, 8), (1, 2, 4)
OURS = "nothing"


def _whole_seconds(count: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    return get_mrope_input_positions(count, [second_per_grid_truncated(span) for span in spans])


def _bfloat16(count: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    positions = bfloat16_position_channels(get_mrope_input_positions(count, spans)[0])
    return positions, mrope_delta(positions)


CONVENTIONS: dict[str, Callable[[int, Sequence[MediaSpan]], tuple[Tensor, int]]] = {
    "transformers 5.17 to 5.23: a video uses max(h, w) positions": larger_side_positions,
    "transformers up to 5.17: seconds per step are truncated": _whole_seconds,
    "vLLM 0.33.0 when pruning: an item uses w positions": width_offset_positions,
    "vLLM 0.33.0 when pruning: positions are in bfloat16": _bfloat16,
}
LIKE_TEXT = "the rule of plain text: every token takes the next position"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a processor tokenizes it."""

    ids: Tensor  # (L,)
    spans: list[MediaSpan]
    kinds: list[str]  # per span
    is_framewise: bool  # text separates the frames of its video


class PositionsExplorer(Explorer):
    """The explorer of positions. Items are prompt tokens."""

    _esm = module("positions")

    def __init__(self, processors: Mapping[str, Any], image, clip, *, second_per_grid: float, side: int):
        self.processors, self.image = processors, load_image(image)
        video = load_video(clip, num_frames=8)
        self.frames = [Image.fromarray(frame) for frame in video.frames]
        self.words: dict[str, int] = {}
        found: dict[tuple, dict] = {}
        for state in product(processors, IMAGE_SIZES, CLIP_SIZES, SECONDS, RATES):
            rows = self.compared(self.prompt(*state), state[0])
            found |= {(*state, name): row for name, row in rows.items()}
        controls = [
            Control("family", "family", list(processors), kind="menu"),
            Control("image", "image, w : h", list(IMAGE_SIZES), kind="menu", rare=True),
            Control("clip", "frames, w : h", list(CLIP_SIZES), kind="menu", rare=True),
            Control("seconds", "video length, s", SECONDS, rare=True),
            Control("rate", "frames per second", RATES, rare=True),
            Control("convention", "compare with", [OURS, LIKE_TEXT, *CONVENTIONS], kind="menu"),
        ]
        rate = min(RATES, key=lambda rate: abs(2 / rate - second_per_grid))
        size = min(CLIP_SIZES, key=lambda size: abs(CLIP_SIZES[size][0] - side))
        start = (next(iter(processors)), "3 : 2", size, SECONDS[1], rate, OURS)
        shared = {
            "words": list(self.words),
            "image": photo(self.image, side=240),
            "frames": [photo(frame, side=160) for frame in self.frames],
        }
        super().__init__(controls, found, shared=shared, start=start)
        image_tokens = (found[start]["kinds"] == 1).nonzero().flatten()
        self.selected = int(image_tokens[len(image_tokens) // 2])

    def prompt(self, family: str, image_size: str, clip_size: str, seconds: int, rate: int) -> Prompt:
        """Return the family's tokens of "image, question, video, question" at these sizes."""
        processor = self.processors[family]
        image = ImageOps.fit(self.image, _pixels(IMAGE_SIZES[image_size], processor))
        taken = [self.frames[i * len(self.frames) // (seconds * rate)] for i in range(seconds * rate)]
        frames = np.stack([np.asarray(ImageOps.fit(f, _pixels(CLIP_SIZES[clip_size], processor))) for f in taken])
        parts = [
            {"type": "image", "image": image}, {"type": "text", "text": "What is this?"},
            {"type": "video", "video": frames, "fps": rate}, {"type": "text", "text": "And what happens here?"},
        ]  # fmt: skip
        messages = processor.messages([{"role": "user", "content": parts}])
        media = processor.extents(processor.decode(messages))
        ids = torch.tensor(processor.tokenize(messages, media))
        spans = find_media_spans(processor.placeholders(ids), media, processor.token_ids)
        kinds = [medium.kind for medium in media for _ in medium.runs]
        return Prompt(ids, spans, kinds, isinstance(media[-1], FramewiseMedia))

    def compared(self, prompt: Prompt, family: str) -> dict[str, dict]:
        """Return refvl's row, a row for the rule of plain text, and a row for each convention that
        differs; if several conventions agree, only the first.

        All these conventions are about videos without text between the frames. If text
        separates frames, vLLM continues after the largest position, as we do.
        """
        count = len(prompt.ids)
        positions, delta = get_mrope_input_positions(count, prompt.spans)
        row = {"positions": positions, "delta": delta, "words": self._words(prompt, family)} | _places(prompt)
        counted = torch.arange(count).repeat(3, 1)
        rows = {OURS: row | {"other": None, "other_delta": None}}
        rows[LIKE_TEXT] = row | {"other": counted, "other_delta": 0}
        seen = [positions, counted]
        for name, convention in ({} if prompt.is_framewise else CONVENTIONS).items():
            other, other_delta = convention(count, prompt.spans)
            if not any(torch.equal(other, one) for one in seen):
                rows[name] = row | {"other": other, "other_delta": other_delta}
                seen.append(other)
        return rows

    def _words(self, prompt: Prompt, family: str) -> Tensor:
        """Return the index of each token's text in `shared["words"]`, (L,);
        equal placeholders have the same text.
        """
        tokenizer = self.processors[family].tokenizer
        known = {int(i): tokenizer.decode([int(i)]) for i in prompt.ids.unique()}
        return torch.tensor([self.words.setdefault(known[int(i)], len(self.words)) for i in prompt.ids])

    def figure(self) -> Figure:
        options, row = self.options, self.row(self.index)
        prompt = self.prompt(*list(options.values())[:5])
        figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
        plot_positions(row["positions"], prompt.spans, kinds=prompt.kinds, title=f"delta {row['delta']}", ax=ax)
        if row["other"] is not None:
            for line in row["other"]:
                ax.plot(line, color="black", lw=1, ls=(0, (3, 3)), drawstyle="steps-mid")
            dashed = f"dashed, {options['convention']}: delta {row['other_delta']}"
            ax.set_title(f"delta {row['delta']}; {dashed}", fontsize=10)
        return figure

    def describe(self) -> str:
        options, row = self.options, self.row(self.index)
        release, _, rule = options["convention"].partition(": ")
        other = "" if row["other"] is None else f" In {release}, {rule}, so delta is {row['other_delta']}."
        return (
            f"A {options['family']} prompt of {row['positions'].shape[1]} tokens with an image of shape "
            f"{options['image']} and a video of {options['seconds']} s at {options['rate']} frames per second has "
            f"delta {row['delta']}.{other}"
        )


def _pixels(size: tuple[int, int], processor: ChatProcessor) -> tuple[int, int]:
    """Return the (width, height) in pixels of `size` merged tokens."""
    factor = processor.image_config.factor
    return size[0] * factor, size[1] * factor


def _places(prompt: Prompt) -> dict[str, Tensor]:
    """Return kinds (L,): 0 text, 1 image, 2 video; places (L, 3): step, row and column; and
    the item's extents (L, 3).
    """
    count = len(prompt.ids)
    kinds, places, extents = torch.zeros(count), torch.zeros(count, 3), torch.ones(count, 3)
    steps = {"image": 0, "video": 0}
    total = sum(span.t for span, kind in zip(prompt.spans, prompt.kinds, strict=True) if kind == "video")
    for span, kind in zip(prompt.spans, prompt.kinds, strict=True):
        inside = slice(span.offset, span.offset + span.num_tokens)
        kinds[inside] = 1 + (kind == "video")
        steps_rows_columns = torch.cartesian_prod(*(torch.arange(n) for n in (span.t, span.h, span.w)))
        places[inside] = steps_rows_columns + torch.tensor([steps[kind], 0, 0])
        extents[inside] = torch.tensor([total if kind == "video" else 1, span.h, span.w]).float()
        steps[kind] += span.t
    return {"kinds": kinds.long(), "places": places.long(), "extents": extents.long()}
