"""Linear layers on a CPU use torch's default kernel or oneDNN's, whichever is faster on this machine.

torch passes `F.linear` in float32 to MKL, which is less optimised for AMD processors: two blocks of
Qwen2.5-VL's tower take 1.2 to 1.35 times as long with it at 224 px, on an AMD EPYC with one thread.
oneDNN reads torch's weights in place. Each layer keeps its weights, so you can save, move, change,
adapt and inspect them as before. The kernel is private to torch: if a release lacks it, "auto"
chooses torch's default.
"""

import time
import timeit
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CPU = torch.device("cpu")
KERNELS = ("auto", "torch", "onednn")
# multiplications per call; below this number, the call itself costs more than oneDNN saves
MIN_WORK = 2**22
FASTER = 1.3  # the speed-up that oneDNN must reach, so that a short disturbance does not decide the choice


class OneDnnLinear(nn.Linear):
    """An nn.Linear that uses oneDNN's kernel if it can: in float32 on a CPU, for several rows, without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        weight, rows = self.weight, input.numel() // max(self.in_features, 1)
        other = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
        suits = not other and rows > 1 and rows * weight.numel() >= MIN_WORK
        if suits and input.dtype == weight.dtype == torch.float32 and input.device == weight.device == CPU:
            return _onednn(input, weight, self.bias)
        return super().forward(input)


def choose_linear(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return "torch" or "onednn": the requested kernel, or the faster one for "auto"."""
    if requested not in KERNELS:
        raise ValueError(f"linear: expected one of {KERNELS}, got {requested!r}")
    if requested == "auto":
        runs = device.type == "cpu" and dtype == torch.float32
        return "onednn" if runs and times_as_fast() >= FASTER else "torch"
    return requested


def use_onednn(model: nn.Module) -> None:
    """Make every plain nn.Linear in `model` a `OneDnnLinear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter:  # subclasses may define their own forward
            module.__class__ = OneDnnLinear


@cache
@torch.no_grad()
def times_as_fast() -> float:
    """Return oneDNN's speed-up over torch's default, or 0 if it cannot be called; measured once, in about 10 ms.

    It compares thread CPU time and the fastest of several interleaved calls, so other processes
    barely affect it.
    """
    x, weight, bias = torch.ones(128, 512), torch.ones(512, 512), torch.ones(512)
    ways = partial(F.linear, x, weight, bias), partial(_onednn, x, weight, bias)
    try:
        rounds = [[timeit.timeit(way, timer=time.thread_time, number=1) for way in ways] for _ in range(6)]
    except (AttributeError, RuntimeError, TypeError):  # a release of torch without this kernel
        return 0.0
    default, onednn = (min(seconds) for seconds in zip(*rounds[1:], strict=True))
    return default / onednn


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
