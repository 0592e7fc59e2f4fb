"""`refvl bench NAME --device cuda:1` on the second of two simulated GPUs, with tiny towers and few inputs."""

import pytest
import torch
from simulated_cuda import simulated_cuda

from benchmarks import tower
from refvl.encoders import Glm4vVisionConfig, Qwen2_5_VisionConfig

TINY = {
    "TOWERS": {"cuda": {"Qwen2.5-VL": Qwen2_5_VisionConfig.tiny(), "GLM-4.1V": Glm4vVisionConfig.tiny()}},
    "INPUTS": {"cuda": {"84 px": [(1, 6, 6)], "a clip": [(2, 4, 4)]}},
}


@pytest.mark.slow
def test_a_benchmark_runs_on_the_second_gpu(monkeypatch, shell):
    for name, value in TINY.items():
        monkeypatch.setattr(tower, name, value)
    with simulated_cuda(devices=2):
        status, out, err = shell("bench", "tower", "--device", "cuda:1", "--repeats", 1)
        assert status == 0, err
        assert torch.cuda.current_device() == 1
        monkeypatch.undo()  # here: later it would bring functions of this machine back
    assert out.count("\n") > 3


def test_a_gpu_that_is_not_there_is_refused(shell):
    with simulated_cuda(devices=2):
        status, _, err = shell("bench", "tower", "--device", "cuda:2")
    assert status == 1 and "device: expected one of the 2 CUDA devices of this machine, got 'cuda:2'" in err
