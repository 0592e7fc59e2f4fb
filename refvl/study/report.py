"""The report of a run: `Trace` prints a table of its stages,
and saves their tensors for `refvl.compare`.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import refvl
from refvl.checks import is_grid
from refvl.graphs.budgets import padding_waste
from refvl.pixels.crops import CropLayout
from refvl.pixels.media import Video
from refvl.study.comparison import Stages
from refvl.trace import Record

FLOAT16_LIMIT = torch.finfo(torch.float16).max  # 65,504


@dataclass(slots=True, eq=False, repr=False)
class Trace(Record):
    """One run, with the result of every stage; a field is None or empty until its stage has run.

    The attentions and hidden_states of the language model and the tower are filled only on request.
    Q counts the tokens that the model has read: the L tokens of the prompt, and all new tokens
    except the last. token_ids[k] was chosen after row L - 1 + k. N counts the patch rows of all
    media, concatenated in the order of `patches`. With `prefill_chunk`, patches, metadata, embeds
    and inputs_embeds are empty, because their tensors are freed during the run.
    """

    resizer: str = ""  # the software that resized images and its version, such as "Pillow 13.0.0"
    largest: dict[str, float] = field(default_factory=dict)  # stage -> the largest absolute value in results or layers
    last_states: Tensor | None = None  # (layers + 1, D): the last prompt token before layer 0 and after each layer
    first_logits: Tensor | None = None  # (V,): the logits from which the first new token was chosen
    margins: Tensor | None = None  # for each new token, the best logit minus the second best; None with beams
    attentions: list[Tensor | None] = field(default_factory=list)  # per layer (H, Q, Q): query, key; linear: None
    hidden_states: list[Tensor] = field(default_factory=list)  # (Q, D) before layer 0, after each layer (last: normed)
    tower_attentions: list[list] = field(default_factory=list)  # a `SegmentAttention` per segment, for each block
    tower_hidden_states: list[Tensor] = field(default_factory=list)  # (N, E): input of block 0, output of each block

    def __repr__(self) -> str:
        """Return one line per stage: its name, seconds, largest magnitude and shapes."""
        lines = [f"  {stage:<14}{s:9.4f} s  {self.magnitude(stage):>9}  {shapes}" for stage, shapes, s in self.rows()]
        return "\n".join([f"Trace of {self.text!r}, first token after {self.ttft:.3f} s", *lines])

    def rows(self) -> list[tuple[str, str, float]]:
        """Return (stage, shapes, seconds) of every stage, for tables."""
        return [(stage, _shapes(self, stage), seconds) for stage, seconds in self.seconds.items()]

    def magnitude(self, stage: str) -> str:
        """Return the largest magnitude of a stage as text,
        with an exclamation mark if float16 cannot represent it.
        """
        largest = self.largest.get(stage)
        return "" if largest is None else f"{largest:.3g}" + "!" * (not largest < FLOAT16_LIMIT)

    @property
    def stages(self) -> Stages:
        """The tensors of each stage, for `refvl.compare`."""
        sampled: list[Any] = [torch.tensor(m.indices) if isinstance(m, Video) else None for m in self.media]
        pixels: list[Any] = [patches.pixel_values for patches in self.patches]
        found: dict[str, Tensor | None] = {}
        by_item = {"decode media": sampled, "patchify": pixels, "encode": self.embeds, "prune": self.keep_masks}
        for stage, items in by_item.items():
            found |= {f"{stage}/{i}": x for i, x in enumerate(items)}
        found |= {"merge/input_ids": self.input_ids, "merge/inputs_embeds": self.inputs_embeds}
        found |= {"merge/deepstack": self.deepstack, "positions/ids": self.positions}
        found |= {"prefill/last_states": self.last_states, "prefill/first_logits": self.first_logits}
        found |= {"decode tokens/token_ids": torch.tensor(self.token_ids), "decode tokens/margins": self.margins}
        made = {name: x.detach().cpu() for name, x in found.items() if x is not None and x.numel()}
        grids = [layout if is_grid(layout) else None for layout in self.layouts]
        any_pruned = any(mask is not None for mask in self.keep_masks)
        return Stages(made, f"refvl {refvl.__version__}", grids, [] if any_pruned else self.spans)

    def save(self, folder: str | Path) -> None:
        """Write the tensors of each stage, as safetensors with a manifest, for `refvl.compare`;
        see `Stages.save`.
        """
        self.stages.save(folder)

    @property
    def layouts(self) -> list:
        """The arrangement of each item's rows: (t, h, w) in patches for Qwen and GLM."""
        return [p.layout for p in self.patches]

    @property
    def ttft(self) -> float:
        """The time to the first token in seconds: all stages except the decoding of later tokens.

        With beams, it is the time to the last token.
        """
        return sum(s for stage, s in self.seconds.items() if stage != "decode tokens")


def _shapes(trace: Trace, stage: str) -> str:
    match stage:
        case "decode media":
            return ", ".join(map(_size, trace.media)) or "text only"
        case "patchify":
            return ", ".join(f"{tuple(p.pixel_values.shape)} {layout_text(p.layout)}" for p in trace.patches)
        case "look up":
            return f"{sum(trace.cached)} of {len(trace.cached)} in the media cache, {trace.seconds_saved:.4f} s saved"
        case "plan":
            replays = f"{len(trace.media)} items in {len(trace.graph_batches)} replays or eager forwards"
            padding = f", {padding_waste(trace.graph_batches):.0%} padding"
            return replays + padding if trace.graph_batches else ", ".join(m.summary for m in trace.metadata)
        case "encode":
            return ", ".join(str(tuple(e.shape)) for e in trace.embeds) + _graph_report(trace)
        case "prune":
            return ", ".join(f"{int(k.sum())} of {len(k)} kept" for k in trace.keep_masks if k is not None)
        case "tokenize":
            return f"prompt ({len(trace.full_ids)},)"
        case "merge":
            return f"prompt ({len(trace.input_ids)},), embeddings {tuple(trace.inputs_embeds.shape)}"
        case "positions":
            return f"{tuple(trace.positions.shape)}, delta {trace.delta}"
        case "generate":
            return f"{len(trace.token_ids)} tokens"
        case "prefill":
            chunks = f"{sum(trace.chunks)} tokens in chunks of {max(trace.chunks)}, " if trace.chunks else ""
            return chunks + "the first token"
        case "decode tokens":
            more = len(trace.token_ids) - 1
            return f"{more} more, {more / (trace.seconds[stage] or 1):.0f} a second" if more else "0 more"
    return ""


def _size(medium: Any) -> str:
    return f"frames {medium.frames.shape}" if isinstance(medium, Video) else "{} x {} px".format(*medium.size)


def _graph_report(trace: Trace) -> str:
    """Describe each batch: its path, items, budget and padding."""
    text = ""
    for batch in trace.graph_batches:
        ran = f"graph of {batch.budget}, {padding_waste([batch]):.0%} padding" if batch.budget else "eager"
        path = f"{batch.path} path of " if batch.path else ""
        text += f"; {path}media {', '.join(str(i + 1) for i in batch.indices)}: {ran}"
    return text


def layout_text(layout) -> str:
    """Describe the arrangement of an item's rows: the grid, the crops,
    or the number and sizes of the slices.
    """
    if isinstance(layout, CropLayout):
        return f"overview and {layout.rows} x {layout.columns} crops" if layout.crops else "overview"
    if not hasattr(layout[0], "slices"):
        return f"grid {layout}"
    sizes = Counter(size for group in layout for size in group.slices)
    return "slices: " + ", ".join(f"{count} of {h} x {w}" for (h, w), count in sizes.items())
