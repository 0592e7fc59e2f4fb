"""The CUDA backend: the same contract as the trace backend, kept by the driver."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP_RUNS = 2  # lazy initialisation (cuBLAS handles, kernels compiled on first use) must not be captured


class CudaGraph:
    """`torch.cuda.CUDAGraph` with the interface of `TraceGraph`; all graphs of a manager share one memory pool."""

    def __init__(self, pool=None):
        self.pool, self.graph, self.output = pool, torch.cuda.CUDAGraph(), None

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        """Warm up on a side stream, then capture one run of `function`.

        Reading a value back inside raises the driver's error. Every tensor it closes over must be kept alive.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.inference_mode(), torch.cuda.graph(self.graph, pool=self.pool):
            self.output = function()
        return self.output

    def replay(self) -> Tensor:
        """Run the captured kernels on what the buffers hold now; returns the output, at its captured address."""
        self.graph.replay()
        return self.output
