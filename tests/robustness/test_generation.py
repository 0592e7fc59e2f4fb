"""Hostile options and tensors at VLM.chat and VLM.generate: one sentence that names the argument;
oracle: transformers.

Streams: whatever the reader does, the thread behind a stream ends within a token.
"""

import gc
import re
import threading

import pytest
import torch
from checkpoint_factory import transformers_model
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

import refvl
from refvl.paths import DATA

PHOTO = DATA / "pictures" / "coffee.jpg"
QUESTION = {"prompt": "What is it?", "images": [PHOTO]}
IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def vlm(checkpoint):
    vlm = refvl.load(checkpoint, device="cpu", progress=False)
    vlm.language_model.generation_config.eos_token_id = None  # answers as long as asked
    return vlm


@pytest.fixture(scope="module")
def oracle(checkpoint):
    model = transformers_model(checkpoint)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def tensors(vlm):
    """A question about an image as `VLM.generate` takes it."""
    trace = vlm.trace(**QUESTION, max_new_tokens=1)
    [patches] = trace.patches
    grid = torch.tensor([patches.layout])
    return {"input_ids": trace.full_ids[None], "pixel_values": patches.pixel_values, "image_grid_thw": grid}


def theirs(vlm, oracle, tensors, **options):
    types = (tensors["input_ids"] == vlm.token_ids["image"]).int()
    return oracle.generate(mm_token_type_ids=types, **tensors, **({"do_sample": False} | options))


# --- options of generate ----------------------------------------------------------------------------------------------

