"""What a service adds to the journey in `refvl.pipeline`, which is read without it. `refvl.load` gives this `VLM`.

options.py        what `generate` is asked for, refused before anything is encoded
batches.py        chat_batch: many requests, decoded together
tensors.py        generate: transformers' call, on tensors
long_prompts.py   prefill_chunk: a prompt N tokens at a time
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from transformers import StoppingCriteriaList

from refvl import pipeline
from refvl.checks import check_flag, check_positive_int
from refvl.pipeline import Request
from refvl.serving import batches, tensors
from refvl.serving.drafts import Assistant, prefill_for_drafts
from refvl.serving.long_prompts import read_in_chunks
from refvl.serving.options import check_options, drafts
from refvl.serving.streaming import FanOut, stream_text
from refvl.study.watch import LanguageWatch, TowerWatch, keep_largest, largest_values
from refvl.trace import Trace


class VLM(pipeline.VLM):
    """The journey of `refvl.pipeline`, with options checked first, streams, chunks, drafts, batches and tensors."""

    chat_batch, answer_each, answers = batches.chat_batch, batches.answer_each, batches.answers
    generate = tensors.generate

    def chat(
        self,
        prompt: str | Sequence[dict],
        *,
        images: Sequence = (),
        videos: Sequence = (),
        max_new_tokens: int = 128,
        pruning_rate: float = 0.0,
        pruning: str = "evs",
        stream: bool = False,
        allow_special_tokens: bool = False,
        prefill_chunk: int | None = None,
        **generate_kwargs,
    ) -> str | Iterator[str]:
        """Answer a question about images and videos; greedy unless `do_sample=True` and its options are given.

        prompt: text, or messages in the transformers chat format with media anywhere in them. images, videos: paths,
        PIL images, arrays, frame lists; they come before the text, images first. pruning_rate: the share of a video's
        tokens that goes, in [0, 1). pruning: which of them, by "evs" or "vidcom2" (`refvl.positions.PRUNERS`).
        allow_special_tokens: special tokens in the caller's text count as such, instead of being plain text.
        prefill_chunk: prefill the prompt so many tokens at a time, in memory that does not grow with it but for the
        cache (`refvl.serving.chunks`); None: all at once. stream: return a generator of text pieces; closing or
        dropping it ends the generation within one token. generate_kwargs: options of transformers' `generate` that lead
        to one answer in text (`num_beams`, `stop_strings`, `streamer`, ...). With `prompt_lookup_num_tokens=n`, or
        another `VLM` with the same prompts as `assistant_model`, tokens are drafted and checked several at once, which
        changes no greedy answer. Errors: see `trace`.
        """
        check_options(
            self, "chat", generate_kwargs,
            max_new_tokens=max_new_tokens, stream=stream,
        )  # fmt: skip
        request = Request(prompt, images, videos, pruning_rate, pruning, allow_special_tokens)
        if prefill_chunk is None and drafts(self.language_model, generate_kwargs) is None:
            trace = self.read(request)
        else:
            trace = self.read_ahead(request, prefill_chunk, generate_kwargs)
        if stream:
            return self._stream(trace, max_new_tokens, generate_kwargs)
        self.answer(trace, max_new_tokens, **generate_kwargs)
        return trace.text

    def trace(
        self,
        prompt: str | Sequence[dict],
        *,
        images: Sequence = (),
        videos: Sequence = (),
        max_new_tokens: int = 128,
        pruning_rate: float = 0.0,
        pruning: str = "evs",
        allow_special_tokens: bool = False,
        attentions: bool = False,
        hidden_states: bool = False,
        prefill_chunk: int | None = None,
        **generate_kwargs,
    ) -> Trace:
        """The same run as `chat` with every stage kept, and the seconds each took.

        attentions, hidden_states: keep the weights of all heads, and what passes between blocks, of tower and language
        model (see `Trace`). Both run eagerly for it, on the same weights, also where graphs are captured; for long
        prompts that is much memory: layers * heads * tokens^2.
        With `prefill_chunk` pixels and embeddings are let go on the way. With beams, prefill and decoding are one
        stage. Raises FileNotFoundError for missing files and ValueError or TypeError, naming the argument, for media
        that cannot be read, placeholders that do not match the media, a pruning rate outside [0, 1), a prompt longer
        than the context, and options of `generate` that do not exist or do not lead to one answer in text.
        """
        num_beams = check_options(
            self, "trace", generate_kwargs,
            max_new_tokens=max_new_tokens,
        )  # fmt: skip
        wanted = {
            "attentions": check_flag(attentions, "attentions"),
            "hidden_states": check_flag(hidden_states, "hidden_states"),
        }
        request = Request(prompt, images, videos, pruning_rate, pruning, allow_special_tokens)
        if prefill_chunk is not None or drafts(self.language_model, generate_kwargs) is not None:
            if any(wanted.values()):
                raise ValueError("attentions, hidden_states: not with prefill_chunk or drafted tokens")
            trace = self.read_ahead(request, prefill_chunk, generate_kwargs)
            self.answer(trace, max_new_tokens, **generate_kwargs)
            return trace
        if not any(wanted.values()):
            with largest_values(self, with_prefill=num_beams == 1) as largest:
                trace = self.read(request)
                self.answer(trace, max_new_tokens, **generate_kwargs)
            keep_largest(trace, largest)
            return trace
        if num_beams != 1:
            raise ValueError(f"num_beams: must be 1 with attentions or hidden_states, got {num_beams}")
        tower, language = TowerWatch(self.encoder, **wanted), LanguageWatch(self.language_model, **wanted)
        watched = copy.copy(self)  # whatever else a model has, but no graphs: a replay hands nothing out
        watched.encoder, watched.language_model, watched.graphs = tower.encoder, language.language_model, None
        with largest_values(watched) as largest:
            trace = watched.read(request)
            output = watched.answer(trace, max_new_tokens, **(generate_kwargs | language.options))
        keep_largest(trace, largest)
        tower.fill(trace)
        language.fill(trace, output)
        return trace

    def read_ahead(self, request: Request, prefill_chunk: int | None, options: dict) -> Trace:
        """`read`, in chunks where that is wanted; an assistant in `options` reads the same, and its cache is kept."""
        if prefill_chunk is None:
            trace = self.read(request)
        else:
            trace = read_in_chunks(self, check_positive_int(prefill_chunk, "prefill_chunk"), request)
        if assistant := options.get("assistant_model"):
            with trace.stage("assistant"):
                read = read_in_chunks(assistant, prefill_chunk or self.max_context, request)
            if not torch.equal(read.full_ids, trace.full_ids):
                raise ValueError("assistant_model: writes this prompt in other tokens, and cannot draft for this model")
            options["assistant_model"] = Assistant(assistant.language_model, read.cache)
        prefill_for_drafts(self.language_model, [trace], options)
        return trace

    def _stream(self, trace: Trace, max_new_tokens: int, generate_kwargs: dict) -> Iterator[str]:
        streamer, criteria = generate_kwargs.pop("streamer", None), generate_kwargs.pop("stopping_criteria", None) or ()

        def run(text_streamer, stop) -> None:
            both, stops = FanOut(text_streamer, streamer), StoppingCriteriaList([*criteria, stop])
            self.decode([trace], max_new_tokens, streamer=both, stopping_criteria=stops, **generate_kwargs)

        return stream_text(run, self.processor.tokenizer)
