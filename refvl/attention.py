"""Variable-length attention with a choice of explicit backends.

The encoder concatenates all segments (windows, or whole frames) into one sequence; `cu_seqlens`
marks the start of each segment. Each token attends only within its own segment. Queries and
keys have the same segments in self-attention, but not in the resampler's cross-attention. Only
the last backend builds a mask:

- `varlen`: flash-attn 2 as shipped with torch (CUDA, compute capability 8.0 or higher, half precision)
- `sdpa`:   every device and dtype; segments of equal length form one batch, with one SDPA call per distinct length
- `masked`: every device and dtype; its shapes follow from sizes, so captured graphs use it if varlen cannot run

Shape suffixes: M queries and N keys over all segments (equal in self-attention), H heads, K
head dimension. A group has G segments with S queries and T keys each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import check_shape

BACKENDS = ("varlen", "sdpa", "masked")
HALF = (torch.float16, torch.bfloat16)
AMPERE = (8, 0)  # the lowest compute capability that supports bfloat16 and flash-attn 2
LARGEST_KEY = torch.finfo(torch.float32).max / 2**24  # larger keys may give inf, and inf + the mask's -inf is nan
SegmentPairs = Sequence[tuple[Tensor, Tensor]]  # per group: token indices of its queries (G, S) and of its keys (G, T)


def available_backends(device, dtype: torch.dtype, head_dim: int = 64) -> list[str]:
    """Return the backends that run on `device` with `dtype`, fastest first; `sdpa` and `masked` are always included.

    The kernel behind `varlen` needs Ampere or later (it does not run on a T4 or V100), and a
    head dimension that is a multiple of 8 and at most 256.
    """
    has_kernel = dtype in HALF and head_dim % 8 == 0 and head_dim <= 256 and is_ampere(device)
    return ["varlen"] * has_kernel + ["sdpa", "masked"]


def is_ampere(device) -> bool:
    """Return whether `device` is CUDA with compute capability 8.0 or above, assuming so if there is no GPU to query."""
    if torch.device(device).type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= AMPERE


def choose_backend(requested: str, device, dtype: torch.dtype, head_dim: int = 64) -> str:
    """Resolve "auto" to the best backend for the device, dtype and head dimension, or check an explicit request.

    Raises ValueError if the requested backend is unknown or does not support these arguments.
    """
    if requested not in ("auto", *BACKENDS):
        raise ValueError(f"attention: expected one of {('auto', *BACKENDS)}, got {requested!r}")
    available = available_backends(device, dtype, head_dim)
    if requested == "auto":
        return available[0]
    if requested not in available:
        where = f"{device} with {dtype} and head_dim={head_dim}"
        raise ValueError(f"attention: {requested!r} cannot run on {where}; available: {available}")
    return requested


def group_segments(cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """Group segments of equal length into one (G, S) int64 tensor of token indices per distinct length S.

    Empty segments are omitted. The function copies `cu_seqlens` (segments + 1,) to the host, so
    it belongs in `plan`.
    """
    starts = cu_seqlens.cpu().numpy()
    lengths = np.diff(starts)
    groups = []
    for length in np.unique(lengths[lengths > 0]):
        index_GS = starts[:-1][lengths == length, None] + np.arange(length)
        groups.append(torch.from_numpy(index_GS).to(cu_seqlens.device))
    return tuple(groups)


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """Return the cumulative sums of `lengths`, (len + 1,) int32, with a leading 0."""
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The inputs of self-attention other than q, k and v; the metadata classes of most towers extend this class."""

    cu_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (segments + 1,) int32, in tokens, with a leading 0
    groups: tuple[Tensor, ...] | None = field(metadata={"pad": "empty"})  # see `group_segments`; only for sdpa
    max_seqlen: int  # the number of tokens in the longest segment; a captured graph stores it as a capacity

    def attend(self, q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, backend: str) -> Tensor:
        """Return the output of attention, (N, H * K), with the heads side by side (see `varlen_attention`).

        Output rows after the last segment are undefined.
        """
        cu_seqlens, longest = self.cu_seqlens, self.max_seqlen
        groups = group_segments(cu_seqlens) if self.groups is None and backend == "sdpa" else self.groups
        pairs = [(index_GS, index_GS) for index_GS in groups or ()]
        return attend(q_NHK, k_NHK, v_NHK, cu_seqlens, cu_seqlens, longest, longest, backend, pairs).flatten(1)


def plan_segments(lengths: Sequence[int], *, with_groups: bool = True) -> dict[str, Any]:
    """Return the fields of `Segments` by name. with_groups: whether the backend reads the groups; only `sdpa` does."""
    cu_seqlens = cumulative_lengths(lengths)
    groups = group_segments(cu_seqlens) if with_groups else None
    return {"cu_seqlens": cu_seqlens, "groups": groups, "max_seqlen": max(lengths, default=0)}


def equal_segments(count: int, length: int, device: torch.device) -> Segments:
    """Return `count` segments of `length` tokens; their tensors depend only on sizes, so a graph can capture them."""
    index = torch.arange(count * length, device=device)
    ends = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)
    return Segments(ends, (index.view(count, length),), length)


def segment_capacity(max_tokens: int, max_segments: int) -> dict[str, Any]:
    """Return the fields of `Segments` at full size: one segment contains all tokens, and the others are empty."""
    return plan_segments([max_tokens] + [0] * (max_segments - 1), with_groups=False)


