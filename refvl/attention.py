"""One variable-length attention over explicit backends.

The encoder lays all segments (windows, or whole frames) end to end in one sequence; `cu_seqlens` says where each
begins. Tokens attend within their own segment only. In self-attention queries and keys share their segments;
the resampler's cross-attention uses the same backends. Only `masked` builds a mask:

- `varlen`: flash-attn 2 as torch has it (CUDA from compute capability 8.0 on, half precision)
- `flash`:  flash-attn 2, when installed and asked for (the same)
- `cudnn`:  cuDNN, where torch has it for variable lengths (from 2.14 on, Hopper and Blackwell); only if asked for
- `sdpa`:   every device and dtype: segments of equal length form one batch, one SDPA call per distinct length
- `masked`: every device and dtype: for captured graphs where varlen cannot run; see `refvl.masked_attention`

Shape suffixes: M queries and N keys of all segments (one number in self-attention), H heads, K head dimension,
G segments of a group, S their queries, T their keys.
"""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from refvl import cudnn, on_gpu
from refvl.checks import check_shape
from refvl.masked_attention import is_padding, masked_sdpa

BACKENDS = ("varlen", "flash", "cudnn", "sdpa", "masked")
HALF = (torch.float16, torch.bfloat16)
AMPERE = (8, 0)  # the compute capability from which on a GPU computes in bfloat16 and flash-attn 2 runs
SegmentPairs = Sequence[tuple[Tensor, Tensor]]  # per group: token indices of its queries (G, S) and of its keys (G, T)


def available_backends(device, dtype: torch.dtype, head_dim: int = 64) -> list[str]:
    """The backends that can run on `device` with `dtype`, fastest first; `sdpa` and `masked` always can.

    The flash kernels behind `varlen` and `flash` run from Ampere on (not on a T4 or V100), and take head dimensions up
    to 256 that are multiples of 8. `cudnn` takes those up to 128; it stands last, so that "auto" never chooses it.
    """
    fits = dtype in HALF and head_dim % 8 == 0 and head_dim <= 256 and is_ampere(device)
    kernels = [name for name, where in KERNELS.items() if fits and _find(*where)]
    return [*kernels, "sdpa", "masked", *["cudnn"] * (fits and cudnn.can_run(device, head_dim))]


def is_ampere(device) -> bool:
    """Whether `device` is a CUDA device of compute capability 8.0 or above; yes where this machine has none to ask."""
    if torch.device(device).type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= AMPERE


def choose_backend(requested: str, device, dtype: torch.dtype, head_dim: int = 64) -> str:
    """Resolve "auto" to the best backend for device, dtype and head dimension; check an explicit request.

    Raises ValueError when the requested backend is unknown or cannot run there.
    """
    if requested not in ("auto", *BACKENDS):
        raise ValueError(f"attention: expected one of {('auto', *BACKENDS)}, got {requested!r}")
    available = available_backends(device, dtype, head_dim)
    if requested == "auto":
        return available[0]
    if requested not in available:
        where = f"{device} with {dtype} and heads of {head_dim}"
        raise ValueError(f"attention: {requested!r} cannot run on {where}; available: {available}")
    return requested


