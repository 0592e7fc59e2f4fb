"""Two graphs per picture: one path for its overview, one for its crops, each with budgets of its own.

    pictures (rows, layouts)
       | split by path     crops -> "local", overviews -> "global"; a picture may have no crops
       | per path          its own `EncoderGraphManager`: plan_batches -> fill -> replay -> clone, or eager
       | join              a picture's embeddings in the order in which its rows came: crops, then overview

The paths pack by themselves, since each picture is put together again in the end anyway: which pictures share a replay
may differ between them, and one path may run eagerly while the other replays. The policy "paired" does it as vLLM does:
pictures are packed once, and a batch must fit both paths. Upstream: the dual path of `EncoderCudaGraphManager`.
"""

import bisect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import local
from typing import Any, Protocol

import torch
from torch import Tensor

from refvl.checks import check_pixel_rows, check_positive_int
from refvl.contracts import GraphEncoder
from refvl.graphs.budgets import POLICIES, Batch, Limits, generate_budgets
from refvl.graphs.manager import MAX_BUDGET, EncoderGraphManager, GraphPlan, GraphStats

MAX_UNITS = 64  # squares in the largest inferred graph; models whose squares have many tokens stop at MAX_BUDGET


class PathEncoder(GraphEncoder, Protocol):
    """One path: a `GraphEncoder` whose items consist of equal units."""

    tokens: int  # output tokens of one unit: the smallest sensible budget


class DualPathEncoder(Protocol):
    """What an encoder of several paths has to offer. A picture's rows, and its embeddings, lie path by path."""

    @property
    def paths(self) -> Mapping[str, PathEncoder]:
        """The paths by name, in the order in which a picture's rows lie."""

    def check_layouts(self, layouts) -> Sequence[Any]:
        """The layouts of a batch, normalised, or a ValueError or TypeError that says what is wrong."""

    def item_size(self, layout) -> tuple[int, int, int]:
        """(patch rows, output tokens, units) of one picture, all paths together."""

    def path_layouts(self, layout) -> Mapping[str, Hashable | None]:
        """What each path is given of a picture; None: nothing."""


@dataclass(frozen=True, slots=True)
class PairedBatch:
    """Pictures that run together. budgets: per path, None for eager; a path with nothing to do is absent."""

    indices: tuple[int, ...]
    budgets: Mapping[str, int | None]


