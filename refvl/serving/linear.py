"""Linear layers on a CPU use torch's default kernel or oneDNN's, whichever is faster on this machine.

torch passes `F.linear` in float32 to MKL, which is less optimised for AMD processors. On AMD processors, oneDNN takes
less than half the time; on Intel, both take about the same time. oneDNN reads torch's weights in place. Each layer
keeps its weights, so you can save, move, change, adapt and inspect them as before. The kernel is private to torch: if a
release lacks it, or changes its arguments, torch's default is used.
"""

import time
import timeit
import warnings
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CPU = torch.device("cpu")
KERNELS = ("auto", "torch", "onednn")
MIN_WORK = 2**22  # multiplications per call; below this number, the call itself costs more than oneDNN saves
FASTER = 1.3  # oneDNN has to reach this speed-up, so that a short disturbance does not decide


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
    """Return "torch" or "onednn": the requested kernel, or the faster one for "auto".

    Raises ValueError for any other name.

    If oneDNN's kernel cannot be called, it warns and returns "torch".
    """
    if requested not in KERNELS:
        raise ValueError(f"linear: expected one of {KERNELS}, got {requested!r}")
    runs = device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if requested == "torch" or (requested == "auto" and not runs):
        return "torch"
    if reason := missing_kernel():
        warnings.warn(f"linear: torch's default kernel is used, because oneDNN's cannot run: {reason}", stacklevel=3)
        return "torch"
    return "onednn" if requested == "onednn" or times_as_fast() >= FASTER else "torch"


@cache
@torch.no_grad()
def missing_kernel() -> str:
    """Return the reason why oneDNN's kernel cannot be used in this torch, or "" if it can and its result is correct."""
    x, weight, bias = torch.eye(2, 3), torch.arange(12.0).view(4, 3), torch.ones(4)
    try:
        equal = torch.equal(_onednn(x, weight, bias), F.linear(x, weight, bias))  # small integers: exact
    except (AttributeError, RuntimeError, TypeError) as error:
        return str(error).partition("\n")[0]
    return "" if equal else "it computes a different result"


def use_onednn(model: nn.Module) -> None:
    """Make every plain nn.Linear in `model` a `OneDnnLinear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter:  # subclasses may define their own forward
            module.__class__ = OneDnnLinear


def use_faster_linear(model: nn.Module) -> str:
    """Install the kernel that "auto" chooses on the model's device, and return its name."""
    weight = next(model.parameters())
    kernel = choose_linear("auto", weight.device, weight.dtype)
    if kernel == "onednn":
        use_onednn(model)
    return kernel


@cache
@torch.no_grad()
def times_as_fast() -> float:
    """Return oneDNN's speed-up over torch's default; measured once, in about 10 ms.

    It compares thread CPU time and the fastest of several interleaved calls, so other processes barely affect it.
    """
    x, weight, bias = torch.ones(128, 512), torch.ones(512, 512), torch.ones(512)
    ways = partial(F.linear, x, weight, bias), partial(_onednn, x, weight, bias)
    rounds = [[timeit.timeit(way, timer=time.thread_time, number=1) for way in ways] for _ in range(6)]
    default, onednn = (min(seconds) for seconds in zip(*rounds[1:], strict=True))
    return default / onednn


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
