"""Load videos from disk or memory as sampled frames; images are loaded in `refvl.pixels.images`.

    load_image(path | PIL image | array | tensor) -> PIL.Image, mode RGB
    load_video(path | frames | array | tensor)    -> Video: sampled frames (T, H, W, 3) uint8 and their times

PyAV decodes videos. This file makes the choices that PyAV leaves open: which frames are
sampled, when each frame is shown, which side is up, and how much may be decoded
(`MediaLimits`). A file passes through these steps:

    open -> list the packets (how many frames there are, and when) -> sample -> open again, decode
    forward -> stack

The file is decoded forward, without seeking, and only the sampled frames are kept in memory.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refvl.checks import as_sequence, check_positive, check_positive_int, check_positive_ints
from refvl.paths import data
from refvl.pixels.images import LIMITS, MediaLimits, load_image

DEFAULT_FPS = 2.0
PART = ("video_start", "video_end")  # keys of a message part that limit sampling to the frames between two times
VIDEO_SUFFIXES = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"))
_NO_FRAMES = np.empty((0, 0, 0, 3), np.uint8)
_NO_TIMESTAMPS = 128  # AVFMT_NOTIMESTAMPS
_OPENING: Any = {  # titles may be in any encoding; if no protocol is allowed, a playlist cannot open other files
    "metadata_errors": "replace", "options": {"protocol_whitelist": "none"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """The sampled frames of a video, and their positions in the video."""

    frames: np.ndarray = field(repr=False)  # (T, H, W, 3) uint8
    fps: float  # the rate of the sampled frames; one temporal patch lasts temporal_patch_size / fps seconds
    source_fps: float  # the file's frame rate; if the rate varies, the average, total_num_frames / duration
    indices: tuple[int, ...]  # the indices of the sampled frames, out of total_num_frames
    total_num_frames: int
    duration: float  # the length of the whole video in seconds
    seconds: tuple[float, ...] | None = None  # times of the sampled frames if the rate varies; None: index / source_fps
    source: str = ""  # the file's path; empty for frames in memory

    @property
    def timestamps(self) -> list[float]:
        """The time of each sampled frame, in seconds from the start."""
        return [i / self.source_fps for i in self.indices] if self.seconds is None else list(self.seconds)


def is_video(item: object) -> bool:
    """Return whether a media item is a video: a path with a video's suffix, a Video, or a list or array of frames."""
    if isinstance(item, (str, os.PathLike)):
        return Path(item).suffix.lower() in VIDEO_SUFFIXES
    return isinstance(item, (Video, list, tuple)) or getattr(item, "ndim", 3) == 4


