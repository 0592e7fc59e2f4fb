"""What may change an answer, and by how much. Oracle: float64, one image at a time, on one thread.

The tolerance is derived in `benchmarks.reproducibility.bound`; the matrix of measured differences is in
data/measurements/reproducibility_cpu.json.
"""

import json

import pytest
import torch

import refvl
from benchmarks.reproducibility import CHECKPOINTS, WAYS, measure, threads
from refvl.graphs import EncoderGraphManager
from refvl.paths import DATA

SCENE, QUESTION = DATA / "pictures" / "scene.png", "What color is the circle?"


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_way_of_computing_stays_within_rounding(checkpoint):
    """Backends, batch sizes, threads, graphs and dtypes; and coarser dtypes do differ by more, so they were used."""
    matrix = measure(checkpoint)
    assert matrix.keys() == WAYS.keys()
    for way, cell in matrix.items():
        assert 0 < cell["difference"] <= cell["bound"], way
    assert matrix["float32"]["difference"] < matrix["float16"]["difference"] < matrix["bfloat16"]["difference"]


def test_the_committed_matrix_is_of_these_ways():
    committed = json.loads((DATA / "measurements" / "reproducibility_cpu.json").read_text())
    assert {"device", "torch", "transformers", "threads", "date"} <= committed.keys()
    for name in CHECKPOINTS:
        assert committed["checkpoints"][name].keys() == WAYS.keys()
        assert all(cell["difference"] <= cell["bound"] for cell in committed["checkpoints"][name].values())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_same_seed_gives_the_same_ids(checkpoint):
    """Twice in one model, once more in a model loaded anew; another seed gives others."""
    models = [refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", progress=False) for _ in range(2)]

    def sample(vlm, seed):
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 8.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 12}
        return vlm.trace(QUESTION, images=[SCENE], **options).token_ids

    ids = sample(models[0], 3)
    assert (
        sample(models[0], 3) == ids == sample(models[1], 3) and len({tuple(sample(models[0], s)) for s in range(4)}) > 1
    )


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_answer_does_not_depend_on_threads_batches_or_graphs(checkpoint):
    """The trained models are sure of it: rounding is far below the gaps between their logits."""
    vlm = refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", progress=False)
    answer = vlm.chat(QUESTION, images=[SCENE], max_new_tokens=8)
    with threads(2):
        assert vlm.chat(QUESTION, images=[SCENE], max_new_tokens=8) == answer
    request = {"prompt": QUESTION, "images": [SCENE]}
    assert vlm.chat_batch([request, request | {"images": [SCENE] * 2}], max_new_tokens=8)[0] == answer
    vlm.graphs = EncoderGraphManager(vlm.encoder, min_budget=vlm.processor.tokens_at_once, progress=False)
    assert vlm.chat(QUESTION, images=[SCENE], max_new_tokens=8) == answer
