"""The public class `VLM`, which `refvl.load` returns: it extends the pipeline in
`refvl.pipeline` with all other methods.

Each method is short and imports the code that it calls only when it runs, so a plain answer
loads only the stages.

chat, trace               one question; `trace` keeps the result of every stage (study/watch.py)
chat_batch, answer_each   many questions, decoded together (serving/batches.py)
answers, generate         prepared prompts, or tensors as in transformers (serving/batches.py, serving/tensors.py)
encode, feature_map       embeddings, as rows or as a grid (pipeline.py, serving/features.py)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from refvl.pipeline import Pipeline, Request
from refvl.trace import Record

if TYPE_CHECKING:
    from refvl.study.report import Trace


class VLM(Pipeline):
    """A vision-language model in three accessible parts: `processor`, `encoder`, `language_model`.

    There is no `to` method, because plans, graphs and caches belong to the device and dtype that
    `refvl.load` chooses. `encoder.dtype` and `language_model.dtype` name the dtype.
    """

    media_cache: Any = None  # a `MediaCache`, if `refvl.load` was given one
    adapters: Any = None  # a PEFT model, if `refvl.adapters.attach` has put its layers into this model

    def chat(
        self,
        prompt: str | Sequence[dict],
        *,
        images: Sequence = (),
        videos: Sequence = (),
        max_new_tokens: int | None = 128,
        pruning_rate: float = 0.0,
        pruning: str = "evs",
        stream: bool = False,
        allow_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        prefill_chunk: int | None = None,
        **generate_kwargs,
    ) -> str | Iterator[str]:
        """Answer a question about images and videos; decoding is greedy unless the options ask for sampling or beams.

        prompt: text, or messages with media anywhere in them, in the forms of docs/migrate.md.
        images, videos: paths, PIL images, arrays, frame lists; they come before the text,
        images first, or fill the parts of messages that have no source. max_new_tokens: the
        limit; None: as many tokens as fit into the context. pruning_rate: the share of a
        video's tokens that is dropped, in [0, 1). pruning: the method that selects these
        tokens, "evs" or "vidcom2" (`refvl.positions.PRUNERS`). allow_special_tokens: whether
        special tokens in the caller's text keep their meaning instead of being treated as plain
        text. template_kwargs: variables of the chat template, such as `tools` or
        `enable_thinking`. prefill_chunk: the number of prompt tokens to prefill at a time, so
        only the cache grows with the prompt (`refvl.serving.long_prompts`). None prefills the
        whole prompt at once. stream: whether to return a generator of text pieces. Closing or
        deleting the generator ends the generation within one token. generate_kwargs: options of
        transformers' `generate` that produce one answer in text (`num_beams`, `stop_strings`,
        `streamer`, ...), and `seed` for sampling. A temperature of 0 means greedy decoding.
        Errors: see `trace`.
        """
        beams = self.language_model.generation_config.num_beams or 1  # a checkpoint may set more
        runs_plainly = beams == 1 and self.encoder.device.type != "meta"
        request = Request(prompt, images, videos, pruning_rate, pruning, allow_special_tokens, template_kwargs)
        if generate_kwargs or stream or prefill_chunk is not None or not runs_plainly:
            return self._chat_with_options(request, max_new_tokens, prefill_chunk, stream, generate_kwargs)
        trace = self.read(request)
        self.answer(trace, max_new_tokens)
        return trace.text

    def _chat_with_options(
        self, request: Request, max_new_tokens: int | None, prefill_chunk: int | None, stream: bool, options: dict
    ) -> str | Iterator[str]:
        num_beams = self.check_options("chat", options, max_new_tokens)
        if prefill_chunk is None:
            trace = self.read(request)
        else:
            from refvl.serving.long_prompts import read_in_chunks

            trace, options = read_in_chunks(self, prefill_chunk, request, options)
        if stream:
            from refvl.serving.streaming import stream_answer

            return stream_answer(self, trace, max_new_tokens, options)
        answer = self.answer if num_beams == 1 else self.answer_with_beams
        answer(trace, max_new_tokens, **options)
        return trace.text

    def trace(
        self,
        prompt: str | Sequence[dict],
        *,
        attentions: bool = False,
        hidden_states: bool = False,
        replace: Mapping[str, Callable] | None = None,
        **request,
    ) -> "Trace":
        """Run like `chat`, but keep the result and the time of every stage. request: arguments of `chat`.

        attentions, hidden_states: keep the attention weights of all heads, and the values between
        blocks, for both the tower and the language model (see `Trace`). These two models then run
        eagerly, with unchanged weights, even if graphs are captured. For long prompts, the
        attention weights need a lot of memory: layers * heads * tokens^2.
        replace: functions by stage, such as `{"positions": f}`.
        f receives the result of the stage, and the run continues with f's return value
        (`refvl.study.interventions`). With `prefill_chunk`, pixels and embeddings are freed during
        the run. With beam search, prefill and decoding are one stage.
        Raises FileNotFoundError for missing files. Raises ValueError or TypeError, naming the argument, for media that
        cannot be read, or for placeholders that do not match the media. The same errors are raised for a pruning rate
        outside [0, 1), for a prompt longer than the context, and for options of `generate` that do not exist or do not
        lead to one answer in text.
        """
        from refvl.study import watch

        return watch.trace(self, prompt, attentions=attentions, hidden_states=hidden_states, replace=replace, **request)

    def chat_batch(self, requests: Sequence[dict], **options) -> list[str]:
        """Answer independent requests in order, as many at a time as fit (`refvl.serving.batches.chat_batch`).

        requests: one dict per request, with the arguments `prompt`, `images` and `videos` of
        `chat`. options: default arguments of `chat` for all requests, and those of
        `refvl.serving.batches.chat_batch`.
        """
        from refvl.serving import batches

        return batches.chat_batch(self, requests, **options)

    def answer_each(self, requests: Iterable[dict], common: dict, **options) -> Iterator[str | Exception]:
        """Yield the answers of `chat_batch` one by one as batches finish (`refvl.serving.batches.answer_each`)."""
        from refvl.serving import batches

        return batches.answer_each(self, requests, common, **options)

    def answers(self, traces: Sequence, **options) -> list[str]:
        """Answer prepared prompts by decoding them together (`refvl.serving.batches.answers`)."""
        from refvl.serving import batches

        return batches.answers(self, traces, **options)

    def generate(self, input_ids: Tensor, **inputs) -> Any:
        """Run transformers' `generate` on tensors: (B, L) prompts in, (B, L + new) ids out, greedy by default.

        inputs: pixels, grids or embeddings, and options (`refvl.serving.tensors.generate`).
        """
        from refvl.serving import tensors

        return tensors.generate(self, input_ids, **inputs)

    def feature_map(self, medium: Any, *, blocks: Sequence[int] | None = None) -> Any:
        """Return an image or a video as a grid of features, (t, h, w, D); a list of items gives a list of grids.

        A list of frames counts as a list of images, and a tuple of frames as a video
        (`refvl.serving.features`). blocks: the tower blocks, with -1 for the last. With blocks, the
        result is a list with one map per block, (t, H, W, E).
        """
        from refvl.serving import features

        return features.feature_map(self, medium, blocks=blocks)

    def with_stages(self, **functions: Callable) -> "VLM":
        """Return a Qwen2.5-VL that shares this model's weights but runs your functions in place of the library's.

        functions: `target_size`, `patch_rows`, `window_index`, `rotate`, `attend`, `fold`,
        `mrope`, `evs` or `replay`, with the signatures of `refvl.study.stages.Stages`.
        """
        from refvl.study import stages

        return stages.with_stages(self, functions)

    def check_options(self, method: str, options: dict, max_new_tokens: int | None) -> int:
        """Return the number of beams; raise ValueError for options that `method` does not support.

        The check runs before anything is encoded (`refvl.serving.options`).
        """
        from refvl.serving.options import check_options

        return check_options(self, method, options, max_new_tokens)

    def answer_with_beams(self, trace: Record, max_new_tokens: int | None, **options) -> None:
        """Do the same as `answer`, but time generation as one stage, because beam search calls no streamer."""
        with trace.stage("generate"):
            output = self.decode([trace], max_new_tokens, **options)
        [trace.token_ids] = output.sequences.tolist()
        trace.text = self.processor.text(trace.token_ids)

    def __repr__(self) -> str:
        """Describe the model: its parts, sizes and memory (`refvl.study.costs.overview`)."""
        from refvl.study.costs import overview

        return overview(self)