def sample_frame_indices(
    total_num_frames: int,
    source_fps: float | None = None,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    temporal_patch_size: int = 2,
) -> list[int]:
    """Return evenly spaced indices of the frames to sample: `fps` per second (default 2), or `num_frames` in total.

    With `fps`, the number is clamped to [min_frames, max_frames] and rounded down to a multiple of
    temporal_patch_size; `num_frames` is rounded to the nearest multiple. Index i is `i * total //
    number`. This is the rule of transformers' `Qwen2VLVideoProcessor.sample_frames`, which computes
    the indices in floating point. In transformers, some lengths give one index past the end (61
    frames at num_frames=14), and beyond 16,000 frames some indices are too large by one. A video of
    fewer than temporal_patch_size frames keeps them all; transformers raises an error.

    Raises ValueError if both fps and num_frames are given, or if num_frames exceeds the number
    of frames. Raises TypeError if a limit is not an integer.

    >>> sample_frame_indices(132, 25.0)
    [0, 13, 26, 39, 52, 66, 79, 92, 105, 118]
    """
    limits = {"temporal_patch_size": temporal_patch_size, "min_frames": min_frames, "max_frames": max_frames}
    total, step, min_frames, max_frames = check_positive_ints(total_num_frames=total_num_frames, **limits)
    if num_frames is not None:
        if fps is not None:
            raise ValueError(f"fps, num_frames: expected at most one of them, got fps={fps}, num_frames={num_frames}")
        if (num_frames := check_positive_int(num_frames, "num_frames")) > total:
            raise ValueError(f"num_frames: expected at most {total}, the number of frames available, got {num_frames}")
        wanted = round(num_frames / step) * step
    else:
        fps = check_positive(DEFAULT_FPS if fps is None else fps, "fps")
        source_fps = check_positive(source_fps, "source_fps")
        if max_frames < step:
            raise ValueError(f"max_frames: must be at least temporal_patch_size={step}, got {max_frames}")
        wanted = int(min(max(total / source_fps * fps, min_frames), max_frames, total)) // step * step
    number = min(max(wanted, step), total // step * step) or total
    return [i * total // number for i in range(number)]


def load_video(
    source,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    source_fps: float | None = None,
    sample: Callable[[int, float], Sequence[int]] | None = None,
    video_start: float = 0.0,
    video_end: float = math.inf,
    limits: MediaLimits = LIMITS,
) -> Video:
    """Return the sampled frames of a video.

    source: a path, or the name of a shipped video; a list of frames, each of a type that
    `load_image` accepts; an array or a tensor, (T, H, W, 3) or (T, 3, H, W); a pair (frames,
    metadata), with keys as in `with_times`; or a Video, which is returned unchanged. The
    sampling arguments are those of `sample_frame_indices`. Frames in memory are treated as
    already sampled, at `fps` per second (default 2), unless source_fps sets their recorded rate
    or num_frames sets the number to sample. For a file, source_fps overrides the file's times.
    sample: a function that replaces the sampling rule for a file; it maps (total_num_frames,
    source_fps) to increasing indices. video_start, video_end: the times in seconds between
    which a file's frames are sampled, as if the file had no others; the frames keep their times
    in the file. limits: the limits on decoding. Memory use grows with the number of sampled
    frames, not with the length of the video.

    A file's frame times come from its packets. If each time equals index / rate within one tick
    of the file's clock, the header's rate is used. If the rate varies, frames are sampled by
    the average rate, source_fps, and keep their exact timestamps. Phones store a rotation or
    mirroring in a file's display matrix; `load_video` applies it, while transformers' PyAV
    reader ignores it.

    Raises FileNotFoundError for a path that is not a file, and TypeError for an unsupported
    type of source. Raises ValueError, with the name of the file and the reason, for a file that
    PyAV cannot decode, that is shorter than its header states (MP4, AVI), or that exceeds
    `limits`. Also raises ValueError for frames of unequal size.
    """
    if isinstance(source, Video):
        return source
    if source_fps is not None:
        source_fps = check_positive(source_fps, "source_fps")
    rule = partial(sample_frame_indices, fps=fps, num_frames=num_frames, min_frames=min_frames, max_frames=max_frames)
    if isinstance(source, (str, os.PathLike)):
        # a path that is not a file must be a shipped video's name; URLs, folders and blocking pipes are refused
        source = source if os.path.isfile(source) else data(source, kind="video")
        part = partial(_sample_part, sample or rule, video_start, video_end)
        return _read_file(os.fspath(source), part, source_fps, limits)
    if (video_start, video_end) != (0, math.inf):
        raise ValueError("video_start, video_end: expected a file, got frames; pass fewer frames")
    if isinstance(source, tuple) and source and isinstance(source[-1], Mapping):
        return with_times(as_frames(source[0], limits=limits), dict(source[1]))

    frames = as_frames(source, limits=limits)
    if source_fps is None and num_frames is None:
        source_fps = check_positive(DEFAULT_FPS if fps is None else fps, "fps")
        return _make_video(frames, range(len(frames)), len(frames), source_fps)
    source_fps = DEFAULT_FPS if source_fps is None else source_fps
    indices = rule(len(frames), source_fps)
    return _make_video(frames[indices], indices, len(frames), source_fps)


@dataclass(frozen=True, slots=True)
class Listing:
    """The number and times of a file's frames, read from its packets, without decoding."""

    total: int  # the number of frames that are shown
    rate: float  # frames per second; an average if the rate varies
    tick: float  # the unit of the file's clock, in seconds
    # the tick of the first frame if the rate varies; None: frame i is shown at i / rate
    start: int | None = None


def _sample_part(sample: Callable, start: float, end: float, total: int, rate: float) -> tuple[list[int], float]:
    """Return the indices of the frames that `sample` selects between two times in seconds, and
    the rate of these frames.

    Upstream: `calculate_video_frame_range` of qwen-vl-utils.
    """
    first, last = math.ceil(start * rate), math.floor(min(end * rate, total - 1))
    if not 0 <= first <= last:
        raise ValueError(f"video_start, video_end: no frame of {total / rate:.2f} s is between {start:g} and {end:g} s")
    indices = [first + i for i in sample(last - first + 1, rate)]
    return indices, len(indices) / (last - first + 1) * rate


def _read_file(name: str, sample: Callable, source_fps: float | None, limits: MediaLimits) -> Video:
    """Read the frames that `sample` selects from a file.

    sample: a function (total, rate) -> (indices, their rate). source_fps: a rate that replaces
    the file's times.
    """
    with _opened(name) as container:
        listing = _list_frames(container, name, limits)
    if source_fps is not None:
        listing = replace(listing, rate=source_fps, start=None)
    indices, fps = sample(listing.total, listing.rate)
    frames, ticks, decoded = _decode_forward(name, indices, limits)
    if 0 < decoded <= indices[-1]:  # some packets contain no frame of their own
        scale = 1.0 if listing.start is None else decoded / listing.total  # the duration stays the same
        listing = replace(listing, total=decoded, rate=listing.rate * scale)
        indices, fps = sample(listing.total, listing.rate)
        frames, ticks, decoded = _decode_forward(name, indices, limits)
    if not decoded:
        raise ValueError(f"video: {name} has no frames that can be decoded")

    video = replace(_make_video(frames, indices, listing.total, listing.rate), fps=fps, source=name)
    times = sorted(tick for tick in ticks if tick is not None)
    if listing.start is None or len(times) < len(ticks):
        return video
    return replace(video, seconds=tuple((tick - listing.start) * listing.tick for tick in times))


@contextmanager
def _opened(name: str) -> Iterator[Any]:
    """Open a video file. Raises ValueError with the file's name if PyAV fails in the `with` block."""
    import av  # imported here because PyAV's libraries load slowly

    try:
        with open(name, "rb") as file, av.open(file, **_OPENING) as container:
            yield container
    except av.error.FFmpegError as error:
        raise ValueError(f"video: {name} cannot be read: {error}") from error


def _list_frames(container, name: str, limits: MediaLimits) -> Listing:
    """Return the number and times of the frames that an opened file shows, from the file's packets and header."""
    if not container.streams.video or container.streams.video[0].codec_context is None:
        raise ValueError(f"video: {name} has no video stream that can be decoded")
    stream = container.streams.video[0]
    if stream.width * stream.height > limits.max_image_pixels:
        most = f"max_image_pixels is {limits.max_image_pixels:,}; raise it with limits=MediaLimits(...)"
        raise ValueError(f"video: {name} has frames of {stream.width} x {stream.height} pixels, but {most}")

    codec = stream.codec_context.name
    shown = [(packet.pts, packet.duration or 0) for packet in container.demux(stream) if _is_shown(packet, codec)]
    rate, tick = float(stream.average_rate or stream.guessed_rate or 0), float(stream.time_base)
    seconds = len(shown) / rate if rate else 0.0
    # the times of a raw stream are missing or invented
    is_timed = not container.format.flags & _NO_TIMESTAMPS and all(pts is not None for pts, _ in shown)
    starts = np.sort([pts for pts, _ in shown]) if is_timed else np.zeros(0)
    if len(starts):
        ticks = int(starts[-1] - starts[0])
        _, last = max(shown)
        seconds = (ticks + (last or ticks / max(1, len(shown) - 1))) * tick or seconds
    if not shown or not seconds:
        raise ValueError(f"video: {name} has no readable frames or no readable frame rate")

    is_mp4 = "mp4" in container.format.name and stream.duration
    promised = stream.frames / rate if rate else 0.0
    if is_mp4:
        promised = stream.duration * tick  # this duration excludes the frames that an edit list hides
    if promised - seconds > 1.5 * seconds / len(shown):
        raise ValueError(f"video: {name} is truncated: it ends after {seconds:.2f} s of {promised:.2f} s")
    if rate and (not is_timed or _is_steady(starts, rate, tick)):
        return Listing(len(shown), rate, tick)
    return Listing(len(shown), len(shown) / (promised if is_mp4 else seconds), tick, int(starts[0]))


def _is_shown(packet, codec: str) -> bool:
    """Return whether a packet contains a frame that is shown.

    Counting packets without a shown frame would shift all later frames in time.

    Some packets are empty, and an edit list may hide others. VP8 also has hidden frames, to
    which other frames refer.
    """
    return packet.size > 0 and not packet.is_discard and (codec != "vp8" or bool(bytes(packet)[0] & 16))


def _is_steady(times: np.ndarray, rate: float, tick: float) -> bool:
    """Return whether every frame i is shown at i / rate, to the precision of the file's clock. times: sorted ticks."""
    late = (times - times[0]) * tick - np.arange(len(times)) / rate
    return bool(np.abs(late).max() <= min(1.001 * tick, 0.5 / rate))


def _decode_forward(name: str, indices: Sequence[int], limits: MediaLimits) -> tuple[np.ndarray, list[int | None], int]:
    """Return the upright frames (T, H, W, 3) uint8 at increasing `indices`, their ticks, and
    the number of decoded frames.
    """
    wanted = set(indices)
    frames = _NO_FRAMES
    ticks: list[int | None] = []
    decoded = 0
    with _opened(name) as container:
        container.streams.video[0].thread_type = "AUTO"
        for decoded, frame in enumerate(container.decode(video=0), 1):
            if decoded - 1 in wanted:
                image = upright(frame.to_ndarray(format="rgb24"), frame.side_data.get("DISPLAYMATRIX"))
                frames = _put(image, len(ticks), frames, len(indices), f"video: {name}", limits)
                ticks.append(frame.pts)
            if decoded > indices[-1]:
                break
    return frames, ticks, decoded


def upright(image: np.ndarray, matrix) -> np.ndarray:
    """Orient a decoded frame (H, W, 3) by its display matrix: rotate it by quarter turns, mirror it, or both.

    matrix: None, or 3 x 3 int32 [a b u; c d v; x y w], which maps (x, y) to (a x + c y, b x + d
    y). The scale and offset are ignored, and an oblique angle is rounded to the nearest quarter
    turn. FFmpeg's programs do the same with the filters transpose, hflip and vflip.
    """
    if matrix is None:
        return image
    (a, b, _), (c, d, _), _ = np.frombuffer(matrix, np.int32).reshape(3, 3).astype(float)
    if abs(b) + abs(c) > abs(a) + abs(d):  # rotated by a quarter turn
        image, a, d = image.swapaxes(0, 1), c, b
    return image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _put(image: np.ndarray, place: int, frames: np.ndarray, count: int, what: str, limits: MediaLimits) -> np.ndarray:
    """Write a frame (H, W, 3) to index `place` of the array of all `count` frames; the first
    call allocates the array.
    """
    if place == 0:
        if (size := count * image.size) > limits.max_video_bytes:
            most = f"max_video_bytes is {limits.max_video_bytes:,}; take fewer, or raise it in limits=MediaLimits(...)"
            raise ValueError(f"{what}: {count} frames need {size:,} bytes, but {most}")
        frames = np.empty((count, *image.shape), np.uint8)
    elif image.shape != frames.shape[1:]:
        raise ValueError(f"{what}: expected frames of one size, got {frames.shape[1:]} and {image.shape}")
    frames[place] = image
    return frames


def _make_video(frames: np.ndarray, indices: Sequence[int], total: int, source_fps: float) -> Video:
    fps = len(indices) / total * source_fps
    return Video(frames, fps, float(source_fps), tuple(map(int, indices)), total, total / source_fps)


def with_times(frames: np.ndarray, metadata: dict) -> Video:
    """Return frames that were sampled elsewhere as a Video with their times.

    metadata: a dict with keys of transformers' `VideoMetadata`: `fps` (the rate of the source),
    `frames_indices` and `total_num_frames`. Without indices, the frames count as the whole
    source. If the dict contains `timestamps`, in seconds, only these are read.
    """
    seconds = metadata.get("timestamps")
    times = metadata.get("frames_indices") if seconds is None else seconds
    times = as_sequence(range(len(frames)) if times is None else times, "video_metadata")
    if len(times) != len(frames) or list(times) != sorted(times):
        raise ValueError(f"video_metadata: expected {len(frames)} increasing indices or timestamps, got {times}")
    if seconds is None:
        fps = check_positive(metadata.get("fps"), "video_metadata: fps")
        return _make_video(frames, times, metadata.get("total_num_frames") or times[-1] + 1, fps)
    step = check_positive((times[-1] - times[0]) / (len(times) - 1), "timestamps") if len(times) > 1 else 0.5
    video = _make_video(frames, range(len(times)), len(times), 1 / step)
    return replace(video, seconds=tuple(times), duration=times[-1] + step)


def as_frames(frames, *, limits: MediaLimits = LIMITS) -> np.ndarray:
    """Return frames in memory as one (T, H, W, 3) uint8 array; `load_video` lists the accepted types."""
    if isinstance(frames, Video):
        return frames.frames
    if not isinstance(frames, (np.ndarray, torch.Tensor, Sequence)) or isinstance(frames, (str, bytes)):
        raise TypeError(f"video: expected a path, a list of frames, an array or a Video, got {type(frames).__name__}")
    if len(frames) == 0 or getattr(frames, "ndim", 4) != 4:
        got = tuple(frames.shape) if hasattr(frames, "shape") else "no frames"
        raise ValueError(f"video: expected at least one frame, or an array of shape (T, H, W, 3), got {got}")
    if isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.shape[-1] == 3:
        return frames
    stacked = _NO_FRAMES
    for i, frame in enumerate(frames):
        stacked = _put(np.asarray(load_image(frame, limits=limits)), i, stacked, len(frames), "video", limits)
    return stacked
