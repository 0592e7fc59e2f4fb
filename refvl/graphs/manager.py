"""The manager: captures one graph per budget, packs arriving items, replays, and hands outputs back in order.

    items (pixels, layouts) -> plan_batches -> for each batch: plan -> fill static buffers -> replay -> clone -> split
                                     too large for every budget: the same encoder, eagerly

It knows an encoder only through `GraphEncoder`: plan, forward, metadata at capacity, and the sizes of an item.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from refvl.checks import check_shape
from refvl.graphs.budgets import Batch, infer_limits, plan_batches
from refvl.graphs.buffers import fill_metadata, fill_padded, metadata_tensors
from refvl.graphs.cuda import CudaGraph, pool_bytes
from refvl.graphs.recorder import TraceGraph

BACKENDS = ("cuda", "trace")
MIN_BUDGET = 64  # tokens: a picture of 224 px
MAX_BUDGET = {"varlen": 4096, "sdpa": 4096, "masked": 256}  # masked attention is quadratic in the budget
CACHED_PATCHES = 2**16  # of kept plans, together: at most 0.4 KiB of device memory each for Qwen, 3 KiB for GLM


class GraphEncoder(Protocol):
    """What an encoder has to offer to be captured."""

    device: torch.device
    dtype: torch.dtype
    graph_attention: str  # the backend to capture: "varlen", "masked", or "sdpa" where all segments are equally long

    def check_layouts(self, layouts) -> list[Hashable]:
        """The layouts of a batch, normalised, or a ValueError or TypeError that says what is wrong."""

    def item_size(self, layout: Hashable) -> tuple[int, int, int]:
        """(patch rows, output tokens, frames) of one item."""

    def plan(self, layouts) -> object:
        """Metadata of a batch: a frozen dataclass of tensors and integers, with a padding rule on each tensor."""

    def plan_capacity(self, max_tokens: int, max_frames: int) -> object:
        """The same dataclass with every tensor as long, and every integer as large, as any batch within the limits."""

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """(patch rows, values) zeros for `max_tokens` output tokens; items with more rows take a larger budget."""

    def __call__(self, pixel_values: Tensor, *, metadata, attention: str | None = None) -> Tensor:
        """Patch rows -> (tokens, D)."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedBudget:
    """One graph and everything it reads and writes: strong references, or the memory would be handed out again."""

    graph: CudaGraph | TraceGraph
    pixel_values: Tensor
    metadata: object
    output: Tensor


@dataclass(slots=True)
class GraphStats:
    """Counters since the capture. Items that ran eagerly are misses; waste counts tokens of replays only."""

    hits: int = 0
    misses: int = 0
    tokens: int = 0
    budget_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of items that a graph encoded; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def padding_waste(self) -> float:
        """Share of replayed tokens that were padding; 0 before the first."""
        return 1 - self.tokens / self.budget_tokens if self.budget_tokens else 0.0


