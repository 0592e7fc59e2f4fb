"""The manager: captures one graph per budget, packs arriving items, replays, and hands outputs back in order.

    plan   layouts -> plan_batches -> the encoder's plan of every batch
    run    pixels -> for each batch: fill static buffers -> replay -> clone -> split
                     too large for every budget: the same encoder, eagerly

It knows an encoder only through `GraphEncoder`: plan, forward, metadata at capacity, and the sizes of an item.

Any number of threads may use one manager, and any number of managers one encoder. What a call plans belongs to that
call; the buffers belong to one call at a time, which holds a lock from the first fill to the last clone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import RLock, local

import torch
from torch import Tensor
from tqdm.auto import tqdm

from refvl.checks import check_pixel_rows
from refvl.contracts import GraphEncoder
from refvl.graphs.budgets import Batch, infer_limits, plan_batches
from refvl.graphs.buffers import fill_metadata, fill_padded, metadata_tensors
from refvl.graphs.cuda import CudaGraph, Pool, pool_bytes
from refvl.graphs.recorder import TraceGraph
from refvl.graphs.weights import adapters_of, addresses, modules_of, weights_of

BACKENDS = ("cuda", "trace")
MIN_BUDGET = 64  # tokens: a picture of 224 px
MAX_BUDGET = {"varlen": 4096, "sdpa": 4096, "masked": 256}  # masked attention is quadratic in the budget


@dataclass(frozen=True, slots=True, eq=False)
class CapturedBudget:
    """One graph and everything it reads and writes: strong references, or the memory would be handed out again."""

    graph: CudaGraph | TraceGraph
    pixel_values: Tensor
    metadata: object
    output: Tensor

    @property
    def buffers(self) -> dict[str, Tensor]:
        """All that is filled before a replay, by name."""
        return {"pixel_values": self.pixel_values, **metadata_tensors(self.metadata)}

    def fill(self, rows: Tensor, metadata) -> None:
        """Copy a batch's patch rows and plan in, and pad them; errors as of `fill_padded` and `fill_metadata`."""
        fill_padded(self.pixel_values, rows, "zero", "pixel_values")
        fill_metadata(self.metadata, metadata)


@dataclass(slots=True)
class GraphStats:
    """Counters of items and tokens. Items that ran eagerly are misses; waste counts tokens of replays only."""

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

    def count(self, batches: Sequence[Batch]) -> None:
        """Add what these batches were."""
        for batch in batches:
            if batch.budget is None:
                self.misses += len(batch.indices)
            else:
                self.hits += len(batch.indices)
                self.tokens += batch.tokens
                self.budget_tokens += batch.budget


@dataclass(frozen=True, slots=True, eq=False)
class GraphPlan:
    """What one call is going to run. It belongs to that call, and to the weights that the encoder had when it was made.

    layouts: of every item. sizes: (patch rows, output tokens, frames) of every item. batches: which items run together.
    metadata: the encoder's plan of each batch. weights: where the captured weights lie.
    """

    layouts: list
    sizes: list[tuple[int, int, int]]
    batches: list[Batch]
    metadata: list
    weights: tuple


