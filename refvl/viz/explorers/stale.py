"""The effect of a stale graph buffer: no error is raised, but the result is wrong.

All buffers are filled with a first batch; then all but one are refilled with a second batch. The
recording is replayed operation by operation and compared with a replay in which all buffers are
refilled. This shows where the error begins and how far it spreads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from refvl.graphs.manager import CapturedBudget
from refvl.graphs.recorder import TraceGraph


@dataclass(frozen=True, slots=True, eq=False)
class StaleReplay:
    """The results of a replay.

    outputs: (budget, D), a copy. errors: one per operation, 0 if its result is correct.
    """

    outputs: Tensor
    errors: list[float]


@torch.inference_mode()
def replay_stale(
    captured: CapturedBudget, before: tuple[Tensor, object], batch: tuple[Tensor, object]
) -> Mapping[str, StaleReplay]:
    """Replay `batch` once for each buffer, in which `before` is left; return results by the
    stale buffer's name ("": none).

    captured: a recording of the trace backend. before, batch: two batches, each a pair (patch rows,
    plan). An error is the norm of the difference relative to the correct result; for integers and
    booleans, it is the share of values that differ.
    """
    graph = captured.graph
    if not isinstance(graph, TraceGraph):
        raise TypeError(f"captured: expected a recording of the trace backend, got {type(graph).__name__}")
    captured.fill(*before)
    left = {name: buffer.clone() for name, buffer in captured.buffers.items()}
    captured.fill(*batch)
    right, outputs = _replay(graph)
    replays = {"": StaleReplay(outputs, [0.0] * len(right))}
    for name, contents in left.items():
        captured.fill(*batch)
        captured.buffers[name].copy_(contents)
        results, outputs = _replay(graph)
        errors = [_error(result, expected) for result, expected in zip(results, right, strict=True)]
        replays[name] = StaleReplay(outputs, errors)
    captured.fill(*batch)
    return replays


def _replay(graph: TraceGraph) -> tuple[list[Tensor], Tensor]:
    """Return copies of each operation's first result and the output;
    later operations may overwrite the originals.
    """
    results = []
    for operation in graph.operations:
        operation.replay()
        results.append(operation.outputs[0].clone())
    assert graph.output is not None  # captured
    return results, graph.output.clone()


def _error(result: Tensor, expected: Tensor) -> float:
    finite = expected.isfinite()  # masks contain -inf
    if not expected.is_floating_point() or not torch.equal(result.isfinite(), finite):
        return float((result != expected).float().mean())
    difference = (result - expected)[finite].norm()
    return float(difference / expected[finite].norm()) if difference else 0.0
