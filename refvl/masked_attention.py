"""Attention for captured graphs if no variable-length kernel can run: one mask, and shapes that follow from sizes."""

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_KEY = torch.finfo(torch.float32).max / 2**24  # the mask adds -inf to scores, and -inf + inf is nan


def masked_sdpa(q_MHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Attend with one M x N mask. All shapes follow from M, N and the number of segments, so a graph can capture it.

    A masked key has weight zero, but zero times nan is nan. Keys are therefore zeroed first if they are padding or
    invalid (not finite, or too large to multiply). Afterwards, queries become nan if they attend to an invalid key or
    are not finite: an item that overflows affects only itself. Padding queries attend to every key, because a softmax
    over no keys would be nan; their rows are zeroed at the end.
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
    """Return the segment index of each token, (count,)."""
    return torch.searchsorted(cu_seqlens.long(), torch.arange(count, device=cu_seqlens.device), right=True)


def is_padding(cu_seqlens: Tensor, count: int) -> Tensor:
    """Return whether each token comes after the last segment, (count,) bool."""
    return torch.arange(count, device=cu_seqlens.device) >= cu_seqlens[-1]
