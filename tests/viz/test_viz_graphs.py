"""Figures of encoder graphs. Oracle: the recordings, buffers and plans that they show."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from refvl import viz
from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import Batch, TraceGraph, padding_waste
from refvl.graphs.buffers import fill_metadata
from refvl.study.timeline import launch_timeline
from refvl.viz.style import HIGHLIGHT

TOKENS = [30, 200, 30, 600]
BATCHES = [Batch((0, 2), 64), Batch((1,), 256), Batch((3,), None)]
PLANNED_GRID = (1, 6, 10)  # 60 patches, 15 merged tokens, 6 windows of the tiny tower


@pytest.fixture(scope="module")
def toy():
    """A recording of three operations over two buffers: mul and add read `a`, the last add reads a view of `b`."""
    a, b, graph = torch.ones(2), torch.ones(2, 2), TraceGraph()
    graph.capture(lambda: a * 2 + a + b[0])
    return graph, a, b


@pytest.fixture(scope="module")
def filled():
    """The tower's static buffers at 16 tokens and 4 frames, filled for one item, and its plan."""
    tower = Qwen2_5_VisionTransformer(Qwen2_5_VisionConfig.tiny())
    buffers, planned = tower.plan_capacity(16, 4), tower.plan([PLANNED_GRID])
    fill_metadata(buffers, planned)
    return buffers, planned


