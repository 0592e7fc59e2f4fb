"""Four position rules: the positions of the tokens of one sliced image and one video under each
rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor

from refvl.pixels.media import load_image, load_video
from refvl.pixels.slices import SliceConfig, plan_slices
from refvl.positions import CanvasMarks, MediaSpan, canvas_positions, compute_retention_mask, get_mrope_input_positions
from refvl.study.releases import closed_up_positions
from refvl.viz.explorers.base import Control, Explorer, module, photo
from refvl.viz.style import TOKEN_COLORS

RULES = {
    "Qwen2.5-VL": "each slice after the previous one; frames share h and w",
    "Qwen3-VL": "slices and frames one after another",
    "MiniCPM-V 4.7": "each slice at its location in the image",
    "like plain text": "not a model: each token adds 1",
}
SLICES, FRAMES, PRUNED = (1, 2, 4, 6), (2, 4), (0.0, 0.5)
SIZE, CUT = (768, 512), SliceConfig(scale_resolution=168, patch_size=14, multiple=4)  # a token covers 56 x 56 px
FRAME = (2, 3)  # (h, w) in tokens
MARKS = CanvasMarks(1, 2, 3, 4, 5)
TEXT, FILL = 0, 6
STEP = 2.0  # positions between two frames in Qwen2.5-VL, one second apart


@dataclass
class Prompt:
    """The ids of a prompt under construction, and the spans of its items."""

    ids: list[int] = field(default_factory=list)
    spans: list[MediaSpan] = field(default_factory=list)

    def write(self, *ids: int) -> None:
        self.ids += ids

    def show(self, start: int, h: int, w: int, end: int, *, t: int = 1) -> None:
        """Append a piece between its separators."""
        self.write(start)
        self.spans.append(MediaSpan(len(self.ids), t, h, w, STEP if t > 1 else 1.0))
        self.write(*[FILL] * (t * h * w), end)


class PositionRulesExplorer(Explorer):
    """The explorer of position rules.

    Items are the tokens of the overview, the slices and the frames.
    """

    _esm = module("rules")

    def __init__(self, image, clip):
        self.image = ImageOps.fit(load_image(image), SIZE)
        video = load_video(clip, num_frames=max(FRAMES))
        self.frames = [ImageOps.fit(Image.fromarray(frame), (240, 160)) for frame in video.frames]
        controls = [
            Control("slices", "max slices", SLICES),
            Control("frames", "frames", FRAMES),
            Control("pruned", "pruned from the video", ["nothing", "half"], kind="menu"),
        ]
        states = list(product(*(control.options for control in controls)))
        shared = {
            "image": photo(self.image), "frames": [photo(frame, side=160) for frame in self.frames],
            "rules": list(RULES), "says": list(RULES.values()),
        }  # fmt: skip
        rows = [self.compared(*state) for state in states]
        super().__init__(controls, rows, shared=shared, start=(4, 2, "nothing"), selected=30)  # in the last slice

    def compared(self, slices: int, frames: int, pruned: str) -> dict:
        """Return the sizes of the pieces, `kept` (items,),
        and for each rule all positions and the next text position.

        positions (3, items) is -1 where a token is pruned; text (3, tokens).
        """
        plan = plan_slices(*SIZE, replace(CUT, max_slice_nums=slices))
        sizes = [(h // 4, w // 4) for h, w in plan.tgt_sizes]
        kept = torch.ones(sum(h * w for h, w in sizes) + frames * FRAME[0] * FRAME[1], dtype=torch.bool)
        kept[-frames * FRAME[0] * FRAME[1] :] = self.kept(frames, PRUNED[pruned == "half"])
        columns = plan.grid[0] if plan.grid else 0
        return {
            "sizes": sizes, "grid": plan.grid or (0, 0), "frame": FRAME, "kept": kept,
            "rules": [placed(rule, sizes, columns, frames, kept) for rule in RULES],
        }  # fmt: skip

    def kept(self, frames: int, q: float) -> Tensor:
        """Prune with the pixels of the cells instead of their embeddings;
        return (frames * h * w,) bool.
        """
        h, w = FRAME
        pixels = torch.from_numpy(np.stack([np.asarray(f) for f in self.frames[:: len(self.frames) // frames]])).float()
        cells = pixels.unflatten(2, (w, -1)).unflatten(1, (h, -1)).transpose(2, 3).flatten(3).flatten(0, 2)
        return compute_retention_mask(cells, (frames, h, w), 1, q)

    def figure(self) -> Figure:
        row = self.row(self.index)
        figure, axes = plt.subplots(1, 4, figsize=(11, 3.2), layout="constrained")
        for ax, (rule, found) in zip(axes, zip(RULES, row["rules"], strict=True), strict=True):
            draw_map(ax, found, row["sizes"], rule)
        axes[0].legend(fontsize=7, loc="upper right")
        return figure

    def describe(self) -> str:
        options, row = self.options, self.row(self.index)
        columns, rows = row["grid"]
        cut = f"cut into {columns} x {rows} slices" if columns else "that is not cut"
        ends = ", ".join(f"{found['end']} ({rule})" for rule, found in zip(RULES, row["rules"], strict=True))
        lost = "with half of its tokens pruned, " if options["pruned"] == "half" else ""
        return (
            f"After an image {cut} and a video of {options['frames']} frames, {lost}the next text token is at "
            f"position {ends}."
        )


def prompt_of(rule: str, sizes: Sequence[tuple[int, int]], columns: int, frames: int) -> Prompt:
    """Return the items in a family's format, with three words of text before, between and after."""
    prompt, mark = Prompt(), MARKS
    prompt.write(TEXT, TEXT, TEXT)
    prompt.show(mark.image_start, *sizes[0], mark.image_end)
    for number, size in enumerate(sizes[1:]):
        if number and number % columns == 0:
            prompt.write(mark.newline)
        prompt.show(mark.slice_start, *size, mark.slice_end)
    prompt.write(TEXT, TEXT, TEXT)
    if rule in ("Qwen2.5-VL", "like plain text"):
        prompt.show(TEXT, *FRAME, TEXT, t=frames)
    for _ in range(frames if rule in ("Qwen3-VL", "MiniCPM-V 4.7") else 0):
        if rule == "Qwen3-VL":
            prompt.write(TEXT, TEXT, TEXT)  # <1.0 seconds>
        prompt.show(mark.image_start, *FRAME, mark.image_end)
    prompt.write(TEXT, TEXT, TEXT)
    return prompt


