"""Graphs of two paths: whatever each one packs, replays or runs eagerly, the outputs are those of the eager encoder."""

import json
from pathlib import Path

import pytest
import torch
from closeness import assert_agree
from graph_families import build, make_case

from refvl.encoders import Step3VisionConfig, Step3VisionEncoder
from refvl.graphs import Batch, CaptureError, EncoderGraphManager, plan_paired_batches
from refvl.study.report import Trace

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "encoder_graph_plan.json").read_text())
PLANS = [case for case in GOLDEN["plans"] if len(case["path_token_budgets"]) == 2]
CONFIG = Step3VisionConfig.tiny()  # an overview has 36 patches and 4 tokens, a crop 16 patches and 1 token
BUDGETS, MAX_ITEMS = {"local": [3, 6, 12], "global": [4, 8, 16]}, 3


@pytest.fixture(scope="module")
def encoder():
    return build("Step3-VL")


def new_manager(encoder, **options):
    return EncoderGraphManager(encoder, **{"budgets": BUDGETS, "max_items": MAX_ITEMS} | options, progress=False)


# --- plans of paired paths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PLANS, ids=lambda c: c["name"])
def test_paired_plans_equal_golden(case):
    """Oracle: vLLM 0.33.0 `EncoderCudaGraphManager`, its greedy plan; its budget of 0 is a path that does not run."""
    tokens = [item["path_output_tokens"] for item in case["items"]]
    budgets = {path: [b for b in of_path if b] for path, of_path in case["path_token_budgets"].items()}
    got = plan_paired_batches(tokens, budgets, case["max_batch_size"])
    want = case["plain_greedy"]["batches"]
    assert [batch.indices for batch in got] == [tuple(batch["indices"]) for batch in want]
    assert [batch.budgets for batch in got] == [{c["path"]: c["budget"] for c in b["calls"]} for b in want]
    replays = sum(len(b.indices) for b in got for budget in b.budgets.values() if budget is not None)
    assert replays >= case["plain_greedy"]["graph_hits"] or len(want) == 0


@pytest.mark.parametrize("case", PLANS, ids=lambda c: c["name"])
def test_inferred_budgets_equal_golden(case):
    """Oracle: vLLM 0.33.0: each path doubles from one square up to the largest budget that the user gave, or 4096."""
    config = Step3VisionConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    with torch.device("meta"):
        encoder = Step3VisionEncoder(config)
    given_budgets, max_items = case["config"].get("budgets"), case["config"].get("items")
    manager = EncoderGraphManager(
        encoder, max_budget=max(given_budgets) if given_budgets else None, max_items=max_items, backend="trace"
    )
    for path, budgets in case["path_token_budgets"].items():
        assert [*manager.limits[path].budgets] == [b for b in budgets if b]
    if not given_budgets:
        assert min(limits.max_items for limits in manager.limits.values()) == case["max_batch_size"]


def test_one_path_runs_eagerly_while_the_other_replays(encoder):
    """Oracle: each picture alone through the encoder, and the comments. A picture counts on each path it has rows on.

    Crops that no graph holds are the encoder's own bits.
    """
    manager = new_manager(encoder, policy="greedy")
    layouts = [(1, 2), (0, 0), (3, 5)]  # 2 crops in a graph of 3, 15 eagerly; 3 overviews in a graph of 16
    case = make_case(encoder, layouts)
    outputs = manager.execute(case.rows, layouts)
    assert_agree(outputs, case.wanted, encoder)
    assert torch.equal(outputs[2][:15], case.wanted[2][:15])
    assert manager.last_batches == [
        Batch((0,), 3, "local", 2),
        Batch((2,), None, "local", 15),
        Batch((0, 1, 2), 16, "global", 12),
    ]
    local, overview, both = manager.path_stats()["local"], manager.path_stats()["global"], manager.stats()
    assert (local.hits, local.misses, local.tokens, local.budget_tokens) == (1, 1, 2, 3)
    assert (overview.hits, overview.misses, overview.tokens, overview.budget_tokens) == (3, 0, 12, 16)
    assert (both.hits, both.misses, both.hit_rate, both.padding_waste) == (4, 1, 4 / 5, 1 - 14 / 19)


class ReadsBack(Step3VisionEncoder):
    """Looks at the pixels of overviews, as no captured encoder may."""

    def encode_stack(self, rows_NC, position_embeds, *, attention=None):
        out = super().encode_stack(rows_NC, position_embeds, attention=attention)
        return -out if len(position_embeds) == 37 and out.sum() < 0 else out


def test_when_one_path_cannot_be_captured_no_graph_is_kept():
    manager = new_manager(ReadsBack(CONFIG).eval())
    with pytest.raises(CaptureError, match="__bool__ reads a value back"):
        manager.capture()
    assert manager.captured == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": {"local": [4]}}, r"budgets: expected a dict with the keys \['local', 'global'\], got \['local'\]"),
        ({"budgets": None, "max_budget": 3}, "min_budget: must not exceed max_budget, got 4 and 3"),
    ],
    ids=str,
)
def test_limits_that_contradict_each_other(encoder, options, message):
    with pytest.raises(ValueError, match=message):
        new_manager(encoder, **options)


def test_a_trace_says_what_ran_on_each_path():
    trace = Trace(
        media=[None], embeds=[torch.zeros(19, 2)], seconds={"plan": 0.1, "encode": 0.1},
        graph_batches=[Batch((0,), None, "local", 15), Batch((0,), 8, "global", 4)],
    )  # fmt: skip
    [(_, planned, _), (_, shapes, _)] = trace.rows()
    assert planned == "1 items in 2 replays or eager forwards, 50% padding"
    assert shapes.endswith("; local path of media 1: eager; global path of media 1: graph of 8, 50% padding")
