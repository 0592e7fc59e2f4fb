"""The record of a run, with the tensors and seconds of every stage; this file imports no other file of refvl."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LATER: Any = None  # a field has this value until its stage has run


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """One run, with the result of every stage.

    L_full is the length of the prompt before pruning, and L the number of tokens that the
    language model read. D is the language model's width. W is the width of the encoder's rows:
    D, or D * (1 + k) if the text model also accepts k DeepStack features.
    """

    device: torch.device | None = None  # the clock waits for the queued work of this device
    messages: list[dict] = field(default_factory=list)  # the prompt in the chat format, with the media's sources
    media: list = field(default_factory=list)  # decoded PIL images and `Video`s
    patches: list = field(default_factory=list)  # pixel_values (N, C*Tp*P*P), layout, merged extents
    metadata: list = field(default_factory=list)  # the encoder's plans, one per forward or replay
    graph_batches: list = field(default_factory=list)  # how graphs packed the media; empty if the encoder ran eagerly
    cached: list[bool] = field(default_factory=list)  # with a media cache: whether each item was cached
    seconds_saved: float = 0.0  # the time that it took to encode the cached items
    embeds: list[Tensor] = field(default_factory=list)  # (M, W) per item, before pruning
    keep_masks: list[Tensor | None] = field(default_factory=list)  # (M,) bool per item; None if the item was not pruned
    spans: list = field(default_factory=list)  # each item's spans in the full prompt, one span per run
    full_ids: Tensor = LATER  # (L_full,): the prompt with all of its placeholders
    full_positions: Tensor = LATER  # (3, L_full)
    keep: Tensor = LATER  # (L_full,) bool
    input_ids: Tensor = LATER  # (L,) full_ids[keep]
    inputs_embeds: Tensor = LATER  # (L, D)
    deepstack: Tensor = LATER  # (L, W - D): DeepStack features, which k layers add; zeros for text
    positions: Tensor = LATER  # (3, L)
    delta: int = 0  # the position of decode step k is L + k + delta
    chunks: list[int] = field(default_factory=list)  # prompt tokens per forward, if the prompt was prefilled in chunks
    token_ids: list[int] = field(default_factory=list)  # the generated ids
    text: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # seconds per stage, in order

    def __repr__(self) -> str:
        return f"{type(self).__name__} with the stages: {', '.join(self.seconds) or 'none'}"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add a stage's time to `seconds`; if a stage runs several times, its times are summed."""
        start = synchronized_time(self.device)
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + synchronized_time(self.device) - start


def check_finite(items: Iterable[Tensor], what: str) -> None:
    """Raise ValueError if a tensor contains a value that is not finite; the error names the first such tensor.

    what: the stage and the word for a tensor, for the message. The sums of all tensors are
    copied to the host together, so the host waits only once.
    """
    sums = [item.sum(dtype=torch.float32) for item in items]
    finite = torch.stack(sums).isfinite().tolist() if sums else []
    if not all(finite):
        cause = "the dtype, the weights, the config, and the mean and standard deviation of pixels"
        raise ValueError(f"{what} {finite.index(False)} are not finite; check {cause}")


def synchronized_time(device: torch.device | None) -> float:
    """Return the time in seconds, after the device's queued work is done."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