def placed(rule: str, sizes: Sequence[tuple[int, int]], columns: int, frames: int, kept: Tensor) -> dict:
    """Return `positions` (3, items), `text` (3, other tokens), and `end`,
    the position of the next text token.
    """
    prompt = prompt_of(rule, sizes, columns, frames)
    media = torch.cat([s.offset + torch.arange(s.num_tokens) for s in prompt.spans])
    stays = torch.ones(len(prompt.ids), dtype=torch.bool)
    stays[media] = kept
    if rule == "like plain text":
        positions = torch.full((3, len(stays)), -1)
        positions[:, stays] = closed_up_positions(int(stays.sum()))[0]
    elif rule == "MiniCPM-V 4.7":
        positions = canvas_positions(torch.tensor(prompt.ids), prompt.spans, MARKS)
    else:
        positions = get_mrope_input_positions(len(prompt.ids), prompt.spans)[0]
    is_text = torch.ones(len(prompt.ids), dtype=torch.bool)
    is_text[media] = False
    return {
        "positions": positions[:, media].masked_fill(~kept, -1), "text": positions[:, is_text],
        "end": int(positions[:, -1].max()) + 1,
    }  # fmt: skip


def draw_map(ax: Axes, found: dict, sizes: Sequence[tuple[int, int]], rule: str) -> None:
    """Draw h and w of all tokens under one rule; those of the overview are larger,
    because slices may cover them.
    """
    overview, image = sizes[0][0] * sizes[0][1], sum(h * w for h, w in sizes)
    positions = found["positions"]
    parts = {
        "text": (found["text"], TOKEN_COLORS["text"], 3, "."),
        "overview": (positions[:, :overview], "none", 30, "s"),
        "slices": (positions[:, overview:image], TOKEN_COLORS["image"], 9, "s"),
        "video": (positions[:, image:], TOKEN_COLORS["video"], 9, "s"),
    }
    for name, (thw, color, area, marker) in parts.items():
        thw = thw[:, thw[0] >= 0]
        edge = TOKEN_COLORS["image"] if color == "none" else color
        ax.scatter(thw[2], thw[1], s=area, c=color, edgecolors=edge, marker=marker, label=name, linewidths=0.8)
    ax.set(aspect="equal", xlim=(-2, found["end"] + 1), ylim=(found["end"] + 1, -2), xlabel="w", ylabel="h")
    ax.set_title(f"{rule}: text continues at {found['end']}", fontsize=9)
