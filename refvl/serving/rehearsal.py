"""Rehearse options of `generate` before anything is encoded: transformers runs them on a model with one layer.

transformers checks options only when it needs them, in some cases after the prompt has been read, and raises errors of
all kinds. Here its `generate` produces two tokens with the same options, vocabulary and defaults on a model that is
eight values wide.
"""

import copy
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from refvl.checks import printable
from refvl.language.model import CausalTextModel, generate

HUB_CODE = ("constraints", "dola_layers", "force_words_ids", "num_beam_groups", "penalty_alpha")  # code on the hub
CALLED = ("logits_processor", "stopping_criteria")  # lists of functions, which are checked but not called here
FUNCTIONS = {"streamer": ("put", "end"), "prefix_allowed_tokens_fn": ("__call__",)}  # objects that need these methods
FEW = 4  # this many beams or sequences are enough for a rehearsal


def rehearse(language_model: CausalTextModel, tokenizer: Any, options: dict) -> None:
    """Raise ValueError, naming the option, if transformers' `generate` would fail with `options`."""
    given = options.get("generation_config")
    for name in HUB_CODE:
        value = options.get(name, getattr(given or language_model.generation_config, name, None))
        if value is not None and not (name == "num_beam_groups" and value == 1):
            setting = f"generation_config.{name}" if given and name not in options else name
            raise ValueError(
                f"{setting}: must be None, got {printable(repr(value))}; refvl never runs its code, which is on the hub"
            )
    acting = (*CALLED, *FUNCTIONS)
    tried = {name: value for name, value in options.items() if name not in acting}
    if (error := _fails(language_model, tokenizer, tried)) is None:
        return
    for name in tried:
        if _fails(language_model, tokenizer, {other: tried[other] for other in tried if other != name}) is None:
            raise ValueError(f"{name}: generate rejects {printable(repr(options[name]))}: {_words(error)}") from error
    names = ", ".join(tried) or "generation_config"
    raise ValueError(f"{names}: generate rejects this combination: {_words(error)}") from error


def check_kinds(options: dict) -> None:
    """Raise errors for arrays, and for values of the wrong type in options that call the caller's code."""
    for name, value in options.items():
        if getattr(value, "ndim", 0) and not name.startswith("negative_prompt"):
            raise TypeError(f"{name}: expected plain Python values, got {type(value).__name__}")
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(config := given.get("generation_config", GenerationConfig()), GenerationConfig):
        raise TypeError(f"generation_config: expected a GenerationConfig, got {type(config).__name__}")
    for name in FUNCTIONS.keys() & given:
        if missing := [method for method in FUNCTIONS[name] if not callable(getattr(given[name], method, None))]:
            raise TypeError(f"{name}: expected an object with {missing[0]}(), got {type(given[name]).__name__}")
    for name in given.keys() & set(CALLED):
        if not isinstance(given[name], Sequence) or not all(map(callable, given[name])):
            raise TypeError(f"{name}: expected a list of functions, got {printable(repr(given[name]))}")


def _fails(language_model: CausalTextModel, tokenizer: Any, options: dict) -> Exception | None:
    """Return the exception that transformers raises on the narrow model, or None."""
    eager = language_model.config._attn_implementation == "eager"
    actor = copy.copy(_narrow_model(language_model.config.vocab_size, "eager" if eager else "sdpa"))
    actor.generation_config = language_model.generation_config
    options = {"tokenizer": tokenizer} | options
    for name in ("num_beams", "num_return_sequences"):
        if isinstance(options.get(name), int):
            options[name] = min(options[name], FEW)
    if options.get("assistant_model") is not None:
        options["assistant_model"] = actor
    ids = torch.zeros(1, 2, dtype=torch.int64)
    if not any(options.get(name) is not None for name in ("prompt_lookup_num_tokens", "assistant_model")):
        options["inputs_embeds"] = actor.get_input_embeddings()(ids)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            generate(actor, ids, torch.arange(2)[None], torch.ones_like(ids), max_new_tokens=2, **options)
    except Exception as error:  # values of the wrong type or size cause errors of all kinds
        return error
    return None


@lru_cache(maxsize=4)
def _narrow_model(vocab_size: int, attention: str) -> Any:
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    config = LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=True, **sizes | {"attn_implementation": attention})
    with torch.random.fork_rng(devices=[]):
        return LlamaForCausalLM(config).eval()


def _words(error: Exception) -> str:
    return printable(error) or type(error).__name__
