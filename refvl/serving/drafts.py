"""Tokens that are drafted, by the prompt itself or by another model, and checked several at once."""

from collections.abc import Sequence
from typing import Any

from transformers import Cache

from refvl.language.model import CausalTextModel
from refvl.serving.chunks import new_cache, prefill
from refvl.serving.options import drafts
from refvl.trace import Trace


def prefill_for_drafts(language_model: CausalTextModel, traces: Sequence[Trace], options: dict) -> None:
    """Sets `cache` where tokens are drafted, or transformers would go back to ids, in which media are placeholders."""
    draft = drafts(language_model, options)
    if draft is None:
        return
    if len(traces) > 1:
        raise ValueError(f"{draft}: one prompt at a time, got a batch of {len(traces)}")
    [trace] = traces
    if trace.cache is None:
        trace.cache = new_cache(language_model)
        embeds, deepstack = trace.inputs_embeds[None], trace.deepstack[None]
        if embeds.shape[1] > 1:
            positions = trace.positions[:, None, :-1]
            prefill(language_model, embeds[:, :-1], deepstack[:, :-1], positions, trace.cache)


class Assistant:
    """A text model that has read the prompt, media included, where transformers takes a model that drafts from ids."""

    def __init__(self, language_model: Any, cache: Cache):
        self.language_model, self.cache = language_model, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.language_model, name)

    def generate(self, **options) -> Any:
        """transformers' `generate`, which gives the cache of a call to the next one, and to the first none."""
        return self.language_model.generate(**({"past_key_values": self.cache} | options))