def varlen_attention(
    q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    *, backend: str, groups: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute non-causal attention of every token over its own segment, with scores scaled by 1 / sqrt(K).

    q, k, v: (N, H, K). cu_seqlens: (segments + 1,) int32 on the same device, with a leading 0.
    max_seqlen: the length of the longest segment. groups: `group_segments(cu_seqlens)` from the
    plan, used by `sdpa` (None: computed in this call). Returns (N, H, K), with zeros in rows
    after the last segment. Raises ValueError if the backend is unknown or the shapes differ.
    Upstream: `MMEncoderAttention`.
    """
    check_shape(q_NHK, ("N", "H", "K"), "q_NHK")
    check_shape(k_NHK, q_NHK.shape, "k_NHK")
    check_shape(v_NHK, k_NHK.shape, "v_NHK")
    segments = Segments(cu_seqlens, None if groups is None else tuple(groups), max_seqlen)
    return zero_padding(segments.attend(q_NHK, k_NHK, v_NHK, backend).view(q_NHK.shape), cu_seqlens, backend)


def zero_padding(out_MHK: Tensor, cu_seqlens: Tensor, backend: str) -> Tensor:
    """Zero the rows after the last segment, because the varlen kernel does not write them.

    Encoders skip this step, which would add four kernels to every layer, because nothing reads
    these rows.
    """
    if backend in ("sdpa", "masked") or not len(out_MHK):
        return out_MHK
    return out_MHK.masked_fill(is_padding(cu_seqlens, len(out_MHK))[:, None, None], 0)


def attend(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend, groups) -> Tensor:
    """Compute attention with the given backend for checked shapes. groups: index pairs, which only `sdpa` reads.

    The backend may also be your own function of q, k, v and the segment lengths (see
    `refvl.study.stages`).
    """
    if len(cu_seqlens_q) < 2:  # the kernels do not accept inputs without segments
        return torch.zeros_like(q_MHK)
    if callable(backend):
        return backend(q_MHK, k_NHK, v_NHK, cu_seqlens_q.diff().tolist())
    match backend:
        case "varlen":
            return _flash_attention(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        case "sdpa":
            return _grouped_sdpa(q_MHK, k_NHK, v_NHK, groups)
        case "masked":
            return _masked_sdpa(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k)
    raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")


def _flash_attention(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_q: int, max_k: int) -> Tensor:
    """Call the kernel of `torch.nn.attention.varlen.varlen_attn` directly, because
    `varlen_attn` also clears random-number state.

    Since torch 2.14, `varlen_attn` uses cuDNN for long segments on Hopper. This function uses
    the same kernel for every image, eagerly and in graphs, with every release of torch.
    """
    op = torch.ops.aten._flash_attention_forward
    return op(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_q, max_k, 0.0, False, False)[0]


def _grouped_sdpa(q_MHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, groups: SegmentPairs) -> Tensor:
    if len(groups) == 1 and groups[0][0].numel() == len(q_MHK) and groups[0][1].numel() == len(k_NHK):
        count = len(groups[0][0])  # all segments have the same length, so views suffice
        return _batched_sdpa(*(x.unflatten(0, (count, -1)) for x in (q_MHK, k_NHK, v_NHK))).flatten(0, 1)
    out_MHK = torch.zeros_like(q_MHK)
    for q_index_GS, k_index_GT in groups:
        out_GSHK = _batched_sdpa(q_MHK[q_index_GS], k_NHK[k_index_GT], v_NHK[k_index_GT])
        out_MHK = out_MHK.index_copy(0, q_index_GS.flatten(), out_GSHK.flatten(0, 1))
    return out_MHK


def _batched_sdpa(q_GSHK: Tensor, k_GTHK: Tensor, v_GTHK: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_GSHK, k_GTHK, v_GTHK))  # (G, H, S or T, K)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _masked_sdpa(q_MHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Attend with one M x N mask; a graph can capture this, because all shapes follow from M, N and the segment count.

    A masked key has weight zero, but zero times nan is nan. A key and its value are therefore
    zeroed first if they are padding or invalid (not finite, or too large to multiply).
    Afterwards, the output of a query becomes nan if the query is not finite or attends to an
    invalid key, so an item that overflows affects only itself. Padding queries attend to every
    key, because a softmax over no keys would be nan; their outputs are zeroed at the end.
    """
    segment_M, is_padding_M = _segment(cu_seqlens_q, len(q_MHK)), is_padding(cu_seqlens_q, len(q_MHK))
    segment_N, is_padding_N = _segment(cu_seqlens_k, len(k_NHK)), is_padding(cu_seqlens_k, len(k_NHK))
    same_MN = segment_M[:, None] == segment_N
    is_spoiled_N = ~((k_NHK.abs() < LARGEST_KEY) & v_NHK.isfinite()).flatten(1).all(1)
    q, k, v = (
        x.masked_fill(is_empty[:, None, None], 0).transpose(0, 1)[None]  # (1, H, M or N, K)
        for x, is_empty in (
            (q_MHK, is_padding_M),
            (k_NHK, is_padding_N | is_spoiled_N),
            (v_NHK, is_padding_N | is_spoiled_N),
        )
    )
    out_1HMK = F.scaled_dot_product_attention(q, k, v, attn_mask=same_MN | is_padding_M[:, None])
    is_spoiled_M = (same_MN & is_spoiled_N).any(1) | ~q_MHK.isfinite().flatten(1).all(1)
    out_MHK = out_1HMK[0].transpose(0, 1).masked_fill(is_spoiled_M[:, None, None], torch.nan)
    return out_MHK.masked_fill(is_padding_M[:, None, None], 0)


def _segment(cu_seqlens: Tensor, count: int) -> Tensor:
    """Return the number of each token's segment, counted from 1, (count,)."""
    return torch.searchsorted(cu_seqlens.long(), torch.arange(count, device=cu_seqlens.device), right=True)


def is_padding(cu_seqlens: Tensor, count: int) -> Tensor:
    """Return the mask of the tokens after the last segment, (count,) bool."""
    return torch.arange(count, device=cu_seqlens.device) >= cu_seqlens[-1]