def ticks(ax) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def items(ax) -> list[tuple[float, float, float]]:
    """(left, width, row) of the bars that are neither padding nor the outline of a budget."""
    bars = [bar for bar in ax.patches if bar.get_facecolor()[3] and not bar.get_hatch()]
    return [(bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in bars]


def padding(ax) -> list[tuple[float, float]]:
    """(left, width) of the hatched bars."""
    return [(bar.get_x(), bar.get_width()) for bar in ax.patches if bar.get_hatch()]


def test_recording_shows_every_operation_in_the_row_of_its_kind(ax, toy):
    graph, a, b = toy
    viz.plot_recording(graph, {"a": a, "b": b}, ax=ax)
    assert [str(operation.function) for operation in graph.operations] == [
        "aten.mul.Tensor", "aten.add.Tensor", "aten.add.Tensor",
    ]  # fmt: skip
    assert ticks(ax) == ["mul  (1)", "add  (2)"]
    assert ax.get_title() == "3 recorded operations"
    everything, reads_a, reads_b = ax.lines
    assert everything.get_ydata().tolist() == [0, 1, 1]
    assert list(zip(reads_a.get_xdata(), reads_a.get_ydata(), strict=True)) == [(0, 0), (1, 1)]
    assert list(zip(reads_b.get_xdata(), reads_b.get_ydata(), strict=True)) == [(2, 1)]  # a view of b is b
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["reads a", "reads b"]


def test_buffers_show_their_contents_and_shade_the_padding(filled):
    buffers, planned = filled
    names = ["window_index", "cu_window_seqlens", "positions"]
    index, lengths, positions = viz.plot_buffers(buffers, planned, names)
    assert index.get_title() == "window_index: 15 of 16 filled, padding: identity"
    np.testing.assert_array_equal(index.lines[0].get_ydata(), buffers.window_index)
    np.testing.assert_array_equal(lengths.lines[0].get_ydata(), buffers.cu_window_seqlens)
    np.testing.assert_array_equal(positions.images[0].get_array(), buffers.positions.T)
    for panel, name in zip((index, lengths, positions), names, strict=True):
        [shade] = [patch for patch in panel.patches if to_rgb(patch.get_facecolor()) == to_rgb(HIGHLIGHT)]
        count, capacity = len(getattr(planned, name)), len(getattr(buffers, name))
        assert (shade.get_x(), shade.get_width()) == (count - 0.5, capacity - count)
    plt.close("all")


def test_packing_lays_items_end_to_end_and_hatches_the_rest(ax):
    viz.plot_packing(TOKENS, BATCHES, ax=ax)
    assert items(ax) == [(0, 30, 0), (30, 30, 0), (0, 200, 1), (0, 600, 2)]
    assert padding(ax) == [(60, 4), (200, 56)]
    outlines = [bar.get_width() for bar in ax.patches if not bar.get_facecolor()[3]]
    assert outlines == [64, 256]
    assert ticks(ax) == ["graph of 64", "graph of 256", "eager"]
    assert [t for t in texts(ax) if "tokens" in t] == [
        "60 tokens, 6% padding", "200 tokens, 22% padding", "600 tokens, too large for a graph",
    ]  # fmt: skip
    assert ax.get_title() == "2 replays, budgets sum to 320, 19% padding"  # 1 - 260 / 320


def test_padding_waste_counts_replays_only():
    """260 of 320 tokens are not padding; the eager 600 do not count."""
    assert padding_waste(BATCHES, TOKENS) == 1 - 260 / 320
    assert padding_waste([Batch((3,), None)], TOKENS) == 0


def test_waste_is_drawn_in_percent(ax):
    viz.plot_waste({"greedy": {1: 0.5, 2: 0.25}, "optimal": {1: 0.5, 4: 0.125}}, title="arrivals", ax=ax)
    assert [list(line.get_xydata().flatten()) for line in ax.lines] == [[1, 50, 2, 25], [1, 50, 4, 12.5]]
    assert ax.get_xticks().tolist() == [1, 2, 4] and ax.get_ylim()[0] == 0
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["greedy", "optimal"]
    assert ax.get_title() == "arrivals"


def measured(px: int, images: int, floor_ms: float | None = None) -> dict:
    """A row of a measurement: eager takes px ms, the other ways twice, three and four times that; tails 5 ms more."""
    ways = ("eager", "planned", "doubling", "fitted")
    medians = {f"{way}_ms": (i + 1) * px for i, way in enumerate(ways)}
    return {"px": px, "images": images, "floor_ms": floor_ms} | medians | {
        f"{way}_p99_ms": medians[f"{way}_ms"] + 5 for way in ways
    }  # fmt: skip


MEASUREMENT = {"device": "a GPU", "date": "2026-11-20", "rows": [measured(112, 1), measured(112, 4), measured(224, 1)]}


def test_timings_are_medians_with_a_tail(ax):
    """Oracle: the rows, and the errorbars' segments from the median to the 99th percentile."""
    viz.plot_replay_timings(MEASUREMENT, ax=ax)
    for i, container in enumerate(ax.containers):
        line, _, [tails] = container.lines
        assert line.get_xydata().tolist() == [[112, (i + 1) * 112], [224, (i + 1) * 224]]
        assert [segment[:, 1].tolist() for segment in tails.get_segments()] == [
            [(i + 1) * px, (i + 1) * px + 5] for px in (112, 224)
        ]
    assert [container.get_label() for container in ax.containers] == [
        "eager", "eager, existing plan", "replay, doubling budgets", "replay, fitted budgets",
    ]  # fmt: skip
    assert ax.get_title() == "1 image per call: a GPU, 2026-11-20" and ax.get_yscale() == "log"
    assert ax.get_xticks().tolist() == [112, 224]


def test_stale_errors_are_drawn_by_operation_and_token():
    row = {"operations": np.array([0, 85, 255]), "tokens": np.array([[0.1, 0.2], [0.3, 1.8]])}
    left, right = viz.plot_stale_errors(row, [{"name": "a", "count": 1}, {"name": "blocks.0", "count": 2}], title="t")
    [area] = left.collections
    assert area.get_paths()[0].vertices[:, 1].max() == 255
    assert texts(left) == ["a", "blocks.0"]
    np.testing.assert_array_equal(right.images[0].get_array(), row["tokens"])
    plt.close(left.figure)


@pytest.mark.parametrize("launch_us", [0.0, 1.0, 4.0, 20.0])
def test_the_device_waits_for_launches_or_works(launch_us):
    """Oracle: the longest path. An operation's chain begins with some launch, and from there the device only works."""
    durations = [3.0, 0.5, 7.0, 2.0, 2.0, 11.0]
    times = launch_timeline(durations, launch_us)
    for stop, (_, end) in enumerate(times, 1):
        assert end == max(start * launch_us + sum(durations[start - 1 : stop]) for start in range(1, stop + 1))
    assert [end - start for start, end in times] == durations


def test_lanes_show_launches_an_eager_run_and_a_replay():
    """Oracle: two operations of 3 us. At 5 us per launch they start at 5 and 10; a replay starts them at 5 and 8."""
    ax = viz.plot_launches([3.0, 3.0], 5.0)
    bars = [
        [(box.x0, box.width) for box in (path.get_extents() for path in lane.get_paths())] for lane in ax.collections
    ]
    assert bars == [[(0, 5), (5, 5)], [(5, 3), (10, 3)], [(5, 3), (8, 3)]]
    assert ax.get_title("left") == "5 µs per launch: eager 13 µs (device idle 54%), replay 11 µs"
    plt.close("all")
