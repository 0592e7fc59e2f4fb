"""The CUDA backend: its contract is that of the trace backend, but the CUDA driver enforces it."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from refvl.graphs.recorder import ONE_CAPTURE, CaptureError, refuse_read_back

# the return value of `torch.cuda.graph_pool_handle`, a pair of integers whose type is private to torch
Pool = Any


class CudaGraph:
    """`torch.cuda.CUDAGraph` with the interface of `TraceGraph`.

    Graphs of one `pool` share memory. stream: the stream for warm-up and capture, which must
    differ from the current one; None: a new stream on the current device. Libraries keep a
    workspace per stream, so graphs that share a pool should also share a stream.
    """

    def __init__(self, pool: Pool | None = None, stream: torch.cuda.Stream | None = None):
        self.pool, self.stream = pool, stream or torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        self.output: Tensor | None = None

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        """Warm up on the side stream, then capture one run of `function` there.

        The warm-up does the lazy initialisation (library handles, kernels compiled on first use),
        which must not be captured. If `function` reads a value back, CaptureError is raised before
        the driver notices, because a capture that fails inside the driver would leave the allocator
        and the streams in the capture state. Every tensor that `function` closes over must live as
        long as the graph. Captures from several threads run one after the other; they are not
        disturbed if other threads use the device ("thread_local").
        """
        if self.output is not None:
            raise CaptureError("capture: this graph already has a recording")
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
            finally:  # the warm-up's inputs may be freed afterwards, even if the capture fails
                current.wait_stream(self.stream)
        self.output = output
        return output

    def replay(self) -> Tensor:
        """Run the captured kernels on the buffers' current contents; return the output at its captured address."""
        if self.output is None:
            raise CaptureError("replay: nothing has been captured")
        self.graph.replay()
        return self.output


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let a capture allocate the workspaces of its matrix multiplications in the graph's own pool.

    Up to 2.14, torch keeps one workspace per stream. A graph would store the address of the
    warm-up's workspace without owning it, so code that clears workspaces, such as code compiled
    with "reduce-overhead", would leave replays writing to freed memory. Upstream:
    `clear_cublas_manager` (torch), pytorch issue 193402.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def pool_bytes(pool: Pool) -> int:
    """Return the number of bytes of device memory that the allocator holds for the graphs of `pool`."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


def _check_capturable(function: Callable[[], Tensor]) -> None:
    """Run `function` once under the rules of the trace backend, with PyTorch's synchronisation warnings on.

    The warnings apply to the whole process, where other threads may synchronise, so
    warnings must not become errors.
    """
    waits: list[str] = []
    mode, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()

    def note(message, *args, **kwargs) -> None:
        if threading.get_ident() == thread and "called a synchronizing CUDA operation" in str(message):
            waits.append(str(message))  # this omits torch's notice that the mode is a prototype

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
        raise CaptureError(f"capture: a graph cannot synchronise, but the function {waits[0]}")
