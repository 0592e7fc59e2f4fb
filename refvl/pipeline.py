"""OPEN FIRST. One picture from pixels to answer: `VLM.read`, then `VLM.answer`. Every line is a room.

decode media      pixels/media       file, array -> image, sampled frames
patchify          pixels/            -> patch rows (N, C*Tp*P*P) and their layout, e.g. the grid (t, h, w)
plan              encoders/          layout -> window order, rotary angles, segment lengths (CPU)
encode            encoders/, graphs/ rows -> embeddings (M, D)
prune             positions/pruners  which video tokens stay: EVS or VidCom2
merge             merge.py           embeddings into the prompt's placeholders
positions         positions/mrope    (3, L) for every token, restricted to what stays
prefill, decode   language/          embeddings + positions -> token ids -> text

What a service adds - batches, streaming, long prompts, drafts, tensors in and out - is in `refvl.serving`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.generation.utils import GenerateOutput

from refvl import families
from refvl.checks import check_pruning_rate
from refvl.contracts import Encoder, Processor
from refvl.encoders.tower import encode_eagerly, plan_eagerly, send_rows
from refvl.graphs import EncoderGraphManager
from refvl.language.model import CausalTextModel, copies_wanted, generate, option
from refvl.merge import MergedMedia, find_media_spans, left_pad
from refvl.positions.mrope import media_places, mrope_delta
from refvl.positions.pruners import PRUNERS
from refvl.serving.streaming import FanOut
from refvl.trace import TokenTimer, Trace


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, checked when it is made: the stages trust it."""

    prompt: str | Sequence[dict]  # text, or messages in the transformers chat format
    images: Sequence = ()
    videos: Sequence = ()
    pruning_rate: float = 0.0  # the share of a video's tokens that goes, in [0, 1)
    pruning: str = "evs"  # which of them: a row of `refvl.positions.PRUNERS`
    allow_special_tokens: bool = False  # those in the prompt count as such, instead of being plain text

    def __post_init__(self):
        check_pruning_rate(self.pruning_rate, "pruning_rate")
        if not isinstance(self.pruning, str) or self.pruning not in PRUNERS:
            raise ValueError(f"pruning: expected {' or '.join(map(repr, PRUNERS))}, got {self.pruning!r}")


