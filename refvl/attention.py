"""One variable-length attention over explicit backends.

The encoder lays all segments (windows, or whole frames) end to end in one sequence; `cu_seqlens` says where each
begins. Tokens attend within their own segment only. In self-attention queries and keys share their segments; in
cross-attention each segment has queries and keys of its own, in different numbers. Only `masked` builds a mask:

- `varlen`: `torch.nn.attention.varlen` (CUDA, half precision)
- `flash`:  flash-attn 2, when installed and asked for (CUDA, half precision)
- `sdpa`:   every device and dtype: segments of equal length form one batch, one SDPA call per distinct length
- `masked`: every device and dtype: for captured graphs where varlen cannot run; see `_masked_sdpa`

Shape suffixes: M queries and N keys of all segments (one number in self-attention), H heads, K head dimension,
G segments of a group, S their queries, T their keys.
"""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import check_shape

BACKENDS = ("varlen", "flash", "sdpa", "masked")
HALF = (torch.float16, torch.bfloat16)
LARGEST_KEY = torch.finfo(torch.float32).max / 2**24  # the mask adds -inf to scores, and -inf + inf is nan
SegmentPairs = Sequence[tuple[Tensor, Tensor]]  # per group: token indices of its queries (G, S) and of its keys (G, T)


def available_backends(device, dtype: torch.dtype, head_dim: int = 64) -> list[str]:
    """The backends that can run on `device` with `dtype`, fastest first; `sdpa` and `masked` always can.

    The flash kernels behind `varlen` and `flash` take head dimensions up to 256 that are multiples of 8.
    """
    has_kernel = torch.device(device).type == "cuda" and dtype in HALF and head_dim % 8 == 0 and head_dim <= 256
    found = ["varlen"] if has_kernel and _varlen_attn() is not None else []
    if has_kernel and importlib.util.find_spec("flash_attn") is not None:
        found.append("flash")
    return [*found, "sdpa", "masked"]


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
    return tuple(index_GS for index_GS, _ in group_segment_pairs(cu_seqlens, cu_seqlens))


