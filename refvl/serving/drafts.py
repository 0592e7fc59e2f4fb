"""Prompts that are prefilled before `generate` begins, in chunks or for drafted tokens.

Tokens are drafted from the prompt itself or by a second model; one forward pass then checks several at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from refvl.checks import check_positive_int
from refvl.language.model import CausalTextModel
from refvl.pipeline import Request
from refvl.serving.long_prompts import prefill, read_in_chunks
from refvl.serving.options import copies_wanted, draft_option
from refvl.trace import Record


def read_ahead(model: Any, request: Request, prefill_chunk: int | None, options: dict) -> tuple[Record, dict]:
    """Read a prompt, in chunks if requested; return its trace, and `options` with the caches of model and assistant.

    Raises ValueError if the assistant tokenises the prompt differently.
    """
    if prefill_chunk is not None:
        model.family.require("chunks")
        if copies_wanted(model.language_model, options) > 1:
            model.family.require("chunked_beams")
    if prefill_chunk is None:
        trace = model.read(request)
    else:
        trace = read_in_chunks(model, check_positive_int(prefill_chunk, "prefill_chunk"), request)
    if assistant := options.get("assistant_model"):
        with trace.stage("assistant"):
            read = read_in_chunks(assistant, prefill_chunk or model.max_context, request)
        if not torch.equal(read.full_ids, trace.full_ids):
            raise ValueError("assistant_model: expected the same prompt token ids as in this model, got different ids")
        options = options | {"assistant_model": Assistant(assistant.language_model, read.cache)}
    return trace, with_cache(model.language_model, [trace], options)


def with_cache(language_model: CausalTextModel, traces: Sequence[Record], options: dict) -> dict:
    """Add `past_key_values` to `options` if the prompt was read in chunks or the answer uses drafts.

    Drafts need the cache, because transformers would otherwise fall back on the ids, in which media are placeholders.
    Raises ValueError if tokens would be drafted for several prompts at once.
    """
    draft = draft_option(language_model, options)
    if draft is not None and len(traces) > 1:
        raise ValueError(f"{draft}: expected one prompt at a time, got a batch of {len(traces)}")
    if draft is None and traces[0].cache is None:
        return options
    [trace] = traces
    cache: Any = trace.cache or _prefilled(language_model, trace)
    trace.cache = None  # from now on, the cache grows with the answer
    copies = copies_wanted(language_model, options)
    if copies > 1:  # `batch_repeat_interleave` does not support linear attention
        cache.reorder_cache(torch.zeros(copies, dtype=torch.int64))
    return options | {"past_key_values": cache}


def _prefilled(language_model: CausalTextModel, trace: Record) -> Cache:
    """Return the keys and values of all tokens except the last, computed in one forward pass."""
    cache = language_model.cache_class(config=language_model.config)
    embeds = trace.inputs_embeds[None, :-1]
    if embeds.shape[1]:
        prefill(language_model, embeds, trace.deepstack[None, :-1], trace.positions[:, None, :-1], cache)
    return cache


class Assistant:
    """A text model that has already read the prompt with its media; transformers would pass it the ids alone."""

    def __init__(self, language_model: Any, cache: Any):
        self.language_model, self.cache = language_model, cache
        cache.activate_past_recording()  # transformers does the same for its own caches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.language_model, name)

    def generate(self, **options) -> Any:
        """Call transformers' `generate`; add the prompt's cache to the first call, which has none."""
        return self.language_model.generate(**({"past_key_values": self.cache} | options))
