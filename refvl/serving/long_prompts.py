"""A long prompt in chunks: media are encoded when their first token comes, and let go when their last is read."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from refvl.merge import MergedMedia
from refvl.pipeline import VLM, Request
from refvl.positions import restrict_positions
from refvl.serving.chunks import MediumRows, prefill_in_chunks
from refvl.serving.options import check_runnable
from refvl.trace import Trace


def read_in_chunks(model: VLM, chunk: int, request: Request) -> Trace:
    """Every stage up to the last token of the prompt, `chunk` tokens at a time."""
    q, pruning = request.pruning_rate, request.pruning
    check_runnable(model)
    trace = Trace(device=model.device)
    messages = model.processor.messages(request.prompt, request.images, request.videos)
    with trace.stage("decode media"):
        trace.media = model.processor.decode(messages)
    with trace.stage("tokenize"):
        merged = model.processor.extents(trace.media)
        for medium in merged:
            medium.check_pruning(q)
        ids = model.processor.tokenize(messages, merged, allow_special_tokens=request.allow_special_tokens)
        trace.full_ids = torch.as_tensor(ids)
        trace.spans = model.find_media(trace.full_ids, merged)
    with trace.stage("positions"):
        trace.full_positions = model.language_model.positions(len(trace.full_ids), trace.spans)
    spans, media = iter(trace.spans), list[MediumRows]()
    trace.keep_masks = [None] * len(merged)
    for number, medium in enumerate(merged):
        places = [torch.arange(s.offset, s.offset + s.num_tokens) for s in islice(spans, len(medium.runs))]
        media.append(MediumRows(torch.cat(places), _encode_pieces(model, trace, number, medium, q, pruning, chunk)))
    trace.cache = prefill_in_chunks(trace, model.language_model, media, chunk, model.max_context)
    trace.input_ids = trace.full_ids[trace.keep]
    trace.positions, trace.delta = restrict_positions(trace.full_positions, trace.keep)
    return trace


def _encode_pieces(
    model: VLM, trace: Trace, number: int, medium: MergedMedia, q: float, pruning: str, chunk: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(rows, which are kept) of a medium's pieces, each made when asked for; of one that is pruned, all at once."""
    embeds, pieces = list[Tensor](), model.processor.pieces(trace.media[number], chunk)
    while True:
        with trace.stage("patchify"):
            layout, patches = next(pieces, (None, None))
        if patches is None:
            break
        encoded = Trace()
        with trace.stage("encode"):
            model.encode_rows(encoded, [patches], [layout])
        [rows] = encoded.embeds
        model.check_width(rows)
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
