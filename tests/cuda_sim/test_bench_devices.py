"""`refvl bench NAME --device cuda:1` on the second of two simulated GPUs, with tiny models and few inputs.

Oracle: `refvl.study.arithmetic`, with which the benchmarks compare what runs; the streams' devices.
"""

from functools import partial

import pytest
import torch
from simulated_cuda import simulated_cuda

from benchmarks import evs_ttft, graphs, prefill_chunks, tower
from refvl.encoders import Glm4vVisionConfig, Qwen2_5_VisionConfig
from refvl.graphs import EncoderGraphManager
from refvl.paths import DATA

TINY = {
    tower: {
        "TOWERS": {"cuda": {"Qwen2.5-VL": Qwen2_5_VisionConfig.tiny(), "GLM-4.1V": Glm4vVisionConfig.tiny()}},
        "INPUTS": {"cuda": {"84 px": [(1, 6, 6)], "a clip": [(2, 4, 4)]}},
    },
    graphs: {
        "TOWERS": {name: (graphs.TOWERS[name][0],) * 2 for name in ("qwen2_5_vl", "step3")},
        "SIZES": {"cuda": (56,)},
        "BATCHES": (2,),
        "MIN_BUDGET": {"cuda": 16},
        "EncoderGraphManager": lambda encoder, min_budget=0, **given: EncoderGraphManager(
            encoder, **given or {"min_budget": min_budget, "max_budget": 2 * min_budget}
        ),
        "measure_packing": partial(graphs.measure_packing, 4, 1),
    },
    evs_ttft: {"CONFIG": DATA / "checkpoints" / "tiny-qwen2_5_vl" / "config.json", "RATES": (0.0, 0.5)},
    prefill_chunks: {"CLIPS": (2,), "CHUNKS": (64, None)},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "module",
    [m if m is tower else pytest.param(m, marks=pytest.mark.slow) for m in TINY],
    ids=lambda module: module.__name__.removeprefix("benchmarks."),
)
def test_a_benchmark_runs_on_the_second_gpu(module, monkeypatch, shell):
    for name, value in TINY[module].items():
        monkeypatch.setattr(module, name, value)
    with simulated_cuda(devices=2) as machine:
        status, out, err = shell("bench", module.__name__.split(".")[1], "--device", "cuda:1", "--repeats", 1)
        assert status == 0, err
        idle, busy = (machine.default_streams[index] for index in (0, 1))
        assert busy.seen[busy] > 100 and idle.seen[idle] == 0 and torch.cuda.current_device() == 1
        monkeypatch.undo()  # here: later it would bring functions of this machine back
    assert out.count("\n") > 3


def test_a_gpu_that_is_not_there_is_refused(shell):
    with simulated_cuda(devices=2):
        status, _, err = shell("bench", "tower", "--device", "cuda:2")
    assert status == 1 and "device: expected one of the 2 CUDA devices of this machine, got 'cuda:2'" in err
