"""The frames that GLM samples from a video, and the timestamps that the prompt contains for them.

    duration, fps -> frame indices    about `target_fps` per second, by the rule of the variant
                  -> even count       duplicates dropped in order, the last frame repeated if the count is odd
                  -> timestamps       one per pair: a pair of frames is one step of the grid (t, h, w)

    variant    releases               frames per second                             at most
    glm4v      GLM-4.1V, GLM-4.5V     2                                             600 (300 s; longer ones: spread)
    glm46v     GLM-4.6V               6 up to 30 s, 2 up to 300 s, 1 beyond         640
    glmga      GLM-GA                 2                                             640

One sampler determines both pixels and placeholders, so they cannot disagree. Upstream:
`sample_frames` of the video processors (transformers), and `_get_video_second_idx_*` (vLLM). vLLM's
functions return no frame for videos under half a second.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refvl.checks import as_sequence, check_int, check_positive, check_positive_int

VARIANTS = ("glm4v", "glm46v", "glmga")
GLM46V_RATES = ((30, 3), (300, 1), (2400, 0.5))  # (maximum duration of a video in seconds, grid steps per second)


@dataclass(frozen=True, slots=True)
class FrameSample:
    """Sampled frames: an even number of indices in the source video, and the `written_seconds` of every two indices."""

    indices: list[int]
    timestamps: list[float]


def sample_video_frames(
    variant: str,
    *,
    fps: float,
    total_num_frames: int,
    duration: float | None = None,
    frames_indices: Sequence[int] | None = None,
    do_sample_frames: bool = True,
    target_fps: float = 2.0,
    max_duration: float = 300.0,
    max_frames: int = 640,
    temporal_patch_size: int = 2,
) -> FrameSample:
    """Sample an even number of frames from a video of `total_num_frames` frames at `fps` frames per second.

    duration: in seconds; None: computed from the number of frames. do_sample_frames=False keeps
    `frames_indices`, the indices of frames that were sampled elsewhere. Otherwise,
    `frames_indices` is ignored. The other arguments are settings of a video processor:
    target_fps ("glm4v", "glmga"), max_duration in seconds ("glm4v"), max_frames ("glm46v",
    "glmga") and temporal_patch_size ("glm46v"). Raises ValueError or TypeError for an unknown
    variant, or for numbers that are not above 0.

    >>> sample_video_frames("glm4v", fps=30, total_num_frames=75, duration=2.5)
    FrameSample(indices=[0, 15, 30, 45, 60, 60], timestamps=[0, 1, 2])
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {VARIANTS}, got {variant!r}")
    fps, total = check_positive(fps, "fps"), check_positive_int(total_num_frames, "total_num_frames")
    duration = round((total - 1) / fps) + 1 if duration is None else check_positive(duration, "duration")
    target_fps = check_positive(target_fps, "target_fps")
    if not do_sample_frames:
        indices = _check_indices(frames_indices, total)
    elif variant == "glm4v":
        indices = _sample_glm4v(fps, total, duration, target_fps, max_duration)
    elif variant == "glm46v":
        indices = _sample_glm46v(fps, total, duration, max_frames, temporal_patch_size)
    else:
        indices = _sample_glmga(fps, total, duration, max_frames, target_fps)
    indices = distinct_and_even(indices)
    return FrameSample(indices, [written_seconds(variant, index / fps) for index in indices[::2]])


def written_seconds(variant: str, seconds: float) -> float:
    """Return a time as the variant's prompts state it: rounded down to a second ("glm4v"), or rounded to a tenth."""
    return int(seconds) if variant == "glm4v" else round(seconds, 1)


def _sample_glm4v(fps: float, total: int, duration: float, target_fps: float, max_duration: float) -> list[int]:
    """Return the index of a frame every 1 / target_fps seconds, rounded up.

    If a video is longer than max_duration, spread max_duration * target_fps frames evenly.
    """
    if duration <= max_duration:
        count = max(1, math.floor(duration * target_fps))
        return [math.ceil(min(total - 1, i * fps / target_fps)) for i in range(count)]
    count = max(1, int(max_duration * target_fps))
    if count >= total:
        return list(range(total))
    return [math.ceil(min(total - 1, second * fps)) for second in np.linspace(0, duration, count).tolist()]


def _sample_glm46v(fps: float, total: int, duration: float, max_frames: int, temporal_patch_size: int) -> list[int]:
    """Return frame indices at a rate that falls as the duration grows.

    If a short video has fewer frames than this rate needs, indices are repeated.
    """
    longest = GLM46V_RATES[-1][0]
    rate = next(rate for seconds, rate in GLM46V_RATES if min(duration, longest) <= seconds) * temporal_patch_size
    count = min(max(1, int(min(duration, longest) * rate)), max_frames)
    if total < count:
        return _spread(0, total - 1, count)
    return _to_count(_walk(fps, total, 1 / rate, int(duration), count), count, total)


def _sample_glmga(fps: float, total: int, duration: float, max_frames: int, target_fps: float) -> list[int]:
    """Return frame indices at a fixed rate, up to one step before the end of the video."""
    count = max(1, int(min(duration * target_fps, max_frames)))
    if total < count:
        return [math.floor(i * total / count) for i in range(count)]
    return _to_count(_walk(fps, total, 1 / target_fps, duration - 1 / target_fps, count), count, total)


def _walk(fps: float, total: int, step: float, stop: float, count: int) -> list[int]:
    """Return the index of the first frame at or after each multiple of `step` seconds, until `stop` seconds.

    The function stops after more than `count` frames, because the exact number no longer
    matters. The sums are rounded as upstream rounds them, because higher precision would select
    different frames.
    """
    chosen, second, frame_seconds = [0], step, 1 / fps
    while second < stop and len(chosen) <= count:
        after = range(chosen[-1] + 1, total)
        place = bisect.bisect_left(after, second, key=lambda index: index * frame_seconds)
        if place == len(after):
            break
        chosen.append(after[place])
        second += step
    return chosen


def _to_count(indices: list[int], count: int, total: int) -> list[int]:
    """Return `count` indices; too few are spread over their own range, and too many over the whole video."""
    if len(indices) < count:
        return _spread(indices[0], indices[-1], count)
    return indices if len(indices) == count else _spread(0, total - 1, count)


def _spread(first: int, last: int, count: int) -> list[int]:
    return np.linspace(first, last, count, dtype=int).tolist()


def distinct_and_even(indices: Sequence[int]) -> list[int]:
    """Drop duplicates in order, and repeat the last index if the count is odd: [0, 0, 3, 5] becomes [0, 3, 5, 5]."""
    distinct = list(dict.fromkeys(indices))
    return distinct + distinct[-1:] * (len(distinct) % 2)


def _check_indices(indices, total: int) -> list[int]:
    indices = [check_int(i, "frames_indices", 0) for i in as_sequence(indices, "frames_indices")]
    if not indices or max(indices) >= total:
        raise ValueError(f"frames_indices: expected at least one index, each from 0 to {total - 1}, got {indices}")
    return indices
