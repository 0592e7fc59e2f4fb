"""Linear layers with the faster kernel: oneDNN's or torch's on a CPU, and rows of whole 16 bytes on a GPU.

torch passes `F.linear` in float32 to MKL, which is less optimised for AMD processors: two blocks of
Qwen2.5-VL's tower take 1.2 to 1.35 times as long with it at 224 px, on an AMD EPYC with one thread.
oneDNN reads torch's weights in place. Each layer keeps its weights, so you can save, move, change,
adapt and inspect them as before. The kernel is private to torch: if a release lacks it, "auto"
chooses torch's default.

On a GPU, a matmul is fast only if every row starts at a multiple of 16 bytes. The rows of 3,420 half-precision values
inside the MLPs of Qwen2.5-VL-3B and 7B do not. Four more columns of zeros change no result; on an H200 the MLP of a
504 px image then takes 0.08 ms instead of 0.25 ms.
"""

import time
import timeit
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.encoders.qwen2_5_vl import SwiGLU

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


class AlignedSwiGLU(SwiGLU):
    """A SwiGLU whose weights are parts of wider ones that end in zeros; `align_rows` makes it.

    Their names, shapes and values are as before, but `down_proj.weight` is not contiguous. With gradients, or once the
    weights have been moved elsewhere, it computes like a SwiGLU.
    """

    def forward(self, x_NE: Tensor) -> Tensor:
        """Map (N, E) to (N, E)."""
        down = self.down_proj.weight
        if torch.is_grad_enabled() or down.is_contiguous() or {*map(type, self.children())} != {nn.Linear}:
            return super().forward(x_NE)
        narrow = (*self.gate_proj.parameters(), *self.up_proj.parameters())
        wide = [p.as_strided((down.stride(0), *p.shape[1:]), p.stride()) for p in narrow]
        hidden = F.silu(F.linear(x_NE, *wide[:2])) * F.linear(x_NE, *wide[2:])
        return F.linear(hidden, down.as_strided((len(down), down.stride(0)), down.stride()), self.down_proj.bias)


def align_rows(tower: nn.Module) -> None:
    """Let the hidden rows of every SwiGLU in `tower` start at multiples of 16 bytes, in place."""
    for module in (x for x in tower.modules() if type(x) is SwiGLU):
        down = module.down_proj.weight.data
        if missing := -down.shape[1] % (16 // down.itemsize):
            for layer in (module.gate_proj, module.up_proj):
                for name, p in dict(layer.named_parameters()).items():
                    wide = F.pad(p.data, (0, 0) * (p.ndim - 1) + (0, missing))
                    setattr(layer, name, nn.Parameter(wide[: len(p)]))
            module.down_proj.weight = nn.Parameter(F.pad(down, (0, missing))[:, : down.shape[1]])
            module.__class__ = AlignedSwiGLU


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