class VLM:
    """A vision-language model in three reachable parts: `processor`, `encoder`, `language_model`."""

    def __init__(
        self, config: PretrainedConfig, processor: Processor, encoder: Encoder, language_model: CausalTextModel
    ):
        self.config = config
        self.processor = processor
        self.encoder = encoder
        self.language_model = language_model
        self.graphs: EncoderGraphManager | None = None  # when set, it encodes, not the encoder
        self.adapters: Any = (
            None  # PEFT's model, once `refvl.serving.adapters.attach` has put layers in place of these parts'
        )

    def chat(self, prompt: str | Sequence[dict], *, max_new_tokens: int = 128, **request) -> Any:
        """The answer to a question about images and videos, greedy; request: see `read`."""
        trace = self.read(Request(prompt, **request))
        self.answer(trace, max_new_tokens)
        return trace.text

    def read(self, request: Request) -> Trace:
        """From pixels to what the language model is given; each stage fills the fields of the trace that it makes."""
        device = self.encoder.device
        trace = Trace(device=device)
        messages = self.processor.messages(request.prompt, request.images, request.videos)
        with trace.stage("decode media"):
            trace.media = self.processor.decode(messages)
        with trace.stage("patchify"):
            trace.patches = self.processor.patchify(trace.media)
            rows = [p.rows if device.type == "cuda" else p.pixel_values for p in trace.patches]
        merged = [p.merged for p in trace.patches]
        if request.pruning_rate > 0:
            for medium in merged:
                medium.check_pruning(request.pruning_rate)
        self.encode_rows(trace, rows, [p.layout for p in trace.patches])
        with trace.stage("prune"):
            media = zip(merged, trace.embeds, strict=True)
            trace.keep_masks = [m.keep_mask(embeds, request.pruning_rate, request.pruning) for m, embeds in media]
        with trace.stage("merge"):
            ids = self.processor.tokenize(messages, merged, allow_special_tokens=request.allow_special_tokens)
            trace.full_ids = torch.as_tensor(ids)
            self.merge(trace, merged)
        with trace.stage("positions"):
            self.position(trace)
        return trace

    def encode_rows(self, trace: Trace, rows: Sequence, layouts: Sequence, *, progress: bool = True) -> None:
        """Sets `embeds`, (M, W) per medium, and what was planned for them: by graph where there are any, or eagerly."""
        graphs: Any = self.graphs if rows else None
        with trace.stage("plan"):
            planned = graphs.plan(layouts) if graphs else plan_eagerly(self.encoder, layouts)
            trace.graph_batches = planned.batches
            trace.metadata = planned.metadata
        with trace.stage("encode"), torch.inference_mode():
            if graphs:
                trace.embeds = graphs.run(send_rows(rows, self.encoder), planned)
            else:
                trace.embeds = encode_eagerly(self.encoder, rows, planned, progress=progress)

    @torch.no_grad()
    def merge(self, trace: Trace, merged: Sequence[MergedMedia]) -> None:
        """Embed the text, put the media's rows where their placeholders stand, and drop what was pruned."""
        trace.spans = self.find_media(trace.full_ids, merged)
        places_M = media_places(trace.spans)
        rows_LW = self.language_model.text_rows(trace.full_ids)
        trace.keep = torch.ones(len(trace.full_ids), dtype=torch.bool)
        if merged:
            rows_MW = torch.cat(trace.embeds)
            self.check_width(rows_MW)
            masks = zip(trace.embeds, trace.keep_masks, strict=True)
            keep_masks = [rows.new_ones(len(rows), dtype=torch.bool) if m is None else m for rows, m in masks]
            rows_LW[places_M.to(rows_LW.device)] = rows_MW.to(rows_LW)
            trace.keep[places_M] = torch.cat(keep_masks).cpu()
        trace.input_ids = trace.full_ids[trace.keep]
        if len(trace.input_ids) >= self.max_context:
            raise ValueError(f"prompt: {len(trace.input_ids)} tokens do not fit the context of {self.max_context}")
        hidden_size = self.language_model.config.hidden_size
        kept_LW = rows_LW[trace.keep.to(rows_LW.device)]
        trace.inputs_embeds, trace.deepstack = kept_LW.tensor_split([hidden_size], dim=1)

    def position(self, trace: Trace) -> None:
        """Positions of the full layout, restricted to what is kept: at q = 0 nothing changes."""
        trace.full_positions = self.language_model.positions(len(trace.full_ids), trace.spans)
        trace.positions = trace.full_positions[:, trace.keep]
        trace.delta = mrope_delta(trace.positions)

    def answer(self, trace: Trace, max_new_tokens: int, *, streamer: Any = None, **generate_kwargs) -> GenerateOutput:
        """Prefill and decode; sets `token_ids`, `text`, and the seconds of both."""
        if option(self.language_model, generate_kwargs, "num_beams") == 1:
            timer = TokenTimer(self.encoder.device)
            streamer = timer if streamer is None else FanOut(timer, streamer)
            output = self.decode([trace], max_new_tokens, streamer=streamer, **generate_kwargs)
            timer.fill(trace)
        else:  # transformers tells no streamer of beams
            with trace.stage("generate"):
                output = self.decode([trace], max_new_tokens, **generate_kwargs)
        [trace.token_ids] = output.sequences.tolist()
        trace.text = self.processor.text(trace.token_ids)
        return output

    def decode(self, traces: Sequence[Trace], max_new_tokens: int, **generate_kwargs) -> GenerateOutput:
        """transformers' output, whose `sequences` (B, new) follow prompts that are ready, padded on the left."""
        device = self.language_model.device
        pad_id = self.language_model.generation_config.pad_token_id or 0
        input_ids, mask = left_pad([trace.input_ids.to(device) for trace in traces], pad_id)
        positions_BL3, _ = left_pad([trace.positions.T.to(device) for trace in traces])  # `left_pad` pads rows
        prompt = dict[str, Any]()
        if traces[0].cache is None:
            prompt["inputs_embeds"], _ = left_pad([trace.inputs_embeds for trace in traces])
            if self.language_model.row_width > self.language_model.config.hidden_size:
                prompt["deepstack_embeds"], _ = left_pad([trace.deepstack for trace in traces])
        else:
            prompt["past_key_values"] = traces[0].cache
            traces[0].cache = None  # it grows with the answer from here on
            copies = copies_wanted(self.language_model, generate_kwargs)
            if copies > 1:
                prompt["past_key_values"].batch_repeat_interleave(copies)
        generate_kwargs.setdefault("tokenizer", self.processor.tokenizer)  # read where there are stop_strings
        max_new_tokens = min(max_new_tokens, self.max_context - input_ids.shape[1])
        positions_3BL = positions_BL3.permute(2, 0, 1)
        return generate(
            self.language_model, input_ids, prompt, positions_3BL, mask,
            max_new_tokens=max_new_tokens, **generate_kwargs,
        )  # fmt: skip

    @torch.inference_mode()
    def encode(self, images: Sequence = (), videos: Sequence = (), *, progress: bool = True) -> list[Tensor]:
        """One (M, W) tensor per item, images first. Long encodes run in several forwards with a progress bar.

        W is the language model's width D, or D * (1 + k) where it takes k deeper features as well.
        """
        trace, messages = Trace(), self.processor.messages("", images, videos)
        patches = self.processor.patchify(self.processor.decode(messages))
        self.encode_rows(trace, [p.rows for p in patches], [p.layout for p in patches], progress=progress)
        return trace.embeds

    def find_media(self, ids_L: Tensor, merged: Sequence[MergedMedia]) -> list:
        """Where the media stand in a prompt, by their placeholders; ValueError where they do not match."""
        spans = find_media_spans(self.processor.placeholders(ids_L), merged, self.processor.token_ids)
        if int(ids_L[-1]) in self.processor.token_ids.values():
            raise ValueError("prompt: must end in text, because later positions continue from its last token")
        return spans

    def check_width(self, rows_MW: Tensor) -> None:
        """ValueError where the encoder's rows do not fit the language model."""
        width = self.language_model.row_width
        if rows_MW.shape[1] != width:
            raise ValueError(f"encoder: its rows have {rows_MW.shape[1]} values, the language model takes {width}")

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

    def __repr__(self) -> str:
        """Family, device and dtype; what the parts are, and how large."""
        return families.describe(self)
