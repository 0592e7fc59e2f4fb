"""One variable-length attention over explicit backends.

The encoder lays all segments (windows, or whole frames) end to end in one sequence; `cu_seqlens` says
where each begins. Tokens attend within their segment only. No N x N mask is built, but for graphs without varlen:

- `varlen`: `torch.nn.attention.varlen` (CUDA, half precision)
- `flash`:  flash-attn 2, when installed and asked for (CUDA, half precision)
- `sdpa`:   every device and dtype: segments of equal length form one batch, one SDPA call per distinct length
- `masked`: every device and dtype: for captured graphs where varlen cannot run; see `_masked_sdpa`

Shape suffixes: N tokens of all segments, H heads, K head dimension, G segments of a group, S their length.
"""

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import check_shape

BACKENDS = ("varlen", "flash", "sdpa", "masked")
HALF = (torch.float16, torch.bfloat16)


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
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    return tuple(
        starts[lengths == length][:, None] + torch.arange(length, device=cu_seqlens.device)
        for length in sorted(set(lengths.tolist()) - {0})
    )


def varlen_attention(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHK: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    backend: str,
    groups: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """Non-causal attention of every token over its own segment, scaled by 1 / sqrt(K).

    q, k, v: (N, H, K). cu_seqlens: (segments + 1,) int32 on the same device, leading 0. max_seqlen: the longest
    segment. groups: `group_segments(cu_seqlens)` from the plan, used by `sdpa` (computed here when None).
    Returns (N, H, K), zero in rows behind the last segment. Raises ValueError for an unknown backend or when the
    shapes differ. Upstream: `MMEncoderAttention`.
    """
    check_shape(q_NHK, ("N", "H", "K"), "q_NHK")
    check_shape(k_NHK, q_NHK.shape, "k_NHK")
    check_shape(v_NHK, q_NHK.shape, "v_NHK")
    match backend:
        case "varlen":
            out_NHK = _torch_varlen(q_NHK, k_NHK, v_NHK, cu_seqlens, max_seqlen, cu_seqlens, max_seqlen)
            return _zero_padding(out_NHK, cu_seqlens)
        case "flash":
            from flash_attn import flash_attn_varlen_func

            out_NHK = flash_attn_varlen_func(q_NHK, k_NHK, v_NHK, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
            return _zero_padding(out_NHK, cu_seqlens)
        case "sdpa":
            return _grouped_sdpa(q_NHK, k_NHK, v_NHK, group_segments(cu_seqlens) if groups is None else groups)
        case "masked":
            return _masked_sdpa(q_NHK, k_NHK, v_NHK, cu_seqlens)
    raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")


def group_segment_pairs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """As `group_segments` for cross attention: (queries (G, Sq), keys (G, Sk)) per distinct pair of lengths.

    Segments without queries or without keys vanish.
    """
    starts_q, lengths_q = cu_seqlens_q[:-1].long(), cu_seqlens_q.diff().long()
    starts_k, lengths_k = cu_seqlens_k[:-1].long(), cu_seqlens_k.diff().long()
    pairs = sorted({(q, k) for q, k in zip(lengths_q.tolist(), lengths_k.tolist(), strict=True) if q and k})
    groups = []
    for q, k in pairs:
        chosen = (lengths_q == q) & (lengths_k == k)
        groups.append(
            (
                starts_q[chosen][:, None] + torch.arange(q, device=cu_seqlens_q.device),
                starts_k[chosen][:, None] + torch.arange(k, device=cu_seqlens_k.device),
            )
        )
    return tuple(groups)


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
    groups: tuple[tuple[Tensor, Tensor], ...] | None = None,
) -> Tensor:
    """Every query of segment s over all keys of segment s, scaled by 1 / sqrt(K).

    q: (M, H, K). k, v: (N, H, K). cu_seqlens_q, cu_seqlens_k: (segments + 1,) int32, leading 0; the same number of
    segments. groups: `group_segment_pairs(cu_seqlens_q, cu_seqlens_k)` from the plan, used by `sdpa`.
    Returns (M, H, K), zero in rows behind the last segment; queries of a segment need at least one key. Raises
    ValueError for an unknown backend or when the shapes differ.
    """
    check_shape(q_MHK, ("M", "H", "K"), "q_MHK")
    check_shape(k_NHK, ("N", *q_MHK.shape[1:]), "k_NHK")
    check_shape(v_NHK, k_NHK.shape, "v_NHK")
    check_shape(cu_seqlens_k, tuple(cu_seqlens_q.shape), "cu_seqlens_k")
    match backend:
        case "varlen":
            out_MHK = _torch_varlen(q_MHK, k_NHK, v_NHK, cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k)
            return _zero_padding(out_MHK, cu_seqlens_q)
        case "flash":
            from flash_attn import flash_attn_varlen_func

            out_MHK = flash_attn_varlen_func(
                q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            )
            return _zero_padding(out_MHK, cu_seqlens_q)
        case "sdpa":
            groups = group_segment_pairs(cu_seqlens_q, cu_seqlens_k) if groups is None else groups
            return _grouped_cross_sdpa(q_MHK, k_NHK, v_NHK, groups)
        case "masked":
            return _masked_cross_sdpa(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k)
    raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")


def _grouped_sdpa(q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, groups: tuple[Tensor, ...]) -> Tensor:
    if len(groups) == 1 and groups[0].numel() == len(q_NHK):  # all segments equally long: a view, no gather
        count = len(groups[0])
        return _batched_sdpa(*(x.unflatten(0, (count, -1)) for x in (q_NHK, k_NHK, v_NHK))).flatten(0, 1)
    out_NHK = torch.zeros_like(q_NHK)
    for index_GS in groups:
        out_GSHK = _batched_sdpa(q_NHK[index_GS], k_NHK[index_GS], v_NHK[index_GS])
        out_NHK = out_NHK.index_copy(0, index_GS.flatten(), out_GSHK.flatten(0, 1))
    return out_NHK


def _masked_sdpa(q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Every shape follows from N and the length of `cu_seqlens`, no value is read back: a graph can hold it.

    The price is the N x N mask. Rows behind the last segment are emptied first: masked out they would weigh zero, but
    zero times nan is nan.
    """
    segment_N, is_padding_N = _segments(cu_seqlens, len(q_NHK))
    is_padding = is_padding_N[:, None, None]
    q, k, v = (x.masked_fill(is_padding, 0).transpose(0, 1)[None] for x in (q_NHK, k_NHK, v_NHK))  # (1, H, N, K)
    out_1HNK = F.scaled_dot_product_attention(q, k, v, attn_mask=segment_N[:, None] == segment_N)
    return out_1HNK[0].transpose(0, 1).masked_fill(is_padding, 0)


def _grouped_cross_sdpa(q_MHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, groups) -> Tensor:
    out_MHK = torch.zeros_like(q_MHK)
    for q_index_GS, k_index_GT in groups:
        out_GSHK = _batched_sdpa(q_MHK[q_index_GS], k_NHK[k_index_GT], v_NHK[k_index_GT])
        out_MHK = out_MHK.index_copy(0, q_index_GS.flatten(), out_GSHK.flatten(0, 1))
    return out_MHK


def _masked_cross_sdpa(q_MHK, k_NHK, v_NHK, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """As `_masked_sdpa`, with an M x N mask. Padding queries see every key, since a softmax over none would be nan."""
    segment_M, is_padding_M = _segments(cu_seqlens_q, len(q_MHK))
    segment_N, is_padding_N = _segments(cu_seqlens_k, len(k_NHK))
    q = q_MHK.masked_fill(is_padding_M[:, None, None], 0).transpose(0, 1)[None]  # (1, H, M, K)
    k, v = (x.masked_fill(is_padding_N[:, None, None], 0).transpose(0, 1)[None] for x in (k_NHK, v_NHK))
    mask_MN = (segment_M[:, None] == segment_N) | is_padding_M[:, None]
    out_1HMK = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_MN)
    return out_1HMK[0].transpose(0, 1).masked_fill(is_padding_M[:, None, None], 0)


def _segments(cu_seqlens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(count,) number of each token's segment, and whether the token lies behind the last."""
    token = torch.arange(count, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.long(), token, right=True), token >= cu_seqlens[-1]


def _batched_sdpa(q_GSHK: Tensor, k_GSHK: Tensor, v_GSHK: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_GSHK, k_GSHK, v_GSHK))  # (G, H, S, K)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@functools.cache
def _varlen_attn():
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _torch_varlen(q, k, v, cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k) -> Tensor:
    # Non-causal is the default of every release; how to ask for it by name changed in torch 2.11.
    return _varlen_attn()(q, k, v, cu_seq_q=cu_seqlens_q, cu_seq_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k)


def _zero_padding(out_NHK: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rows behind the last segment (padding) are left unwritten by the kernels: zero them, whatever memory held."""
    is_padding = torch.arange(len(out_NHK), device=out_NHK.device) >= cu_seqlens[-1]
    return out_NHK.masked_fill(is_padding[:, None, None], 0)
