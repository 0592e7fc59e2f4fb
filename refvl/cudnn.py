"""cuDNN's variable-length attention, available in torch from 2.14 on and used only on request."""

import torch
from torch import Tensor

HOPPER = (9, 0)  # the lowest compute capability for which torch has the kernel
MAX_HEAD_DIM = 128


def can_run(device: torch.device | str, head_dim: int) -> bool:
    """Return whether torch can run cuDNN's variable-length attention on `device` with this head dimension."""
    if torch.__version__ < "2.14" or not (torch.cuda.is_available() and torch.backends.cudnn.is_available()):
        return False
    return head_dim <= MAX_HEAD_DIM and torch.cuda.get_device_capability(device) >= HOPPER


def attend(
    q_MHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int
) -> Tensor:
    """Attend with cuDNN; return (M, H, K), like the other kernels of `refvl.attention`."""
    op = torch.ops.aten._cudnn_attention_forward
    segments = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    return op(q_MHK, k_NHK, v_NHK, None, *segments, compute_log_sumexp=False)[0]
