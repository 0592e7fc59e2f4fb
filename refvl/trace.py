"""What a run leaves behind: every stage's tensors, shapes and seconds."""

import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import refvl
from refvl.comparison import Stages, html_table, is_grid
from refvl.graphs.budgets import Batch, padding_waste
from refvl.pixels.crops import CropLayout
from refvl.pixels.media import Video
from refvl.positions import MediaSpan
from refvl.processors.chat import Patches

FLOAT16_LIMIT = torch.finfo(torch.float16).max  # 65,504
LATER: Any = None  # what a field is until its stage of the run has filled it


@dataclass(slots=True, eq=False, repr=False)
class Trace:
    """One run with every stage kept; what no stage has set yet is None.

    L_full counts the prompt before pruning, L what the language model saw. D is the language model's width, and W that
    of the encoder's rows: D, or D * (1 + k) where the text model takes k deeper features of the tower (deepstack).

    attentions and hidden_states, of language model and tower, are filled only when asked for. Q counts the tokens that
    were read: L of the prompt and all new ones but the last; token_ids[k] was chosen after row L - 1 + k. N counts the
    patch rows of all media, end to end in the order of `patches`.
    With `prefill_chunk` patches, metadata, embeds and inputs_embeds stay empty: what they hold is let go on the way.
    """

    device: torch.device | None = None  # whose queued work the clock waits for
    media: list = field(default_factory=list)  # PIL images and `Video`s, decoded
    patches: list[Patches] = field(default_factory=list)  # pixel_values (N, C*Tp*P*P), layout, merged extents
    metadata: list = field(default_factory=list)  # what `encoder.plan` made, one per forward or replay
    graph_batches: list[Batch] = field(default_factory=list)  # how graphs packed the media; empty when run eagerly
    embeds: list[Tensor] = field(default_factory=list)  # (M, W) per medium, before pruning
    keep_masks: list[Tensor | None] = field(default_factory=list)  # (M,) bool per medium; None: not pruned
    spans: list[MediaSpan] = field(default_factory=list)  # where each medium stands in the full prompt, one per run
    full_ids: Tensor = LATER  # (L_full,) the prompt with all placeholders
    full_positions: Tensor = LATER  # (3, L_full)
    keep: Tensor = LATER  # (L_full,) bool
    input_ids: Tensor = LATER  # (L,) full_ids[keep]
    inputs_embeds: Tensor = LATER  # (L, D)
    deepstack: Tensor = LATER  # (L, W - D), zeros for text: added to hidden states, k layers' features
    positions: Tensor = LATER  # (3, L)
    delta: int = 0  # decode step k sits at L + k + delta
    cache: Any = None  # keys and values of the prompt but its last token, until `generate` continues from them
    chunks: list[int] = field(default_factory=list)  # prompt tokens per forward, where it was prefilled in chunks
    token_ids: list[int] = field(default_factory=list)  # generated
    passes: list[int] = field(default_factory=list)  # tokens that each forward gave: 1, and the drafts it accepted
    text: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # per stage, in order
    is_measured: bool = False  # whether `largest` is kept
    largest: dict[str, float] = field(default_factory=dict)  # magnitude, of what a stage's layers or itself put out
    attentions: list[Tensor] = field(default_factory=list)  # language model, per layer (H, Q, Q): query, key
    hidden_states: list[Tensor] = field(default_factory=list)  # (Q, D) into layer 0, out of each; the last is normed
    tower_attentions: list[list] = field(default_factory=list)  # per block: a `SegmentAttention` of every segment
    tower_hidden_states: list[Tensor] = field(default_factory=list)  # (N, E) into block 0, out of each

    def __repr__(self) -> str:
        """A line per stage: its name, shapes and seconds."""
        lines = [f"  {stage:<14}{s:9.4f} s  {self.magnitude(stage):>9}  {shapes}" for stage, shapes, s in self.rows()]
        return "\n".join([f"Trace of {self.text!r}, first token after {self.ttft:.3f} s", *lines])

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        cells = [(stage, shapes, self.magnitude(stage), f"{seconds:.4f}") for stage, shapes, seconds in self.rows()]
        caption = f"{self.text} (first token after {self.ttft:.3f} s)"
        return html_table(caption, ("stage", "shapes", "max |x|", "seconds"), cells)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage into `seconds`, or a part of one that runs in several."""
        start = synchronized_time(self.device)
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + synchronized_time(self.device) - start

    @contextmanager
    def watch(self, stage: str, model: Any) -> Iterator[None]:
        """Keep the largest magnitude that any layer of `model` puts out for more than one token; see `keep_largest`.

        Only what this thread runs counts. model: None where graphs or compiled blocks run, which must not hold this;
        what the stage left has to do there.
        """
        if model is None or not self.is_measured:
            yield
            return
        found, thread = list[Tensor](), threading.get_ident()

        def keep(layer, arguments, output) -> None:
            x = output[0] if isinstance(output, tuple) else output
            is_prompt = isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[-2] > 1
            if is_prompt and threading.get_ident() == thread:
                found.append(max_norm(x))

        layers = [layer for group in model.modules() if isinstance(group, nn.ModuleList) for layer in group]
        handles = [layer.register_forward_hook(keep) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.keep_largest(stage, found)

    def keep_largest(self, stage: str, tensors: Iterable[Tensor]) -> None:
        """Keep the largest magnitude in `tensors`; warn where float16 comes near its limit."""
        found = [x for x in tensors if x.numel()] if self.is_measured else []
        if not found:
            return
        largest = torch.tensor([self.largest.get(stage, 0.0), *(float(max_norm(x)) for x in found)]).amax().item()
        self.largest[stage] = largest
        if any(x.dtype == torch.float16 for x in found) and not largest < FLOAT16_LIMIT / 2:
            reached = f"{stage}: values reach {largest:,.0f}, and float16 ends at {FLOAT16_LIMIT:,.0f}"
            warnings.warn(f"{reached}: answers may be nonsense ('!!!!'); load with dtype='bfloat16'", stacklevel=2)

    def magnitude(self, stage: str) -> str:
        """The largest magnitude of a stage in words, with a mark where float16 could not hold it."""
        largest = self.largest.get(stage)
        return "" if largest is None else f"{largest:.3g}" + "!" * (not largest < FLOAT16_LIMIT)

    @property
    def stages(self) -> Stages:
        """What each stage made, for `refvl.compare`."""
        media: dict[str, Sequence[Tensor | None]]
        media = {"patchify": [p.pixel_values for p in self.patches], "encode": self.embeds, "prune": self.keep_masks}
        found: dict[str, Tensor | None] = {
            f"{stage}/{i}": x for stage, items in media.items() for i, x in enumerate(items)
        }
        found |= {"merge/input_ids": self.input_ids, "merge/inputs_embeds": self.inputs_embeds}
        found |= {"merge/deepstack": self.deepstack, "positions/ids": self.positions}
        found |= {"decode tokens/token_ids": torch.tensor(self.token_ids)}
        made = {name: x.detach().cpu() for name, x in found.items() if x is not None and x.numel()}
        grids = [layout if is_grid(layout) else None for layout in self.layouts]
        return Stages(made, f"refvl {refvl.__version__}", grids)

    def save(self, folder: str | Path) -> None:
        """Write what each stage made, safetensors and a manifest, for `refvl.compare`; see `Stages.save`."""
        self.stages.save(folder)

    @property
    def layouts(self) -> list:
        """How each medium's rows lie: (t, h, w) in patches for Qwen and GLM."""
        return [p.layout for p in self.patches]

    @property
    def ttft(self) -> float:
        """Seconds to the first token: every stage but the decoding of the others. With beams, to all of them."""
        return sum(s for stage, s in self.seconds.items() if stage != "decode tokens")

    def rows(self) -> list[tuple[str, str, float]]:
        """(stage, shapes, seconds) of every stage, for tables."""
        return [(stage, self._shapes(stage), seconds) for stage, seconds in self.seconds.items()]

    def _shapes(self, stage: str) -> str:
        match stage:
            case "decode media":
                return ", ".join(_media_size(m) for m in self.media) or "text only"
            case "patchify":
                return ", ".join(f"{tuple(p.pixel_values.shape)} {layout_text(p.layout)}" for p in self.patches)
            case "plan":
                return self._packing() if self.graph_batches else ", ".join(m.summary for m in self.metadata)
            case "encode":
                return ", ".join(str(tuple(e.shape)) for e in self.embeds) + self._graph_report()
            case "prune":
                return ", ".join(f"{int(k.sum())} of {len(k)} kept" for k in self.keep_masks if k is not None)
            case "tokenize":
                return f"prompt ({len(self.full_ids)},)"
            case "merge":
                return f"prompt ({len(self.input_ids)},), embeddings {tuple(self.inputs_embeds.shape)}"
            case "positions":
                return f"{tuple(self.positions.shape)}, delta {self.delta}"
            case "generate":
                return f"{len(self.token_ids)} tokens"
            case "prefill":
                chunks = f"{sum(self.chunks)} tokens in chunks of {max(self.chunks)}, " if self.chunks else ""
                return chunks + "the first token"
            case "decode tokens":
                return self._decoding()
        return ""

    @property
    def accepted(self) -> int:
        """Generated tokens that were drafts: each forward of the language model adds one of its own to them."""
        return sum(tokens - 1 for tokens in self.passes)

    def _decoding(self) -> str:
        """How many tokens after the first forward's, how fast, and how many of all were drafts."""
        more, seconds = len(self.token_ids) - (self.passes or [1])[0], self.seconds["decode tokens"]
        speed = f", {more / seconds:.0f} a second" if more and seconds else ""
        drafts = f"; {self.accepted} of {len(self.token_ids)} were accepted drafts" if self.accepted else ""
        return f"{more} more{speed}{drafts}"

    def _packing(self) -> str:
        """What the graphs planned, in one line."""
        items = len({i for batch in self.graph_batches for i in batch.indices})
        eager = sum(batch.budget is None for batch in self.graph_batches)
        replays = len(self.graph_batches) - eager
        counts = f"{items} item{'s' * (items != 1)} in {replays} replay{'s' * (replays != 1)}"
        return f"{counts}, {padding_waste(self.graph_batches):.0%} padding" + f", {eager} eager" * bool(eager)

    def _graph_report(self) -> str:
        """What each replay held: hit or miss, budget, waste."""
        lines = []
        for batch in self.graph_batches:
            ran = f"graph of {batch.budget}, {padding_waste([batch]):.0%} padding" if batch.budget else "eager"
            path = f"{batch.path} path of " if batch.path else ""
            lines.append(f"{path}media {', '.join(str(i + 1) for i in batch.indices)}: {ran}")
        return "; " + "; ".join(lines) if lines else ""


