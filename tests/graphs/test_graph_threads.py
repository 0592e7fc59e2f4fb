"""One manager, many threads: every caller gets the embeddings of its own items, and its own account of the packing."""

import random
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from graph_families import FAMILIES, build, distance, draw_layouts, make_case, manager_of

import refvl
from refvl.graphs import CaptureError, TraceGraph
from refvl.graphs import cuda as cuda_graphs
from refvl.paths import DATA
from refvl.study.readout import Readout

# float32, as a share of an item's norm. A graph sums in another order than the eager encoder; both round each of a few
# hundred sums by 2^-24 and some layers add that up. Another caller's rows, or a stale one, are off by more than 0.1.
TOLERANCE = 1e-4
THREADS = 8


@pytest.fixture(autouse=True)
def eager_switching():
    """Threads take turns 1000 times as often as usual, so that a missing lock shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(function, count=THREADS):
    """`function(i)` in `count` threads that start together; what they return. An exception of one is raised here."""
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait(60)
        return function(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def cases_of(family, encoder, count=24):
    draw = random.Random(0)
    return [make_case(encoder, draw_layouts(family, draw), seed) for seed in range(count)]


def hammer(managers, cases, calls):
    """Every thread runs `calls` batches in an order of its own; the worst difference, and that batches are its own."""

    def run(thread):
        manager, draw, worst = managers[thread % len(managers)], random.Random(thread), 0.0
        for _ in range(calls):
            case = draw.choice(cases)
            worst = max(worst, distance(manager.execute(case.rows, case.layouts), case.wanted))
            packed = {i for batch in manager.last_batches for i in batch.indices}
            assert packed == set(range(len(case.layouts)))
            assert sum(batch.tokens for batch in manager.last_batches) == sum(map(len, case.wanted))
        return worst

    return max(in_threads(run))


@pytest.mark.parametrize("calls", [5, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_caller_gets_its_own_embeddings(family, calls):
    """Oracle: each item alone through the eager encoder. The first calls of all threads capture together."""
    encoder = build(family)
    manager, cases = manager_of(encoder), cases_of(family, encoder)
    assert hammer([manager], cases, calls) <= TOLERANCE
    assert len(manager.captured) == sum(len(limits.budgets) for limits in manager.limits.values())
    stats = manager.stats()
    assert stats.hits + stats.misses >= THREADS * calls and stats.hits > stats.misses > 0


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "GLM-4.1V", "Step3-VL"])
def test_two_managers_on_one_encoder(family):
    """Oracle: as above. Both capture and replay at once; the recorder's modes belong to their threads."""
    encoder = build(family)
    assert hammer([manager_of(encoder), manager_of(encoder)], cases_of(family, encoder), 4) <= TOLERANCE


def test_a_recording_holds_its_own_thread_s_operations_only():
    """Two captures at once, and a thread that reads values back meanwhile: none sees the others' operations."""
    x = torch.arange(4.0)

    def run(i):
        if i == 0:
            return [x.sum().item() for _ in range(300)][-1]
        graph, steps = TraceGraph(), 40 + i
        graph.capture(lambda: sum((x * k for k in range(steps)), x))
        return len(graph.operations)

    assert in_threads(run, 3) == [6.0, 2 * 41, 2 * 42]


def test_a_failure_leaves_the_manager_to_the_others():
    """Half of the threads hand in rows that do not fit: they get the error, the others their embeddings."""
    encoder = build("Qwen2.5-VL")
    manager, [case] = manager_of(encoder), cases_of("Qwen2.5-VL", encoder, 1)

    def run(i):
        for _ in range(5):
            if i % 2:
                with pytest.raises(ValueError, match="pixel_values: expected a shape that fits"):
                    manager.execute(case.rows[:, :-1], case.layouts)
            else:
                assert distance(manager.execute(case.rows, case.layouts), case.wanted) <= TOLERANCE

    in_threads(run, 4)