def plan_paired_batches(
    path_tokens: Sequence[Mapping[str, int]], budgets: Mapping[str, Sequence[int]], max_items: int
) -> list[PairedBatch]:
    """Pack pictures once for all paths, smallest first, while every path's tokens fit its largest budget.

    path_tokens: per picture, its output tokens on each path. budgets: per path. A picture too large for a path is a
    batch of its own: that path runs eagerly, the others replay. Upstream: the greedy plan of vLLM's dual path.

    >>> plan_paired_batches([{"local": 162, "global": 169}, {"local": 0, "global": 169}],
    ...                     {"local": [81, 162, 324], "global": [169, 338]}, 8)
    [PairedBatch(indices=(1, 0), budgets={'local': 162, 'global': 338})]
    """
    budgets = {path: sorted(of_path) for path, of_path in budgets.items()}
    check_positive_int(max_items, "max_items")

    def tokens_of(indices: Sequence[int]) -> dict[str, int]:
        return {path: sum(path_tokens[i].get(path, 0) for i in indices) for path in budgets}

    def fits(indices: Sequence[int]) -> bool:
        return len(indices) <= max_items and all(n <= budgets[path][-1] for path, n in tokens_of(indices).items())

    groups: list[list[int]] = []
    for i in sorted(range(len(path_tokens)), key=lambda i: sum(path_tokens[i].values())):  # stable
        if groups and fits([*groups[-1], i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [PairedBatch(tuple(group), _smallest_budgets(tokens_of(group), budgets)) for group in groups]


def _smallest_budgets(tokens: Mapping[str, int], budgets: Mapping[str, Sequence[int]]) -> dict[str, int | None]:
    """The smallest budget of each path that has tokens; None where even the largest is too small."""
    return {
        path: budgets[path][bisect.bisect_left(budgets[path], n)] if n <= budgets[path][-1] else None
        for path, n in tokens.items()
        if n
    }


@dataclass(frozen=True, slots=True, eq=False)
class DualGraphPlan:
    """What one call is going to run, in order: (path, pictures, plan of what they have there). See `GraphPlan`."""

    layouts: list
    parts: list[tuple[str, list[int], GraphPlan]]

    @property
    def batches(self) -> list[Batch]:
        """Batches of all paths, in the order in which they run."""
        return [
            Batch(tuple(indices[j] for j in batch.indices), batch.budget, path, batch.tokens)
            for path, indices, plan in self.parts
            for batch in plan.batches
        ]

    @property
    def metadata(self) -> list:
        """The path's plan of each batch."""
        return [metadata for _, _, plan in self.parts for metadata in plan.metadata]


class DualPathGraphManager:
    """An `EncoderGraphManager` for encoders of several paths: the same calls, one manager per path inside.

    Threads may share it, and weights may change, as there.
    """

    def __init__(
        self,
        encoder: DualPathEncoder,
        *,
        budgets: Mapping[str, Sequence[int]] | None = None,
        max_budget: int | None = None,
        max_items: int | None = None,
        min_budget: int | None = None,
        backend: str = "auto",
        policy: str = "optimal",
        progress: bool = True,
    ):
        """budgets: output tokens per graph, for each path. What is None is inferred: budgets double from one unit of
        the path up to `max_budget`. max_items: pictures per replay.

        min_budget: what `EncoderGraphManager` begins with; not read, since a path begins with one unit. policy:
        "optimal" or "greedy", by which each path packs for itself (see `plan_batches`), or "paired". Raises ValueError
        naming the argument when limits contradict each other, budgets miss a path, or the backend cannot run here.
        """
        if policy not in ("paired", *POLICIES):
            raise ValueError(f"policy: expected one of {('paired', *POLICIES)}, got {policy!r}")
        self.encoder, self.policy = encoder, policy
        paths = encoder.paths
        if budgets is None:
            budgets = {name: _infer_budgets(path, max_budget, max_items) for name, path in paths.items()}
        elif set(budgets) != set(paths):
            raise ValueError(f"budgets: expected budgets for the paths {list(paths)}, got them for {list(budgets)}")
        self.managers = {
            name: EncoderGraphManager(
                path, budgets=budgets[name], min_budget=path.tokens, max_items=max_items,
                max_frames=max(1, max(budgets[name]) // path.tokens),
                backend=backend, policy="greedy" if policy == "paired" else policy, progress=progress,
            )
            for name, path in paths.items()
        }  # fmt: skip
        self._of_thread = local()

    @property
    def limits(self) -> dict[str, Limits]:
        """Budgets and item limit of each path."""
        return {path: manager.limits for path, manager in self.managers.items()}

    def capture(self) -> None:
        """Capture every budget of every path; nothing when that has happened. When one fails, no graph is kept."""
        try:
            for manager in self.managers.values():
                manager.capture()
        except BaseException:
            self.clear()
            raise

    def execute(self, pixel_values: Tensor, layouts) -> list[Tensor]:
        """Encode pictures; one (M, D) tensor each, in the caller's order.

        pixel_values: (N, values) patch rows of all pictures in order, path by path within each. layouts: what the
        encoder's `plan` takes. Captures first when that has not happened. The same as `plan`, then `run`.
        """
        return self.run(pixel_values, self.plan(layouts))

    def plan(self, layouts) -> DualGraphPlan:
        """Pack pictures on each path and plan every batch; `run` it before the weights change. Captures first."""
        layouts = self.encoder.check_layouts(layouts)
        self.capture()
        of_paths, parts = [self._path_layouts(layout) for layout in layouts], []
        for indices in self._groups(of_paths):
            for path, manager in self.managers.items():
                if there := [i for i in indices if path in of_paths[i]]:
                    parts.append((path, there, manager.plan([of_paths[i][path] for i in there])))
        return DualGraphPlan(layouts, parts)

    @torch.inference_mode()
    def run(self, pixel_values: Tensor, plan: DualGraphPlan) -> list[Tensor]:
        """Encode what was planned; one (M, D) tensor each, in the caller's order. pixel_values: as in `execute`."""
        counts = [self.encoder.item_size(layout)[0] for layout in plan.layouts]
        device = next(iter(self.managers.values())).encoder.device
        check_pixel_rows(pixel_values, (sum(counts), "values"), device)
        rows = [self._split(*item) for item in zip(pixel_values.split(counts), plan.layouts, strict=True)]
        outputs: list[dict[str, Tensor]] = [{} for _ in plan.layouts]
        for path, indices, of_path in plan.parts:
            embeds = self.managers[path].run(torch.cat([rows[i][path] for i in indices]), of_path)
            for i, embeds_MD in zip(indices, embeds, strict=True):
                outputs[i][path] = embeds_MD
        self._of_thread.batches = plan.batches
        return [torch.cat([output[path] for path in self.managers if path in output]) for output in outputs]

    @property
    def last_batches(self) -> list[Batch]:
        """How the calling thread's last pictures were packed; code that needs it takes the `batches` of its `plan`."""
        return getattr(self._of_thread, "batches", [])

    def _path_layouts(self, layout: Hashable) -> dict[str, Hashable]:
        """What each path is given of a picture, where it has anything."""
        layouts = self.encoder.path_layouts(layout)
        return {path: layouts[path] for path in self.managers if layouts[path] is not None}

    def _split(self, rows: Tensor, layout: Hashable) -> dict[str, Tensor]:
        """The rows of one picture on each path where it has any."""
        layouts = self._path_layouts(layout)
        counts = [self._size(path, path_layout)[0] for path, path_layout in layouts.items()]
        return dict(zip(layouts, rows.split(counts), strict=True))

    def _groups(self, of_paths: list[dict[str, Hashable]]) -> list[tuple[int, ...]]:
        """Which pictures are handed to the paths together: all of them, unless they are packed in pairs."""
        if self.policy != "paired":
            return [tuple(range(len(of_paths)))]
        tokens = [{path: self._size(path, layout)[1] for path, layout in layouts.items()} for layouts in of_paths]
        budgets = {path: limits.budgets for path, limits in self.limits.items()}
        max_items = min(limits.max_items for limits in self.limits.values())
        return [batch.indices for batch in plan_paired_batches(tokens, budgets, max_items)]

    def _size(self, path: str, layout: Hashable) -> tuple[int, int, int]:
        return self.managers[path].encoder.item_size(layout)

    def stats(self) -> GraphStats:
        """All paths together since the capture; a picture counts once on each path where it has rows."""
        stats = self.path_stats().values()
        return GraphStats(
            **{name: sum(getattr(s, name) for s in stats) for name in ("hits", "misses", "tokens", "budget_tokens")}
        )

    def path_stats(self) -> dict[str, GraphStats]:
        """The same for each path."""
        return {path: manager.stats() for path, manager in self.managers.items()}

    def memory_bytes(self) -> int:
        """Bytes that the graphs of all paths hold."""
        return sum(manager.memory_bytes() for manager in self.managers.values())

    def clear(self) -> None:
        """Drop all graphs and buffers; the next `execute` captures again."""
        for manager in self.managers.values():
            manager.clear()


def _infer_budgets(path: PathEncoder, max_budget: int | None, max_items: int | None) -> list[int]:
    """Doubling from one unit (or as many tokens as items) to `max_budget`."""
    if max_budget is None:
        max_budget = min(MAX_BUDGET[path.graph_attention], MAX_UNITS * path.tokens)
    smallest = max(path.tokens, max_items or 1)
    if check_positive_int(max_budget, "max_budget") < smallest:
        raise ValueError(f"max_budget: must hold one unit of every path, at least {smallest} tokens, got {max_budget}")
    return generate_budgets(smallest, max_budget)