class TokenTimer(BaseStreamer):
    """When tokens came: transformers calls `put` with the prompt when generation begins, then with every new token."""

    def __init__(self, device: torch.device):
        self.device = device
        self.times: list[float] = []
        self.tokens: list[int] = []  # per call; several new ones where drafts were accepted

    def put(self, value: Tensor) -> None:
        self.times.append(synchronized_time(self.device))
        self.tokens.append(value.numel())

    def end(self) -> None:
        pass

    def prefill_and_decode(self) -> tuple[float, float]:
        """Seconds to the first new token, and from there to the last."""
        return self.times[1] - self.times[0], self.times[-1] - self.times[1]


def max_norm(x: Tensor) -> Tensor:
    """The largest magnitude, nan where there is one; on the tensor's device."""
    return torch.linalg.vector_norm(x.detach(), torch.inf)


def synchronized_time(device: torch.device | None) -> float:
    """Seconds on a clock that has waited for the device's queued work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def layout_text(layout) -> str:
    """How a medium's rows lie, in a few words: the grid, the crops, or how many slices of which sizes."""
    if isinstance(layout, CropLayout):
        return f"overview and {layout.rows} x {layout.columns} crops" if layout.crops else "overview"
    if not hasattr(layout[0], "slices"):
        return f"grid {layout}"
    sizes = Counter(size for group in layout for size in group.slices)
    return "slices: " + ", ".join(f"{count} of {h} x {w}" for (h, w), count in sizes.items())


def _media_size(medium) -> str:
    return f"frames {medium.frames.shape}" if isinstance(medium, Video) else f"{medium.width} x {medium.height} px"
