"""Computations of released software that differ from refvl's, for comparison only.

Each function is named after its effect; its docstring names the releases. Notebooks 02 and 03 show the consequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from refvl.positions.evs import compute_retention_mask
from refvl.positions.mrope import MediaSpan, get_mrope_input_positions, mrope_delta


def second_per_grid_truncated(span: MediaSpan, tokens_per_second: float = 2.0) -> MediaSpan:
    """Return the span with its seconds per grid step truncated to an integer, which is 0 at more than 2 frames/s.

    Found in transformers up to 5.17 (`get_rope_index`), and in vLLM 0.33.0 with pruning
    (`_postprocess_video_embeds_evs`). As in both, images are not changed.

    >>> second_per_grid_truncated(MediaSpan(0, t=4, h=2, w=2, t_factor=2 * 0.5)).t_factor
    0.0
    """
    if span.t == 1:
        return span
    return replace(span, t_factor=tokens_per_second * int(span.t_factor / tokens_per_second))


def larger_side_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    """Return positions (3, L) and delta if an item uses max(h, w) positions, regardless of the extent of its time axis.

    This is the rule of transformers 5.17 to 5.23: text after a long video gets positions that the video already uses.
    """
    return _positions_with_cost(num_tokens, spans, lambda span: max(span.h, span.w))


def width_offset_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    """Return positions (3, L) and delta if an item uses w positions, regardless of its height and time.

    This is the rule of vLLM 0.33.0 for pruned prompts (`recompute_mrope_positions`): text after a portrait image gets
    positions of the image's lower rows. vLLM applies the rule to the kept tokens, so restrict the result to them.
    """
    return _positions_with_cost(num_tokens, spans, lambda span: span.w)


def text_uncounted_positions(
    input_ids, multimodal_positions: Sequence[Tensor], vision_start_token_id: int, image_token_id: int,
    video_token_id: int,
) -> tuple[Tensor, int]:  # fmt: skip
    """Return positions (3, L) and delta of a pruned prompt, from a search that counts the media's tokens but no text.

    This is the rule of vLLM 0.32.0 (`recompute_mrope_positions`) for a prompt in one piece. Suppose the text before an
    item is longer than the items before it. Then the search for this item finds the start of an earlier item and
    overwrites it. The later tokens of the item itself then share one position. On a server that prunes videos, this
    also affects prompts with two images and no video.

    input_ids: (L,) the pruned prompt. multimodal_positions: for each item, (4, n) positions of the kept tokens, t, h, w
    and extent, as in `compute_mrope_for_media`. vLLM has the width in that row instead of the extent.
    """
    ids = torch.as_tensor(input_ids)
    is_text = (ids != image_token_id) & (ids != video_token_id)
    starts = (ids == vision_start_token_id).nonzero().flatten()
    positions, counted = torch.arange(len(ids)).repeat(3, 1), 0
    for piece in multimodal_positions:
        start = int(starts[starts >= counted][0])
        base, stop = int(positions[2, start]) + 1, start + 1 + piece.shape[1]
        positions[:, start + 1 : stop] = piece[:3] + base
        positions[:, stop:] = is_text[stop:].cumsum(0) + base + piece[3, 0] - 1
        counted += piece.shape[1]  # the text before the piece does not count
    return positions, mrope_delta(positions)


def bfloat16_position_channels(positions: Tensor) -> Tensor:
    """Round integer positions to bfloat16, which has 8 significant bits, so odd positions above 256 become even.

    vLLM 0.33.0 appends the positions of pruned media to their embeddings as four more channels.

    >>> bfloat16_position_channels(torch.tensor([255, 256, 257, 259, 515])).tolist()
    [255, 256, 256, 260, 516]
    """
    return positions.to(torch.bfloat16).to(positions.dtype)


def closed_up_positions(num_kept: int) -> tuple[Tensor, int]:
    """Return positions (3, K) and delta, 0, of a pruned prompt whose K kept tokens are numbered without gaps.

    This is the rule of `nemotron_h_omni` in transformers 5.23, NVIDIA's own EVS. It has no effect there, because the
    attention of its text model does not rotate queries and keys. Its Mamba layers use only the order of the tokens.
    """
    return torch.arange(num_kept).repeat(3, 1), 0


def joined_videos_masks(videos: Sequence[Tensor], tokens_per_frame: int, q: float) -> list[Tensor]:
    """Return EVS keep masks, (M,) bool, of the videos of a prompt, scored as one array of frames.

    This is the rule of `nemotron_h_omni` in transformers 5.23. Only the first video is guaranteed to keep its first
    frame. The first frame of every later video is compared with the last frame of the previous video, and all videos
    share one budget.

    videos: merged embeddings (M, D) of each video, frame-major, with `tokens_per_frame` tokens in each frame.
    """
    lengths = [len(video_MD) for video_MD in videos]
    frames_thw = (sum(lengths) // tokens_per_frame, 1, tokens_per_frame)
    return list(compute_retention_mask(torch.cat(list(videos)), frames_thw, 1, q).split(lengths))


def _positions_with_cost(num_tokens: int, spans: Sequence[MediaSpan], cost: Callable) -> tuple[Tensor, int]:
    """Return refvl's positions, with everything after an item shifted so that the item uses `cost(span)` positions."""
    positions, _ = get_mrope_input_positions(num_tokens, spans)
    for span in spans:
        used = int(span.grid_positions().max()) + 1
        positions[:, span.offset + span.num_tokens :] += cost(span) - used
    return positions, mrope_delta(positions)
