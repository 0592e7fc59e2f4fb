"""`refvl/graphs/cuda.py` and the manager's CUDA branch, as a driver sees them: pools, streams, modes, failures.

The driver is the simulated device: it keeps what every capture was asked for. Oracle: the rules of
`torch.cuda.CUDAGraph` (a shared pool for graphs that do not run at once, captures off the current
stream).
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from graph_families import build, distance, make_case, manager_of
from simulated_cuda import simulated_cuda

from refvl.graphs import CaptureError
from refvl.graphs.cuda import CudaGraph

FAMILY, LAYOUTS = "Qwen2.5-VL", [(1, 4, 4), (2, 4, 2), (1, 2, 160)]  # the last is too large for every graph


@pytest.fixture(scope="module")
def case():
    encoder = build(FAMILY).bfloat16()
    return encoder, make_case(encoder, LAYOUTS)


def on_device(case):
    """The manager of a copy of the encoder on the device, the rows there, and what
    they should become."""
    encoder, (rows, layouts, wanted) = build(FAMILY), (case[1].rows, case[1].layouts, case[1].wanted)
    return manager_of(encoder.to("cuda", torch.bfloat16)), rows.to("cuda"), layouts, wanted


def near(outputs, wanted) -> bool:
    """Two kernels that round to bfloat16 in other places, four blocks deep."""
    return distance([output.cpu() for output in outputs], wanted) < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("inference", [True, False])
def test_all_graphs_share_a_pool_and_a_stream_that_is_not_the_current_one(machine, case, inference):
    """Captured in and out of inference mode. Outputs outlive replays; what is
    behind the segments holds NaN."""
    manager, rows, layouts, wanted = on_device(case)
    with torch.inference_mode(inference):
        manager.capture()
    outputs = manager.execute(rows, layouts)
    manager.execute(rows[:16] * 2, layouts[:1])
    assert near(outputs, wanted) and manager.captured["", 8].output.isnan().any()
    assert manager.backend == "cuda" and [budget for _, budget in manager.captured] == [16, 8]
    assert [capture.pool for capture in machine.captures] == [manager._pool] * 2
    assert {capture.mode for capture in machine.captures} == {"thread_local"}  # other threads may use the device
    [stream] = {capture.stream for capture in machine.captures}
    assert stream is not torch.cuda.current_stream()
    assert torch.cuda.current_stream() in stream.waited_for and stream in torch.cuda.current_stream().waited_for


def test_threads_capture_one_after_the_other(machine, case):
    """Two managers. Oracle: torch, in which one capture in a process may be under way."""
    managers = [on_device(case)[0] for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda manager: manager.capture(), managers))


@pytest.mark.parametrize("call", [1, 2, 3], ids=["in the warm-up", "in the check", "inside the capture"])
def test_a_failure_leaves_streams_modes_and_graphs_as_they_were(machine, case, call):
    """An allocator that is out of memory at any of the three runs; the next
    capture works."""
    manager, rows, layouts, wanted = on_device(case)
    forward, calls = manager.encoder.forward, []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    manager.encoder.forward = fails
    with pytest.raises(torch.OutOfMemoryError):
        manager.capture()
    manager.encoder.forward = forward
    assert manager.captured == {} and machine.capture is None
    assert torch.cuda.get_sync_debug_mode() == 0 and torch.cuda.current_stream() is torch.cuda.default_stream()
    assert near(manager.execute(rows, layouts), wanted)


def test_a_value_read_back_is_refused_before_the_driver_sees_it(machine):
    x, graph = torch.ones(2, device="cuda"), CudaGraph()
    with pytest.raises(CaptureError, match="__bool__ reads a value back"):
        graph.capture(lambda: -x if x.sum() < 0 else x)
    assert torch.cuda.current_stream().waited_for == [graph.stream]  # which may still read x
    with pytest.raises(CaptureError, match="copy from the host"):
        CudaGraph().capture(lambda: x + torch.tensor([1.0, 2.0], device="cuda"))
    assert machine.captures == [] and torch.cuda.get_sync_debug_mode() == 0


def test_compiled_code_runs_before_its_capture(machine):
    """It is compiled then. Oracle: the stance of torch's compiler, and whether a
    capture goes on, in each run."""
    x, runs, stance = torch.ones(2, device="cuda"), [], lambda: torch._dynamo.eval_frame._stance.stance
    CudaGraph().capture(lambda: runs.append((stance(), machine.capture is not None)) or x + 1)
    assert runs == [("default", False), ("force_eager", False), ("default", True)]


def test_weights_that_move_are_captured_anew_in_another_pool(machine, case):
    manager, rows, layouts, wanted = on_device(case)
    manager.execute(rows, layouts)
    manager.encoder.load_state_dict({k: v.clone() for k, v in manager.encoder.state_dict().items()}, assign=True)
    assert near(manager.execute(rows, layouts), wanted)
    pools = [capture.pool for capture in machine.captures]
    half = len(pools) // 2
    assert len(set(pools[:half])) == len(set(pools[half:])) == 1 and pools[0] != pools[half]


def test_memory_is_that_of_the_buffers_and_of_the_manager_s_pool(machine, case, monkeypatch):
    """Oracle: the segments that the allocator lists, two of this pool and one of
    another."""
    manager, rows, layouts, _ = on_device(case)
    manager.execute(rows, layouts)
    segments = [{"segment_pool_id": pool, "total_size": 1 << 20} for pool in (manager._pool, (0, 0), manager._pool)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    buffers = sum(x.nbytes for captured in manager.captured.values() for x in captured.buffers.values())
    assert manager.memory_bytes() == buffers + (2 << 20)


def test_graphs_on_the_second_device(case):
    """Warm-up, capture and replays happen where the encoder is, whatever device is
    current, each after the last."""
    with simulated_cuda(devices=2) as machine:
        manager = manager_of(build(FAMILY).to("cuda:1", torch.bfloat16))
        rows = case[1].rows.to("cuda:1")
        streams = [torch.cuda.Stream("cuda:1") for _ in range(2)]
        for stream in streams:
            with torch.cuda.stream(stream), torch.cuda.device("cuda:0"):
                assert near(manager.execute(rows, case[1].layouts), case[1].wanted)
        first, second = (stream.waited_for for stream in streams)
        [captured] = {capture.stream for capture in machine.captures}
        assert captured.device == rows.device and captured.waited_for == [streams[0]] * len(machine.captures)
        assert first[-1] is captured and second == [streams[0]]
