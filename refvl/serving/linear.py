"""Linear layers on a CPU: by torch's default kernel, or by oneDNN's, whichever is faster on this machine.

torch hands `F.linear` in float32 to MKL, which knows AMD's processors less well than oneDNN does: there oneDNN takes
less than half the time; on Intel's the two are alike. oneDNN reads torch's weights where they lie, so that a layer
keeps them: what is saved, moved, changed or adapted, and what graphs watch, is as before. The kernel is private to
torch: where a release lacks it, or takes other arguments, torch's default stays.
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
MIN_WORK = 2**22  # multiplications of a call; in fewer, what the call itself costs is more than oneDNN saves
FASTER = 1.3  # how many times as fast oneDNN has to be: the choice must not hang on a busy moment


class OneDnnLinear(nn.Linear):
    """nn.Linear with oneDNN's kernel where that can run: float32 on a CPU, several rows, no gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        weight, rows = self.weight, input.numel() // max(self.in_features, 1)
        other = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
        suits = not other and rows > 1 and rows * weight.numel() >= MIN_WORK
        if suits and input.dtype == weight.dtype == torch.float32 and input.device == weight.device == CPU:
            return _onednn(input, weight, self.bias)
        return super().forward(input)


def choose_linear(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """ "torch" or "onednn": what was asked for, or for "auto" the faster one. Raises ValueError for another name.

    Warns where oneDNN's kernel cannot be called, and takes torch's.
    """
    if requested not in KERNELS:
        raise ValueError(f"linear: expected one of {KERNELS}, got {requested!r}")
    runs = device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if requested == "torch" or (requested == "auto" and not runs):
        return "torch"
    if reason := missing_kernel():
        warnings.warn(f"linear: torch's default kernel is used, as oneDNN's cannot be: {reason}", stacklevel=3)
        return "torch"
    return "onednn" if requested == "onednn" or times_as_fast() >= FASTER else "torch"


@cache
@torch.no_grad()
def missing_kernel() -> str:
    """Why oneDNN's kernel cannot be called in this torch; empty where it can, and computes what it should."""
    x, weight, bias = torch.eye(2, 3), torch.arange(12.0).view(4, 3), torch.ones(4)
    try:
        equal = torch.equal(_onednn(x, weight, bias), F.linear(x, weight, bias))  # small integers: exact
    except (AttributeError, RuntimeError, TypeError) as error:
        return str(error).partition("\n")[0]
    return "" if equal else "it computes something else"


def use_onednn(model: nn.Module) -> None:
    """Make every plain nn.Linear in `model` a `OneDnnLinear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter:  # subclasses know better
            module.__class__ = OneDnnLinear


def use_faster_linear(model: nn.Module) -> str:
    """Put the kernel in place that "auto" chooses where `model` is, and return its name."""
    weight = next(model.parameters())
    kernel = choose_linear("auto", weight.device, weight.dtype)
    if kernel == "onednn":
        use_onednn(model)
    return kernel


@cache
@torch.no_grad()
def times_as_fast() -> float:
    """How many times as fast as torch's default oneDNN is; measured once, in some 10 ms.

    By the processor's time and the shortest of several calls, which take turns: other processes hardly show in it.
    """
    x, weight, bias = torch.ones(128, 512), torch.ones(512, 512), torch.ones(512)
    ways = partial(F.linear, x, weight, bias), partial(_onednn, x, weight, bias)
    rounds = [[timeit.timeit(way, timer=time.thread_time, number=1) for way in ways] for _ in range(6)]
    default, onednn = (min(seconds) for seconds in zip(*rounds[1:], strict=True))
    return default / onednn


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
