"""Faster linear layers: the quicker of oneDNN's and torch's kernels on a CPU, and wide, aligned matrices on a GPU.

torch passes `F.linear` in float32 to MKL, which is less optimised for AMD processors. At 224 px, on
an AMD EPYC with one thread, two blocks of Qwen2.5-VL's tower take 1.2 to 1.35 times as long with
MKL as with oneDNN. oneDNN reads torch's weights in place. Each layer keeps its weights, so you can
save, move, change, adapt and inspect them as before. The kernel is private to torch: if a release
lacks it, "auto" chooses torch's default.

On a GPU, a matmul is fast only if every row starts at a multiple of 16 bytes. The rows of 3,420
half-precision values inside the MLPs of Qwen2.5-VL-3B and 7B do not. Four more columns change no
result; on an H200 the MLP of a 504 px image then takes 0.08 ms instead of 0.25 ms. The same wide
matrices save one or two kernels per block, so a block has 12 or 13 kernels instead of 14.
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
MANY_ROWS = 1024  # between the 256 and 1,296 rows at which one and two matmuls were timed
SPARE = 128  # values, at least half of the widest head
FASTER = 1.3  # the speed-up that oneDNN must reach, so that a short disturbance does not decide the choice


class OneDnnLinear(nn.Linear):
    """An nn.Linear that uses oneDNN's kernel if it can: in float32 on a CPU, for several rows, without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        weight, rows = self.weight, input.numel() // max(self.in_features, 1)
        suits = not (_has_mode() or torch.compiler.is_compiling()) and rows > 1 and rows * weight.numel() >= MIN_WORK
        if suits and input.dtype == weight.dtype == torch.float32 and input.device == weight.device == CPU:
            return _onednn(input, weight, self.bias)
        return super().forward(input)


class SpacedLinear(nn.Linear):
    """An nn.Linear whose result has spare memory before and after it, as `rotate_by_offsets` needs it."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, in) to (N, out)."""
        if torch.compiler.is_compiling() or _has_mode() or input.ndim != 2 or _is_quantised(self.weight):
            return super().forward(input)
        size = len(input) * self.out_features
        out = input.new_empty(size + 2 * SPARE)[SPARE : SPARE + size].view(len(input), self.out_features)
        factors = input, self.weight.T
        return torch.mm(*factors, out=out) if self.bias is None else torch.addmm(self.bias, *factors, out=out)


class FusedSwiGLU(SwiGLU):
    """A SwiGLU in four or five kernels instead of six, whose weights are parts of wider matrices;
    `fuse_layers` creates it.

    For few rows, one matmul computes gate and up. For many rows, two matmuls do, because SiLU
    and the product run faster on contiguous tensors: on an H200, the MLP takes 0.286 instead of
    0.358 ms at 1036 px. The last matmul adds its product to the residual, in place. The hidden
    values have a further column, which is always 1, so the bias of `down_proj` is a column of
    its wide matrix. Names, shapes and values of the weights are as before, but those of
    `down_proj` are not contiguous. With gradients or autocast, and once layers have adapters,
    hooks, or weights that were moved or replaced, it computes like a SwiGLU.
    """

    def forward(self, x_NE: Tensor, residual_NE: Tensor) -> Tensor:
        """Map two (N, E) tensors to (N, E); the residual is overwritten, so do not use it again."""
        gate, down = self.gate_proj, self.down_proj.weight
        if _has_mode() or not self.is_fused():
            return super().forward(x_NE, residual_NE)
        E, width = down.shape[0], down.stride(0)
        weight, bias = gate.weight.as_strided((2 * width, E), (E, 1)), gate.bias.as_strided((2 * width,), (1,))
        if torch.compiler.is_compiling() or len(x_NE) < MANY_ROWS:
            gate_NI, up_NI = F.linear(x_NE, weight, bias).chunk(2, dim=-1)
        else:
            gate_NI, up_NI = map(partial(F.linear, x_NE), weight.chunk(2), bias.chunk(2))
        return residual_NE.addmm_(F.silu(gate_NI) * up_NI, down.as_strided((width, E), (1, width)))

    def is_fused(self) -> bool:
        """Return whether the layers are as `fuse_layers` left them, without adapters, hooks or new weights."""
        layers = [*self.children()]  # checked once per block and call, so without the slower attributes
        parts = [x for layer in layers for x in layer._parameters.values() if x is not None]
        changed = any(type(x) is not nn.Linear or x._forward_hooks or x._forward_pre_hooks for x in layers)
        if changed or len(parts) < 6 or any(map(_is_quantised, parts)):
            return False
        if torch.compiler.is_compiling():  # a compiler cannot read addresses
            return not parts[4].is_contiguous()
        gate, gate_bias, up, up_bias, down, down_bias = (x.data_ptr() for x in parts)
        (E, used), width, size = parts[4].shape, parts[4].stride(0), parts[4].itemsize
        return (up - gate, up_bias - gate_bias, down_bias - down) == (width * E * size, width * size, used * size)


def _has_mode() -> bool:
    """Return whether gradients or autocast are enabled, which torch's own layers support."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _is_quantised(weight: Tensor) -> bool:
    """Return whether a weight is of a class with its own kernels, such as those of torchao."""
    return type(weight).__torch_function__ is not nn.Parameter.__torch_function__


def fuse_layers(tower: nn.Module) -> None:
    """Make every SwiGLU of Qwen2.5-VL in `tower` a `FusedSwiGLU`, and every QKV layer a `SpacedLinear`, in place."""
    for module in tower.modules():
        if isinstance(module, SwiGLU):
            _fuse_mlp(module)
        elif type(getattr(module, "qkv", None)) is nn.Linear:
            module.qkv.__class__ = SpacedLinear


def _fuse_mlp(mlp: SwiGLU) -> None:
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    used = down.in_features
    more = 1 + -(used + 1) % (16 // down.weight.itemsize)
    weights = torch.stack([F.pad(x.weight.data, (0, 0, 0, more)) for x in (gate, up)])
    # silu(64) is 64, so the hidden value of a row of zeros is 1
    biases = torch.stack([F.pad(gate.bias.data, (0, more), value=64), F.pad(up.bias.data, (0, more), value=1 / 64)])
    for layer, weight, bias in zip((gate, up), weights, biases, strict=True):
        layer.weight, layer.bias = nn.Parameter(weight[:used]), nn.Parameter(bias[:used])
    columns = F.pad(torch.column_stack([down.weight.data, down.bias.data]), (0, more - 1))
    down.weight, down.bias = nn.Parameter(columns[:, :used]), nn.Parameter(columns[:, used])
    mlp.__class__ = FusedSwiGLU


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

    The CPU time of this thread is compared, for the fastest of several interleaved calls, so other
    processes barely affect the result.
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
