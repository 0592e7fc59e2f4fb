"""`trace(replace=...)`.

Oracle: the same change by hand - a patched function, a changed weight - and the plain run.
"""

import copy
from dataclasses import replace as with_fields
from unittest.mock import patch

import pytest
import torch
from random_models import RANDOM, random_model
from shipped import shipped

import refvl
from refvl.paths import DATA
from refvl.study.interventions import RESULTS, TABLE

PICTURE, CLIP = DATA / "pictures/scene.png", DATA / "clips/scene.mp4"
WHERE = {"prompt": "Where is the star?", "images": [PICTURE]}


@pytest.fixture(scope="module")
def model():
    return shipped("tiny-qwen2_5_vl")


@pytest.mark.parametrize("name", RANDOM)
def test_a_function_that_returns_what_it_gets_changes_nothing(name):
    """Bit for bit, for every family: each stage is replaced by itself, and each function is called."""
    vlm, called = random_model(name), []

    def same(stage):
        return lambda made: (called.append(stage), made)[1]

    request = {"prompt": "What is it?", "images": [PICTURE, DATA / "pictures/page.png"], "max_new_tokens": 3}
    has_table = any(TABLE.search(name) for name, _ in vlm.encoder.named_parameters())
    stages = [*RESULTS, *["position_table"] * has_table]
    plain = vlm.trace(**request)
    changed = vlm.trace(**request, replace={stage: same(stage) for stage in stages})
    assert set(called) == set(stages)
    assert torch.equal(plain.inputs_embeds, changed.inputs_embeds)
    assert torch.equal(plain.first_logits, changed.first_logits)
    assert (plain.token_ids, plain.delta) == (changed.token_ids, changed.delta)


def test_positions_are_those_of_the_function(model):
    """Oracle: `restrict_positions`, patched by hand, whose delta follows the positions."""

    def as_text(positions_3L):
        return torch.arange(positions_3L.shape[1]).expand(3, -1)

    def by_hand(positions_3L, keep_L):
        return as_text(positions_3L), 0

    with patch("refvl.pipeline.restrict_positions", by_hand):
        expected = model.trace(**WHERE)
    found = model.trace(**WHERE, replace={"positions": as_text})
    assert (found.text, found.delta) == (expected.text, expected.delta) == (found.text, 0)
    assert torch.equal(found.first_logits, expected.first_logits)
    assert not torch.equal(found.first_logits, model.trace(**WHERE).first_logits)


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "GLM-4.1V", "MiniCPM-V 4.5"])
def test_decode_step_k_is_at_length_plus_k_plus_delta(name, num_beams):
    """On every axis, wherever the last column is, alone and together.

    Oracle: what transformers' model is given.
    """
    vlm, seen = random_model(name), []
    listen = vlm.language_model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"].unique().tolist()), with_kwargs=True
    )
    with listen:
        for change in (lambda p: p.flip(1), lambda p: p + torch.tensor([[0], [50], [50]])):
            trace = vlm.trace(**WHERE, replace={"positions": change}, max_new_tokens=3, num_beams=num_beams)
            first = int(trace.positions.max()) + 1
            assert first == len(trace.input_ids) + trace.delta and seen[-2:] == [[first], [first + 1]]
        vlm.answers([trace, with_fields(trace, delta=999)], max_new_tokens=3, num_beams=num_beams)
    assert seen[-2:] == [[first + k, len(trace.input_ids) + 999 + k] for k in (0, 1)]


