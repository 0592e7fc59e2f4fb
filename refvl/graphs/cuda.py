"""The CUDA backend: the same contract as the trace backend, kept by the driver."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from refvl.graphs.recorder import ONE_CAPTURE, CaptureError, refuse_read_back

Pool = Any  # what `torch.cuda.graph_pool_handle` returns: a pair of integers, of a type that torch keeps private


class CudaGraph:
    """`torch.cuda.CUDAGraph` with the interface of `TraceGraph`.

    Graphs of one `pool` share memory. stream: where to warm up and to capture, not the current one; libraries keep a
    workspace per stream, so graphs should share that, too. None: a new one on the current device.
    """

    def __init__(self, pool: Pool | None = None, stream: torch.cuda.Stream | None = None):
        self.pool, self.stream = pool, stream or torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        self.output: Tensor | None = None

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        """Warm up on the side stream, then capture one run of `function` there.

        Lazy initialisation (library handles, kernels compiled on first use) must not be captured, hence the warm-up.
        Raises CaptureError when `function` reads a value back, before the driver sees it: a capture that fails inside
        the driver would leave allocator and streams in its state. Every tensor that `function` closes over must be
        kept alive as long as the graph. Captures of several threads take turns; what other threads do with the device
        meanwhile does not disturb them ("thread_local").
        """
        if self.output is not None:
            raise CaptureError("capture: this graph already holds a recording")
        with ONE_CAPTURE, torch.inference_mode():
            current = torch.cuda.current_stream(self.stream.device)
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):
                    function()
                    _check_capturable(function)
                    with (
                        _own_workspaces(),
                        torch.cuda.graph(
                            self.graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                        ),
                    ):
                        output = function()
            finally:  # after a failure, too, what the warm-up reads may be freed
                current.wait_stream(self.stream)
        self.output = output
        return output

    def replay(self) -> Tensor:
        """Run the captured kernels on what the buffers hold now; returns the output, at its captured address."""
        if self.output is None:
            raise CaptureError("replay: nothing has been captured")
        self.graph.replay()
        return self.output


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let a capture allocate the workspaces of its matrix products in its own pool.

    Up to 2.14 torch keeps one per stream, and a graph its address. That of the warm-up is not the graph's: whoever
    clears the workspaces, as code compiled with "reduce-overhead" does, would leave replays writing to freed memory.
    Upstream: `clear_cublas_manager` (torch), pytorch issue 193402.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def pool_bytes(pool: Pool) -> int:
    """Bytes of device memory that the allocator holds for the graphs of `pool`."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


def _check_capturable(function: Callable[[], Tensor]) -> None:
    """Run once under the rules of the trace backend, and where PyTorch reports that the host waits for the device.

    The report is a mode of the whole process, hence a warning and not an error: other threads may wait as they like.
    """
    waits: list[str] = []
    mode, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()

    def note(message, *args, **kwargs) -> None:
        if threading.get_ident() == thread and "called a synchronizing CUDA operation" in str(message):
            waits.append(str(message))  # and not torch's remark, at the first use, that the mode is a prototype

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            torch.cuda.set_sync_debug_mode("warn")
            with refuse_read_back():
                function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if waits:
        raise CaptureError(f"capture: {waits[0]}, which a graph cannot do")
