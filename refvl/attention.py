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

from refvl.schema import check_shape

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
            return _zero_padding(_torch_varlen(q_NHK, k_NHK, v_NHK, cu_seqlens, max_seqlen), cu_seqlens)
        case "flash":
            from flash_attn import flash_attn_varlen_func

            out_NHK = flash_attn_varlen_func(q_NHK, k_NHK, v_NHK, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
            return _zero_padding(out_NHK, cu_seqlens)
        case "sdpa":
            return _grouped_sdpa(q_NHK, k_NHK, v_NHK, group_segments(cu_seqlens) if groups is None else groups)
        case "masked":
            return _masked_sdpa(q_NHK, k_NHK, v_NHK, cu_seqlens)
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
    token_N = torch.arange(len(q_NHK), device=q_NHK.device)
    segment_N = torch.searchsorted(cu_seqlens.long(), token_N, right=True)
    is_padding = (token_N >= cu_seqlens[-1])[:, None, None]
    q, k, v = (x.masked_fill(is_padding, 0).transpose(0, 1)[None] for x in (q_NHK, k_NHK, v_NHK))  # (1, H, N, K)
    out_1HNK = F.scaled_dot_product_attention(q, k, v, attn_mask=segment_N[:, None] == segment_N)
    return out_1HNK[0].transpose(0, 1).masked_fill(is_padding, 0)


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


def _torch_varlen(q_NHK, k_NHK, v_NHK, cu_seqlens, max_seqlen) -> Tensor:
    # Non-causal is the default of every release; how to ask for it by name changed in torch 2.11.
    return _varlen_attn()(
        q_NHK, k_NHK, v_NHK, cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=max_seqlen, max_k=max_seqlen
    )


def _zero_padding(out_NHK: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rows behind the last segment (padding) are left unwritten by the kernels: zero them, whatever memory held."""
    is_padding = torch.arange(len(out_NHK), device=out_NHK.device) >= cu_seqlens[-1]
    return out_NHK.masked_fill(is_padding[:, None, None], 0)
