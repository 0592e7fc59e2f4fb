"""Kernels that a CPU does not have: what they demand of their arguments, compute, and leave unwritten."""

import torch
import torch.nn.functional as F
from torch import Tensor


def flash_attention(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale=None, window_size_left=-1,
    window_size_right=-1, **unused,
):  # fmt: skip
    """`mha_varlen_fwd` of flash-attn 2. A window at least as long as the longest
    segment is none."""
    for window in (window_size_left, window_size_right):
        require(window < 0 or window >= max_k, "no window here")
    return varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale), *torch.zeros(4, 0)


def varlen(q, k, v, cu_q, cu_k, max_q: int, max_k: int, scale: float | None) -> Tensor:
    """(M, H, K); what the kernel demands of its arguments is checked first."""
    require(q.dtype in (torch.float16, torch.bfloat16), f"fp16 and bf16 data type, got {q.dtype}")
    require(q.dtype == k.dtype == v.dtype, "one dtype")
    require(cu_q.dtype == cu_k.dtype == torch.int32, f"cu_seqlens of dtype int32, got {cu_q.dtype} and {cu_k.dtype}")
    require(cu_q.is_contiguous() and cu_k.is_contiguous(), "contiguous cu_seqlens")
    require(len(cu_q) == len(cu_k) > 1, "a positive batch size")
    require(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"a head size of at most 256 in steps of 8, got {q.shape[-1]}")
    for x in (q, k, v):
        require(x.stride(-1) == 1, "a contiguous last dimension")
        require(
            all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1]), "rows that begin at multiples of 16 bytes"
        )
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    lengths_q, lengths_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    require(min(lengths_q + lengths_k) >= 0, "cu_seqlens that do not fall")
    require(starts_q[-1] <= len(q) and starts_k[-1] <= len(k), "segments inside of the rows")
    require(max(lengths_q) <= max_q and max(lengths_k) <= max_k, "segments no longer than max_seqlen")
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    for a, b, m, n in zip(starts_q, starts_k, lengths_q, lengths_k, strict=False):
        heads = [x.float().transpose(0, 1) for x in (q[a : a + m], k[b : b + n], v[b : b + n])]
        out[a : a + m] = F.scaled_dot_product_attention(*heads, scale=scale).transpose(0, 1) if n else 0
    return out


def flash_sdpa(q, k, v, dropout=0.0, is_causal=False, debug=False, *, scale=None):
    """What `F.scaled_dot_product_attention` calls in half precision without a mask."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    return out, *torch.zeros(3, 0), q.shape[2], k.shape[2], *torch.zeros(3, 0)


def efficient_sdpa(q, k, v, bias, log_sumexp, dropout=0.0, is_causal=False, *, scale=None):
    """What it calls otherwise."""
    out = F.scaled_dot_product_attention(q, k, v, bias, is_causal=is_causal, scale=scale, enable_gqa=True)
    return out, *torch.zeros(3, 0)


def fused_rms_norm(x, shape, weight, eps):
    """float32 inside, rounded once: by parts, as on a CPU, it is rounded before
    the weight as well."""
    dims = tuple(range(-len(shape), 0))
    scale = torch.rsqrt(x.float().pow(2).mean(dims, keepdim=True) + eps)
    return (x.float() * scale * weight.float()).to(x.dtype), scale


def convolution(x, weight, *rest):
    """cuDNN's: by default, it reads float32 as TF32, which keeps ten bits of the
    fraction."""
    if x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        x, weight = ((operand.view(torch.int32) + 2**12 & -(2**13)).view(torch.float32) for operand in (x, weight))
    return torch.ops.aten.convolution(x, weight, *rest)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"attention: the kernel takes {what}")


KERNELS: dict = {  # those that a CPU does not have
    torch.ops.aten._flash_attention_forward.default: flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention.default: flash_sdpa,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: efficient_sdpa,
    torch.ops.aten._fused_rms_norm.default: fused_rms_norm,
    torch.ops.aten.convolution.default: convolution,
}
