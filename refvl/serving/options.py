"""Options of `generate`: they are read here, and unsupported ones raise an error before anything is encoded."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from refvl import pipeline
from refvl.checks import check_flag, check_names, check_positive, check_positive_int, check_pruning_rate, printable
from refvl.language.model import CausalTextModel
from refvl.positions.pruners import find_pruner
from refvl.serving.rehearsal import check_kinds, rehearse

MAX_BEAMS = 1024  # a limit, because each beam is a copy of the prompt
LOSE_MEDIA = (  # with these options, transformers falls back on the prompt's ids, in which media are placeholders
    "prefill_chunk_size", "assistant_early_exit",
)  # fmt: skip
NEEDS_IDS = {  # options that transformers ignores for embeddings -> the value that switches each off
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "token_healing": False,
}  # fmt: skip
GENERATE_OPTIONS = frozenset(
    {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig()), "tokenizer"}
    - {"self", "inputs", "kwargs", "custom_generate"}  # the last one would run code from a checkpoint
)
DRAFTS = ("prompt_lookup_num_tokens", "assistant_model")  # options that make transformers draft tokens
NOT_ON_META = "device: a model on 'meta' can plan, but not run; load it on 'cpu' or 'cuda'"
NOT_IN_TEXT = (  # if one of these is set, the result of `generate` is not an answer in text
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
)  # fmt: skip
USUAL: dict[str, tuple] = dict.fromkeys([*LOSE_MEDIA, *DRAFTS], (None,)) | dict.fromkeys(NOT_IN_TEXT, (None, False))
USUAL |= {name: (None, off) for name, off in NEEDS_IDS.items()}
USUAL |= {"num_beams": (None, 1), "num_return_sequences": (None, 1)}  # never refused


class Wanted(NamedTuple):
    """The ways in which a call differs from a plain greedy answer."""

    num_beams: int = 1
    draft: str | None = None  # the name of the option that makes transformers draft tokens


def check_unusual(model: Any, method: str, options: dict, max_new_tokens: int, stream: bool) -> Wanted:
    """Check the options passed to `VLM.check_options`."""
    check_positive_int(max_new_tokens, "max_new_tokens")
    check_runnable(model)
    check_flag(stream, "stream")
    own = [name for name in inspect.signature(getattr(model, method)).parameters if name != "generate_kwargs"]
    check_generate_options(model.language_model, options, own)
    rehearse(model.language_model, model.processor.tokenizer, options)
    num_beams = option(model.language_model, options, "num_beams")
    if (assistant := options.get("assistant_model")) is not None:
        if method not in ("chat", "trace"):
            raise ValueError(f"assistant_model: not supported by {method}; use `chat` or `trace`")
        if not isinstance(assistant, pipeline.Pipeline):
            raise TypeError(f"assistant_model: expected a VLM, as `load` returns, got {type(assistant).__name__}")
    for name, off in (("stream", False), ("streamer", None)):
        if num_beams != 1 and (stream if name == "stream" else options.get(name)):
            raise ValueError(f"{name}: must be {off} with num_beams, because the last token decides which beam wins")
    wanted = Wanted(num_beams, draft_option(model.language_model, options))
    if wanted.draft:
        model.family.require("assistant" if wanted.draft == "assistant_model" else "drafts")
    if is_static(model.language_model, options):
        model.family.require("static_cache")
    if method == "generate":
        return wanted
    if (count := option(model.language_model, options, "num_return_sequences")) != 1:
        raise ValueError(f"num_return_sequences: expected 1 with {method}, got {count}; use `generate`")
    for name in NOT_IN_TEXT:
        if option(model.language_model, options, name):
            raise ValueError(f"{name}: not supported by {method}, which returns text; use `generate`")
    return wanted


def is_static(language_model: CausalTextModel, options: dict) -> bool:
    """Return whether `generate` will decode with a cache of fixed size."""
    return option(language_model, options, "cache_implementation") in ALL_STATIC_CACHE_IMPLEMENTATIONS


def check_generate_options(language_model: CausalTextModel, options: dict, own: Sequence[str] = ()) -> None:
    """Raise ValueError, naming the option, if transformers' `generate` lacks it, or would lose the media with it.

    own: other names that the caller accepts, used to suggest a name for a misspelt one (`image` for `images`).
    """
    if not options.keys() <= GENERATE_OPTIONS:
        check_names(options, [*own, *sorted(GENERATE_OPTIONS)], "generate", ValueError)
    check_kinds(options)
    for name in ("num_beams", "num_return_sequences"):
        if name in options and check_positive_int(options[name], name) > MAX_BEAMS:
            raise ValueError(f"{name}: must be at most {MAX_BEAMS}, got {options[name]}")
    for name in ("temperature", "top_p", "repetition_penalty"):
        if options.get(name) is not None:
            check_positive(options[name], name)
    for name in LOSE_MEDIA:
        if option(language_model, options, name) is not None:
            raise ValueError(f"{name}: not supported with media, whose placeholders transformers would read as text")
    for name, off in NEEDS_IDS.items():
        if (value := option(language_model, options, name)) not in (None, off):
            what = f"{name}: must be None or {off}, got {printable(repr(value))}"
            raise ValueError(f"{what}; transformers applies it to token ids only, and prompts here are embeddings")
    if draft := draft_option(language_model, options):
        if options.get("prompt_lookup_num_tokens") is not None:
            check_positive_int(options["prompt_lookup_num_tokens"], "prompt_lookup_num_tokens")
        for name, alone in (("num_beams", 1), ("num_return_sequences", 1), ("cache_implementation", None)):
            if (value := option(language_model, options, name)) != alone:
                raise ValueError(f"{name}: must be {alone} with {draft}, got {value!r}")
    if options.get("use_cache") not in (None, True):
        raise ValueError("use_cache: expected True, because without a cache placeholders would be read as text")


def check_pruning(pruning: str, q: float) -> float:
    """Return the rate as a float; raise an error for an unknown pruner or a rate outside [0, 1)."""
    find_pruner(pruning)
    return check_pruning_rate(q, "pruning_rate")


def option(language_model: CausalTextModel, options: dict, name: str) -> Any:
    """Return the value that `generate` will use: from an argument, from `generation_config`, or from the checkpoint.

    If nothing sets it, it is 1 for a number of beams or sequences, otherwise None.
    """
    config = options.get("generation_config") or language_model.generation_config
    value = options.get(name, getattr(config, name, None))
    return 1 if value is None and name in ("num_beams", "num_return_sequences") else value


def copies_wanted(language_model: CausalTextModel, options: dict) -> int:
    """Return the number of sequences that `generate` makes for each prompt: beams, or samples."""
    return max(option(language_model, options, name) for name in ("num_beams", "num_return_sequences"))


def check_runnable(model: Any) -> None:
    """Raise ValueError for a model on the meta device."""
    if model.encoder.device.type == "meta":
        raise ValueError(NOT_ON_META)


def draft_option(language_model: CausalTextModel, options: dict) -> str | None:
    """Return the name of the option that makes transformers draft tokens, or None if there is none."""
    return next((name for name in DRAFTS if option(language_model, options, name) is not None), None)
