"""The `generate` of transformers, on tensors: it accepts pixels or embeddings and returns token ids."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateOutput

from refvl.checks import as_seconds, check_pixel_rows, check_prompts
from refvl.merge import MediaTokens
from refvl.pipeline import Request
from refvl.serving.options import option
from refvl.trace import Record


@torch.inference_mode()
def generate(
    model: Any,
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
    """Run transformers' `generate` on tensors: (B, L) prompts in, (B, L + new) ids out, greedy by default.

    With `num_return_sequences=n`, the result is (B * n, L + new); with
    `return_dict_in_generate=True`, it is transformers' output object. input_ids: (B, L),
    left-padded where attention_mask (B, L) is 0, with one placeholder per merged token.
    pixel_values: (N, C*Tp*P*P) patch rows of all images of the batch in order. image_grid_thw:
    (images, 3) in patches, or the encoder's layouts if a family has no grids. image_embeds:
    embeddings from `encode` instead of pixel_values, (M, W) for all images in order, or one
    tensor per image. The same arguments exist for videos; pruning also works on precomputed
    embeddings. second_per_grid_ts: seconds between two grid steps of each video (default 1;
    ignored by families whose prompts contain timestamps). Raises ValueError or TypeError,
    naming argument and dimension, if rows, grids, embeddings and placeholders do not match, or
    if a mask is not 0s followed by 1s.
    """
    generate_kwargs.pop("mm_token_type_ids", None)  # added by transformers' processors; the ids imply it
    model.check_options("generate", generate_kwargs, max_new_tokens)
    Request("", pruning_rate=pruning_rate, pruning=pruning)  # checks both values
    if pruning_rate > 0:
        model.family.require("pruning")
    if image_embeds is not None or video_embeds is not None:
        model.family.require("embeds")
    mask = check_prompts(input_ids, attention_mask, model.language_model.config.vocab_size)
    images = _items(model, "image", pixel_values, image_grid_thw, image_embeds)
    videos = _items(model, "video", pixel_values_videos, video_grid_thw, video_embeds, second_per_grid_ts)
    prompts = _prompts(model, input_ids.cpu(), mask, images, videos, pruning_rate, pruning)
    output: Any = model.decode(prompts, max_new_tokens, **generate_kwargs)
    before = input_ids.repeat_interleave(len(output.sequences) // len(input_ids), dim=0)
    output.sequences = torch.cat([before, output.sequences.to(input_ids)], dim=1)
    wants_dict = option(model.language_model, generate_kwargs, "return_dict_in_generate")
    return output if wants_dict else output.sequences


def _items(
    model: Any, kind: str, pixel_values, layouts, embeds, second_per_grid_ts=None
) -> list[tuple[MediaTokens, Tensor]]:
    """Return (merged extents, embeddings) of every image or video of a batch."""
    pixels_name = "pixel_values" if kind == "image" else "pixel_values_videos"
    layouts_name, embeds_name = f"{kind}_grid_thw", f"{kind}_embeds"
    arguments = {pixels_name: pixel_values, embeds_name: embeds, layouts_name: layouts}
    given = [name for name, value in arguments.items() if value is not None]
    if given not in ([], [pixels_name, layouts_name], [embeds_name, layouts_name]):
        both = f"{pixels_name}, {layouts_name}: expected both or neither"
        raise ValueError(f"{both} ({embeds_name} may replace {pixels_name}), got {given}")
    layouts = [] if layouts is None else model.encoder.check_layouts(layouts, name=layouts_name)
    seconds = [1.0] * len(layouts)
    if second_per_grid_ts is not None:
        seconds = as_seconds(second_per_grid_ts, len(layouts), "second_per_grid_ts")
    if not given:
        return []
    merged = [model.processor.media_tokens(kind, layout, s) for layout, s in zip(layouts, seconds, strict=True)]
    width: Any = "values"
    if embeds is None:
        name, rows = pixels_name, pixel_values
        counts = [model.encoder.item_size(layout)[0] for layout in layouts]
    else:
        name, rows, width = embeds_name, embeds, ("channels", model.language_model.row_width)
        counts = [medium.num_tokens for medium in merged]
        if not isinstance(rows, Tensor):
            if (got := [len(item) for item in rows]) != counts:
                raise ValueError(f"{name}: expected tensors of {counts} tokens, one for each item, got {got}")
            rows = torch.cat(list(rows))
    check_pixel_rows(rows, ((f"patches or tokens of {layouts_name}", sum(counts)), width), name)
    encoded = Record(embeds=list(rows.split(counts)))
    if embeds is None:
        model.encode_rows(encoded, encoded.embeds, layouts)
    return list(zip(merged, encoded.embeds, strict=True))


def _prompts(
    model: Any, input_ids: Tensor, attention_mask: Tensor, images: list, videos: list, q: float, pruning: str
) -> list[Record]:
    """Return each prompt of a batch, merged and positioned; media are assigned in order of their placeholders."""
    queues, traces = {"image": iter(images), "video": iter(videos)}, list[Record]()
    for ids, mask in zip(input_ids, attention_mask, strict=True):
        trace = Record()
        items = [item for kind in queues for item in _take(model, kind, queues[kind], ids[mask])]
        trace.embeds = [embeds for _, embeds in items]
        trace.keep_masks = [merged.keep_mask(embeds, q, pruning) for merged, embeds in items]
        model.merge(trace, ids[mask], [merged for merged, _ in items])
        model.position(trace)
        traces.append(trace)
    if left := {kind: len(rest) for kind, queue in queues.items() if (rest := list(queue))}:
        raise ValueError(f"input_ids: expected placeholders for all media, got none for {left}")
    return traces


def _take(model: Any, kind: str, queue: Iterator, ids: Tensor) -> list:
    """Return the next media of `kind` that this prompt's placeholders need."""
    wanted, taken = int((model.processor.placeholders(ids) == model.token_ids[kind]).sum()), []
    while wanted > 0:
        item = next(queue, None)
        if item is None:
            raise ValueError(f"input_ids: expected placeholders only for the given {kind}s, got {wanted} too many")
        taken.append(item)
        wanted -= item[0].num_tokens
    return taken
