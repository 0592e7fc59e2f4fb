"""The whole path with graphs; oracle: the same path without them. The gpu-marked half is the same on CUDA."""

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_logits_agree
from random_models import RANDOM, load, random_folder, random_model

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
@pytest.mark.parametrize("name", [name for name in RANDOM if not name.startswith(("Step", "MiniCPM"))])
def test_pruned_prompts_are_those_without_graphs(name, rule):
    """Oracle: the run without graphs."""
    eager, graphed = random_model(name), load(random_folder(name), graphs={"max_budget": 128})
    video = {"prompt": "What?", "videos": [FRAMES], "pruning_rate": 0.5, "pruning": rule, "max_new_tokens": 1}
    expected, trace = eager.trace(**video), graphed.trace(**video)
    stats = graphed.graphs.stats()
    assert stats.hits and not stats.misses and len(trace.full_ids) > len(trace.input_ids)
    assert torch.equal(trace.keep, expected.keep) and torch.equal(trace.positions, expected.positions)
    for ours, theirs in zip(trace.embeds, expected.embeds, strict=True):
        assert_agree(ours, theirs, eager.encoder)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    def test_float32_answers_equal_the_cpu(self, checkpoint):
        """float32 on both; sampling noise is far below the gaps between the logits of these wide weights."""
        media = {"images": PHOTOS, "videos": [FRAMES]}
        on_cpu = ask(refvl.load(checkpoint, device="cpu", progress=False), **media)
        on_cuda = ask(refvl.load(checkpoint, device="cuda", dtype="float32", progress=False), **media)
        assert on_cuda.token_ids == on_cpu.token_ids

    def test_bfloat16_embeddings_with_and_without_graphs(self, checkpoint):
        """The same varlen kernel on the same rows: equal up to the order of sums."""
        eager, graphed = both(checkpoint, device="cuda", dtype="bfloat16")
        expected, trace = ask(eager, images=PHOTOS, videos=[FRAMES]), ask(graphed, images=PHOTOS, videos=[FRAMES])
        for ours, theirs in zip(trace.embeds, expected.embeds, strict=True):
            assert_agree(ours, theirs, 12 * eager.encoder.config.depth)  # what a block rounds to bfloat16
        assert graphed.graphs.backend == "cuda" and graphed.graphs.stats().hits == 4

    def test_pruning_composes_with_graphs(self, checkpoint):
        _, graphed = both(checkpoint, device="cuda", dtype="bfloat16")
        trace = ask(graphed, videos=[FRAMES], pruning_rate=0.5)
        assert len(trace.input_ids) < len(trace.full_ids) and graphed.graphs.stats().misses == 0
