"""One manager, many threads: every caller gets the embeddings of its own items."""

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
    """`function(i)` in `count` threads that start together; what they return.

    An exception of one is raised here.
    """
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait(60)
        return function(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def cases_of(family, encoder, count=12):
    draw = random.Random(0)
    return [make_case(encoder, draw_layouts(family, draw), seed) for seed in range(count)]


def hammer(managers, cases, calls):
    """Every thread runs `calls` batches in an order of its own; the worst difference."""

    def run(thread):
        manager, draw, worst = managers[thread % len(managers)], random.Random(thread), 0.0
        for _ in range(calls):
            case = draw.choice(cases)
            worst = max(worst, distance(manager.execute(case.rows, case.layouts), case.wanted))
        return worst

    return max(in_threads(run))


MANAGERS = [("Qwen2.5-VL", 2), ("Step3-VL", 2), *((family, 1) for family in FAMILIES)]


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "count"), MANAGERS)
def test_every_caller_gets_its_own_embeddings(family, count, calls=5):
    """Oracle: each item alone through the eager encoder. The first calls of all threads capture together.

    Several managers on one encoder capture and replay at once: the recorder's modes belong to their
    threads.
    """
    encoder = build(family)
    managers = [manager_of(encoder) for _ in range(count)]
    assert hammer(managers, cases_of(family, encoder), calls) <= TOLERANCE
    for manager in managers:
        assert len(manager.captured) == sum(len(limits.budgets) for limits in manager.limits.values())
        stats = manager.stats()
        assert stats.hits + stats.misses >= THREADS // count * calls and stats.hits > stats.misses > 0


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


@pytest.mark.parametrize("folder", ["tiny-qwen2_5_vl", "tiny-step3"])
def test_a_model_answers_every_thread_about_its_own_picture(folder):
    """Oracle: the same model without graphs, one question after the other.

    The trace tells of its own picture.
    """
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
    with pytest.raises(CaptureError, match="capture: a graph cannot synchronise, but the function called a synchron"):
        cuda_graphs._check_capturable(wait)
    assert mode == ["default", "warn", "default", "warn", "default"]
