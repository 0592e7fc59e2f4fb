"""EVS: the selection of the video tokens to keep, and their positions.

Efficient Video Sampling (arXiv 2510.14624) keeps the video tokens that have changed since the
previous frame. A token that has not changed adds little, because its predecessor in the same
cell contains the same information. Like serving engines, this module works on merged embeddings
of any width.

Kept tokens and all later text keep their positions in the full prompt, so the pruned layout is
exactly the full layout restricted to the kept tokens. Positions are integers, stored separately
from the embeddings, because extra embedding channels in bfloat16 would round values above 256.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import as_grids, check_floats, check_int, check_positive_int, check_pruning_rate, check_shape
from refvl.positions.mrope import check_t_factor, grid_positions, mrope_delta

ALWAYS_KEPT = 255.0  # the dissimilarity of first-frame tokens; cosine distances never exceed 2


def compute_retained_tokens_count(tokens_per_frame: int, num_frames: int, q: float) -> int:
    """Return the number of video tokens kept at pruning rate q in [0, 1): at least those of the
    first frame, and at most all.

    The count depends on the sizes and on q, not on the content, so it gives both the number of
    placeholders in the prompt and the number of tokens that the mask keeps.

    Raises ValueError for counts below 1 or a q outside [0, 1).

    >>> compute_retained_tokens_count(tokens_per_frame=64, num_frames=8, q=0.5)
    256
    """
    tokens_per_frame = check_positive_int(tokens_per_frame, "tokens_per_frame")
    total = tokens_per_frame * check_positive_int(num_frames, "num_frames")
    return max(tokens_per_frame, int(total * (1 - check_pruning_rate(q))))


def compute_dissimilarity(video_embeds: Tensor, num_frames: int) -> Tensor:
    """Return each token's 1 - cosine similarity to the token in the same cell one frame earlier, (t, M / t) float32.

    First-frame tokens get 255, so they come first in any ranking. A token gets 0 if nan or inf
    in the embeddings make its dissimilarity undefined. video_embeds: (M, D), frame-major.
    Raises TypeError or ValueError for invalid embeddings, or for a num_frames that does not
    divide M.
    """
    check_floats(check_shape(video_embeds, ("M", "D"), "video_embeds"), "video_embeds")
    frames = split_frames(video_embeds.float(), num_frames)  # (t, M/t, D)
    change = 1 - F.cosine_similarity(frames[1:], frames[:-1], dim=-1)
    return torch.cat([change.new_full((1, frames.shape[1]), ALWAYS_KEPT), change.nan_to_num(nan=0)])


def split_frames(rows_MD: Tensor, num_frames: int) -> Tensor:
    """Reshape (M, D), frame-major, to (t, M / t, D); raise ValueError for a num_frames that does not divide M."""
    if len(rows_MD) % check_positive_int(num_frames, "num_frames") or not len(rows_MD):
        raise ValueError(f"num_frames: expected a divisor of {len(rows_MD)} (tokens of video_embeds), got {num_frames}")
    return rows_MD.unflatten(0, (num_frames, -1))


def compute_retention_mask(video_embeds: Tensor, video_size_thw, spatial_merge_size: int, q: float) -> Tensor:
    """Return the mask of the tokens with the largest dissimilarities, (M,) bool; among ties, the earliest are kept.

    Only exactly equal values are ties. The dissimilarities of unchanged tokens are 0 up to
    rounding errors of about 1e-7, and these errors decide which of the unchanged tokens are
    kept, as in upstream's formula.

    video_embeds: (M, D) merged embeddings of one video, frame-major. video_size_thw: (t, h, w) in patches.
    spatial_merge_size: the number of patches along each side of a token, or 1 if the size counts tokens. q: the share
    of tokens that is dropped, in [0, 1). The first frame is always kept. Raises ValueError if the shape of the
    embeddings is not (M, D).
    """
    t, num_tokens = num_tokens_of(video_size_thw, spatial_merge_size)
    check_shape(video_embeds, (num_tokens, "D"), "video_embeds")
    keep = compute_retained_tokens_count(num_tokens // t, t, q)
    ranking = compute_dissimilarity(video_embeds, t).flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(num_tokens, dtype=torch.bool, device=video_embeds.device)
    mask[ranking[:keep]] = True
    return mask


def compute_mrope_for_media(
    video_size_thw, spatial_merge_size: int, tokens_per_second: float = 1.0, video_second_per_grid: float = 1.0
) -> Tensor:
    """Return each merged token's position (t, h, w) relative to the item's start, and the item's extent, (M, 4) int64.

    The extent of an item is 1 + the largest position in the *whole* item over all axes. Later
    text has to skip the whole extent, so every kept token carries it, even if the tokens with
    the largest position are pruned. The default rates are for images. Raises ValueError if a
    rate is not a finite number.
    """
    t, h, w = _one_grid(video_size_thw, spatial_merge_size)
    t_factor = tokens_per_second * video_second_per_grid
    check_t_factor(t_factor, t, "tokens_per_second * video_second_per_grid")
    positions_M3 = grid_positions(t, h // spatial_merge_size, w // spatial_merge_size, t_factor).T
    extent = (positions_M3.max() + 1).expand(len(positions_M3), 1)
    return torch.cat([positions_M3, extent], dim=1)


def recompute_mrope_positions(
    input_ids,
    multimodal_positions: Sequence[Tensor],
    mrope_positions: Tensor,
    num_computed_tokens: int,
    vision_start_token_id: int,
    image_token_id: int,
    video_token_id: int,
) -> tuple[Tensor, int]:
    """Update the positions of a pruned prompt whose media arrive in pieces, for chunked prefill.

    input_ids: (L,) the pruned prompt. multimodal_positions: the (4, n) pieces that arrived with
    this chunk, in prompt order, with rows t, h, w, extent as in `compute_mrope_for_media`, cut
    to the kept tokens. A piece never spans two items. mrope_positions: (3, L or more), the
    result of the previous chunk; columns beyond the prompt, from the longer unpruned layout,
    are cut off. num_computed_tokens: the number of prompt tokens that are done; their positions
    are not changed.

    Returns positions (3, L) int64 and delta. For any chunk boundaries, the positions equal the full
    layout restricted to the kept tokens, up to the end of the last piece and the text after it.
    Media tokens that have not arrived yet have provisional positions. Raises ValueError if the
    pieces do not fit the prompt.
    """
    ids = torch.as_tensor(input_ids).flatten().cpu()
    check_shape(mrope_positions, (3, "at least L"), "mrope_positions")
    if mrope_positions.shape[1] < ids.numel():
        raise ValueError(f"mrope_positions: expected {ids.numel()} positions or more, got {mrope_positions.shape[1]}")
    positions = mrope_positions[:, : ids.numel()].clone().long()
    if check_int(num_computed_tokens, "num_computed_tokens", 0) > ids.numel():
        raise ValueError(f"num_computed_tokens: must be in [0, {ids.numel()}], got {num_computed_tokens}")
    is_media = (ids == image_token_id) | (ids == video_token_id)
    index = num_computed_tokens
    for i, piece in enumerate(multimodal_positions):
        name = f"multimodal_positions[{i}]"
        if check_shape(piece, (4, "n"), name).shape[1]:
            index = _place_piece(positions, ids, is_media, index, piece.long(), vision_start_token_id, name)
    return positions, mrope_delta(positions) if ids.numel() else 0


def _place_piece(positions, ids, is_media, index, piece, vision_start_token_id, name) -> int:
    """Write a piece at the first media token from `index` on, and the text after its item; return the piece's end."""
    remaining = is_media[index:].nonzero().flatten()
    if not len(remaining):
        wanted = f"expected media tokens for {piece.shape[1]} positions"
        raise ValueError(f"{name}: {wanted}, got none from prompt token {index} on")
    start = index + int(remaining[0])
    lengths = ids.unique_consecutive(return_counts=True)[1]
    ends = lengths.cumsum(0)
    medium = int(torch.searchsorted(ends, start, right=True))
    media_start, media_stop = int(ends[medium] - lengths[medium]), int(ends[medium])
    stop = start + piece.shape[1]
    if stop > media_stop:
        left = f"expected at most {media_stop - start} positions, the tokens left in its media item"
        raise ValueError(f"{name}: {left}, got {piece.shape[1]}")
    if media_start and ids[media_start - 1] != vision_start_token_id:
        wanted = f"expected vision_start_token_id={vision_start_token_id} before media token {media_start}"
        raise ValueError(f"input_ids: {wanted}, got {ids[media_start - 1]}")
    base = int(positions[0, media_start - 1]) + 1 if media_start else 0
    piece = piece.to(positions.device)
    positions[:, start:stop] = piece[:3] + base
    after = torch.arange(ids.numel() - media_stop, device=positions.device)
    positions[:, stop:media_stop] = base + int(piece[3, 0])  # the tokens that have not arrived yet
    positions[:, media_stop:] = base + piece[3, 0] + after
    return stop


def num_tokens_of(video_size_thw, spatial_merge_size: int) -> tuple[int, int]:
    """Return (number of frames, number of tokens) of a video whose size (t, h, w) is in patches."""
    t, h, w = _one_grid(video_size_thw, spatial_merge_size)
    return t, t * h * w // spatial_merge_size**2


def _one_grid(size_thw, spatial_merge_size: int) -> tuple[int, int, int]:
    check_positive_int(spatial_merge_size, "spatial_merge_size")
    return as_grids([size_thw], spatial_merge_size=spatial_merge_size, name="video_size_thw")[0]
