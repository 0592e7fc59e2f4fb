"""The graph manager: it captures one graph per budget, packs arriving items, replays, and returns outputs in order.

    plan   layouts -> the part of each item for each path
                   -> batches: which items share a replay, on each path
                   -> the path's plan of every batch
    run    pixels  -> for each batch: fill static buffers -> replay -> clone -> split
                      too large for every budget: the same path, eagerly
                   -> the paths' results for an item, joined in the order of its rows

Most encoders have a single path, named "". Step3-VL has two `paths`: the crops and the overview of
an image are squares of two sizes, so each size has its own graphs. Each path packs its own parts,
so two images may share a replay on one path but not on the other. One path may also run eagerly
while the other path replays graphs. Upstream: `EncoderCudaGraphManager`, which packs images once
for all paths (`plan_paired_batches`).

The manager uses only these parts of an encoder: plan, forward, metadata at capacity, and the sizes
of an item.

Any number of threads may use one manager, and any number of managers may use one encoder. A plan
belongs to one call. Only one call at a time uses the buffers; the call holds a lock from its
first fill to its last clone.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from tqdm.auto import tqdm

from refvl.checks import check_pixel_rows
from refvl.graphs.budgets import Batch, Limits, check_policy, infer_limits, pack_items
from refvl.graphs.buffers import fields_to_fill, fill_together, metadata_tensors
from refvl.graphs.cuda import CudaGraph, Pool, pool_bytes
from refvl.graphs.packing import Capacity
from refvl.graphs.recorder import TraceGraph

BACKENDS = ("cuda", "trace")
MIN_BUDGET = 64  # in tokens: an image of 224 px
MAX_BUDGET = {"varlen": 4096, "sdpa": 4096, "masked": 256}  # masked attention is quadratic in the budget
ADAPTER_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # attributes of PEFT's layers
MAX_UNITS = 64  # the maximum number of squares in an inferred budget, unless MAX_BUDGET is lower

Part = tuple[int, str]  # (item, path): the part of one item that a path encodes
Size = tuple[int, int, int]  # (patch rows, output tokens, frames)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedBudget:
    """One graph and every tensor that it reads or writes; these references keep the memory from being reused."""

    graph: CudaGraph | TraceGraph
    pixel_values: Tensor
    metadata: object
    output: Tensor

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every buffer that is filled before a replay, by name."""
        return {"pixel_values": self.pixel_values, **metadata_tensors(self.metadata)}

    def fill(self, rows: Tensor, metadata) -> None:
        """Copy a batch's patch rows and plan into the buffers, and pad them.

        Errors are as in `fill_padded` and `fill_metadata`.
        """
        fill_together([(self.pixel_values, rows, "zero", "pixel_values"), *fields_to_fill(self.metadata, metadata)])


@dataclass(slots=True)
class GraphStats:
    """Counters of items and tokens. Items that ran eagerly count as misses; padding is counted only in replays."""

    hits: int = 0
    misses: int = 0
    tokens: int = 0
    budget_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of items that a graph encoded, 0 before the first item."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def padding_waste(self) -> float:
        """The share of padding among the replayed tokens, 0 before the first replay."""
        return 1 - self.tokens / self.budget_tokens if self.budget_tokens else 0.0

    def count(self, batch: Batch) -> None:
        """Add a batch to the counters."""
        if batch.budget is None:
            self.misses += len(batch.indices)
        else:
            self.hits += len(batch.indices)
            self.tokens += batch.tokens
            self.budget_tokens += batch.budget


@dataclass(frozen=True, slots=True, eq=False)
class GraphPlan:
    """The plan of one call, valid for the encoder's weights at the time of planning.

    layouts: the layout of every item. sizes: the sizes of each item's part on each path, in the
    order of the patch rows. batches: the items that run together, in order of execution. metadata:
    the plan of each batch on its path.
    """

    layouts: Sequence
    sizes: dict[Part, Size]
    batches: list[Batch]
    metadata: list


