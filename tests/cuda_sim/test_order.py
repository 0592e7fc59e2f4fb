"""What CUDA does not order raises.

Oracle: "Asynchronous Concurrent Execution" of the CUDA programming guide, torch's notes on streams and pinned memory.
"""

import pytest
import torch
from graph_families import build, distance, make_case, manager_of
from mutants import MUTANTS, ROOT, WANTED, choose
from simulated_cuda import CudaError, simulated_cuda
from simulated_order import RaceError

from refvl.encoders.tower import send_rows
from refvl.serving.media_cache import Embeddings, MediaCache


def written_on_a_side_stream():
    """A tensor of the current stream, its last write on another one, and that stream."""
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    return x, side


WAITS = {
    "wait_stream": lambda side: torch.cuda.current_stream().wait_stream(side),
    "an event": lambda side: torch.cuda.current_stream().wait_event(side.record_event()),
    "the host": lambda side: side.synchronize(),
    "the device": lambda side: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_stream_that_waits_reads_what_was_written(machine, wait):
    x, side = written_on_a_side_stream()
    WAITS[wait](side)
    assert (x + 1).tolist() == [2] * 4


@pytest.mark.parametrize("use", ["neg", "zero_", "tolist"])
def test_one_that_does_not_raises_with_both_places(machine, use):
    x, _ = written_on_a_side_stream()
    with pytest.raises(RaceError, match=r"test_order.py:\d+: this \w+ does not wait for .*test_order.py:\d+"):
        getattr(x, use)()


def test_a_write_waits_for_readers_too(machine):
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    assert (x * 2).tolist() == [2] * 4  # two readers do not disturb each other
    x + 1, side.synchronize()
    with torch.cuda.stream(side):
        x + 1
    with pytest.raises(RaceError, match="this write does not wait for"):
        x.zero_()


def test_a_pinned_buffer_is_not_written_before_it_was_copied(machine):
    rows = torch.ones(4).pin_memory()
    there = rows.to("cuda", non_blocking=True)
    with pytest.raises(RaceError, match="this write does not wait for"):
        rows.fill_(2)
    torch.cuda.current_stream().synchronize()
    rows.fill_(2)
    assert there.tolist() == [1] * 4
    pageable = torch.ones(4)
    there = pageable.to("cuda", non_blocking=True)
    pageable.fill_(2)  # it has been staged
    assert there.tolist() == [1] * 4


def test_a_copy_to_the_host_holds_poison_until_it_was_waited_for(machine):
    here = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
    assert here.numpy()[0] != 1
    with pytest.raises(RaceError, match="this read does not wait for"):
        here + 1
    torch.cuda.synchronize()
    assert here.numpy().tolist() == [1] * 4 and (here + 1).tolist() == [2] * 4
    pageable = torch.zeros(4)
    pageable.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    assert pageable.tolist() == [1] * 4  # a copy there waits, whatever was asked for


def test_large_pageable_copies_wait_and_bytes_of_all_are_counted(machine):
    for size, waits in ((1 << 14, 0), (1 << 15, 1)):
        machine.counts.clear()
        torch.ones(size).to("cuda", non_blocking=True)
        assert (machine.counts["waits"], machine.counts["staged"]) == (waits, 4 * size)
        torch.ones(size).pin_memory().to("cuda", non_blocking=True)
        assert (machine.counts["waits"], machine.counts["staged"]) == (waits, 4 * size)


def test_memory_goes_back_to_the_stream_that_allocated_it(machine):
    """Not to the one that still reads it, unless `record_stream` has said so."""
    for recorded in (True, False):
        x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        if recorded:
            x.record_stream(side)
        del x
        if recorded:
            torch.ones(4, device="cuda")
    with pytest.raises(RaceError, match="this may get memory that is still used at"):
        torch.ones(4, device="cuda")
    del y


def test_streams_belong_to_a_device():
    """A capture records its stream alone: a graph of the wrong device is empty."""
    with simulated_cuda(devices=2) as machine:
        assert torch.cuda.Stream().device == torch.device("cuda:0")
        assert torch.cuda.Stream("cuda:1").device == torch.device("cuda:1")
        x, graph = torch.ones(2, device="cuda:1"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x + 1
        assert machine.captures[0].calls == []
        with torch.cuda.stream(torch.cuda.Stream(1)):
            assert torch.cuda.current_device() == 1 and torch.ones(1, device="cuda").device == x.device
        assert torch.cuda.current_device() == 0


def test_a_graph_whose_memory_was_freed_does_not_replay(machine):
    x, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    del x
    with pytest.raises(CudaError, match="has been freed"):
        graph.replay()
    assert y.tolist() == [2, 2]


def test_traffic_is_counted_by_dtype(machine):
    x = torch.ones(8, device="cuda", dtype=torch.bfloat16)
    machine.traffic.clear()
    x.double()
    assert machine.traffic == {torch.bfloat16: 16, torch.float64: 64}


# --- the graphs of an encoder -----------------------------------------------------------------------------------------


def test_threads_with_streams_of_their_own_share_a_manager(machine):
    """Each call fills the buffers that the one before has read, on another stream; by turns, so that it is the same
    each time. Oracle: the eager encoder on the CPU."""
    encoder = build("Qwen2.5-VL").bfloat16()
    case = make_case(encoder, [(1, 4, 4), (1, 8, 10)])
    manager = manager_of(encoder.to("cuda"))
    rows, outputs = case.rows.to("cuda"), []
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs.append(manager.execute(rows, case.layouts))
    torch.cuda.synchronize()
    for output in outputs:
        assert distance([x.cpu() for x in output], case.wanted) < 8 * torch.finfo(torch.bfloat16).eps


def test_graphs_on_the_second_device():
    """Warm-up, capture and replay happen where the encoder is, whatever device is current."""
    encoder = build("Qwen2.5-VL").bfloat16()
    case = make_case(encoder, [(1, 4, 4)])
    with simulated_cuda(devices=2):
        manager = manager_of(encoder.to("cuda:1"))
        outputs = [x.cpu() for x in manager.execute(case.rows.to("cuda:1"), case.layouts)]
    assert distance(outputs, case.wanted) < 8 * torch.finfo(torch.bfloat16).eps


def test_rows_may_be_sent_again_at_once(machine):
    """Two batches on their way, both from pinned memory. Oracle: the rows themselves."""
    encoder = build("Qwen2.5-VL").to("cuda", torch.bfloat16)
    batches = [torch.full((4, encoder.config.patch_values), float(i)) for i in range(2)]
    sent = [send_rows([rows], encoder) for rows in batches]
    assert [x.cpu().unique().tolist() for x in sent] == [[0], [1]]


def test_a_media_cache_between_streams(machine):
    """What one stream encoded another reads; keys are made of rows on the device as of those on the host."""
    cache, encoder = MediaCache(100), build("Qwen2.5-VL").to("cuda", torch.bfloat16)
    rows = torch.ones(16, encoder.config.patch_values)
    keys = cache.keys(encoder, [rows], [(1, 4, 4)])
    assert cache.keys(encoder, [rows.to("cuda")], [(1, 4, 4)]) == keys
    sums = []
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            found, hits = cache.fetch(keys, lambda new: [Embeddings(torch.ones(4, 2, device="cuda"), 1.0)])
            sums.append(found[0].rows.sum())
    torch.cuda.synchronize()
    assert ([x.item() for x in sums], hits) == ([8, 8], [True])


def test_planted_bugs_are_where_the_list_says():
    """`mutants.py` stays true to the sources."""
    assert len({mutant.name for mutant in MUTANTS}) == 40 and WANTED == 36
    for mutant in MUTANTS:
        assert compile(mutant.source(), mutant.file, "exec")


def test_the_score_of_planted_bugs_is_on_the_page():
    """`docs/gpu.md` counts those that have a test; `mutants.py` fails if one of them is not caught."""
    visible = sum(mutant.is_visible for mutant in MUTANTS)
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert f"plants forty bugs, of which it detects {visible}." in page
    assert ("No simulation can detect the other two:" in page) == (len(MUTANTS) - visible == 2)


def test_a_part_of_the_planted_bugs_is_chosen_by_number_or_name():
    parts = [choose([part]) for part in ("1-14", "15-27", "28-40")]
    assert [mutant for part in parts for mutant in part] == choose([]) == MUTANTS
    assert choose([MUTANTS[3].name]) == [MUTANTS[3]]
    with pytest.raises(ValueError, match="names: expected names of mutants or 1-40, got "):
        choose(["41-50"])