def group_segments(cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """Group segments of equal length: one (G, S) int64 tensor of token indices per distinct length S.

    This reads `cu_seqlens` (segments + 1,) back to Python: it belongs in `plan`. Empty segments vanish.
    """
    starts = cu_seqlens.cpu().numpy()
    lengths = np.diff(starts)
    groups = []
    for length in np.unique(lengths[lengths > 0]):
        index_GS = starts[:-1][lengths == length, None] + np.arange(length)
        groups.append(torch.from_numpy(index_GS).to(cu_seqlens.device))
    return tuple(groups)


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """(len + 1,) int32, leading 0."""
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What self-attention needs besides q, k and v; the metadata of most towers are these and more."""

    cu_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (segments + 1,) int32, tokens, leading 0
    groups: tuple[Tensor, ...] | None = field(metadata={"pad": "empty"})  # of equal length; planned for sdpa alone
    max_seqlen: int  # tokens of the longest segment; a capture bakes it in: there it is a capacity

    def attend(self, q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, backend: str) -> Tensor:
        """(N, H * K): `varlen_attention`, heads side by side; rows behind the last segment may hold anything."""
        cu_seqlens, longest = self.cu_seqlens, self.max_seqlen
        groups = self.groups
        if groups is None and backend == "sdpa":
            groups = group_segments(cu_seqlens)
        pairs = [(index_GS, index_GS) for index_GS in groups or ()]
        return attend(q_NHK, k_NHK, v_NHK, cu_seqlens, cu_seqlens, longest, longest, backend, pairs).flatten(1)


def plan_segments(lengths: Sequence[int], *, with_groups: bool = True) -> dict[str, Any]:
    """The fields of `Segments`. with_groups: whether the backend reads them; `sdpa` alone does."""
    cu_seqlens = cumulative_lengths(lengths)
    groups = group_segments(cu_seqlens) if with_groups else None
    return {"cu_seqlens": cu_seqlens, "groups": groups, "max_seqlen": max(lengths, default=0)}


def segment_capacity(max_tokens: int, max_segments: int) -> dict[str, Any]:
    """The same, as large as any batch needs; legal values: one segment holds everything, the others are empty."""
    return plan_segments([max_tokens] + [0] * (max_segments - 1), with_groups=False)


def varlen_attention(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHK: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    backend: str,
    groups: Sequence[Tensor] | None = None,
) -> Tensor:
    """Non-causal attention of every token over its own segment, scaled by 1 / sqrt(K).

    q, k, v: (N, H, K). cu_seqlens: (segments + 1,) int32 on the same device, leading 0. max_seqlen: the longest
    segment. groups: `group_segments(cu_seqlens)` from the plan, used by `sdpa` (computed here when None).
    Returns (N, H, K), zero in rows behind the last segment. Raises ValueError for an unknown backend or when the
    shapes differ. Upstream: `MMEncoderAttention`.
    """
    check_shape(q_NHK, ("N", "H", "K"), "q_NHK")
    check_shape(k_NHK, q_NHK.shape, "k_NHK")
    check_shape(v_NHK, k_NHK.shape, "v_NHK")
    segments = Segments(cu_seqlens, None if groups is None else tuple(groups), max_seqlen)
    out_NHK = segments.attend(q_NHK, k_NHK, v_NHK, backend).view(q_NHK.shape)
    return zero_padding(out_NHK, cu_seqlens, backend)


def zero_padding(out_MHK: Tensor, cu_seqlens: Tensor, backend: str) -> Tensor:
    """The kernels leave rows behind the last segment unwritten: zero them, whatever memory held.

    An encoder does without: nothing reads these rows, and four kernels in every layer are many.
    """
    if backend in ("sdpa", "masked") or not len(out_MHK):
        return out_MHK
    return out_MHK.masked_fill(is_padding(cu_seqlens, len(out_MHK))[:, None, None], 0)


def attend(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend, groups) -> Tensor:
    """Attend by a backend; shapes are known to be good. groups: for `sdpa` alone."""
    if len(cu_seqlens_q) < 2:  # no segments, which the kernels refuse
        return torch.zeros_like(q_MHK)
    match backend:
        case "varlen":
            return on_gpu.attend(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        case "flash":
            kernel = _find(*KERNELS["flash"])
            return kernel(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        case "cudnn":
            return cudnn.attend(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        case "sdpa":
            return _grouped_sdpa(q_MHK, k_NHK, v_NHK, groups)
        case "masked":
            return masked_sdpa(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k)
    raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")


def _grouped_sdpa(q_MHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, groups: SegmentPairs) -> Tensor:
    if len(groups) == 1 and groups[0][0].numel() == len(q_MHK) and groups[0][1].numel() == len(k_NHK):
        count = len(groups[0][0])  # all segments are equally long: views, no gather
        return _batched_sdpa(*(x.unflatten(0, (count, -1)) for x in (q_MHK, k_NHK, v_NHK))).flatten(0, 1)
    out_MHK = torch.zeros_like(q_MHK)
    for q_index_GS, k_index_GT in groups:
        out_GSHK = _batched_sdpa(q_MHK[q_index_GS], k_NHK[k_index_GT], v_NHK[k_index_GT])
        out_MHK = out_MHK.index_copy(0, q_index_GS.flatten(), out_GSHK.flatten(0, 1))
    return out_MHK


def _batched_sdpa(q_GSHK: Tensor, k_GTHK: Tensor, v_GTHK: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_GSHK, k_GTHK, v_GTHK))  # (G, H, S or T, K)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


KERNELS = {  # backend: where its function is
    "varlen": ("torch.nn.attention.varlen", "varlen_attn"),
    "flash": ("flash_attn", "flash_attn_varlen_func"),
}


@functools.cache
def _find(module: str, function: str) -> Any:
    """None where either is missing: flash-attn 4 alone installs a package of the same name without the function."""
    try:
        return getattr(importlib.import_module(module), function, None)
    except ImportError:
        return None
