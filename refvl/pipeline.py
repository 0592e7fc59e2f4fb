"""OPEN FIRST. The whole path, as named calls; every other file is one of these rooms.

decode media      pixels/media       file, array -> image, sampled frames
patchify          pixels/            -> patch rows (N, C*Tp*P*P) and their layout, e.g. the grid (t, h, w)
plan              encoders/          layout -> window order, rotary angles, segment lengths (CPU)
encode            encoders/, graphs/ rows -> embeddings (M, D)
prune             positions/pruners  which video tokens stay: EVS or VidCom2
merge             merge.py           embeddings into the prompt's placeholders
positions         positions/mrope    (3, L) for every token, restricted to what stays
prefill, decode   language/          embeddings + positions -> token ids -> text
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PretrainedConfig, StoppingCriteriaList
from transformers.generation.utils import GenerateOutput

from refvl import families
from refvl.checks import (
    as_seconds,
    check_flag,
    check_pixel_rows,
    check_positive_int,
    check_prompts,
    check_pruning_rate,
    check_shape,
    check_values,
)
from refvl.contracts import Encoder, Processor
from refvl.encoders.tower import send_rows
from refvl.graphs import DualPathGraphManager, EncoderGraphManager
from refvl.language.chunks import MediumRows, prefill_in_chunks
from refvl.language.model import Assistant, CausalTextModel, check_generate_options, drafts, generate, option
from refvl.language.streaming import FanOut, stream_text
from refvl.merge import MergedMedia, find_media_spans, keep_in_prompt, left_pad, merge_embeddings
from refvl.pixels.patches import Levels
from refvl.positions import find_pruner, restrict_positions
from refvl.processors.chat import Patches
from refvl.trace import TokenTimer, Trace
from refvl.watch import LanguageWatch, TowerWatch

MAX_PATCHES_PER_FORWARD = 2**16  # longer encodes run in several forwards, with a progress bar
BATCH_TOKENS = 2**14  # requests decoded together, padding and answers included
NOT_IN_TEXT = (  # options of `generate` whose results an answer in text cannot hold
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
)  # fmt: skip


class VLM:
    """A vision-language model in three reachable parts: `processor`, `encoder`, `language_model`."""

    def __init__(
        self, config: PretrainedConfig, processor: Processor, encoder: Encoder, language_model: CausalTextModel
    ):
        self.config, self.processor, self.encoder, self.language_model = config, processor, encoder, language_model
        self.graphs: EncoderGraphManager | DualPathGraphManager | None = None  # when set, it encodes, not the encoder
        self.adapters: Any = None  # PEFT's model, once `refvl.adapters.attach` has put layers in place of these parts'

    def __repr__(self) -> str:
        """Family, device and dtype; what the parts are, and how large."""
        text = self.language_model.config
        sizes = f"{text.num_hidden_layers} layers of {text.hidden_size}, vocabulary of {text.vocab_size}"
        lines = [
            f"VLM of the family {self.family.name} on {self.device}, {self.encoder.dtype}",
            f"  encoder         {type(self.encoder).__name__}, {_parameters(self.encoder)}",
            f"  language_model  {type(self.language_model).__name__}, {sizes}, {_parameters(self.language_model)}",
            f"  processor       {type(self.processor).__name__}",
            f"  graphs          {type(self.graphs).__name__ if self.graphs else 'none: the encoder runs eagerly'}",
        ]
        if self.adapters is not None:
            lines.append(f"  adapters        {', '.join(self.adapters.peft_config)}")
        return "\n".join(lines)

    @property
    def family(self) -> families.Family:
        return families.find_family(self.config)

    @property
    def token_ids(self) -> dict[str, int]:
        """The placeholders' ids: {"image": ..., "video": ...}."""
        return self.processor.token_ids

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    @property
    def max_context(self) -> int:
        return self.language_model.config.max_position_embeddings

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
        cache (`refvl.language.chunks`); None: all at once. stream: return a generator of text pieces; closing or
        dropping it ends the generation within one token. generate_kwargs: options of transformers' `generate` that lead
        to one answer in text (`num_beams`, `stop_strings`, `streamer`, ...). With `prompt_lookup_num_tokens=n`, or
        another `VLM` with the same prompts as `assistant_model`, tokens are drafted and checked several at once, which
        changes no greedy answer. Errors: see `trace`.
        """
        streams = check_flag(stream, "stream")
        self._check_options("chat", generate_kwargs | {"stream": stream})
        request = prompt, images, videos, pruning_rate, pruning, allow_special_tokens
        trace = self._read(generate_kwargs, prefill_chunk, *request)
        if streams:
            return self._stream(trace, max_new_tokens, generate_kwargs)
        self._answer(trace, max_new_tokens, **generate_kwargs)
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
        num_beams = self._check_options("trace", generate_kwargs)
        wanted = {
            "attentions": check_flag(attentions, "attentions"),
            "hidden_states": check_flag(hidden_states, "hidden_states"),
        }
        request = prompt, images, videos, pruning_rate, pruning, allow_special_tokens
        if not any(wanted.values()):
            trace = self._read(generate_kwargs, prefill_chunk, *request, is_measured=True)
            self._answer(trace, max_new_tokens, **generate_kwargs)
            return trace
        if num_beams != 1:
            raise ValueError(f"num_beams: must be 1 with attentions or hidden_states, got {num_beams}")
        if prefill_chunk is not None or drafts(self.language_model, generate_kwargs) is not None:
            raise ValueError("attentions, hidden_states: not with prefill_chunk or drafted tokens")
        tower, language = TowerWatch(self.encoder, **wanted), LanguageWatch(self.language_model, **wanted)
        watched = copy.copy(self)  # whatever else a model has, but no graphs: a replay hands nothing out
        watched.encoder, watched.language_model, watched.graphs = tower.encoder, language.language_model, None
        trace = watched._prefill_inputs(*request, is_measured=True)
        output = watched._answer(trace, max_new_tokens, **(generate_kwargs | language.options))
        tower.fill(trace)
        language.fill(trace, output)
        return trace

    def _answer(self, trace: Trace, max_new_tokens: int, **generate_kwargs) -> GenerateOutput:
        """Generate, and tell the trace tokens, text and seconds."""
        if option(self.language_model, generate_kwargs, "num_beams") == 1:
            timer = TokenTimer(self.device)
            generate_kwargs["streamer"] = FanOut(timer, generate_kwargs.get("streamer"))
            with trace.watch("prefill", self.language_model):
                output = self._generate([trace], max_new_tokens, **generate_kwargs)
            prefill, decode = timer.prefill_and_decode()
            trace.seconds["prefill"] = trace.seconds.get("prefill", 0.0) + prefill
            trace.seconds["decode tokens"], trace.passes = decode, timer.tokens[1:]
        else:  # transformers tells no streamer of beams
            with trace.stage("generate"):
                output = self._generate([trace], max_new_tokens, **generate_kwargs)
        [trace.token_ids] = output.sequences.tolist()
        trace.text = self.processor.text(trace.token_ids)
        return output

    def chat_batch(
        self,
        requests: Sequence[dict],
        *,
        max_new_tokens: int = 128,
        pruning_rate: float = 0.0,
        pruning: str = "evs",
        allow_special_tokens: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        return_exceptions: bool = False,
        progress: bool = True,
        **generate_kwargs,
    ) -> list:
        """Answers to independent requests, in order, decoded together with left padding.

        requests: the arguments `prompt`, `images`, `videos` of `chat`, one dict each, and where they differ from those
        given here `max_new_tokens` and `pruning_rate`. batch_tokens: requests that follow each other are decoded
        together while their number times the longest, answer included, is not more; a longer one runs alone.
        return_exceptions: what goes wrong with a request stands in the place of its answer, and the others go on;
        otherwise the first error is raised. progress: a bar, after two seconds. Raises ValueError or TypeError naming
        `requests[i]` for other keys.

        Padding and batch change an answer only where the best two tokens are nearer than rounding. A batch ends with
        its longest answer, and the next one begins then: for many users, or a steady load, take a serving engine,
        which lets requests come and go at every token (`refvl.handover` gives it what was encoded here).
        """
        self._check_options("chat_batch", generate_kwargs)
        check_positive_int(batch_tokens, "batch_tokens")
        _check_requests(requests, check_each=not check_flag(return_exceptions, "return_exceptions"))
        common = {"max_new_tokens": max_new_tokens, "pruning_rate": pruning_rate, "pruning": pruning}
        common["allow_special_tokens"] = allow_special_tokens
        answers = list[str | Exception]()
        with tqdm(total=len(requests), desc="answer", delay=2, leave=False, disable=not progress) as bar:
            for answer in self.answer_each(requests, common, batch_tokens, **generate_kwargs):
                if isinstance(answer, Exception) and not return_exceptions:
                    answer.add_note(f"in requests[{len(answers)}]")
                    raise answer
                answers.append(answer)
                bar.update()
        return answers

    def answer_each(
        self, requests: Iterable[dict | Exception], common: dict, batch_tokens: int = BATCH_TOKENS, **generate_kwargs
    ) -> Iterator[str | Exception]:
        """What `chat_batch` returns, one by one as batches are done.

        requests: an error among them, where one could not be read, is its own answer. common: the arguments of requests
        that have none of their own.
        """
        check_positive_int(common["max_new_tokens"], "max_new_tokens")
        check_pruning_rate(common["pruning_rate"], "pruning_rate")
        find_pruner(common.get("pruning", "evs"))
        waiting, limits = list[Trace | Exception](), list[int]()
        same_limit = option(self.language_model, generate_kwargs, "num_beams") > 1  # with another, other beams may win
        alone = drafts(self.language_model, generate_kwargs) is not None
        for request in requests:
            made, limit = self._prepare(request, common)
            longest = max([len(t.input_ids) for t in [*waiting, made] if isinstance(t, Trace)], default=0)
            together = (len(waiting) + 1) * (longest + max([limit, *limits]))
            if waiting and (alone or together > batch_tokens or (same_limit and {limit} != set(limits))):
                yield from self._answers_or_errors(waiting, limits, **generate_kwargs)
                waiting, limits = [], []
            waiting.append(made)
            limits.append(limit)
        yield from self._answers_or_errors(waiting, limits, **generate_kwargs)

    def _prepare(self, request: dict | Exception, common: dict) -> tuple[Trace | Exception, int]:
        """A request's trace, with no more than `answers` reads, or what went wrong; and its limit of new tokens."""
        if isinstance(request, Exception):
            return request, 1
        try:
            _check_request(request, "request")
            request = common | request
            limit = check_positive_int(request.pop("max_new_tokens"), "max_new_tokens")
            trace = self._prefill_inputs(**request)
        except Exception as error:  # whatever a decoder raises, a lack of memory too
            clear_frames(error.__traceback__)
            return error, 1
        ready = Trace(input_ids=trace.input_ids, inputs_embeds=trace.inputs_embeds, positions=trace.positions)
        ready.deepstack = trace.deepstack
        return ready, limit

    def _answers_or_errors(
        self, made: list[Trace | Exception], limits: list[int], **generate_kwargs
    ) -> Iterator[str | Exception]:
        """An answer, cut at its own limit, for every trace; a batch that fails is tried one by one."""
        traces = {i: trace for i, trace in enumerate(made) if isinstance(trace, Trace)}
        answers = dict[int, str]()
        try:
            if traces:
                most = max(limits[i] for i in traces)
                ids = self._generate(list(traces.values()), most, **generate_kwargs).sequences.tolist()
                answers = {i: self.processor.text(row[: limits[i]]) for i, row in zip(traces, ids, strict=True)}
        except Exception as error:
            clear_frames(error.__traceback__)  # which hold the batch's tensors
            if len(made) == 1:
                made = [error]
        for i, trace in enumerate(made):
            if isinstance(trace, Exception):
                yield trace
            elif i in answers:
                yield answers[i]
            else:
                yield from self._answers_or_errors([trace], [limits[i]], **generate_kwargs)

    def answers(self, traces: Sequence[Trace], *, max_new_tokens: int = 128, **generate_kwargs) -> list[str]:
        """Answers to prompts that are ready, decoded together: to see what a trace's positions do, change them first.

        Only input_ids, inputs_embeds, deepstack and positions of each trace are read.
        """
        self._check_options("answers", generate_kwargs)
        if not traces:
            return []
        ids = self._generate(list(traces), max_new_tokens, **generate_kwargs).sequences
        return [self.processor.text(answer) for answer in ids.tolist()]

    def _check_options(self, method: str, options: dict) -> int:
        """The number of beams; refuses, before anything is encoded, what does not exist or `method` cannot return."""
        own = [name for name in inspect.signature(getattr(self, method)).parameters if name != "generate_kwargs"]
        check_generate_options(self.language_model, options, own)
        num_beams = option(self.language_model, options, "num_beams")
        if (assistant := options.get("assistant_model")) is not None:
            if method not in ("chat", "trace"):
                raise ValueError(f"assistant_model: {method} has no media for it to read; `chat` and `trace` take one")
            if not isinstance(assistant, VLM):
                raise TypeError(f"assistant_model: expected a VLM, as `load` gives, got {type(assistant).__name__}")
        for name, off in (("stream", False), ("streamer", None)):
            if num_beams != 1 and options.get(name):
                raise ValueError(f"{name}: must be {off} with num_beams: the last token decides which beam wins")
        if method == "generate":
            return num_beams
        if (count := option(self.language_model, options, "num_return_sequences")) != 1:
            raise ValueError(f"num_return_sequences: {method} gives one answer, got {count}; `generate` gives several")
        for name in NOT_IN_TEXT:
            if option(self.language_model, options, name):
                raise ValueError(f"{name}: {method} answers in text; `generate` returns what transformers does")
        return num_beams

    def _generate(self, traces: list[Trace], max_new_tokens: int, **generate_kwargs) -> GenerateOutput:
        """`sequences` (B, new) of prompts that are ready, padded on the left to one length."""
        device, cache = self.language_model.device, traces[0].cache
        generate_kwargs = {"tokenizer": self.processor.tokenizer} | generate_kwargs  # read where there are stop_strings
        pad_id = self.language_model.generation_config.pad_token_id or 0
        input_ids, mask = left_pad([trace.input_ids.to(device) for trace in traces], pad_id)
        prompt = cache
        if cache is None:
            embeds, _ = left_pad([trace.inputs_embeds for trace in traces])
            deepstack, _ = left_pad([trace.deepstack for trace in traces])
            prompt = embeds, deepstack
        traces[0].cache = None  # it grows with the answer from here on
        positions, _ = left_pad([trace.positions.T.to(device) for trace in traces])
        room = self.max_context - input_ids.shape[1]
        max_new_tokens = min(check_positive_int(max_new_tokens, "max_new_tokens"), room)
        positions = positions.permute(2, 0, 1)  # (B, L, 3) -> (3, B, L)
        return generate(
            self.language_model, input_ids, prompt, positions, mask, max_new_tokens=max_new_tokens, **generate_kwargs,
        )  # fmt: skip

    def _read(self, options: dict, prefill_chunk: int | None, *request, is_measured: bool = False) -> Trace:
        """Every stage up to generation, of `_prefill_inputs`'s arguments; an assistant in `options` reads them too."""
        if prefill_chunk is None:
            trace = self._prefill_inputs(*request, is_measured=is_measured)
        else:
            trace = self._prefill_in_chunks(check_positive_int(prefill_chunk, "prefill_chunk"), *request)
        if assistant := options.get("assistant_model"):
            with trace.stage("assistant"):
                read = assistant._prefill_in_chunks(prefill_chunk or self.max_context, *request)
            if not torch.equal(read.full_ids, trace.full_ids):
                raise ValueError("assistant_model: writes this prompt in other tokens, and cannot draft for this model")
            options["assistant_model"] = Assistant(assistant.language_model, read.cache)
        return trace

    def _decode_media(self, prompt, images, videos, is_measured: bool = False) -> tuple[Trace, list[dict]]:
        trace = Trace(device=self.check_runnable(), is_measured=is_measured)
        messages = self.processor.messages(prompt, images, videos)
        with trace.stage("decode media"):
            trace.media = self.processor.decode(messages)
        return trace, messages

    def _prefill_in_chunks(
        self, chunk: int, prompt, images=(), videos=(), pruning_rate=0.0, pruning="evs", allow_special_tokens=False
    ) -> Trace:
        """Every stage up to the last token of the prompt, `chunk` tokens at a time."""
        q = check_pruning_rate(pruning_rate, "pruning_rate")
        find_pruner(pruning)
        trace, messages = self._decode_media(prompt, images, videos)
        with trace.stage("tokenize"):
            merged = self.processor.extents(trace.media)
            for medium in merged:
                medium.check_pruning(q)
            ids = self.processor.tokenize(messages, merged, allow_special_tokens=allow_special_tokens)
            self._find_media(trace, ids, merged)
        with trace.stage("positions"):
            trace.full_positions = self.language_model.positions(len(trace.full_ids), trace.spans)
        spans, media = iter(trace.spans), list[MediumRows]()
        trace.keep_masks = [None] * len(merged)
        for number, medium in enumerate(merged):
            places = [torch.arange(s.offset, s.offset + s.num_tokens) for s in islice(spans, len(medium.runs))]
            media.append(MediumRows(torch.cat(places), self._encode_pieces(trace, number, medium, q, pruning, chunk)))
        trace.cache = prefill_in_chunks(trace, self.language_model, media, chunk, self.max_context)
        trace.input_ids = trace.full_ids[trace.keep]
        trace.positions, trace.delta = restrict_positions(trace.full_positions, trace.keep)
        return trace

    def _encode_pieces(
        self, trace: Trace, number: int, medium: MergedMedia, q: float, pruning: str, chunk: int
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(rows, which are kept) of a medium's pieces, each made when asked for; of one that is pruned, all at once."""
        embeds, pieces = list[Tensor](), self.processor.pieces(trace.media[number], chunk)
        while True:
            with trace.stage("patchify"):
                layout, patches = next(pieces, (None, None))
            if patches is None:
                break
            with trace.stage("encode"):
                [rows] = self._encode(Trace(), [patches], [layout])
            self._check_width([rows])
            if medium.kind == "video" and q:
                embeds.append(rows)
            else:
                yield rows, None
        if embeds:
            with trace.stage("prune"):
                rows = torch.cat(embeds)
                trace.keep_masks[number] = medium.keep_mask(rows, q, pruning)
            del embeds
            yield rows, trace.keep_masks[number]

    def _prefill_inputs(
        self, prompt, images=(), videos=(), pruning_rate=0.0, pruning="evs", allow_special_tokens: bool = False, *,
        is_measured: bool = False,
    ) -> Trace:  # fmt: skip
        """Every stage up to what the language model is given."""
        q = check_pruning_rate(pruning_rate, "pruning_rate")
        find_pruner(pruning)
        trace, messages = self._decode_media(prompt, images, videos, is_measured)
        with trace.stage("patchify"):
            trace.patches = self.processor.patchify(trace.media)
            rows, layouts = self._rows(trace.patches), [p.layout for p in trace.patches]
        trace.keep_largest("patchify", (p.pixel_values for p in trace.patches))
        merged = [p.merged for p in trace.patches]
        for medium in merged:
            medium.check_pruning(q)
        is_eager = self.graphs is None and not self.encoder.is_compiled
        with trace.watch("encode", self.encoder if is_eager else None):
            trace.embeds = self._encode(trace, rows, layouts)
        trace.keep_largest("encode", trace.embeds)
        with trace.stage("prune"):
            trace.keep_masks = [m.keep_mask(e, q, pruning) for m, e in zip(merged, trace.embeds, strict=True)]
        with trace.stage("merge"):
            ids = self.processor.tokenize(messages, merged, allow_special_tokens=allow_special_tokens)
            self._find_media(trace, ids, merged)
            self._merge(trace, merged)
        trace.keep_largest("merge", [trace.inputs_embeds])
        with trace.stage("positions"):
            self._position(trace)
        return trace

    def _find_media(self, trace: Trace, ids, merged: list[MergedMedia]) -> None:
        """Match placeholders with media."""
        trace.full_ids = torch.as_tensor(ids)
        trace.spans = find_media_spans(self.processor.placeholders(trace.full_ids), merged, self.token_ids)
        if int(trace.full_ids[-1]) in self.token_ids.values():
            raise ValueError("prompt: must end in text, because later positions continue from its last token")

    def _check_width(self, embeds: Sequence[Tensor]) -> None:
        width = self.language_model.row_width
        if wrong := [rows.shape[1] for rows in embeds if rows.shape[1] != width]:
            raise ValueError(f"encoder: its rows have {wrong[0]} values, the language model takes {width}")

    @torch.no_grad()
    def _merge(self, trace: Trace, merged: list[MergedMedia]) -> None:
        """Drop what was pruned, embed text and put the media's rows in place."""
        keep_masks = [piece for m, mask in zip(merged, trace.keep_masks, strict=True) for piece in m.cut(mask)]
        trace.keep = keep_in_prompt(len(trace.full_ids), trace.spans, keep_masks)
        trace.input_ids = trace.full_ids[trace.keep]
        if len(trace.input_ids) >= self.max_context:
            raise ValueError(f"prompt: {len(trace.input_ids)} tokens do not fit the context of {self.max_context}")
        self._check_width(trace.embeds)
        pieces = [piece for m, rows in zip(merged, trace.embeds, strict=True) for piece in m.cut_rows(rows)]
        rows_LW = merge_embeddings(self.language_model.text_rows(trace.full_ids), trace.spans, pieces)
        rows_LW = rows_LW[trace.keep.to(rows_LW.device)]
        hidden_size = self.language_model.config.hidden_size
        trace.inputs_embeds, trace.deepstack = rows_LW.tensor_split([hidden_size], dim=1)

    def _position(self, trace: Trace) -> None:
        """Positions of the full layout, restricted to what is kept: at q = 0 nothing changes."""
        trace.full_positions = self.language_model.positions(len(trace.full_ids), trace.spans)
        trace.positions, trace.delta = restrict_positions(trace.full_positions, trace.keep)

    @torch.inference_mode()
    def encode(self, images: Sequence = (), videos: Sequence = (), *, progress: bool = True) -> list[Tensor]:
        """One (M, W) tensor per item, images first. Long encodes run in several forwards with a progress bar.

        W is the language model's width D, or D * (1 + k) where it takes k deeper features as well.
        """
        messages = self.processor.messages("", images, videos)
        patches = self.processor.patchify(self.processor.decode(messages))
        return self._encode(Trace(), [p.rows for p in patches], [p.layout for p in patches], progress=progress)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw=None,
        image_embeds: Tensor | Sequence[Tensor] | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw=None,
        video_embeds: Tensor | Sequence[Tensor] | None = None,
        second_per_grid_ts: Sequence[float] | Tensor | None = None,
        pruning_rate: float = 0.0,
        pruning: str = "evs",
        max_new_tokens: int = 128,
        **generate_kwargs,
    ) -> Tensor | GenerateOutput:
        """transformers' `generate` on tensors: (B, L) prompts in, (B, L + new) ids out, greedy by default.

        With `num_return_sequences=n` (B * n, L + new), with `return_dict_in_generate=True` transformers' output.
        input_ids: (B, L), left-padded where attention_mask (B, L) is 0, placeholders repeated. pixel_values:
        (N, C*Tp*P*P) patch rows of all images of the batch in order, image_grid_thw: (images, 3) in patches, or for
        families that have no grids the layouts that their encoder plans. image_embeds: instead of pixel_values what
        `encode` makes of them, (M, W) for all images in order or one tensor per image. The same for videos; pruning
        works on given embeddings, too. second_per_grid_ts: seconds between two grid steps of each video (default 1; not
        read by families whose prompts say the time). Raises ValueError or TypeError, naming argument and dimension,
        when rows, grids, embeddings and placeholders do not match, and for masks that are not 0s before 1s.
        """
        q = check_pruning_rate(pruning_rate, "pruning_rate")
        find_pruner(pruning)
        self.check_runnable()
        mask = check_prompts(input_ids, attention_mask, self.language_model.config.vocab_size)
        generate_kwargs.pop("mm_token_type_ids", None)  # transformers' processors add it; the ids say the same
        self._check_options("generate", generate_kwargs)
        images = self._items("image", q, pixel_values, image_grid_thw, image_embeds)
        videos = self._items("video", q, pixel_values_videos, video_grid_thw, video_embeds, second_per_grid_ts)
        prompts = self._prompts(input_ids.cpu(), mask, images, videos, q, pruning)
        output: Any = self._generate(prompts, max_new_tokens, **generate_kwargs)
        before = input_ids.repeat_interleave(len(output.sequences) // len(input_ids), dim=0)
        output.sequences = torch.cat([before, output.sequences.to(input_ids)], dim=1)
        wants_dict = option(self.language_model, generate_kwargs, "return_dict_in_generate")
        return output if wants_dict else output.sequences

    def _items(
        self, kind: str, q: float, pixel_values, layouts, embeds, second_per_grid_ts=None
    ) -> list[tuple[MergedMedia, Tensor]]:
        """(merged extents, embeddings) of every image or video of a batch."""
        pixels_name = "pixel_values" if kind == "image" else "pixel_values_videos"
        layouts_name, embeds_name = f"{kind}_grid_thw", f"{kind}_embeds"
        arguments = {pixels_name: pixel_values, embeds_name: embeds, layouts_name: layouts}
        given = [name for name, value in arguments.items() if value is not None]
        if given not in ([], [pixels_name, layouts_name], [embeds_name, layouts_name]):
            both = f"{pixels_name}, {layouts_name}: give both or neither"
            raise ValueError(f"{both} ({embeds_name} may stand for {pixels_name}), got {given}")
        layouts = [] if layouts is None else self.encoder.check_layouts(layouts, name=layouts_name)
        seconds = [1.0] * len(layouts)
        if second_per_grid_ts is not None:
            seconds = as_seconds(second_per_grid_ts, len(layouts), "second_per_grid_ts")
        if not given:
            return []
        merged = [self.processor.merged(kind, layout, s) for layout, s in zip(layouts, seconds, strict=True)]
        for medium in merged:
            medium.check_pruning(q)
        if embeds is None:
            rows = [self.encoder.item_size(layout)[0] for layout in layouts]
            shape = ((f"patches of {layouts_name}", sum(rows)), "values")
            check_pixel_rows(pixel_values, shape, self.device, pixels_name)
            embeds = self._encode(Trace(), pixel_values.split(rows), layouts)
        else:
            embeds = self._split_embeds(embeds, [m.num_tokens for m in merged], layouts_name, embeds_name)
        return list(zip(merged, embeds, strict=True))

    def _split_embeds(self, embeds, tokens: list[int], layouts_name: str, name: str) -> list[Tensor]:
        """Embeddings that were made before, one checked (M, W) tensor per item."""
        width = ("channels", self.language_model.row_width)
        if isinstance(embeds, Tensor):
            check_values(check_shape(embeds, ((f"tokens of {layouts_name}", sum(tokens)), width), name), name)
            embeds = embeds.split(tokens)
        if not isinstance(embeds, Sequence) or len(embeds) != len(tokens):
            got = len(embeds) if isinstance(embeds, Sequence) else type(embeds).__name__
            raise ValueError(f"{name}: expected one tensor for each of {len(tokens)} items, got {got}")
        for i, (item, count) in enumerate(zip(embeds, tokens, strict=True)):
            check_pixel_rows(item, (("tokens", count), width), self.device, f"{name}[{i}]")
            if not item.isfinite().all():
                raise ValueError(f"{name}[{i}]: holds nan or inf")
        return list(embeds)

    def _prompts(
        self, input_ids: Tensor, attention_mask: Tensor, images: list, videos: list, q: float, pruning: str
    ) -> list[Trace]:
        """Each prompt of a batch, merged and positioned; media are dealt out in order of their placeholders."""
        queues, traces = {"image": iter(images), "video": iter(videos)}, list[Trace]()
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            trace = Trace()
            items = [item for kind in queues for item in self._take(kind, queues[kind], ids[mask])]
            trace.embeds = [embeds for _, embeds in items]
            trace.keep_masks = [merged.keep_mask(embeds, q, pruning) for merged, embeds in items]
            self._find_media(trace, ids[mask], [merged for merged, _ in items])
            self._merge(trace, [merged for merged, _ in items])
            self._position(trace)
            traces.append(trace)
        if left := {kind: len(rest) for kind, queue in queues.items() if (rest := list(queue))}:
            raise ValueError(f"input_ids: no placeholders are left for these media: {left}")
        return traces

    def _take(self, kind: str, queue: Iterator, ids: Tensor) -> list:
        """The next media of `kind`, as many as this prompt's placeholders hold."""
        wanted, taken = int((self.processor.placeholders(ids) == self.token_ids[kind]).sum()), []
        while wanted > 0:
            item = next(queue, None)
            if item is None:
                raise ValueError(f"input_ids: {wanted} {kind} placeholders too many for the {kind}s given")
            taken.append(item)
            wanted -= item[0].num_tokens
        return taken

    def _rows(self, patches: Sequence[Patches]) -> Sequence[Levels | Tensor]:
        """What the encoder is sent; a GPU normalises it itself."""
        return [p.rows if self.device.type == "cuda" else p.pixel_values for p in patches]

    def _encode(self, trace: Trace, rows: Sequence[Levels | Tensor], layouts, *, progress: bool = True) -> list[Tensor]:
        """(M, W) per item, by graph or eagerly; what was planned is kept in `trace`."""
        graphs, embeds = self.graphs if rows else None, list[Tensor]()
        with trace.stage("plan"):
            if graphs:
                planned = graphs.plan(layouts)
                trace.graph_batches, trace.metadata = planned.batches, planned.metadata
            else:
                batches = _batches(rows)
                trace.metadata = [self.encoder.plan([layouts[i] for i in batch]) for batch in batches]
        with trace.stage("encode"), torch.inference_mode():
            if graphs:
                return graphs.run(send_rows(rows, self.encoder), planned)  # type: ignore[arg-type]  # planned by the same manager
            bar = tqdm(batches, desc="encode", disable=not progress or len(batches) < 2, leave=False)
            for batch, metadata in zip(bar, trace.metadata, strict=True):
                pixel_values = send_rows([rows[i] for i in batch], self.encoder)
                tokens = [self.encoder.item_size(layouts[i])[1] for i in batch]
                embeds += self.encoder(pixel_values, metadata=metadata).split(tokens)
        return embeds

    def check_runnable(self) -> torch.device:
        """The device; raises ValueError where it is meta."""
        device = self.device
        if device.type == "meta":
            raise ValueError("device: a model on 'meta' can plan, but not run; load it on 'cpu' or 'cuda'")
        return device

    def _stream(self, trace: Trace, max_new_tokens: int, generate_kwargs: dict) -> Iterator[str]:
        streamer, criteria = generate_kwargs.pop("streamer", None), generate_kwargs.pop("stopping_criteria", None) or ()

        def run(text_streamer, stop) -> None:
            both, stops = FanOut(text_streamer, streamer), StoppingCriteriaList([*criteria, stop])
            self._generate([trace], max_new_tokens, streamer=both, stopping_criteria=stops, **generate_kwargs)

        return stream_text(run, self.processor.tokenizer)


def _batches(rows: Sequence[Levels | Tensor]) -> list[list[int]]:
    """Consecutive items per forward: at most MAX_PATCHES_PER_FORWARD patches each (or one item)."""
    batches, size = list[list[int]](), 0
    for i, patches in enumerate(map(len, rows)):
        if not batches or size + patches > MAX_PATCHES_PER_FORWARD:
            batches, size = [*batches, []], 0
        batches[-1].append(i)
        size += patches
    return batches


def _check_requests(requests: Sequence[dict], *, check_each: bool) -> None:
    if not isinstance(requests, Sequence) or isinstance(requests, str):
        raise TypeError(f"requests: expected a sequence of dicts, got {type(requests).__name__}")
    for i, request in enumerate(requests if check_each else ()):
        _check_request(request, f"requests[{i}]")


def _check_request(request: dict, name: str) -> None:
    allowed = ("prompt", "images", "videos", "max_new_tokens", "pruning_rate")
    if not isinstance(request, dict):
        raise TypeError(f"{name}: expected a dict with {', '.join(allowed)}, got {type(request).__name__}")
    if unknown := [key for key in request if key not in allowed]:
        raise ValueError(f"{name}: unknown key {unknown[0]!r}; allowed: {', '.join(allowed)}")
    if "prompt" not in request:
        raise ValueError(f"{name}: has no prompt")


def _parameters(module: Any) -> str:
    """How many values the parameters of a module have, in words."""
    count = sum(parameter.numel() for parameter in module.parameters())
    return f"{count / 1e9:.2f} billion parameters" if count >= 1e9 else f"{count / 1e6:.2f} million parameters"