WORKING = {
    "several beams": {"num_beams": 4, "num_return_sequences": 3},
    "a config": {"generation_config": GenerationConfig(num_beams=2, pad_token_id=0)},
    "a static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("options", WORKING.values(), ids=WORKING.keys())
def test_options_give_the_ids_of_transformers(vlm, oracle, tensors, options):
    ours = vlm.generate(**tensors, max_new_tokens=8, **options)
    assert torch.equal(ours, theirs(vlm, oracle, tensors, max_new_tokens=8, **options))


def test_beams_answer_in_text(vlm, oracle, tensors):
    trace = vlm.trace(**QUESTION, max_new_tokens=8, num_beams=3)
    ids = theirs(vlm, oracle, tensors, max_new_tokens=8, num_beams=3)
    assert trace.token_ids == ids[0, tensors["input_ids"].shape[1] :].tolist()
    assert vlm.chat(**QUESTION, max_new_tokens=8, num_beams=3) == trace.text
    assert "generate" in trace.seconds
    assert "prefill" not in trace.seconds
    assert trace.ttft == sum(trace.seconds.values())
    vlm.language_model.generation_config.num_beams = 3  # as a checkpoint may ask
    try:
        assert vlm.chat(**QUESTION, max_new_tokens=8) == trace.text
    finally:
        vlm.language_model.generation_config.num_beams = None


def test_stop_strings_end_an_answer(vlm):
    whole = vlm.chat(**QUESTION, max_new_tokens=12)
    stop = whole[len(whole) // 2 :][:2]
    answer = vlm.chat(**QUESTION, max_new_tokens=12, stop_strings=[stop])
    assert stop in answer and len(answer) < len(whole) and whole.startswith(answer)
    assert "".join(vlm.chat(**QUESTION, max_new_tokens=12, stop_strings=[stop], stream=True)) == answer


def test_options_as_openai_and_vllm_name_them(vlm):
    """A temperature of 0 is greedy, `seed` is `torch.manual_seed`, and no limit means the context's."""
    greedy = vlm.trace(**QUESTION, max_new_tokens=6)
    assert vlm.trace(**QUESTION, max_new_tokens=6, temperature=0, do_sample=True).token_ids == greedy.token_ids
    torch.manual_seed(7)
    sampled = vlm.trace(**QUESTION, max_new_tokens=6, do_sample=True, temperature=5.0).token_ids
    again = vlm.trace(**QUESTION, max_new_tokens=6, do_sample=True, temperature=5.0, seed=7).token_ids
    assert again == sampled != greedy.token_ids
    every = list(range(vlm.language_model.config.vocab_size))
    named = {"max_new_tokens": None, "eos_token_id": every, "template_kwargs": {"add_vision_id": True}}
    assert "Picture 1: " in vlm.processor.tokenizer.decode(vlm.trace(**QUESTION, **named).full_ids)


class Recorder(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_streamer_of_the_caller_is_told_every_token(vlm, stream):
    want, recorder = vlm.trace(**QUESTION, max_new_tokens=6), Recorder()
    answer = vlm.chat(**QUESTION, max_new_tokens=6, streamer=recorder, stream=stream)
    assert (answer if isinstance(answer, str) else "".join(answer)) == want.text
    assert torch.cat(recorder.values[1:]).tolist() == want.token_ids and recorder.ended == 1


REFUSED = {  # what chat refuses; those without "chat" are refused by generate as well
    "not_an_option: chat accepts no such argument": {"not_an_option": 1},
    "image: chat accepts no such argument; did you mean 'images'": {"image": PHOTO},
    "system: chat accepts no such argument; write a message with role 'system'": {"system": "Be brief."},
    "tools: chat accepts no such argument; write template_kwargs={...}": {"tools": []},
    "prompt_lookup_num_tokens: expected None, got 3; every token comes": {"prompt_lookup_num_tokens": 3},
    "assistant_model: expected None, got ": {"assistant_model": object()},
    "dola_layers: expected None, got 'low'; transformers would fetch its code": {"dola_layers": "low"},
    "num_beam_groups: expected 1, got 2; transformers would fetch": {"num_beam_groups": 2},
    "penalty_alpha: expected None, got 0.6": {"generation_config": GenerationConfig(penalty_alpha=0.6)},
    "use_cache: expected True, got False": {"use_cache": False},
}
NOT_IN_TEXT = {
    "num_return_sequences: expected 1, got 3": {
        "generation_config": GenerationConfig(num_return_sequences=3, do_sample=True)
    },
    "return_dict_in_generate: expected False, got True; not supported": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize(("message", "options"), (REFUSED | NOT_IN_TEXT).items())
def test_unsupported_options_are_refused_before_anything_is_read(vlm, message, options):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        vlm.chat("What?", images=["nowhere.png"], **options)
    if message in REFUSED and "image" not in options:
        message = message.replace("chat accepts", "generate accepts")
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            vlm.generate(IDS, **options)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_abandoned_streams_leave_no_thread(vlm):
    """Twenty readers that close, drop, or fail after a piece: each answer would take 1900 tokens
    more."""
    before = set(threading.enumerate())
    for i in range(20):
        pieces = vlm.chat("Say much.", stream=True, max_new_tokens=1900)
        if i % 4 == 3:  # dropped before it began
            del pieces
            continue
        next(pieces)
        if i % 4 == 0:
            pieces.close()
        elif i % 4 == 1:
            del pieces
        else:
            with pytest.raises(KeyError):
                for _ in pieces:
                    raise KeyError
            del pieces
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_a_stopping_criterion_of_the_caller_counts_in_a_stream(vlm):
    stop_at_once = [lambda ids, scores, **kwargs: torch.ones(len(ids), dtype=torch.bool)]
    pieces = list(vlm.chat("Hi", stream=True, max_new_tokens=50, stopping_criteria=stop_at_once))
    assert "".join(pieces) == vlm.chat("Hi", max_new_tokens=1)


def test_a_failure_while_streaming_reaches_the_reader(vlm, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(vlm.language_model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(vlm.chat("Hi", stream=True))


# --- tensors ----------------------------------------------------------------------------------------------------------

BAD_TENSORS = {  # what the error says -> what is changed in the arguments of a question about an image
    "input_ids: expected token ids from 0 to 1087, got -1": {"input_ids": lambda ids: ids.clone().fill_(-1)},
    "second_per_grid_ts: expected one number for each of 0": {"second_per_grid_ts": lambda ids: [1.0]},
    "encode: the embeddings of item 0 are not finite": {"pixel_values": lambda rows: rows * float("nan")},
}


@pytest.mark.parametrize(("message", "change"), BAD_TENSORS.items())
def test_bad_tensors_are_named(vlm, tensors, message, change):
    [(name, function)] = change.items()
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        vlm.generate(**tensors | {name: function(tensors.get(name, tensors["input_ids"]))}, max_new_tokens=1)


def test_left_padding_may_hold_any_id(vlm):
    """Labels mark padding with -100; it is never looked up."""
    ids, mask = torch.tensor([[-100, 5, 6, 7]]), torch.tensor([[0, 1, 1, 1]])
    want = vlm.generate(IDS, max_new_tokens=4)
    assert vlm.generate(ids, attention_mask=mask, max_new_tokens=4)[:, 1:].tolist() == want.tolist()
