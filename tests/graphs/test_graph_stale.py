"""Replays in which one buffer is stale. Oracle: the same buffers filled by hand, and one replay of the whole graph."""

import pytest
import torch
from graph_families import build
from torch import Tensor

from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionTransformer
from refvl.graphs import EncoderGraphManager
from refvl.graphs.manager import CapturedBudget
from tests.closeness import assert_agree, assert_differ

BEFORE, NOW = (1, 6, 8), (1, 6, 6)  # grids in patches
CONSTANT = {"frequencies"}  # the same for every image: they depend on the tower's width alone


@pytest.fixture(scope="module")
def towers() -> tuple[Qwen2_5_VisionTransformer, CapturedBudget, dict[tuple, Tensor]]:
    """The tiny tower with random weights, its graph of 16 tokens, and patch rows of both grids."""
    tower = build("Qwen2.5-VL")
    manager = EncoderGraphManager(tower, budgets=[16], max_frames=4, progress=False, backend="trace")
    manager.capture()
    rows = {grid: torch.randn(grid[1] * grid[2], tower.config.patch_values) for grid in (BEFORE, NOW)}
    return tower, manager.captured["", 16], rows


@pytest.fixture(scope="module")
def replays(towers):
    from refvl.viz.explorers.stale import replay_stale  # here: it needs anywidget

    tower, captured, rows = towers
    return replay_stale(captured, (rows[BEFORE], tower.plan([BEFORE])), (rows[NOW], tower.plan([NOW])))


def test_with_everything_refilled_it_is_the_eager_tower(towers, replays):
    tower, _, rows = towers
    with torch.inference_mode():
        eager = tower(rows[NOW], [NOW])
    assert_agree(replays[""].outputs[: len(eager)], eager, tower)
    assert set(replays[""].errors) == {0.0}


def test_a_stale_replay_is_the_graph_on_those_buffers(towers, replays):
    tower, captured, rows = towers
    assert set(replays) == {"", *captured.buffers}
    for name in captured.buffers:
        captured.fill(rows[BEFORE], tower.plan([BEFORE]))
        left = captured.buffers[name].clone()
        captured.fill(rows[NOW], tower.plan([NOW]))
        captured.buffers[name].copy_(left)
        assert torch.equal(captured.graph.replay(), replays[name].outputs), name
        if name not in CONSTANT:
            assert_differ(replays[name].outputs[:9], replays[""].outputs[:9], tower, name)


def test_an_error_begins_where_the_buffer_is_read(towers, replays):
    """And the last operation's is that of the output."""
    _, captured, _ = towers
    right = replays[""].outputs
    for name, buffer in captured.buffers.items():
        first = next(i for i, operation in enumerate(captured.graph.operations) if operation.reads(buffer))
        assert not any(replays[name].errors[:first]) and any(replays[name].errors) == (name not in CONSTANT), name
        error = (replays[name].outputs - right).norm() / right.norm()
        assert replays[name].errors[-1] == pytest.approx(float(error))
