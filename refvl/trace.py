"""What a run leaves behind: every stage's tensors and seconds. A record: it knows no other room."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

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
    patches: list = field(default_factory=list)  # pixel_values (N, C*Tp*P*P), layout, merged extents
    metadata: list = field(default_factory=list)  # what `encoder.plan` made, one per forward or replay
    graph_batches: list = field(default_factory=list)  # how graphs packed the media; empty when run eagerly
    embeds: list[Tensor] = field(default_factory=list)  # (M, W) per medium, before pruning
    keep_masks: list[Tensor | None] = field(default_factory=list)  # (M,) bool per medium; None: not pruned
    spans: list = field(default_factory=list)  # where each medium stands in the full prompt, one per run
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
    largest: dict[str, float] = field(default_factory=dict)  # magnitude, of what a stage's layers or itself put out
    attentions: list[Tensor] = field(default_factory=list)  # language model, per layer (H, Q, Q): query, key
    hidden_states: list[Tensor] = field(default_factory=list)  # (Q, D) into layer 0, out of each; the last is normed
    tower_attentions: list[list] = field(default_factory=list)  # per block: a `SegmentAttention` of every segment
    tower_hidden_states: list[Tensor] = field(default_factory=list)  # (N, E) into block 0, out of each

    def __repr__(self) -> str:
        from refvl.study import report  # what is printed knows all rooms, this record none

        return report.as_text(self)

    def _repr_html_(self) -> str:
        from refvl.study import report

        return report.as_html(self)

    def rows(self) -> list[tuple[str, str, float]]:
        """(stage, shapes, seconds) of every stage, for tables."""
        from refvl.study import report

        return report.rows(self)

    def magnitude(self, stage: str) -> str:
        """The largest magnitude of a stage in words, with a mark where float16 could not hold it."""
        from refvl.study import report

        return report.magnitude(self, stage)

    @property
    def stages(self) -> Any:
        """What each stage made, for `refvl.compare`."""
        from refvl.study import report

        return report.stages(self)

    def save(self, folder: str | Path) -> None:
        """Write what each stage made, safetensors and a manifest, for `refvl.compare`; see `Stages.save`."""
        self.stages.save(folder)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage into `seconds`, or a part of one that runs in several."""
        start = synchronized_time(self.device)
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + synchronized_time(self.device) - start

    @property
    def layouts(self) -> list:
        """How each medium's rows lie: (t, h, w) in patches for Qwen and GLM."""
        return [p.layout for p in self.patches]

    @property
    def ttft(self) -> float:
        """Seconds to the first token: every stage but the decoding of the others. With beams, to all of them."""
        return sum(s for stage, s in self.seconds.items() if stage != "decode tokens")

    @property
    def accepted(self) -> int:
        """Generated tokens that were drafts: each forward of the language model adds one of its own to them."""
        return sum(tokens - 1 for tokens in self.passes)


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

    def fill(self, trace: Trace) -> None:
        """Seconds to the first new token, and from there to the last; the tokens of each forward."""
        trace.seconds["prefill"] = trace.seconds.get("prefill", 0.0) + self.times[1] - self.times[0]
        trace.seconds["decode tokens"] = self.times[-1] - self.times[1]
        trace.passes = self.tokens[1:]


def synchronized_time(device: torch.device | None) -> float:
    """Seconds on a clock that has waited for the device's queued work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