class EncoderGraphManager:
    """Graphs of one encoder. Outputs are clones: the next replay overwrites what a graph returned."""

    def __init__(
        self,
        encoder: GraphEncoder,
        *,
        budgets: Sequence[int] | None = None,
        max_items: int | None = None,
        max_frames: int | None = None,
        min_budget: int = MIN_BUDGET,
        backend: str = "auto",
        policy: str = "optimal",
        progress: bool = True,
    ):
        """budgets: output tokens per graph. max_items, max_frames: per replay. What is None is inferred; inferred
        budgets double from `min_budget`.

        backend: "cuda", "trace" (any device), or "auto" for the one of the encoder's device. policy: see
        `plan_batches`. Raises ValueError when limits contradict each other or the backend cannot run here.
        """
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend: expected one of {('auto', *BACKENDS)}, got {backend!r}")
        on_cuda = encoder.device.type == "cuda"
        self.backend = ("cuda" if on_cuda else "trace") if backend == "auto" else backend
        if self.backend == "cuda" and not on_cuda:
            raise ValueError(f"backend: 'cuda' needs an encoder on CUDA, this one is on {encoder.device}")
        self.encoder, self.policy, self.progress = encoder, policy, progress
        self.limits = infer_limits(
            min_budget, MAX_BUDGET[encoder.graph_attention], budgets=budgets, max_items=max_items, max_frames=max_frames
        )
        plan_batches([], self.limits.budgets, self.limits.max_items, policy=policy)  # refuses an unknown policy now
        self.captured: dict[int, CapturedBudget] = {}
        self._pool = self._stream = None
        self.last_batches: list[Batch] = []
        self._stats, self._plans = GraphStats(), OrderedDict()

    def capture(self) -> None:
        """Capture every budget, largest first, so that smaller graphs reuse its memory. Shows a progress bar.

        Does nothing when that has happened. Raises CaptureError when the encoder reads a value back; then no graph
        is kept.
        """
        if self.captured:
            return
        if self.backend == "cuda":
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.encoder.device)
        bar = tqdm(self.limits.budgets[::-1], desc="capture", unit="graph", disable=not self.progress)
        try:
            for budget in bar:
                self.captured[budget] = self._capture(budget)
                bar.set_postfix_str(f"budget {budget}, {self.memory_bytes() / 2**20:.0f} MiB")
        except BaseException:
            self.captured.clear()
            raise

    def _capture(self, budget: int) -> CapturedBudget:
        metadata = self.encoder.plan_capacity(budget, self.limits.max_frames)
        pixel_values = self.encoder.pixel_buffer(budget)
        graph = CudaGraph(self._pool, self._stream) if self.backend == "cuda" else TraceGraph()
        attention = self.encoder.graph_attention
        output = graph.capture(lambda: self.encoder(pixel_values, metadata=metadata, attention=attention))
        return CapturedBudget(graph, pixel_values, metadata, output)

    @torch.inference_mode()
    def execute(self, pixel_values: Tensor, layouts) -> list[Tensor]:
        """Encode items, images and videos mixed; one (M, D) tensor each, in the caller's order.

        pixel_values: (N, values) patch rows of all items in order. layouts: what the encoder's `plan` takes: (t, h, w)
        per item in patches for Qwen and GLM. Captures first when that has not happened. `last_batches` says afterwards
        how the items were packed.
        """
        layouts = self.encoder.check_layouts(layouts)
        sizes = [self.encoder.item_size(layout) for layout in layouts]
        check_shape(pixel_values, (("patches", sum(patches for patches, _, _ in sizes)), "values"), "pixel_values")
        self.capture()
        rows = pixel_values.split([patches for patches, _, _ in sizes])
        self.last_batches = plan_batches(
            [tokens for _, tokens, _ in sizes], self.limits.budgets, self.limits.max_items,
            policy=self.policy, frames=[frames for _, _, frames in sizes], max_frames=self.limits.max_frames,
            rows=[patches for patches, _, _ in sizes],
            max_rows=[len(self.captured[budget].pixel_values) for budget in self.limits.budgets],
        )  # fmt: skip
        outputs: dict[int, Tensor] = {}
        for batch in self.last_batches:
            batch_rows, batch_layouts = [rows[i] for i in batch.indices], tuple(layouts[i] for i in batch.indices)
            tokens = [sizes[i][1] for i in batch.indices]
            embeds = (
                self._eager(batch_rows, batch_layouts)
                if batch.budget is None
                else self._replay(batch.budget, batch_rows, batch_layouts, sum(tokens))
            )
            outputs |= zip(batch.indices, embeds.split(tokens), strict=True)
            self._count(batch, sum(tokens))
        return [outputs[i] for i in range(len(layouts))]

    def _replay(self, budget: int, rows: list[Tensor], layouts: tuple, tokens: int) -> Tensor:
        captured = self.captured[budget]
        fill_padded(captured.pixel_values, torch.cat(rows), "zero", "pixel_values")
        fill_metadata(captured.metadata, self._plan(layouts))
        return captured.graph.replay()[:tokens].clone()

    def _eager(self, rows: list[Tensor], layouts: tuple) -> Tensor:
        return self.encoder(torch.cat(rows).to(self.encoder.device), metadata=self._plan(layouts))

    def _plan(self, layouts: tuple):
        """Plans depend on sizes alone, and sizes repeat: the most recent ones are kept."""
        plan = self._plans.pop(layouts, None) or self.encoder.plan(layouts)
        self._plans[layouts] = plan
        while len(self._plans) > 1 and sum(map(self._patches, self._plans)) > CACHED_PATCHES:
            self._plans.popitem(last=False)
        return plan

    def _patches(self, layouts: tuple) -> int:
        return sum(self.encoder.item_size(layout)[0] for layout in layouts)

    def _count(self, batch: Batch, tokens: int) -> None:
        if batch.budget is None:
            self._stats.misses += len(batch.indices)
        else:
            self._stats.hits += len(batch.indices)
            self._stats.tokens += tokens
            self._stats.budget_tokens += batch.budget

    def stats(self) -> GraphStats:
        """Hits, misses, hit rate and padding waste since the capture: a copy, later calls do not change it."""
        return replace(self._stats)

    def memory_bytes(self) -> int:
        """Bytes that the graphs hold: static buffers, and the shared pool on CUDA or all recorded outputs of traces."""
        buffers = sum(_bytes(captured) for captured in self.captured.values())
        if self.backend == "cuda":
            return buffers + (pool_bytes(self._pool) if self.captured else 0)
        return buffers + sum(captured.graph.memory_bytes() for captured in self.captured.values())

    def clear(self) -> None:
        """Drop all graphs and buffers and give their memory back; the next `execute` captures again."""
        self.captured.clear()
        self._plans.clear()
        self._stats = GraphStats()
        if self.backend == "cuda":
            torch.cuda.empty_cache()


def _bytes(captured: CapturedBudget) -> int:
    return sum(tensor.nbytes for tensor in (captured.pixel_values, *metadata_tensors(captured.metadata)))
