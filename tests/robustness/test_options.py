"""Options of `generate`, all of them, with values of every kind, in every family: an answer, or one clear sentence.

Oracle: the traceback. An error is ours if its last frame lies in refvl and its message begins with an option's name.
"""

import inspect
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import RANDOM, random_model
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

import refvl
from refvl.model import VLM
from refvl.serving.options import GENERATE_OPTIONS

LIBRARY = str(Path(refvl.__file__).parent)
VALUES = [
    None, True, False, 0, 1, 2, -1, 10**9, 2**70, 0.5, -0.5, float("nan"), float("inf"), 1 + 2j, "x", "",
    "static", b"x", {1}, [], [1], [[1]], [10**9], [-1], ["x"], [None], {}, {"a": 1}, {(1,): 2.0}, (1, 2.0), range(3),
    object(),
    torch.ones(2), torch.tensor(1), np.ones(2), np.float32(0.5), np.int64(1), GenerationConfig(num_beams=2),
    GenerationConfig(penalty_alpha=0.6, top_k=4), LogitsProcessorList(),
]  # fmt: skip
OWN = set(inspect.signature(VLM.generate).parameters) - {"model", "input_ids", "generate_kwargs"}  # not transformers'
NAMES = sorted(GENERATE_OPTIONS | OWN)
NAMED_WITH = {  # an error about how many of these are given begins with the first of them
    f"{kind}_{name}": pixels
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos"))
    for name in ("embeds", "grid_thw")
}
IDS = torch.tensor([[5, 6, 7]])


def assert_right_or_ours(name: str, options: dict) -> None:
    """A result, or an error of refvl's that names one of the options."""
    begins = (*options, *(NAMED_WITH.get(option, option) for option in options))
    try:
        random_model(name).generate(IDS, **({"max_new_tokens": 2} | options))
    except (ValueError, TypeError) as error:
        assert traceback.extract_tb(error.__traceback__)[-1].filename.startswith(LIBRARY), (options, error)
        assert str(error).startswith(begins), (options, error)


@pytest.mark.thorough
@given(
    st.sampled_from(RANDOM), st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES), min_size=1, max_size=3)
)
@settings(max_examples=100)
def test_an_option_is_right_or_refused_by_name(name, options):
    assert_right_or_ours(name, options)


@pytest.mark.slow
@pytest.mark.parametrize("option", NAMES)
@pytest.mark.parametrize("name", RANDOM)
def test_every_option_with_every_kind_of_value(name, option):
    for value in VALUES:
        assert_right_or_ours(name, {option: value})


def test_every_option_is_tried():
    """Oracles: the signatures of both `generate`, and the settings of a `GenerationConfig`."""
    signatures = (inspect.signature(generate).parameters for generate in (GenerationMixin.generate, VLM.generate))
    left_out = set().union(vars(GenerationConfig()), *signatures) - set(NAMES)
    prompt, others = {"self", "model", "inputs", "input_ids"}, {"kwargs", "generate_kwargs"}
    assert left_out == prompt | others | {"custom_generate"}
    with pytest.raises(ValueError, match="^custom_generate: generate accepts no such argument$"):
        random_model("Qwen2.5-VL").generate(IDS, custom_generate="someone/code")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": 5}, "generation_config: expected a GenerationConfig, got int"),
        ({"do_sample": True, "forced_eos_token_id": 10**9}, "forced_eos_token_id: generate rejects 1000000000: "),
        ({"streamer": 5}, r"streamer: expected an object with put\(\), got int"),
        (
            {"dola_layers": "low"},
            "dola_layers: must be None, got 'low'; refvl never runs its code, which is on the hub",
        ),
        (
            {"generation_config": GenerationConfig(penalty_alpha=0.6)},
            r"generation_config\.penalty_alpha: must be None, got 0.6",
        ),
        ({"logits_processor": [5]}, r"logits_processor: expected a list of functions, got \[5\]"),
        ({"use_cache": 0}, "use_cache: expected True, because without a cache"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences: generate rejects 3: "),
        ({"num_beams": 1025}, "num_beams: must be at most 1024, got 1025"),
        ({"encoder_repetition_penalty": 1.4}, "encoder_repetition_penalty: must be None or 1, got 1.4; "),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size: must be None or 0, got 2; "),
        ({"token_healing": True}, "token_healing: must be None or False, got True; "),
        ({"top_k": torch.ones(2)}, "top_k: expected plain Python values, got Tensor"),
    ],
)
def test_what_transformers_would_say_late(options, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        random_model("Qwen2.5-VL").generate(IDS, **options)


def test_a_rehearsal_draws_no_random_number_and_calls_nothing_of_the_caller():
    """The same seed gives the same answer as without a rehearsal: the generator stands where it stood."""
    model, calls = random_model("Qwen2.5-VL"), []
    torch.manual_seed(0)
    before = torch.get_rng_state()
    options = {"do_sample": True, "top_k": 5, "logits_processor": [lambda ids, scores: calls.append(1)]}
    model.check_options("chat", options, 4)
    assert torch.equal(before, torch.get_rng_state()) and not calls