class EncoderGraphManager:
    """Graphs of one encoder. Outputs are clones: the next replay overwrites what a graph returned.

    Weights may change at any time between calls. New values in the same memory are read by the next replay; where the
    weights lie elsewhere or have another dtype (`load_state_dict(assign=True)`, `.to(...)`), the next call captures
    again. Threads may share a manager: each call gets its own embeddings, one replay after the other.
    """

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
        self._wanted_backend = backend
        self.encoder, self.policy, self.progress = encoder, policy, progress
        self.backend = self._choose_backend()
        self.limits = infer_limits(
            min_budget, MAX_BUDGET[encoder.graph_attention], budgets=budgets, max_items=max_items, max_frames=max_frames
        )
        plan_batches([], self.limits.budgets, self.limits.max_items, policy=policy)  # refuses an unknown policy now
        self.captured: dict[int, CapturedBudget] = {}
        self._pool: Pool | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self._weights: tuple = ()
        self._stats = GraphStats()
        self._lock, self._of_thread = RLock(), local()

    def _choose_backend(self) -> str:
        if self._wanted_backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend: expected one of {('auto', *BACKENDS)}, got {self._wanted_backend!r}")
        on_cuda = self.encoder.device.type == "cuda"
        if self._wanted_backend == "cuda" and not on_cuda:
            raise ValueError(f"backend: 'cuda' needs an encoder on CUDA, this one is on {self.encoder.device}")
        return ("cuda" if on_cuda else "trace") if self._wanted_backend == "auto" else self._wanted_backend

    def capture(self) -> None:
        """Capture every budget, largest first, so that smaller graphs reuse its memory. Shows a progress bar.

        Does nothing when that has happened with the weights where they are now; else the graphs of the old weights are
        dropped first. Raises CaptureError when the encoder reads a value back; then no graph is kept.
        """
        with self._lock:
            modules = modules_of(self.encoder)
            weights = (*addresses(weights_of(modules)), *adapters_of(modules))
            if self.captured and weights == self._weights:
                return
            self._drop()
            self.backend, self._weights = self._choose_backend(), weights
            if self.backend == "cuda":
                self._pool, self._last_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.encoder.device)
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
        graph = CudaGraph(self._pool, self._last_stream) if self.backend == "cuda" else TraceGraph()
        attention = self.encoder.graph_attention
        output = graph.capture(lambda: self.encoder(pixel_values, metadata=metadata, attention=attention))
        return CapturedBudget(graph, pixel_values, metadata, output)

    def execute(self, pixel_values: Tensor, layouts) -> list[Tensor]:
        """Encode items, images and videos mixed; one (M, D) tensor each, in the caller's order.

        pixel_values: (N, values) patch rows of all items in order. layouts: what the encoder's `plan` takes: (t, h, w)
        per item in patches for Qwen and GLM. Captures first when that has not happened. The same as `plan`, then `run`.
        """
        return self.run(pixel_values, self.plan(layouts))

    @torch.inference_mode()
    def plan(self, layouts) -> GraphPlan:
        """Pack items into batches and plan each of them; `run` it before the weights change. Captures first."""
        layouts = self.encoder.check_layouts(layouts)
        sizes = [self.encoder.item_size(layout) for layout in layouts]
        with self._lock:
            if not self.captured:
                self.capture()  # `run` notices when the weights have moved since, and plans again
            weights = self._weights
            max_rows = [len(self.captured[budget].pixel_values) for budget in self.limits.budgets]
        rows = [patches for patches, _, _ in sizes]
        batches = plan_batches(
            [tokens for _, tokens, _ in sizes], self.limits.budgets, self.limits.max_items,
            policy=self.policy, frames=[frames for _, _, frames in sizes], max_frames=self.limits.max_frames,
            rows=rows, max_rows=max_rows,
        )  # fmt: skip
        metadata = [self.encoder.plan([layouts[i] for i in batch.indices]) for batch in batches]
        return GraphPlan(layouts, sizes, batches, metadata, weights)

    @torch.inference_mode()
    def run(self, pixel_values: Tensor, plan: GraphPlan) -> list[Tensor]:
        """Encode what was planned; one (M, D) tensor per item, in the caller's order. pixel_values: as in `execute`."""
        counts = [patches for patches, _, _ in plan.sizes]
        check_pixel_rows(pixel_values, (("patches", sum(counts)), "values"), self.encoder.device)
        rows = pixel_values.split(counts)
        outputs: dict[int, Tensor] = {}
        with self._lock:
            self.capture()
            if plan.weights is not self._weights:  # captured again since it was made
                plan = self.plan(plan.layouts)
            self._wait_for_other_streams()
            for batch, metadata in zip(plan.batches, plan.metadata, strict=True):
                embeds = self._encode(batch, torch.cat([rows[i] for i in batch.indices]), metadata)
                tokens = [plan.sizes[i][1] for i in batch.indices]
                outputs |= zip(batch.indices, embeds.split(tokens), strict=True)
            self._stats.count(plan.batches)
        self._of_thread.batches = plan.batches
        return [outputs[i] for i in range(len(counts))]

    def _encode(self, batch: Batch, rows: Tensor, metadata) -> Tensor:
        if batch.budget is None:
            return self.encoder(rows.to(self.encoder.device), metadata=metadata)
        captured = self.captured[batch.budget]
        captured.fill(rows, metadata)
        return captured.graph.replay()[: batch.tokens].clone()

    def _wait_for_other_streams(self) -> None:
        """The lock orders calls on the host; where threads have streams of their own, the device must wait as well."""
        if self.backend == "cuda":
            stream = torch.cuda.current_stream(self.encoder.device)
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream

    @property
    def last_batches(self) -> list[Batch]:
        """How the calling thread's last items were packed; code that needs it takes the `batches` of its `plan`."""
        return getattr(self._of_thread, "batches", [])

    def stats(self) -> GraphStats:
        """Hits, misses, hit rate and padding waste since `clear`: a copy, later calls do not change it."""
        with self._lock:
            return replace(self._stats)

    def memory_bytes(self) -> int:
        """Bytes that the graphs hold: static buffers, and the shared pool on CUDA or all recorded outputs of traces."""
        with self._lock:
            buffers = sum(t.nbytes for captured in self.captured.values() for t in captured.buffers.values())
            graphs = [captured.graph for captured in self.captured.values()]
            recorded = sum(graph.memory_bytes() for graph in graphs if isinstance(graph, TraceGraph))
            return buffers + recorded + (pool_bytes(self._pool) if graphs and self.backend == "cuda" else 0)

    def clear(self) -> None:
        """Drop all graphs and buffers and give their memory back; the next `execute` captures again."""
        with self._lock:
            self._drop()
            self._stats = GraphStats()

    def _drop(self) -> None:
        self.captured.clear()
        if self.backend == "cuda":
            torch.cuda.empty_cache()
