"""What a run leaves behind: every stage's tensors, shapes and seconds."""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from refvl.graphs.dual import PathBatch
from refvl.pixels.crops import CropLayout
from refvl.pixels.media import Video
from refvl.positions import MediaSpan
from refvl.processors.chat import Patches


@dataclass(slots=True, eq=False, repr=False)
class Trace:
    """One run with every stage kept. L_full counts the prompt before pruning, L what the language model saw."""

    device: torch.device | None = None  # whose queued work the clock waits for
    media: list = field(default_factory=list)  # PIL images and `Video`s, decoded
    patches: list[Patches] = field(default_factory=list)  # pixel_values (N, C*Tp*P*P), layout, merged extents
    metadata: list = field(default_factory=list)  # what `encoder.plan` made, one per forward
    graph_batches: list = field(default_factory=list)  # how graphs packed the media; empty when run eagerly
    embeds: list[Tensor] = field(default_factory=list)  # (M, D) per medium, before pruning
    keep_masks: list[Tensor | None] = field(default_factory=list)  # (M,) bool per medium; None: not pruned
    spans: list[MediaSpan] = field(default_factory=list)  # where each medium stands in the full prompt, one per run
    full_ids: Tensor | None = None  # (L_full,) the prompt with all placeholders
    full_positions: Tensor | None = None  # (3, L_full)
    keep: Tensor | None = None  # (L_full,) bool
    input_ids: Tensor | None = None  # (L,) full_ids[keep]
    inputs_embeds: Tensor | None = None  # (L, D)
    positions: Tensor | None = None  # (3, L)
    delta: int = 0  # decode step k sits at L + k + delta
    token_ids: list[int] = field(default_factory=list)  # generated
    text: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # per stage, in order

    @contextmanager
    def stage(self, name: str):
        """Time a stage into `seconds`."""
        start = synchronized_time(self.device)
        yield
        self.seconds[name] = synchronized_time(self.device) - start

    @property
    def layouts(self) -> list:
        """How each medium's rows lie: (t, h, w) in patches for Qwen and GLM."""
        return [p.layout for p in self.patches]

    @property
    def ttft(self) -> float:
        """Seconds to the first token: every stage but the decoding of the others."""
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
                return ", ".join(m.summary for m in self.metadata)
            case "encode":
                return ", ".join(str(tuple(e.shape)) for e in self.embeds) + self._graph_report()
            case "prune":
                return ", ".join(f"{int(k.sum())} of {len(k)} kept" for k in self.keep_masks if k is not None)
            case "merge":
                return f"prompt ({len(self.input_ids)},), embeddings {tuple(self.inputs_embeds.shape)}"
            case "positions":
                return f"{tuple(self.positions.shape)}, delta {self.delta}"
            case "prefill":
                return "the first token"
            case "decode tokens":
                return f"{len(self.token_ids) - 1} more"
        return ""

    def _graph_report(self) -> str:
        """What each replay held: hit or miss, budget, waste."""
        lines = []
        for batch in self.graph_batches:
            of_path = isinstance(batch, PathBatch)
            tokens = batch.tokens if of_path else sum(len(self.embeds[i]) for i in batch.indices)
            waste = f"graph of {batch.budget}, {1 - tokens / batch.budget:.0%} padding" if batch.budget else "eager"
            media = f"media {', '.join(str(i + 1) for i in batch.indices)}"
            lines.append(f"{batch.path} path of {media}: {waste}" if of_path else f"{media}: {waste}")
        return "; " + "; ".join(lines) if lines else ""


class TokenTimer(BaseStreamer):
    """When tokens came: transformers calls `put` with the prompt when generation begins, then with every new token."""

    def __init__(self, device: torch.device):
        self.device, self.times = device, []

    def put(self, value: Tensor) -> None:
        self.times.append(synchronized_time(self.device))

    def end(self) -> None:
        pass

    def prefill_and_decode(self) -> tuple[float, float]:
        return self.times[1] - self.times[0], self.times[-1] - self.times[1]


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
