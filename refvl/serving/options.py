"""Options of transformers' `generate`: unsupported ones raise an error before anything is encoded.

transformers checks the values of all other options itself, when it uses them.
"""

import inspect
from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from refvl.checks import check_names, check_positive_int
from refvl.language.model import CausalTextModel

GENERATE_OPTIONS = frozenset(
    {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig()), "tokenizer", "seed"}
    - {"self", "inputs", "kwargs"}
)
NO_DRAFTS = "every token comes from its own forward pass; tokens are not drafted"
HUB_CODE = "transformers would fetch its code from the hub, and refvl runs no code from there"
AS_IDS = "transformers applies it to token ids, in which media are placeholders"
NOT_IN_TEXT = "not supported by a method that returns text; use `generate`"
REFUSED: dict[str, tuple[tuple, str]] = {  # option -> the values that leave it off, and the reason
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit"), ((None,), NO_DRAFTS)),
    **dict.fromkeys(("constraints", "custom_generate", "dola_layers"), ((None,), HUB_CODE)),
    **dict.fromkeys(("force_words_ids", "penalty_alpha"), ((None,), HUB_CODE)),
    "num_beam_groups": ((1, None), HUB_CODE),
    "prefill_chunk_size": ((None,), AS_IDS),
    "use_cache": ((True, None), AS_IDS),
    "encoder_repetition_penalty": ((1, None), AS_IDS),
    "encoder_no_repeat_ngram_size": ((0, None), AS_IDS),
    "token_healing": ((False, None), AS_IDS),
}
ONLY_TEXT: dict[str, tuple[tuple, str]] = dict.fromkeys(  # refused in addition if the result is text
    ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    ((False, None), NOT_IN_TEXT),
) | {"num_return_sequences": ((1, None), NOT_IN_TEXT)}


def check_options(model: Any, method: str, options: dict, max_new_tokens: int | None) -> int:
    """Return the number of beams; raise ValueError, naming the option, for options that `method` does not support.

    If the caller does not set an option, its value in `generation_config`, or else in the
    checkpoint, counts.
    """
    if max_new_tokens is not None:
        check_positive_int(max_new_tokens, "max_new_tokens")
    check_runnable(model)
    if not options.keys() <= GENERATE_OPTIONS:
        own = [*inspect.signature(model.chat).parameters, *inspect.signature(getattr(model, method)).parameters]
        check_names(options, [*own, *sorted(GENERATE_OPTIONS)], method, ValueError)
    for name, (off, reason) in (REFUSED if method == "generate" else REFUSED | ONLY_TEXT).items():
        value = option(model.language_model, options, name)
        if value not in off:
            raise ValueError(f"{name}: expected {off[0]}, got {value!r}; {reason}")
    if is_static(model.language_model, options):
        model.family.require("static_cache")
    return count_option(model.language_model, options, "num_beams")


def is_static(language_model: CausalTextModel, options: dict) -> bool:
    """Return whether `generate` will decode with a cache of fixed size."""
    return option(language_model, options, "cache_implementation") in ALL_STATIC_CACHE_IMPLEMENTATIONS


def option(language_model: CausalTextModel, options: dict, name: str) -> Any:
    """Return the value that `generate` will use: from an argument, from `generation_config`, or from the checkpoint."""
    config = options.get("generation_config") or language_model.generation_config
    return options.get(name, getattr(config, name, None))


def count_option(language_model: CausalTextModel, options: dict, name: str) -> int:
    """Return the value of `num_beams` or `num_return_sequences`, which is 1 if nothing sets it."""
    return option(language_model, options, name) or 1


def copies_wanted(language_model: CausalTextModel, options: dict) -> int:
    """Return the number of sequences that `generate` makes for each prompt: beams, or samples."""
    return max(count_option(language_model, options, name) for name in ("num_beams", "num_return_sequences"))


def check_runnable(model: Any) -> None:
    """Raise ValueError for a model on the meta device."""
    if model.encoder.device.type == "meta":
        raise ValueError("device: a model on 'meta' can plan, but not run; load it on 'cpu' or 'cuda'")
