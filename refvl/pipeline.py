"""OPEN FIRST. One image from pixels to answer: `Pipeline.read`, then `answer`. Every stage is one call into a folder.

decode media      pixels/            file, array -> image, sampled frames
patchify          pixels/            -> patch rows (N, C*Tp*P*P) and their layout, e.g. the grid (t, h, w)
plan              encoders/          layout -> window order, rotary angles, segment lengths (CPU)
encode            encoders/, graphs/ rows -> embeddings (M, W)
prune             positions/vidcom2  which video tokens are kept: EVS or VidCom2
merge             merge.py           embeddings into the prompt's placeholders
positions         positions/mrope    (3, L) for every token, restricted to the tokens that are kept
prefill, decode   language/          embeddings + positions -> token ids -> text

`refvl.load` returns a `VLM` (model.py), whose `chat` makes these two calls; its other methods
build on them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.generation.utils import GenerateOutput

from refvl import families
from refvl.checks import check_pruning_rate
from refvl.encoders.tower import encode_eagerly, plan_eagerly, send_rows
from refvl.language.model import CausalTextModel, TokenTimer, generate
from refvl.merge import MediaTokens, find_media_spans, keep_in_prompt, left_pad, merge_embeddings
from refvl.positions.mrope import restrict_positions
from refvl.positions.vidcom2 import PRUNERS, find_pruner
from refvl.trace import Record, check_finite


@dataclass(frozen=True, slots=True)
class Request:
    """A question, checked once when the request is built, so that later stages can trust it."""

    prompt: str | Sequence[dict]  # text, or messages in the transformers chat format
    images: Sequence = ()
    videos: Sequence = ()
    pruning_rate: float = 0.0  # the share of a video's tokens that is dropped, in [0, 1)
    pruning: str = "evs"  # the method, a key of `refvl.positions.PRUNERS`
    allow_special_tokens: bool = False  # whether special tokens in the prompt keep their meaning
    template_kwargs: Mapping[str, Any] | None = None  # additional variables of the chat template, such as `tools`

    def __post_init__(self):
        if not (type(self.pruning_rate) is float and 0 <= self.pruning_rate < 1):
            check_pruning_rate(self.pruning_rate, "pruning_rate")
        if not isinstance(self.pruning, str) or self.pruning not in PRUNERS:
            find_pruner(self.pruning)  # raises an error that lists the valid names


class Pipeline:
    """The parts of a model, `processor`, `encoder` and `language_model`, and the path of a request through them."""

    record: Callable[..., Any] = Record

    def __init__(self, config: PretrainedConfig, processor: Any, encoder: Any, language_model: CausalTextModel):
        self.config = config
        self.processor = processor  # a `ChatProcessor` of processors/
        self.encoder = encoder  # a `Tower` of encoders/
        self.language_model = language_model
        self.graphs: Any = None  # an `EncoderGraphManager`; if set, its graphs run instead of the encoder

    def read(self, request: Request) -> Any:
        """Turn media and a question into the language model's inputs; each stage fills its fields of the record."""
        if request.pruning_rate > 0:
            self.family.require("pruning")
        trace = self.record(device=self.encoder.device)
        messages = trace.messages = self.processor.messages(request.prompt, request.images, request.videos)
        with trace.stage("decode media"):
            trace.media = self.processor.decode(messages)
        with trace.stage("patchify"):
            trace.patches = self.processor.patchify(trace.media)
            media = [patches.media_tokens for patches in trace.patches]
        self.encode_rows(trace, [p.rows for p in trace.patches], [p.layout for p in trace.patches])
        with trace.stage("prune"):
            pairs = zip(media, trace.embeds, strict=True)
            trace.keep_masks = [m.keep_mask(embeds, request.pruning_rate, request.pruning) for m, embeds in pairs]
        with trace.stage("merge"):
            options = {**(request.template_kwargs or {}), "allow_special_tokens": request.allow_special_tokens}
            ids = self.processor.tokenize(messages, media, **options)
            self.merge(trace, torch.as_tensor(ids), media)
        with trace.stage("positions"):
            self.position(trace)
        return trace

    def encode_rows(self, trace: Any, rows: Sequence, layouts: Sequence, *, progress: bool = True) -> None:
        """Encode patch rows, with graphs if any were captured; set the trace's plans and `embeds`, (M, W) per item.

        rows: patch rows per item, as `Levels` or tensors. layouts: the encoder's layouts, one
        per item. Raises ValueError, naming the item, for embeddings that are not finite.
        """
        graphs = self.graphs if rows else None
        with trace.stage("plan"):
            planned = graphs.plan(layouts) if graphs else plan_eagerly(self.encoder, layouts)
            trace.graph_batches = planned.batches
            trace.metadata = planned.metadata
        with trace.stage("encode"), torch.inference_mode():
            if graphs:
                trace.embeds = graphs.run(send_rows(rows, self.encoder), planned)
            else:
                trace.embeds = encode_eagerly(self.encoder, rows, planned, progress=progress)
            check_finite(trace.embeds, "encode: the embeddings of item")

    @torch.no_grad()
    def merge(self, trace: Any, ids_L: Tensor, media: Sequence[MediaTokens]) -> None:
        """Embed the text, replace the placeholders with the media's rows, and drop the pruned tokens.

        ids_L: the token ids of the prompt, (L,). Raises ValueError if placeholders or rows do
        not match, or if the prompt exceeds the context.
        """
        trace.full_ids = ids_L
        trace.spans = find_media_spans(self.processor.placeholders(ids_L), media, self.processor.token_ids)
        rows_LW = merge_embeddings(self.language_model.text_rows(ids_L), trace.spans, trace.embeds)
        trace.keep = keep_in_prompt(len(ids_L), trace.spans, trace.keep_masks, [len(rows) for rows in trace.embeds])
        trace.input_ids = ids_L[trace.keep]
        if len(trace.input_ids) >= self.max_context:
            raise ValueError(f"prompt: {len(trace.input_ids)} tokens do not fit the context of {self.max_context}")
        kept_LW = rows_LW[trace.keep.to(rows_LW.device)]
        trace.inputs_embeds, trace.deepstack = kept_LW.tensor_split([self.language_model.config.hidden_size], dim=1)

    def position(self, trace: Any) -> None:
        """Compute the positions of the full layout, then select those of the kept tokens."""
        trace.full_positions = self.language_model.positions(trace.full_ids, trace.spans)
        trace.positions, trace.delta = restrict_positions(trace.full_positions, trace.keep)

    def answer(self, trace: Any, max_new_tokens: int | None, *, streamer: Any = None, **options) -> GenerateOutput:
        """Prefill the prompt and decode the answer; set `token_ids`, `text`, and the seconds of both stages."""
        timer = TokenTimer(trace.device, [streamer])
        output = self.decode([trace], max_new_tokens, streamer=timer, **options)
        start, first = timer.times[:2]
        trace.seconds["prefill"] = trace.seconds.get("prefill", 0.0) + first - start
        trace.seconds["decode tokens"] = timer.times[-1] - first
        [trace.token_ids] = output.sequences.tolist()
        trace.text = self.processor.text(trace.token_ids)
        return output

    def decode(self, traces: Sequence[Any], max_new_tokens: int | None, **options) -> GenerateOutput:
        """Return transformers' output, whose `sequences` (B, new) continue prepared prompts, padded on the left.

        options: the options of transformers' `generate`. If they contain `past_key_values`,
        this cache holds all tokens of the prompt except the last.
        """
        text = self.language_model
        pad_id = text.generation_config.pad_token_id or 0
        input_ids, mask = left_pad([t.input_ids.to(text.device) for t in traces], pad_id)
        longest = input_ids.shape[1]
        positions = [F.pad(t.positions, (longest - t.positions.shape[1], 0)) for t in traces]  # (3, longest) each
        positions_3BL = torch.stack(positions, dim=1)
        first_B = torch.tensor([t.positions.shape[1] + t.delta for t in traces])  # the first position of each answer
        shift_B3 = (first_B - positions_3BL[..., -1] - 1).T
        if shift_B3.any():  # nonzero only if positions or delta were replaced, because a prompt ends in text
            options["position_shift"] = shift_B3.to(text.device)
        if "past_key_values" not in options:
            options["inputs_embeds"], _ = left_pad([t.inputs_embeds for t in traces])
            if text.row_width > text.config.hidden_size:
                options["deepstack_embeds"], _ = left_pad([t.deepstack for t in traces])
        options.setdefault("tokenizer", self.processor.tokenizer)  # only used with stop_strings
        room = self.max_context - longest
        max_new_tokens = room if max_new_tokens is None else min(max_new_tokens, room)
        return generate(text, input_ids, positions_3BL.to(text.device), mask, max_new_tokens=max_new_tokens, **options)

    @torch.inference_mode()
    def encode(self, images: Sequence = (), videos: Sequence = (), *, progress: bool = True) -> list[Tensor]:
        """Return the embeddings of each item, (M, W), images first. Large inputs run in
        several forward passes, with a progress bar.

        W is the language model's width D, or D * (1 + k) if the model also accepts k DeepStack
        features.
        """
        trace = self.record()
        messages = self.processor.messages("", images, videos)
        patches = self.processor.patchify(self.processor.decode(messages))
        self.encode_rows(trace, [p.rows for p in patches], [p.layout for p in patches], progress=progress)
        return trace.embeds

    @property
    def family(self) -> families.Family:
        """The entry of the model's family in `refvl.families`."""
        return families.find_family(self.config)

    @property
    def token_ids(self) -> dict[str, int]:
        """The ids of the placeholders, {"image": ..., "video": ...}."""
        return self.processor.token_ids

    @property
    def device(self) -> torch.device:
        """The device of the encoder."""
        return self.encoder.device

    @property
    def max_context(self) -> int:
        """The maximum number of tokens that the language model reads, including the prompt and the answer."""
        return self.language_model.config.max_position_embeddings