def test_clear_at_any_time():
    """One thread drops the graphs again and again while the others encode."""
    encoder = build("Qwen2.5-VL")
    manager, cases = manager_of(encoder, budgets=[8]), cases_of("Qwen2.5-VL", encoder, 4)

    def run(i):
        if i == 0:
            return [manager.clear() for _ in range(6)] and 0.0
        return max(distance(manager.execute(case.rows, case.layouts), case.wanted) for case in cases)

    assert max(in_threads(run, 4)) <= TOLERANCE


@pytest.mark.parametrize("folder", ["tiny-qwen2_5_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3"])
def test_a_model_answers_every_thread_about_its_own_picture(folder):
    """Oracle: the same model without graphs, one question after the other. The trace tells of its own picture."""
    model = refvl.load(DATA / "checkpoints" / folder, device="cpu", graphs=True, progress=False)
    graphs, model.graphs = model.graphs, None
    pictures = [torch.full((84, 84, 3), 30 * i, dtype=torch.uint8).numpy() for i in range(4)]
    pictures = [picture[: 84 - 28 * (i % 2)] for i, picture in enumerate(pictures)]
    ask = {"prompt": "What color is the circle?", "max_new_tokens": 3}
    wanted = [model.trace(images=[picture], **ask) for picture in pictures]
    model.graphs = graphs

    def run(i):
        traces = [model.trace(images=[pictures[i]], **ask) for _ in range(2)]
        answers = [model.chat(images=[pictures[i]], **ask)]
        return traces, answers

    for want, (traces, answers) in zip(wanted, in_threads(run, 4), strict=True):
        for trace in traces:
            assert distance(trace.embeds, want.embeds) <= TOLERANCE
            assert sum(batch.tokens for batch in trace.graph_batches) == len(want.embeds[0])
            assert trace.text == want.text
        assert answers == [want.text]


def test_a_readout_of_one_thread_does_not_stop_another():
    """torch registers a hook and its `with_kwargs` in two steps, and removes them so: another thread may run between.

    The second step is undone here, so every forward of the other thread runs between the two.
    """
    text = refvl.load(DATA / "checkpoints/tiny-qwen2_5_vl", device="cpu", progress=False).language_model
    readout = Readout(text, text.model.layers, length=4)
    hooked = [text, text.model.layers[0]]
    flags = [dict(module._forward_pre_hooks_with_kwargs) for module in hooked]
    for module in hooked:
        module._forward_pre_hooks_with_kwargs.clear()
    with ThreadPoolExecutor(1) as pool:
        logits = pool.submit(lambda: text(input_ids=torch.arange(4)[None]).logits).result(60)
    assert readout.first_logits is None and readout.last_states is None
    for module, flag in zip(hooked, flags, strict=True):
        module._forward_pre_hooks_with_kwargs.update(flag)
    text(input_ids=torch.arange(4)[None])
    readout.remove()
    assert distance(readout.first_logits, logits[0, -1]) <= TOLERANCE


def test_only_the_capturing_thread_may_not_wait_for_the_device(monkeypatch):
    """Oracle: torch warns where the host waits, in a mode of the whole process; a stub stands for the device here."""
    mode = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)

    def wait():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return torch.zeros(1)

    def wait_elsewhere():
        other = threading.Thread(target=wait)
        other.start()
        other.join()
        return torch.zeros(1)

    cuda_graphs._check_capturable(wait_elsewhere)
    with pytest.raises(
        CaptureError,
        match="capture: a graph cannot synchronise, but the function called a synchronizing CUDA operation",
    ):
        cuda_graphs._check_capturable(wait)
    assert mode == ["default", "warn", "default", "warn", "default"]


def test_a_manager_shows_the_last_batches_of_its_thread():
    encoder = build("Qwen2.5-VL")
    manager, cases = manager_of(encoder), cases_of("Qwen2.5-VL", encoder, 2)
    assert manager.last_batches == []
    manager.execute(cases[0].rows, cases[0].layouts)
    mine = manager.last_batches

    def run(_):
        before = manager.last_batches
        manager.execute(cases[1].rows, cases[1].layouts)
        return before

    assert in_threads(run, 1) == [[]]
    assert manager.last_batches == mine
