"""A long prompt in chunks: the language model reads N tokens at a time and keeps their keys and values.

    full prompt   t t t v v v v v v v v v v t t v v v v t   t text, v placeholders of media
    chunks        |-------|-------|-------|-------|---|-|   chunks may split media; `generate` reads the last token
    pieces              |-----------|-------|   |-------|   of an item: encoded on first use, freed after the last

Memory use then depends on N, not on the length of the prompt, except for the cache and for media
that are pruned. The kept tokens of a pruned item are known only after the whole item is encoded,
so all its embeddings are in memory at the same time. Positions are those of the full prompt,
which are known from sizes before anything is encoded; each chunk uses a section of them. An
engine that does not know the later media in advance needs `recompute_mrope_positions`, which
gives the same positions.

Shape suffixes: L tokens of the full prompt, M tokens of an item, W values per row of the encoder.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from refvl.checks import check_positive_int
from refvl.language.model import CausalTextModel
from refvl.merge import MediaTokens, find_media_spans, media_places
from refvl.pipeline import Request
from refvl.positions import restrict_positions
from refvl.serving.options import copies_wanted
from refvl.trace import Record


def read_in_chunks(model: Any, chunk: int, request: Request, options: dict) -> tuple[Record, dict]:
    """Run every stage up to the last token of the prompt, `chunk` tokens at a time.

    Returns the trace, and `options` plus a cache of all prompt tokens except the last.
    """
    check_positive_int(chunk, "prefill_chunk")
    model.family.require("chunks")
    copies = copies_wanted(model.language_model, options)
    if copies > 1:
        model.family.require("chunked_beams")
    if request.pruning_rate > 0:
        model.family.require("pruning")
    trace = model.record(device=model.device)
    messages = model.processor.messages(request.prompt, request.images, request.videos)
    with trace.stage("decode media"):
        trace.media = model.processor.decode(messages)
    with trace.stage("tokenize"):
        merged = model.processor.extents(trace.media)
        rendering = {**(request.template_kwargs or {}), "allow_special_tokens": request.allow_special_tokens}
        trace.full_ids = torch.as_tensor(model.processor.tokenize(messages, merged, **rendering))
        ids_L = model.processor.placeholders(trace.full_ids)
        trace.spans = find_media_spans(ids_L, merged, model.processor.token_ids)
    with trace.stage("positions"):
        trace.full_positions = model.language_model.positions(trace.full_ids, trace.spans)
    trace.keep_masks = [None] * len(merged)
    items = (_encode_pieces(model, trace, number, medium, request, chunk) for number, medium in enumerate(merged))
    pieces = chain.from_iterable(items)
    cache: Any = prefill_in_chunks(trace, model.language_model, pieces, chunk, model.max_context)
    trace.input_ids = trace.full_ids[trace.keep]
    trace.positions, trace.delta = restrict_positions(trace.full_positions, trace.keep)
    if copies > 1:  # `batch_repeat_interleave` does not support linear attention
        cache.reorder_cache(torch.zeros(copies, dtype=torch.int64))
    return trace, options | {"past_key_values": cache}


def _encode_pieces(
    model: Any, trace: Record, number: int, medium: MediaTokens, request: Request, chunk: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows, mask of kept rows) for an item's pieces, each encoded on demand; a pruned item is one piece."""
    embeds, pieces = list[Tensor](), model.processor.pieces(trace.media[number], chunk)
    while True:
        with trace.stage("patchify"):
            layout, patches = next(pieces, (None, None))
        if patches is None:
            break
        encoded = model.record()
        with trace.stage("encode"):
            model.encode_rows(encoded, [patches], [layout])
        trace.cached += encoded.cached
        trace.seconds_saved += encoded.seconds_saved
        [rows] = encoded.embeds
        if medium.kind == "video" and request.pruning_rate:
            embeds.append(rows)
        else:
            yield rows, torch.ones(len(rows), dtype=torch.bool)
    if embeds:
        with trace.stage("prune"):
            rows = torch.cat(embeds)
            mask = medium.keep_mask(rows, request.pruning_rate, request.pruning)
        assert mask is not None  # the item is a video, and the rate is above 0
        trace.keep_masks[number] = mask = mask.cpu()
        del embeds
        yield rows, mask


@torch.inference_mode()
def prefill_in_chunks(
    trace: Record, language_model: CausalTextModel, pieces: Iterator[tuple[Tensor, Tensor]], chunk: int, limit: int
) -> Cache:
    """Return the keys and values of the whole prompt except its last token; set `keep` and `chunks` of the trace.

    trace: a trace with full_ids, full_positions and spans. pieces: (rows (m, W), mask of kept rows
    (m,)) of all media, in the order of the prompt. Raises ValueError if the kept tokens reach
    `limit`.
    """
    cache, last = DynamicCache(config=language_model.config), len(trace.full_ids) - 1
    trace.keep = torch.ones(len(trace.full_ids), dtype=torch.bool)
    places = media_places(trace.spans)
    rows, keep = language_model.text_rows(trace.full_ids[:0]), trace.keep[:0]  # the rest of a piece that spans chunks
    for start in range(0, last, chunk):
        stop = min(start + chunk, last)
        rows_LW = language_model.text_rows(trace.full_ids[start:stop])
        here = places[(places >= start) & (places < stop)]
        while len(keep) < len(here):
            piece, mask = next(pieces)
            rows, keep = torch.cat([rows, piece.to(rows)]), torch.cat([keep, mask])
        rows_LW[here - start], rows = rows.tensor_split([len(here)])
        trace.keep[here], keep = keep.tensor_split([len(here)])
        kept = trace.keep[start:stop]
        if sum(trace.chunks) + int(kept.sum()) >= limit:
            raise ValueError(f"prompt: expected at most {limit - 1} tokens in a context of {limit}, got more")
        if kept.any():
            positions = trace.full_positions[:, start:stop][:, kept]
            kept_LW = rows_LW[kept.to(rows_LW.device)][None]
            embeds, deeper = kept_LW.tensor_split([language_model.config.hidden_size], dim=-1)
            inputs = {"deepstack_embeds": deeper} if deeper.shape[-1] else {}
            inputs |= {"inputs_embeds": embeds, "position_ids": positions[:, None].to(embeds.device)}
            with trace.stage("prefill"):
                language_model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            trace.chunks.append(int(kept.sum()))
    return cache
