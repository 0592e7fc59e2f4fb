"""Draft tokens: guessed ahead and checked several in one forward. Oracle: greedy decoding without them, id for id."""

import re

import numpy as np
import pytest
import torch
from checkpoint_factory import make_checkpoint
from random_models import random_model
from transformers import LogitsProcessor, LogitsProcessorList

import refvl
from refvl.paths import DATA

PHOTO, CLIP = np.random.default_rng(1).integers(0, 256, (2, 60, 90, 3), dtype=np.uint8)[0], DATA / "clips" / "scene.mp4"
QUESTION = {"prompt": "What is it?", "images": [PHOTO], "videos": [CLIP], "max_new_tokens": 12}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    vlm = refvl.load(make_checkpoint(tmp_path_factory.mktemp("checkpoint")), device="cpu", progress=False)
    vlm.language_model.generation_config.eos_token_id = None
    return vlm


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same prompts, other weights."""
    return refvl.load(make_checkpoint(tmp_path_factory.mktemp("other"), seed=1), device="cpu", progress=False)


@pytest.fixture(scope="module", params=[0.0, 0.6])
def greedy(request, vlm):
    trace = vlm.trace(**QUESTION, pruning_rate=request.param)
    assert trace.passes == [1] * 12 and trace.accepted == 0
    return request.param, trace.token_ids


def test_prompt_lookup_changes_no_id(vlm, greedy):
    q, ids = greedy
    trace = vlm.trace(**QUESTION, pruning_rate=q, prompt_lookup_num_tokens=4)
    assert trace.token_ids == ids and sum(trace.passes) == 12


def test_a_model_accepts_its_own_drafts(vlm, greedy):
    """Its cache holds the media, at their positions: else it would draft something else."""
    q, ids = greedy
    trace = vlm.trace(**QUESTION, pruning_rate=q, assistant_model=vlm)
    assert trace.token_ids == ids
    assert trace.accepted >= 6 and len(trace.passes) == 12 - trace.accepted
    assert f"{trace.accepted} of 12 were accepted drafts" in dict(row[:2] for row in trace.rows())["decode tokens"]


def test_drafts_of_another_model_change_no_id(vlm, other, greedy):
    q, ids = greedy
    assert vlm.trace(**QUESTION, pruning_rate=q, assistant_model=other).token_ids == ids
    chunks = vlm.trace(**QUESTION, pruning_rate=q, assistant_model=other, prefill_chunk=16)
    assert chunks.token_ids == ids and max(chunks.chunks) <= 16


class Cycle(LogitsProcessor):
    """After any token 10, after 10 comes 11, then 12, then 10 again: an answer that repeats itself."""

    def __call__(self, input_ids, scores):
        following = torch.where((input_ids[:, -1:] == 10) | (input_ids[:, -1:] == 11), input_ids[:, -1:] + 1, 10)
        return torch.full_like(scores, -torch.inf).scatter(1, following, 0.0)


def test_looked_up_tokens_are_accepted_where_an_answer_repeats(vlm):
    """Once 10, 11, 12, 10 stand there, every forward accepts what it is given: drafts of 2, and its own token."""
    options = QUESTION | {"max_new_tokens": 13, "logits_processor": LogitsProcessorList([Cycle()])}
    trace = vlm.trace(**options, prompt_lookup_num_tokens=2)
    assert trace.token_ids == vlm.trace(**options).token_ids == [10, 11, 12] * 4 + [10]
    assert trace.passes[:4] == [1] * 4 and trace.passes[4:] == [3] * 3 and trace.accepted == 6


class Counting(LogitsProcessor):
    """After 10 comes 11, ... after 19 comes 10; every fifth token is 700 plus how often there was one before."""

    def __init__(self, prompt_tokens: int):
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids, scores):
        answer = input_ids[0, self.prompt_tokens :].tolist()
        following = 700 + len(answer) // 5 if len(answer) % 5 == 4 else 10 + len(answer) % 10
        return torch.full_like(scores, -torch.inf).scatter(1, torch.tensor([[following]]), 0.0)


@pytest.mark.parametrize("limit", [0, 32])
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_what_was_rejected_leaves_no_trace(name, limit, monkeypatch):
    """Oracle: logits before every token, without drafts. Qwen3.5's linear layers keep one state, which is taken back.

    Drafts are accepted in part, again and again; with limit 0 tokens to be read again have forwards of their own. The
    logits are of two orders of summation: a state with one rejected token differs a thousand times as much.
    """
    monkeypatch.setattr("refvl.language.qwen3_5.READ_AGAIN", limit)
    vlm = random_model(name)
    first = vlm.trace("What is it?", images=[PHOTO], max_new_tokens=1)
    ids = {"input_ids": first.full_ids[None], "image_embeds": first.embeds, "image_grid_thw": first.layouts}
    options = {"max_new_tokens": 30, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    options["logits_processor"] = LogitsProcessorList([Counting(len(first.input_ids))])
    plain = vlm.generate(**ids, **options)
    drafted = vlm.generate(**ids, **options, prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
    assert torch.equal(drafted.sequences, plain.sequences)
    ours, expected = torch.cat(drafted.logits), torch.cat(plain.logits)
    assert (ours - expected).abs().max() < 1e-3 * expected.abs().max()
    other = vlm.trace("What is it?", images=[PHOTO], max_new_tokens=12, assistant_model=random_model(name))
    assert other.token_ids == vlm.trace("What is it?", images=[PHOTO], max_new_tokens=12).token_ids and other.accepted


def test_streams_and_tensors(vlm):
    whole = vlm.trace(**QUESTION)
    assert "".join(vlm.chat(**QUESTION, prompt_lookup_num_tokens=4, stream=True)) == whole.text
    [image, video] = whole.patches
    ids = vlm.generate(
        whole.full_ids[None], image_embeds=whole.embeds[:1], image_grid_thw=[image.layout],
        video_embeds=whole.embeds[1:], video_grid_thw=[video.layout], second_per_grid_ts=[1.0], max_new_tokens=12,
        prompt_lookup_num_tokens=4,
    )  # fmt: skip
    assert ids[0, len(whole.full_ids) :].tolist() == whole.token_ids


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt_lookup_num_tokens": 0}, ValueError, "prompt_lookup_num_tokens: must be at least 1, got 0"),
        ({"prompt_lookup_num_tokens": 2, "num_beams": 2}, ValueError, "num_beams: must be 1 with prompt_lookup"),
        (
            {"prompt_lookup_num_tokens": 2, "cache_implementation": "static"},
            ValueError,
            "cache_implementation: must be None with prompt_lookup_num_tokens, got 'static'",
        ),
        ({"assistant_model": "a name"}, TypeError, "assistant_model: expected a VLM, as `load` returns, got str"),
    ],
)
def test_what_cannot_be_drafted_is_refused_before_anything_is_read(vlm, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        vlm.chat("What?", images=["nowhere.png"], **options)


def test_one_prompt_at_a_time(vlm, other):
    requests = [{"prompt": "One?"}, {"prompt": "Two?"}]
    drafted = vlm.chat_batch(requests, prompt_lookup_num_tokens=3, max_new_tokens=4)
    assert drafted == vlm.chat_batch(requests, max_new_tokens=4)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: expected one prompt at a time, got a batch of 2"):
        vlm.generate(torch.full((2, 3), 5), prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="assistant_model: not supported by chat_batch; use"):
        vlm.chat_batch([{"prompt": "One?"}], assistant_model=other)


def test_an_assistant_must_write_the_same_prompt(vlm, other, monkeypatch):
    monkeypatch.setattr(other.processor, "tokenize", lambda *args, **kwargs: [5, 6, 7])
    with pytest.raises(
        ValueError, match="assistant_model: expected the same prompt token ids as in this model, got different ids"
    ):
        vlm.chat("What?", assistant_model=other)