def group_segment_pairs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """As `group_segments` for cross-attention: (queries (G, S), keys (G, T)) per distinct pair of lengths.

    Segments without queries or without keys vanish.
    """
    starts_q, lengths_q = cu_seqlens_q[:-1].long(), cu_seqlens_q.diff().long()
    starts_k, lengths_k = cu_seqlens_k[:-1].long(), cu_seqlens_k.diff().long()
    groups = []
    for q, k in sorted({(q, k) for q, k in zip(lengths_q.tolist(), lengths_k.tolist(), strict=True) if q and k}):
        chosen = (lengths_q == q) & (lengths_k == k)
        queries_GS = starts_q[chosen][:, None] + torch.arange(q, device=cu_seqlens_q.device)
        keys_GT = starts_k[chosen][:, None] + torch.arange(k, device=cu_seqlens_k.device)
        groups.append((queries_GS, keys_GT))
    return tuple(groups)


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """(len + 1,) int32, leading 0."""
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What self-attention needs besides q, k and v; the metadata of most towers are these and more."""

    cu_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (segments + 1,) int32, tokens, leading 0
    groups: tuple[Tensor, ...] = field(metadata={"pad": "empty"})  # segments of equal length, for the sdpa backend
    max_seqlen: int  # tokens of the longest segment; a capture bakes it in: there it is a capacity

    def attend(self, q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, backend: str) -> Tensor:
        """(N, H * K): `varlen_attention`, heads side by side."""
        out_NHK = varlen_attention(
            q_NHK, k_NHK, v_NHK, self.cu_seqlens, self.max_seqlen, backend=backend, groups=self.groups
        )
        return out_NHK.flatten(1)


def plan_segments(lengths: Sequence[int]) -> dict[str, Any]:
    """The fields of `Segments`."""
    cu_seqlens = cumulative_lengths(lengths)
    return {
        "cu_seqlens": cu_seqlens, "groups": group_segments(cu_seqlens), "max_seqlen": max(lengths, default=0),
    }  # fmt: skip


def segment_capacity(max_tokens: int, max_segments: int) -> dict[str, Any]:
    """The same, as large as any batch needs; legal values: one segment holds everything, the others are empty."""
    return plan_segments([max_tokens] + [0] * (max_segments - 1)) | {"groups": ()}


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
    for x, shape, name in (
        (q_NHK, ("N", "H", "K"), "q_NHK"),
        (k_NHK, q_NHK.shape, "k_NHK"),
        (v_NHK, k_NHK.shape, "v_NHK"),
    ):
        check_shape(x, shape, name)
    pairs = None if groups is None else [(index_GS, index_GS) for index_GS in groups]
    return _attend(q_NHK, k_NHK, v_NHK, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, backend, pairs)


def varlen_cross_attention(
    q_MHK: Tensor,
    k_NHK: Tensor,
    v_NHK: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    backend: str,
    groups: SegmentPairs | None = None,
) -> Tensor:
    """Non-causal attention of every query of a segment over all keys of that segment, scaled by 1 / sqrt(K).

    q: (M, H, K). k, v: (N, H, K). cu_seqlens_q, cu_seqlens_k: (segments + 1,) int32, leading 0; the same number of
    segments. groups: `group_segment_pairs(cu_seqlens_q, cu_seqlens_k)` from the plan, used by `sdpa`.
    Returns (M, H, K), zero in rows behind the last segment; queries of a segment need at least one key. Raises
    ValueError for an unknown backend or when the shapes differ.
    """
    check_shape(q_MHK, ("M", "H", "K"), "q_MHK")
    check_shape(k_NHK, ("N", *q_MHK.shape[1:]), "k_NHK")
    check_shape(v_NHK, k_NHK.shape, "v_NHK")
    check_shape(cu_seqlens_k, tuple(cu_seqlens_q.shape), "cu_seqlens_k")
    return _attend(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend, groups)


def _attend(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend, groups) -> Tensor:
    """What both share, once the shapes have been checked."""
    match backend:
        case "varlen" | "flash":
            kernel = _torch_varlen if backend == "varlen" else _flash_varlen
            out_MHK = kernel(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            # The kernels leave rows behind the last segment unwritten: zero them, whatever memory held.
            return out_MHK.masked_fill(_is_padding(cu_seqlens_q, len(q_MHK))[:, None, None], 0)
        case "sdpa":
            groups = group_segment_pairs(cu_seqlens_q, cu_seqlens_k) if groups is None else groups
            return _grouped_sdpa(q_MHK, k_NHK, v_NHK, groups)
        case "masked":
            return _masked_sdpa(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k)
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


def _masked_sdpa(q_MHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Every shape follows from M, N and the number of segments, no value is read back: a graph can hold it.

    The price is the M x N mask. What it hides weighs zero, but zero times nan is nan: keys of padding and keys that are
    spoiled (not finite, or too large to be multiplied) are emptied first, and queries that would see a spoiled key, or
    are not finite themselves, become nan afterwards: an item that overflows spoils itself and nothing else. Padding
    queries see every key, since a softmax over none would be nan; their rows are zeroed in the end.
    """
    segment_M, is_padding_M = _segment(cu_seqlens_q, len(q_MHK)), _is_padding(cu_seqlens_q, len(q_MHK))
    segment_N, is_padding_N = _segment(cu_seqlens_k, len(k_NHK)), _is_padding(cu_seqlens_k, len(k_NHK))
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
    """(count,) number of each token's segment."""
    return torch.searchsorted(cu_seqlens.long(), torch.arange(count, device=cu_seqlens.device), right=True)


def _is_padding(cu_seqlens: Tensor, count: int) -> Tensor:
    """(count,) whether each token lies behind the last segment."""
    return torch.arange(count, device=cu_seqlens.device) >= cu_seqlens[-1]


def _batched_sdpa(q_GSHK: Tensor, k_GTHK: Tensor, v_GTHK: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_GSHK, k_GTHK, v_GTHK))  # (G, H, S or T, K)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@functools.cache
def _varlen_attn():
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _torch_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> Tensor:
    # Non-causal is the default of every release; how to ask for it by name changed in torch 2.11.
    return _varlen_attn()(q, k, v, cu_seq_q=cu_seqlens_q, cu_seq_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k)


def _flash_varlen(*arguments) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(*arguments)
