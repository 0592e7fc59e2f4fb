"""What released software computes differently from refvl; for comparison only.

Each function is named after its effect; its docstring names the releases. Notebooks 02 and 03 show
the consequences.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from refvl.positions.mrope import MediaSpan, get_mrope_input_positions, mrope_delta

# Intended differences between refvl's prompts and those of transformers' processors (5.17 to 5.23),
# each with the settings of our processor and the options of `tokenize` that reproduce transformers'
# prompts. One more choice affects only pixels: we resize the frames of MiniCPM-V 4.6 and 4.7 with
# Pillow, like images, whereas transformers uses torchvision. The pixels differ by one or two of 255
# levels.
CHOICES: dict[str, tuple[dict, dict]] = {
    "Qwen3-VL's videos without the outer special tokens, as in transformers 4.57": ({"outer_tokens": True}, {}),
    "special tokens in a user's text are text": ({}, {"allow_special_tokens": True}),
}


def second_per_grid_truncated(span: MediaSpan, tokens_per_second: float = 2.0) -> MediaSpan:
    """Return the span with its seconds per grid step truncated to an integer,
    which is 0 at more than 2 frames/s.

    transformers up to 5.17 (`get_rope_index`) and vLLM 0.33.0 with pruning
    (`_postprocess_video_embeds_evs`) truncate these seconds in the same way. Images are not
    changed, as in both releases.

    >>> second_per_grid_truncated(MediaSpan(0, t=4, h=2, w=2, t_factor=2 * 0.5)).t_factor
    0.0
    """
    if span.t == 1:
        return span
    return replace(span, t_factor=tokens_per_second * int(span.t_factor / tokens_per_second))


def larger_side_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    """Return positions (3, L) and delta, with max(h, w) positions for each item,
    regardless of the extent of its time axis.

    This is the rule of transformers 5.17 to 5.23, so text after a long video gets positions that
    the video already uses.
    """
    return _positions_with_cost(num_tokens, spans, lambda span: max(span.h, span.w))


def width_offset_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    """Return positions (3, L) and delta, with w positions for each item,
    regardless of height and time.

    This is the rule of vLLM 0.33.0 for pruned prompts (`recompute_mrope_positions`), so text after
    a portrait image gets positions of the image's lower rows. vLLM applies the rule to the kept
    tokens, so restrict the result to them.
    """
    return _positions_with_cost(num_tokens, spans, lambda span: span.w)


def bfloat16_position_channels(positions: Tensor) -> Tensor:
    """Round integer positions to bfloat16, which has 8 significant bits,
    so odd positions above 256 become even.

    vLLM 0.33.0 appends the positions of pruned media to their embeddings as four more channels.

    >>> bfloat16_position_channels(torch.tensor([255, 256, 257, 259, 515])).tolist()
    [255, 256, 256, 260, 516]
    """
    return positions.to(torch.bfloat16).to(positions.dtype)


def closed_up_positions(num_kept: int) -> tuple[Tensor, int]:
    """Return positions (3, K) and delta (0) of a pruned prompt whose K kept tokens are numbered
    without gaps.

    This is the rule of `nemotron_h_omni`, NVIDIA's own EVS, in transformers 5.23. The rule has no
    effect there, because the attention of that text model does not rotate queries and keys, and the
    Mamba layers use only the order of the tokens.
    """
    return torch.arange(num_kept).repeat(3, 1), 0


def _positions_with_cost(num_tokens: int, spans: Sequence[MediaSpan], cost: Callable) -> tuple[Tensor, int]:
    """Return refvl's positions, with everything after an item shifted so that the item uses
    `cost(span)` positions, and delta.
    """
    positions, _ = get_mrope_input_positions(num_tokens, spans)
    for span in spans:
        used = int(span.grid_positions().max()) + 1
        positions[:, span.offset + span.num_tokens :] += cost(span) - used
    return positions, mrope_delta(positions)


def choice_behind(model: Any, trace: Any, prompts: list[list[int]]) -> str:
    """Describe the entry of `CHOICES` by which the prompts differ; return "" if none fits."""
    media = [patches.media_tokens for patches in trace.patches]
    for choice, (settings, options) in CHOICES.items():
        processor = copy(model.processor)
        processor.__dict__ |= settings
        ids = processor.tokenize(trace.messages, media, **options)
        if ids in prompts and ids != trace.input_ids.tolist():
            return f"a choice of refvl: {choice}"
    return ""
