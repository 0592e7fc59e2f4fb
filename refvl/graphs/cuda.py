"""The CUDA backend: the same contract as the trace backend, kept by the driver."""

from collections.abc import Callable

import torch
from torch import Tensor

from refvl.graphs.recorder import CaptureError, refuse_read_back


class CudaGraph:
    """`torch.cuda.CUDAGraph` with the interface of `TraceGraph`.

    Graphs of one `pool` share memory. stream: where to warm up and to capture, not the current one; libraries keep a
    workspace per stream, so graphs should share that, too. None: a new one on the current device.
    """

    def __init__(self, pool: tuple[int, int] | None = None, stream: torch.cuda.Stream | None = None):
        self.pool, self.stream = pool, stream or torch.cuda.Stream()
        self.graph, self.output = torch.cuda.CUDAGraph(), None

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        """Warm up on the side stream, then capture one run of `function` there.

        Lazy initialisation (library handles, kernels compiled on first use) must not be captured, hence the warm-up.
        Raises CaptureError when `function` reads a value back, before the driver sees it: a capture that fails inside
        the driver would leave allocator and streams in its state. Every tensor that `function` closes over must be
        kept alive as long as the graph.
        """
        if self.output is not None:
            raise CaptureError("capture: this graph already holds a recording")
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            function()
            _check_capturable(function)
            with torch.cuda.graph(self.graph, pool=self.pool, stream=self.stream):
                output = function()
        current.wait_stream(self.stream)
        self.output = output
        return output

    def replay(self) -> Tensor:
        """Run the captured kernels on what the buffers hold now; returns the output, at its captured address."""
        if self.output is None:
            raise CaptureError("replay: nothing has been captured")
        self.graph.replay()
        return self.output


def pool_bytes(pool: tuple[int, int]) -> int:
    """Bytes of device memory that the allocator holds for the graphs of `pool`."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


def _check_capturable(function: Callable[[], Tensor]) -> None:
    """Run once under the rules of the trace backend, and where PyTorch reports that host waits for device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with refuse_read_back():
            function()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise CaptureError(f"capture: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
