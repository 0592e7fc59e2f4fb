"""The `VLM` that `refvl.load` returns: the path of `refvl.pipeline`, with features for daily use.

options.py        the options of `generate`, checked before anything is encoded (rehearsal.py tries them)
long_prompts.py   prefill_chunk: prefill a prompt N tokens at a time
drafts.py         drafted tokens, several of which are checked at once
batches.py        chat_batch: many requests, decoded together
tensors.py        `generate`, called on tensors as in transformers
features.py       feature_map: an image as a grid of features

`refvl.study.watch` adds `trace`: the same run with the result of every stage kept.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from transformers import StoppingCriteriaList

from refvl import pipeline
from refvl.checks import check_positive_int
from refvl.pipeline import Request
from refvl.serving import batches, features, tensors
from refvl.serving.drafts import read_ahead
from refvl.serving.options import NOT_ON_META, USUAL, Wanted, check_unusual, is_static
from refvl.serving.streaming import FanOut, of_a_thread, stream_text
from refvl.trace import Record


class VLM(pipeline.VLM):
    """The path of `refvl.pipeline`, with options checked first, streams, chunks, drafts, batches and tensors."""

    provenance: Sequence = ()  # the `Source`s, i.e. the files that determine the model; empty for a config alone
    media_cache: Any = None  # a `MediaCache`, if `refvl.load` was given one
    adapters: Any = None  # a PEFT model, if `refvl.adapters.attach` has put its layers into these parts
    chat_batch, answer_each, answers = batches.chat_batch, batches.answer_each, batches.answers
    generate = tensors.generate
    feature_map: ClassVar[Callable] = features.feature_map  # type: ignore[has-type]  # mypy reads it too early

    def trace(self, prompt: str | Sequence[dict], **request) -> Any:
        """Answer like `chat`, and return the result of every stage (`refvl.study.watch.trace`)."""
        from refvl.study import watch

        return watch.trace(self, prompt, **request)

    def __repr__(self) -> str:
        from refvl.study.costs import overview

        return overview(self)

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
        """Answer a question about images and videos; decoding is greedy unless the options ask for sampling or beams.

        prompt: text, or messages in the transformers chat format with media anywhere in them. images, videos: paths,
        PIL images, arrays, frame lists; they come before the text, images first. pruning_rate: the share of a video's
        tokens that is dropped, in [0, 1). pruning: the method that selects these tokens, "evs" or "vidcom2"
        (`refvl.positions.PRUNERS`). allow_special_tokens: whether special tokens in the caller's text keep their
        meaning instead of being treated as plain text. prefill_chunk: the number of prompt tokens to prefill at a time,
        so only the cache grows with the prompt (`refvl.serving.long_prompts`). None prefills the whole prompt at once.
        stream: whether to return a generator of text pieces. Closing or deleting the generator ends the generation
        within one token.
        generate_kwargs: options of transformers' `generate` that produce one answer in text (`num_beams`,
        `stop_strings`, `streamer`, ...). With `prompt_lookup_num_tokens=n`, or a second `VLM` with the same prompts as
        `assistant_model`, tokens are drafted and several are checked at once. This never changes a greedy answer.
        Errors: see `trace`.
        """
        wanted = self.check_options("chat", generate_kwargs, max_new_tokens, stream)
        request = Request(prompt, images, videos, pruning_rate, pruning, allow_special_tokens)
        if prefill_chunk is None and wanted.draft is None:
            trace = self.read(request)
        else:
            trace, generate_kwargs = read_ahead(self, request, prefill_chunk, generate_kwargs)
        if stream:
            return self._stream(trace, max_new_tokens, generate_kwargs)
        answer = self.answer if wanted.num_beams == 1 else self.answer_with_beams
        answer(trace, max_new_tokens, **generate_kwargs)
        return trace.text

    def check_options(self, method: str, options: dict, max_new_tokens: int, stream: bool = False) -> Wanted:
        """Raise ValueError for options that do not exist or whose results `method` cannot return.

        This happens before anything is encoded.
        """
        check_positive_int(max_new_tokens, "max_new_tokens")
        if self.encoder.device.type == "meta":
            raise ValueError(NOT_ON_META)
        own = self.language_model.generation_config  # the defaults, for options that the caller does not set
        if not options and stream is False and all(getattr(own, name, None) in usual for name, usual in USUAL.items()):
            return Wanted()
        return check_unusual(self, method, options, stream)

    def answer_with_beams(self, trace: Record, max_new_tokens: int, **options) -> None:
        """Answer like `answer`, but time it as one stage, because transformers does not call a streamer for beams."""
        with trace.stage("generate"):
            output = self.decode([trace], max_new_tokens, **options)
        [trace.token_ids] = output.sequences.tolist()
        trace.text = self.processor.text(trace.token_ids)

    def _stream(self, trace: Record, max_new_tokens: int, options: dict) -> Iterator[str]:
        listener = options.pop("streamer", None)
        criteria = options.pop("stopping_criteria", None) or ()
        options = (of_a_thread() if is_static(self.language_model, options) else {}) | options

        def run(text_streamer, stop) -> None:
            both = FanOut(text_streamer, listener)
            stops = StoppingCriteriaList([*criteria, stop])
            self.decode([trace], max_new_tokens, streamer=both, stopping_criteria=stops, **options)

        return stream_text(run, self.processor.tokenizer)