class EncoderGraphManager:
    """The graphs of one encoder. Outputs are clones, because the next replay overwrites the output of a graph.

    While the encoder has forward hooks, items run eagerly, so the hooks are called. Weights may
    change between calls: values changed in place take effect at the next replay; if weights have a
    new address or dtype (`load_state_dict(assign=True)`, `.to(...)`), the next call captures
    again. Threads may share a manager: each call gets its own embeddings, and replays run one
    after the other.

    limits: the `Limits` of each path. captured: the `CapturedBudget` of each (path, budget).
    last_batches: the batches of the last call of any thread.
    """

    def __repr__(self) -> str:
        return f"EncoderGraphManager of {len(self.captured)} graphs, {self.stats()}"

    def __init__(
        self,
        encoder: Any,
        *,
        budgets: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        max_items: int | None = None,
        max_frames: int | None = None,
        min_budget: int = MIN_BUDGET,
        max_budget: int | None = None,
        backend: str = "auto",
        policy: str = "optimal",
        progress: bool = True,
    ):
        """Set the limits and the backend; nothing is captured yet.

        budgets: a list of the output tokens per graph; for an encoder with several paths, a mapping
        from paths to such lists. max_items, max_frames: limits per replay. Limits that are None are
        inferred. Inferred budgets double from `min_budget` up to `max_budget`; on a path whose
        items consist of equal units, the budgets start at one unit instead.

        backend: "cuda", "trace" (any device), or "auto" to follow the encoder's device. policy: see
        `plan_batches`. Raises ValueError if limits contradict each other, if `budgets` lacks a
        path, or if the backend cannot run here.
        """
        self.encoder: Any = encoder
        self.paths: Mapping[str, Any] = getattr(encoder, "paths", {"": encoder})
        self.policy = check_policy(policy)
        self.progress = progress
        self._wanted_backend = backend
        self.backend = self._choose_backend()
        given: Any = budgets
        if budgets is None or "" in self.paths:
            given = dict.fromkeys(self.paths, budgets)
        if set(given) != set(self.paths):
            raise ValueError(f"budgets: expected a dict with the keys {list(self.paths)}, got {list(given)}")
        others = {"max_items": max_items, "max_frames": max_frames}
        self.limits = {
            name: _limits_of(path, min_budget, max_budget, budgets=given[name], **others)
            for name, path in self.paths.items()
        }
        self.captured: dict[tuple[str, int], CapturedBudget] = {}
        self._capacities: dict[str, Capacity] = {}
        self._weights: tuple = ()
        self._pool: Pool | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self.last_batches: list[Batch] = []
        self._stats = {name: GraphStats() for name in self.paths}
        self._lock = RLock()

    def _choose_backend(self) -> str:
        if self._wanted_backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend: expected one of {('auto', *BACKENDS)}, got {self._wanted_backend!r}")
        on_cuda = self.encoder.device.type == "cuda"
        if self._wanted_backend == "cuda" and not on_cuda:
            raise ValueError(f"backend: 'cuda' needs an encoder on CUDA, got an encoder on {self.encoder.device}")
        return ("cuda" if on_cuda else "trace") if self._wanted_backend == "auto" else self._wanted_backend

    def capture(self) -> None:
        """Capture every budget, starting with the largest on each path, so that smaller graphs reuse its memory.

        Shows a progress bar.

        Does nothing if graphs of the current weights exist; otherwise it first drops the graphs of
        the old weights. Raises CaptureError if the encoder reads a value back; in that case, no
        graph is kept.
        """
        with self._lock:
            weights = baked_in(self.encoder)
            if self.captured and weights == self._weights:
                return
            self._drop()
            self.backend, self._weights = self._choose_backend(), weights
            if self.backend == "cuda":
                self._pool, self._last_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.encoder.device)
            graphs = [(path, budget) for path, limits in self.limits.items() for budget in limits.budgets[::-1]]
            bar = tqdm(graphs, desc="capture", unit="graph", disable=not self.progress)
            captured = {(path, budget): self._capture(path, budget) for path, budget in bar}
            self.captured = captured  # reached only if no capture failed
            for path, limits in self.limits.items():
                max_rows = tuple(len(captured[path, budget].pixel_values) for budget in limits.budgets)
                frames = tuple(map(limits.frames_of, limits.budgets))
                self._capacities[path] = Capacity(limits.budgets, max_rows, limits.max_items, limits.max_frames, frames)

    def _capture(self, path: str, budget: int) -> CapturedBudget:
        encoder = self.paths[path]
        metadata = encoder.plan_capacity(budget, self.limits[path].frames_of(budget))
        pixel_values = encoder.pixel_buffer(budget)
        attention = encoder.graph_attention
        graph = CudaGraph(self._pool, self._last_stream) if self.backend == "cuda" else TraceGraph()
        output = graph.capture(lambda: encoder(pixel_values, metadata=metadata, attention=attention))
        return CapturedBudget(graph, pixel_values, metadata, output)

    def execute(self, pixel_values: Tensor, layouts) -> list[Tensor]:
        """Encode items (images and videos may be mixed); return one (M, D) tensor each, in the caller's order.

        pixel_values: (N, values) patch rows of all items in order, path by path within each item.
        layouts: the layouts that the encoder's `plan` accepts, for Qwen and GLM (t, h, w) per item in
        patches. Captures first if there are no graphs yet. Equivalent to `plan` followed by `run`.
        """
        return self.run(pixel_values, self.plan(layouts))

    @torch.inference_mode()
    def plan(self, layouts) -> GraphPlan:
        """Pack items into batches and plan each batch; `run` the plan before the weights change.

        Captures first if there are no graphs yet.
        """
        layouts = self.encoder.check_layouts(layouts)
        parts = {(i, path): part for i, layout in enumerate(layouts) for path, part in self._split(layout)}
        sizes = {(i, path): self.paths[path].item_size(part) for (i, path), part in parts.items()}
        with self._lock:
            if not self.captured:
                self.capture()
        batches: list[Batch] = []
        for path, capacity in self._capacities.items():
            there = {i: size for (i, name), size in sizes.items() if name == path}
            batches += pack_items(there, capacity, self.policy, path)
        batches = self._without_hooks(batches)
        metadata = [self.paths[batch.path].plan([parts[i, batch.path] for i in batch.indices]) for batch in batches]
        return GraphPlan(layouts, sizes, batches, metadata)

    def _without_hooks(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches; all of them run eagerly if the encoder has hooks, which a replay would not call."""
        of_all = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        if of_all or any(m._forward_hooks or m._forward_pre_hooks for m in _modules(self.encoder)):
            return [replace(batch, budget=None) for batch in batches]
        return batches

    def _split(self, layout: Hashable) -> list[tuple[str, Hashable]]:
        """Return (path, layout of its part) for each path that encodes a part of an item, in
        the order of the rows.
        """
        if "" in self.paths:
            return [("", layout)]
        parts = self.encoder.path_layouts(layout)
        return [(path, parts[path]) for path in self.paths if parts[path] is not None]

    @torch.inference_mode()
    def run(self, pixel_values: Tensor, plan: GraphPlan) -> list[Tensor]:
        """Encode a plan; return one (M, D) tensor per item, in the caller's order. pixel_values: as in `execute`."""
        counts = [patches for patches, _, _ in plan.sizes.values()]
        check_pixel_rows(pixel_values, (("patches", sum(counts)), "values"))
        rows = dict(zip(plan.sizes, pixel_values.split(counts), strict=True))
        outputs: dict[Part, Tensor] = {}
        with self._lock:
            self.capture()
            self._wait_for_other_streams()
            batches = self._without_hooks(plan.batches)
            parts = [[(i, batch.path) for i in batch.indices] for batch in batches]
            joined = (rows[part[0]] if len(part) == 1 else torch.cat([rows[p] for p in part]) for part in parts)
            for part, embeds in zip(parts, self._encode_all(batches, joined, plan.metadata), strict=True):
                outputs |= zip(part, embeds.split([plan.sizes[p][1] for p in part]), strict=True)
            for batch in batches:
                self._stats[batch.path].count(batch)
            self.last_batches = batches
        return [self._join(outputs, i) for i in range(len(plan.layouts))]

    def _encode_all(self, batches: list[Batch], rows: Iterable[Tensor], metadata: list) -> Iterable[Tensor]:
        """Encode the batches lazily, one after the other. rows: the patch rows of each batch."""
        return (self._encode(*parts) for parts in zip(batches, rows, metadata, strict=True))

    def _encode(self, batch: Batch, rows: Tensor, metadata) -> Tensor:
        if batch.budget is None:
            return self.paths[batch.path](rows.to(self.encoder.device), metadata=metadata)
        captured = self.captured[batch.path, batch.budget]
        captured.fill(rows, metadata)
        return captured.graph.replay()[: batch.tokens].clone()

    def _join(self, outputs: dict[Part, Tensor], item: int) -> Tensor:
        """Join an item's results on all paths in the order of its rows, (M, D)."""
        parts = [outputs[item, path] for path in self.paths if (item, path) in outputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _wait_for_other_streams(self) -> None:
        """Make the current stream wait for the last call's stream, because the lock orders calls only on the host."""
        if self.backend == "cuda":
            stream = torch.cuda.current_stream(self.encoder.device)
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream

    def path_stats(self) -> dict[str, GraphStats]:
        """Return a copy of each path's counters since `clear`, by path."""
        with self._lock:
            return {path: replace(stats) for path, stats in self._stats.items()}

    def stats(self) -> GraphStats:
        """Return the counters summed over all paths; an item counts once on each path where it has rows."""
        counters = [astuple(stats) for stats in self.path_stats().values()]
        return GraphStats(*(sum(of_paths) for of_paths in zip(*counters, strict=True)))

    def memory_bytes(self) -> int:
        """Return the size in bytes of the graphs: the static buffers, plus the CUDA pool or the recorded outputs."""
        with self._lock:
            buffers = sum(t.nbytes for captured in self.captured.values() for t in captured.buffers.values())
            graphs = [captured.graph for captured in self.captured.values()]
            recorded = sum(graph.memory_bytes() for graph in graphs if isinstance(graph, TraceGraph))
            return buffers + recorded + (pool_bytes(self._pool) if graphs and self.backend == "cuda" else 0)

    def clear(self) -> None:
        """Drop all graphs and buffers and free their memory; the next `execute` captures again."""
        with self._lock:
            self._drop()
            self._stats = {name: GraphStats() for name in self.paths}

    def _drop(self) -> None:
        self.captured.clear()
        if self.backend == "cuda":
            torch.cuda.empty_cache()


def _limits_of(path: Any, min_budget: int, max_budget: int | None, **given) -> Limits:
    """Infer the limits of one path. given: the caller's `budgets`, `max_items` and `max_frames`."""
    largest = MAX_BUDGET[path.graph_attention]
    unit = getattr(path, "tokens", None)
    if unit is None:
        return infer_limits(min_budget, largest if max_budget is None else max_budget, **given)
    limits = infer_limits(unit, min(largest, MAX_UNITS * unit) if max_budget is None else max_budget, **given)
    if given["max_frames"]:
        return limits
    return replace(limits, max_frames=max(1, limits.budgets[-1] // unit), frame_tokens=None)  # every frame is one unit


def baked_in(encoder: nn.Module) -> tuple:
    """Return the values that a graph of `encoder` depends on; if any of them changes, the graph must be captured again.

    These values are the address and dtype of each parameter, and the active adapters, their scaling
    and the merged adapters.
    """
    modules = _modules(encoder)
    weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    # a list is twice as fast as a generator
    return (*[(weight.data_ptr(), weight.dtype) for weight in weights], *_switches(modules))


def adapter_switches(module: nn.Module) -> list[str]:
    """Return the active adapters, their scaling and the merged adapters of each layer that PEFT put into `module`."""
    return _switches(_modules(module))


def _switches(modules: list[nn.Module]) -> list[str]:
    adapters = [own for module in modules if "merged_adapters" in (own := module.__dict__)]
    return [str([own.get(switch) for switch in ADAPTER_SWITCHES]) for own in adapters]


def _modules(encoder: nn.Module) -> list[nn.Module]:
    modules = [encoder]
    for module in modules:  # the list grows during the loop; `Module.modules` takes five times as long
        modules += [child for child in module._modules.values() if child is not None]
    return modules