def test_a_field_of_the_plan_is_that_of_the_function(model):
    """Oracle: the tower's own forward with a plan that was changed by hand."""
    plain = model.trace(**WHERE)
    [plan], [patches] = plain.metadata, plain.patches
    order = torch.randperm(len(plan.window_index), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        by_hand = model.encoder(patches.pixel_values, metadata=with_fields(plan, window_index=plan.window_index[order]))
    of_plans = {"plan": lambda plans: [with_fields(p, window_index=p.window_index[order]) for p in plans]}
    for replaced in ({"window_index": lambda index: index[order]}, of_plans):
        found = model.trace(**WHERE, replace=replaced)
        assert torch.equal(found.embeds[0], by_hand)
        assert not torch.equal(by_hand, plain.embeds[0])


def test_a_table_is_that_of_the_function_and_the_model_keeps_its_own():
    """Oracle: a model whose weight was changed by hand."""
    vlm = refvl.load("tiny-glm4v", device="cpu", progress=False)
    [name] = [name for name, _ in vlm.encoder.named_parameters() if TABLE.search(name)]
    before, expected = vlm.trace(**WHERE), copy.copy(vlm)
    expected.encoder = copy.deepcopy(vlm.encoder)
    with torch.no_grad():
        expected.encoder.get_parameter(name).zero_()
    found = vlm.trace(**WHERE, replace={"position_table": torch.zeros_like})
    assert torch.equal(found.embeds[0], expected.trace(**WHERE).embeds[0])
    assert torch.equal(vlm.trace(**WHERE).embeds[0], before.embeds[0])
    assert not torch.equal(found.embeds[0], before.embeds[0])


def test_masks_rows_and_embeddings_go_on_as_they_are_returned(model):
    """Oracle: pruning by a rate, the tower on the rows, and an answer about another image."""
    asked = {"prompt": "Which way does the circle move?", "videos": [CLIP]}
    pruned, masks = model.trace(**asked, pruning_rate=0.5), []
    masks += pruned.keep_masks
    found = model.trace(**asked, replace={"prune": lambda _: masks})
    assert torch.equal(found.positions, pruned.positions)
    assert found.token_ids == pruned.token_ids

    grey = model.trace(**WHERE, replace={"patchify": lambda items: [torch.zeros_like(p.pixel_values) for p in items]})
    with torch.inference_mode():
        assert torch.equal(grey.embeds[0], model.encoder(grey.patches[0].pixel_values, metadata=grey.metadata[0]))
    assert not grey.patches[0].pixel_values.any()

    swapped = model.trace(**WHERE, replace={"embeds": lambda embeds: [e.flip(0) for e in embeds]})
    assert torch.equal(swapped.embeds[0], model.trace(**WHERE).embeds[0].flip(0))


def test_graphs_and_cache_of_a_model_are_left_alone(tmp_path):
    """A run that is changed is eager and fills no cache; the next plain run is as before."""
    vlm = refvl.load("tiny-qwen2_5_vl", device="cpu", progress=False, graphs={"budgets": [16]}, media_cache=1000)
    plain = vlm.trace(**WHERE)
    vlm.media_cache.clear()
    vlm.trace(**WHERE, replace={"embeds": lambda embeds: [0 * e for e in embeds]})
    again = vlm.trace(**WHERE)
    assert again.graph_batches and torch.equal(again.first_logits, plain.first_logits)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"prefill": list}, "replace: expected one of the stages patchify, .*, got 'prefill'"),
        ({"position_table": list}, r"replace: the tower of Qwen2\.5-VL has no pos"),
        ({"positions": lambda p: p[:2]}, r"\['positions'\]: expected a tensor of shape \(3, \d+\) .*, got \(2, "),
        ({"positions": lambda p: p + 0.25}, r"\['positions'\]: expected .* torch\.int64, got .*, torch\.float32"),
        ({"window_index": lambda i: i.int()}, r"\['window_index'\]: expected .* torch\.int64, got .*, torch\.int32"),
        ({"encode": lambda e: []}, r"replace\['encode'\]: expected 1 items, got 0"),
    ],
)
def test_what_cannot_be_replaced_is_refused(model, replaced, message):
    with pytest.raises(ValueError, match=message):
        model.trace(**WHERE, replace=replaced)
    with pytest.raises(ValueError, match="prefill_chunk: not supported with replace"):
        model.trace(**WHERE, replace=replaced, prefill_chunk=8)
