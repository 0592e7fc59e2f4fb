"""VidCom2: keep the video tokens that differ most from the rest, and keep more tokens in
distinctive frames.

Video Compression Commander (arXiv 2505.14454; in vLLM since July 2026) compares each token with the
whole video; EVS compares each token with the previous frame. The first frame gets no special
treatment.

    embeddings (M, D)
       | channels     the half that varies least over the video, normalised per row
       | similarity   of each token to the centre of the video, and to the centre of its frame
       | budgets      tokens per frame: more if the similarity to the video is low
       | choice       the least similar tokens of each frame
       | reconcile    to the count that the sizes imply, because the prompt was built with it
    mask (M,)

A video has t frames of n tokens. All values are computed in float64 and compared in float32, so
values that are equal in exact arithmetic are equal on every machine, and ties go to the earlier
token. Exact halves are rounded to even.

`PRUNERS` at the end of this file lists both methods, EVS and VidCom2, by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import check_floats, check_positive_int, check_pruning_rate, check_shape
from refvl.positions.evs import compute_retained_tokens_count, compute_retention_mask, num_tokens_of, split_frames

BANDWIDTHS = tuple(2.0**i for i in range(-3, 2))  # of the Gaussians; a single one would suit one scale of distance
TEMPERATURE = 0.01  # the temperature of the softmax over frames, whose similarities differ by hundredths


def vidcom2_retained_tokens_count(tokens_per_frame: int, num_frames: int, q: float) -> int:
    """Return the number of video tokens kept at pruning rate q in [0, 1): at least one per frame, at most all.

    Raises ValueError for counts below 1 or a q outside [0, 1).

    >>> vidcom2_retained_tokens_count(tokens_per_frame=64, num_frames=8, q=0.99)
    8
    """
    num_frames = check_positive_int(num_frames, "num_frames")
    total = check_positive_int(tokens_per_frame, "tokens_per_frame") * num_frames
    return max(num_frames, int(total * (1 - check_pruning_rate(q))))


def vidcom2_similarities(video_embeds: Tensor, num_frames: int) -> tuple[Tensor, Tensor]:
    """Return each token's similarity to the centre of the video and to that of its frame, (t, n) float64 each, 0 to 5.

    video_embeds: (M, D), frame-major. A token with nan or inf counts as zeros in the centres, and
    as entirely similar to them, so it is dropped first. Raises TypeError or ValueError as
    `compute_dissimilarity` does.
    """
    check_floats(check_shape(video_embeds, ("M", "D"), "video_embeds"), "video_embeds")
    usable = video_embeds.isfinite().all(dim=1, keepdim=True)
    frames = split_frames(torch.where(usable, video_embeds, 0).double(), num_frames)  # (t, n, D)
    spread = frames.var(dim=(0, 1), correction=0).float()
    steadiest = spread.argsort(stable=True)[: max(1, frames.shape[2] // 2)]
    frames, usable = F.normalize(frames[..., steadiest], dim=-1), usable.view(num_frames, -1)
    to_video = _similarity(frames, frames.mean(dim=(0, 1)), usable)
    return to_video, _similarity(frames, frames.mean(dim=1, keepdim=True), usable)


def _similarity(frames: Tensor, centre: Tensor, usable: Tensor) -> Tensor:
    """Return a Gaussian of the distance to the centre, summed over the bandwidths, (t, n)."""
    squared = (frames - centre).square().sum(-1) * usable
    return sum((torch.exp(-squared / (2 * a)) for a in BANDWIDTHS), torch.zeros_like(squared))


def vidcom2_frame_budgets(similarity_to_video: Tensor, q: float) -> Tensor:
    """Return each frame's token budget before the sum is reconciled, at least one token each, (t,) int64.

    similarity_to_video: (t, n), the first result of `vidcom2_similarities`.
    Raises ValueError for a shape other than (t, n) or a q outside [0, 1).
    """
    check_floats(check_shape(similarity_to_video, ("t", "n"), "similarity_to_video"), "similarity_to_video")
    prominence = (-similarity_to_video.mean(dim=1) / TEMPERATURE).softmax(dim=0)
    share = (1 - check_pruning_rate(q)) * (1 + prominence - prominence.mean())
    return (share.clamp(max=1) * similarity_to_video.shape[1]).float().round().clamp(min=1).long()


def vidcom2_retention_mask(video_embeds: Tensor, video_size_thw, spatial_merge_size: int, q: float) -> Tensor:
    """Return the mask of kept tokens, (M,) bool, as vLLM's `vidcom2` does. Arguments as in `compute_retention_mask`.

    At q = 0, all tokens are kept. Among equally similar tokens, the earliest are kept.
    Raises ValueError if the shape of the embeddings is not (M, D).
    """
    t, num_tokens = num_tokens_of(video_size_thw, spatial_merge_size)
    check_shape(video_embeds, (num_tokens, "D"), "video_embeds")
    to_video, to_frame = vidcom2_similarities(video_embeds, t)
    score = (to_video + to_frame).float()
    rank_in_frame = score.argsort(dim=1, stable=True).argsort(dim=1)
    chosen = (rank_in_frame < vidcom2_frame_budgets(to_video, q)[:, None]).flatten()
    return _reconcile(chosen, score.flatten(), vidcom2_retained_tokens_count(num_tokens // t, t, q))


def _reconcile(chosen: Tensor, score: Tensor, count: int) -> Tensor:
    """Return the mask `chosen`, (M,) bool, adjusted so that it keeps exactly `count` tokens.

    If too many were chosen, the most similar are dropped; if too few were chosen, the least
    similar of the others are added.
    """
    order = score.argsort(stable=True)
    order = order[(~chosen[order]).byte().argsort(stable=True)]
    mask = torch.zeros_like(chosen)
    mask[order[:count]] = True
    return mask


@dataclass(frozen=True, slots=True)
class Pruner:
    """A pruning method: `mask(video_embeds, thw, merge_size, q)` keeps as many tokens as
    `count(tokens_per_frame, num_frames, q)` returns.
    """

    title: str
    count: Callable[[int, int, float], int] = field(repr=False)
    mask: Callable[..., Tensor] = field(repr=False)


PRUNERS = {
    "evs": Pruner("EVS", compute_retained_tokens_count, compute_retention_mask),
    "vidcom2": Pruner("VidCom2", vidcom2_retained_tokens_count, vidcom2_retention_mask),
}


def find_pruner(name: str) -> Pruner:
    """Return the pruner registered under `name`; raise ValueError listing the valid names."""
    if not isinstance(name, str) or name not in PRUNERS:
        raise ValueError(f"pruning: expected {' or '.join(map(repr, PRUNERS))}, got {name!r}")
    return PRUNERS[name]
