"""The CUDA backend keeps the equations of test_graph_manager.py: `python -m pytest -m gpu`.

Oracle: the eager encoder on the same device. Attention is the same kernel in both; matrix products
of other heights may take other kernels, so each element differs by some roundings: the error is
bounded relative to the norm. bfloat16 rounds by 2^-9, and some twenty roundings of two blocks add
up like their root; float32 runs the masked attention.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from closeness import assert_agree, gain, roundings
from graph_families import manager_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import CaptureError
from refvl.graphs.cuda import CudaGraph, pool_bytes
from refvl.tools.gpu_checks import _draw_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CONFIG = replace(Qwen2_5_VisionConfig(), depth=2, fullatt_block_indexes=(1,))  # the widths of the 7B tower
if torch.cuda.is_available() and torch.cuda.get_device_name() == "simulated":  # a CPU computes: an eighth of them
    CONFIG = replace(CONFIG, hidden_size=160, num_heads=2, intermediate_size=432, out_hidden_size=448)
BUDGETS, MAX_ITEMS, MAX_FRAMES = [16, 64, 128], 8, 8
new_manager = partial(manager_of, budgets=BUDGETS, max_items=MAX_ITEMS, max_frames=MAX_FRAMES)
with torch.device("meta"):
    STEPS = {torch.bfloat16: 12 * CONFIG.depth, torch.float32: roundings(Qwen2_5_VisionTransformer(CONFIG))}


def random_tower():
    encoder = Qwen2_5_VisionTransformer(CONFIG).eval().requires_grad_(False)
    _draw_weights(encoder)
    return encoder


@pytest.fixture(scope="module", params=STEPS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def encoder(request):
    return random_tower().to("cuda", request.param)


@cache
def growth() -> float:
    """How much rounding in front of the tower grows on the way through it; most if there is one token alone."""
    encoder, grids = random_tower(), [(1, 2, 2)]
    return gain(lambda rows: encoder(rows, grids), patches_of(grids, encoder))


@pytest.fixture(scope="module")
def manager(encoder):
    manager = new_manager(encoder)
    manager.capture()
    yield manager
    manager.clear()


def patches_of(grids, encoder, seed=1):
    count = sum(t * h * w for t, h, w in grids)
    patches = torch.randn(count, CONFIG.patch_values, generator=torch.Generator().manual_seed(seed))
    return patches.to(encoder.device, encoder.dtype)


@torch.inference_mode()
def eager(encoder, patches, grids):
    counts = [t * h * w for t, h, w in grids]
    return [encoder(rows, [grid]) for rows, grid in zip(patches.split(counts), grids, strict=True)]


def assert_equal(outputs, wanted):
    for output, want in zip(outputs, wanted, strict=True):
        assert_agree(output, want, STEPS[output.dtype], scale=growth() * float(want.abs().max()))


@torch.inference_mode()
def poison(manager):
    """NaN in pixel buffers, in outputs, and - by a graph that fills what is free there - in the shared pool.

    Returns the bytes of the pool that were poisoned.
    """
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(manager._pool)]
    free = [block["size"] for s in segments for block in s["blocks"] if block["state"] == "inactive"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=manager._pool):
        tensors = [torch.full((size // 4,), float("nan"), device="cuda") for size in free]
    graph.replay()
    for captured in manager.captured.values():
        captured.pixel_values.fill_(float("nan"))
        captured.output.fill_(float("nan"))
    torch.cuda.synchronize()
    return sum(tensor.nbytes for tensor in tensors)


merged = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
batches = st.lists(merged.map(lambda thw: (thw[0], 2 * thw[1], 2 * thw[2])), max_size=10)


# --- one graph --------------------------------------------------------------------------------------------------------


def test_a_graph_replays_on_new_contents_at_a_fixed_address():
    x, graph = torch.ones(4, device="cuda"), CudaGraph()
    with pytest.raises(CaptureError, match="replay: nothing has been captured"):
        graph.replay()
    output = graph.capture(lambda: x * 2 + 1)
    for value in (3.0, 5.0, 3.0):
        x.fill_(value)
        replayed = graph.replay()
        assert replayed.tolist() == [2 * value + 1] * 4
        assert replayed.data_ptr() == output.data_ptr()
    with pytest.raises(CaptureError, match="already has a recording"):
        graph.capture(lambda: x * 2)


@pytest.mark.parametrize("name", ["item", "cpu", "boolean index", "repeat_interleave", "copy from the host"])
def test_reading_back_and_waiting_are_refused_before_the_driver_sees_them(name):
    """The stream, the mode and the allocator are as before, and the next capture works."""
    x, counts = torch.arange(1.0, 5.0, device="cuda"), torch.tensor([1, 2, 0, 1], device="cuda")
    function = {
        "item": lambda: x * x.sum().item(),
        "cpu": lambda: x.cpu(),
        "boolean index": lambda: x[x > 2],
        "repeat_interleave": lambda: x.repeat_interleave(counts),
        "copy from the host": lambda: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"),
    }[name]
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    with pytest.raises(CaptureError, match="capture: "):
        CudaGraph().capture(function)
    assert (torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == (stream, mode)
    assert not torch.cuda.is_current_stream_capturing()
    graph = CudaGraph()
    graph.capture(lambda: x + 1)
    assert graph.replay().tolist() == [2, 3, 4, 5]


# --- the encoder ------------------------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(batches, st.integers(0, 1000), st.booleans())
def test_any_batch_equals_the_eager_encoder(encoder, manager, grids, seed, from_host):
    """Images and videos in any order and number, some larger than every budget, or in float32 as processors give."""
    patches = patches_of(grids, encoder, seed)
    outputs = manager.execute(patches.float().cpu() if from_host else patches, grids)
    assert all(output.is_cuda for output in outputs)
    assert_equal(outputs, eager(encoder, patches, grids))
    assert sorted(i for batch in manager.last_batches for i in batch.indices) == list(range(len(grids)))


@pytest.mark.allocator
def test_poisoned_memory_changes_no_bit(encoder):
    """Padding, outputs and the free part of the pool hold NaN before the replay, another batch ran between."""
    manager, grids = new_manager(encoder), [(1, 8, 8), (2, 4, 6), (1, 2, 2)]
    patches = patches_of(grids, encoder)
    clean = manager.execute(patches, grids)
    manager.execute(patches_of(grids[:1], encoder, 2), grids[:1])
    assert poison(manager) > 0
    for output, want in zip(manager.execute(patches, grids), clean, strict=True):
        assert torch.equal(output, want)
    manager.clear()


def test_two_threads_with_streams_of_their_own_share_the_graphs(encoder, manager):
    """Oracle: one thread, bit for bit."""
    grids = {"a": [(1, 8, 8)], "b": [(1, 12, 12)]}
    patches = {name: patches_of(grid, encoder) for name, grid in grids.items()}
    wanted = {name: manager.execute(patches[name], grids[name])[0] for name in grids}
    torch.cuda.synchronize()

    @torch.inference_mode()
    def work(name):
        with torch.cuda.stream(torch.cuda.Stream()):
            return [manager.execute(patches[name], grids[name])[0] for _ in range(5)]

    with ThreadPoolExecutor(2) as pool:
        outputs = dict(zip(grids, pool.map(work, grids), strict=True))
    torch.cuda.synchronize()
    assert all(torch.equal(output, wanted[name]) for name in grids for output in outputs[name])


@pytest.mark.parametrize("first", ["graphs", "compiled"])
def test_graphs_keep_their_workspaces_when_compiled_code_clears_its_own(encoder, first):
    """What "reduce-overhead" does, before the capture or after it; then all free memory is poisoned."""
    manager, grids = new_manager(encoder), [(1, 8, 8), (2, 4, 6)]
    patches = patches_of(grids, encoder)
    if first == "compiled":
        torch._C._cuda_clearCublasWorkspaces()
    clean = manager.execute(patches, grids)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    poisoned = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(32)]
    for output, want in zip(manager.execute(patches, grids), clean, strict=True):
        assert torch.equal(output, want)
    manager.clear()
    assert all(x.isnan().all() for x in poisoned)  # nothing was written to memory that is another's now


@pytest.mark.allocator
def test_clear_gives_the_memory_back(encoder):
    """The pool is empty afterwards, the allocator holds as much as after the warm-up, and the next use captures."""
    grids = [(1, 12, 16)]
    patches = patches_of(grids, encoder)
    wanted = eager(encoder, patches, grids)
    manager = new_manager(encoder)
    assert_equal(manager.execute(patches, grids), wanted)
    pool, held = manager._pool, manager.memory_bytes()
    assert held > pool_bytes(pool) > 0
    reserved = torch.cuda.memory_reserved()
    manager.clear()
    assert (manager.memory_bytes(), pool_bytes(pool)) == (0, 0)
    assert torch.cuda.memory_reserved() < reserved
    assert_equal(manager.execute(patches, grids), wanted)
    manager.clear()


@pytest.mark.allocator
def test_smaller_graphs_reuse_the_memory_of_larger_ones(encoder):
    """Three graphs in one pool hold less than twice what the largest holds alone."""
    alone, together = new_manager(encoder, budgets=[128]), new_manager(encoder, budgets=[64, 96, 128])
    alone.capture()
    together.capture()
    assert pool_bytes(together._pool) < 2 * pool_bytes(alone._pool)
    alone.clear()
    together.clear()
