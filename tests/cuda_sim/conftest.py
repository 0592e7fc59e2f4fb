"""The simulated device as a fixture."""

import os

import pytest
import torch
from simulated_cuda import simulated_cuda


@pytest.fixture
def machine(monkeypatch):
    """One simulated GPU while the test lasts."""
    with simulated_cuda() as machine:
        yield machine
        monkeypatch.undo()  # here: later it would bring functions of this machine back


@pytest.fixture(autouse=True)
def switches():
    """refvl changes no switch of torch, at import or later. Oracle: the defaults
    in torch's documentation."""
    yield
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    assert torch.get_float32_matmul_precision() == "highest" and torch.get_default_dtype() == torch.float32
    assert (cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic) == (True, False, False)
    assert not torch.are_deterministic_algorithms_enabled() and not cuda.matmul.allow_fp16_accumulation
    assert cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled() and cuda.cudnn_sdp_enabled()
    assert not os.environ.keys() & {"CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"}
