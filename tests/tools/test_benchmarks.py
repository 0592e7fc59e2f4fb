"""Benchmarks stop if a run does other arithmetic than they report.

Oracle: `refvl.study.costs`, from sizes.
"""

from functools import partial

import pytest
import torch

from benchmarks import against, graphs, performance, report, tower
from refvl.encoders import Glm4vVisionConfig, Qwen2_5_VisionConfig
from refvl.families import read_config

pytestmark = pytest.mark.thorough

SMALL = {
    graphs: {"SIZES": {"cpu": (56,)}, "BATCHES": (2,), "measure_packing": partial(graphs.measure_packing, 4, 1)},
    performance: {
        "ROWS": (8,),
        "PROMPTS": (16,),
        "SIDES": (56,),
        "TOWERS": {"tiny": Qwen2_5_VisionConfig.tiny()},
        "read_config": lambda path: tiny_config(),
    },
}


def tiny_config():
    """In the place of the 3B's; its padding token lies beyond the vocabulary that `measure_evs`
    sets."""
    config = read_config(performance.CHECKPOINT / "config.json")
    config.get_text_config().pad_token_id = None
    return config


@pytest.fixture
def small(monkeypatch):
    threads = torch.get_num_threads()
    for module, values in SMALL.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    yield
    torch.set_num_threads(threads)


def measure_tower(config, grid):
    return tower.measure(*tower.build_pair(config, "cpu", torch.float32), grid, 1, "cpu", torch.float32)


COUNTED = {
    "tower, Qwen2.5-VL": lambda: measure_tower(Qwen2_5_VisionConfig.tiny(), [(1, 6, 6), (2, 4, 10)]),
    "tower, GLM-4.1V": lambda: measure_tower(Glm4vVisionConfig.tiny(), [(1, 6, 6), (2, 4, 10)]),
    "linear": lambda: performance.measure_linear(1),
    "performance, towers": lambda: performance.measure_towers(1),
    "prefill": lambda: performance.measure_gains(1),
    "evs": lambda: performance.measure_evs(1),
} | {f"graphs, {name}": partial(graphs.run_tower, name, "cpu", 1, False) for name in graphs.TOWERS}


@pytest.mark.parametrize("name", COUNTED)
def test_a_wrong_count_stops_a_benchmark(small, monkeypatch, name):
    """Without a mistake it runs; with one multiplication more it raises before it measures that
    row."""
    COUNTED[name]()
    count = report.count_operations
    monkeypatch.setattr(report, "count_operations", lambda call: count(call) + 1)
    with pytest.raises(ArithmeticError, match="operations from its sizes, got "):
        COUNTED[name]()


class FakeTree:
    """A tree whose rows take these seconds, call after call."""

    def __init__(self, rows, asked):
        self.rows, self.asked = {name: iter(seconds) for name, seconds in rows.items()}, asked

    def ask(self, what):
        self.asked.append(self)
        answers = {"kernel": "torch", "groups": ["a group"], "a group": list(self.rows)}
        return answers[what] if what in answers else next(self.rows[what])


def test_trees_are_compared_row_by_row_in_turns():
    """By hand: the first round warms up; medians, and ratios of the last tree's seconds to the
    first's."""
    asked = list[FakeTree]()
    old = FakeTree({"a": [9.0, 1.0, 2.0, 4.0], "gone": []}, asked)
    new = FakeTree({"new": [], "a": [9.0, 2.0, 3.0, 4.0]}, asked)
    [row] = against.compare({"abc": old, "this tree": new}, 3)
    assert row == {
        "row": "a", "abc ms": 2000, "this tree ms": 3000, "ratio to abc": 1.5, "ratio of the least to abc": 2.0,
    }  # fmt: skip
    assert asked[6:] == [new, old, old, new, new, old, old, new]
