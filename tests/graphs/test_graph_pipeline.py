"""The whole path with graphs; oracle: the same path without them. On CUDA, `refvl check-gpu` asks the same."""

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_logits_agree
from random_models import load, random_folder, random_model, rows

import refvl
from refvl.paths import DATA

PHOTOS = [DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea", "rocket")]
FRAMES = np.random.default_rng(0).integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)


def both(folder, **options):
    eager = refvl.load(folder, progress=False, **options)
    return eager, refvl.load(folder, progress=False, graphs={"budgets": [16, 32, 64]}, **options)


def ask(vlm, **media):
    return vlm.trace("What is it?", max_new_tokens=8, **media)


@pytest.mark.parametrize("rule", ["evs", "vidcom2"])
@pytest.mark.parametrize("name", [name for name, row in rows().items() if row.can["pruning"]])
def test_pruned_prompts_are_those_without_graphs(name, rule):
    """Oracle: the run without graphs."""
    eager, graphed = random_model(name), load(random_folder(name), graphs={"max_budget": 128})
    video = {"prompt": "What?", "videos": [FRAMES], "pruning_rate": 0.5, "pruning": rule, "max_new_tokens": 1}
    expected, trace = eager.trace(**video), graphed.trace(**video)
    stats = graphed.graphs.stats()
    assert stats.hits and not stats.misses and len(trace.full_ids) > len(trace.input_ids)
    assert torch.equal(trace.keep, expected.keep) and torch.equal(trace.positions, expected.positions)
    assert_agree(trace.embeds, expected.embeds, eager.encoder)
    assert_logits_agree(eager, expected, trace.first_logits, expected.first_logits)


def test_the_trace_says_which_graph_ran(checkpoint):
    _, graphed = both(checkpoint, device="cpu")
    trace = ask(graphed, images=PHOTOS)
    assert sorted(i for batch in trace.graph_batches for i in batch.indices) == [0, 1, 2]
    rows = {stage: shapes for stage, shapes, _ in trace.rows()}
    assert rows["plan"].startswith(f"3 items in {len(trace.graph_batches)} replay")
    assert len(trace.metadata) == len(trace.graph_batches)
    for batch in trace.graph_batches:
        tokens = sum(len(trace.embeds[i]) for i in batch.indices)
        assert f"graph of {batch.budget}, {1 - tokens / batch.budget:.0%} padding" in rows["encode"]
    assert graphed.graphs.stats().hits == 3
    assert ask(graphed).graph_batches == []


def test_true_infers_budgets_from_the_checkpoint(checkpoint):
    graphed = refvl.load(checkpoint, device="cpu", progress=False, graphs=True)
    assert graphed.graphs.limits[""].budgets == (16, 32, 64, 128, 256)
    assert set(graphed.graphs.captured) == {("", budget) for budget in (16, 32, 64, 128, 256)}
