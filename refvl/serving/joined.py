"""One matmul for the gate and up projections on a GPU; it saves a kernel in every block of a tower with SwiGLU.

Both weights are moved into one contiguous piece of memory, gate's rows first. They remain two parameters with the
checkpoint's names, so they can be saved, adapted and inspected as before. If the weights are no longer contiguous, or
if a layer was replaced or has hooks, the two matmuls are computed separately.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.encoders import glm4v, qwen2_5_vl
from refvl.graphs.manager import has_hooks


class JoinedSwiGLU(qwen2_5_vl.SwiGLU):
    """The MLP of Qwen2.5-VL, with one matmul for gate and up."""

    def forward(self, x_NE: Tensor) -> Tensor:
        hidden_NF = both(self, x_NE)
        return super().forward(x_NE) if hidden_NF is None else self.down_proj(hidden_NF)


class JoinedGlmSwiGLU(glm4v.SwiGLU):
    """The MLP of GLM-4.1V and GLM-OCR, with one matmul for gate and up."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = both(self, x)
        return super().forward(x) if hidden is None else self.down_proj(hidden)


JOINED: dict[type, type] = {qwen2_5_vl.SwiGLU: JoinedSwiGLU, glm4v.SwiGLU: JoinedGlmSwiGLU}


@torch.no_grad()
def join_gate_up(model: Any) -> None:
    """Move the gate and up weights of every SwiGLU in `model` next to each other in memory, in place."""
    for module in [module for module in model.modules() if type(module) in JOINED]:
        for name, gate in list(module.gate_proj.named_parameters()):
            up = module.up_proj.get_parameter(name)
            halves = torch.cat([gate, up]).chunk(2)
            for layer, half in zip((module.gate_proj, module.up_proj), halves, strict=True):
                setattr(layer, name, nn.Parameter(half, requires_grad=gate.requires_grad))
        module.__class__ = JOINED[type(module)]


def both(module: Any, x: Tensor) -> Tensor | None:
    """Return silu(gate(x)) * up(x) from one matmul, or None if that is impossible or if hooks must see both layers."""
    gate, up = module.gate_proj, module.up_proj
    is_plain = type(gate) is nn.Linear and type(up) is nn.Linear and not has_hooks(module)
    if not is_plain or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    weight = joined(gate.weight, up.weight)
    bias = None if gate.bias is None else joined(gate.bias, up.bias)
    if weight is None or (bias is None) != (gate.bias is None):
        return None
    gate_NF, up_NF = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(gate_NF) * up_NF


def joined(first: Tensor, second: Tensor) -> Tensor | None:
    """Return a view of two tensors that are adjacent in the same memory, otherwise None."""
    follows = second.storage_offset() == first.storage_offset() + first.numel()
    if not follows or second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None
    return first.as_strided((len(first) + len(second), *first.shape[1:]), first.stride())
