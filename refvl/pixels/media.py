"""Load videos from disk or memory as sampled frames; images are loaded in `refvl.pixels.images`.

    load_image(path | PIL image | array | tensor) -> PIL.Image, mode RGB
    load_video(path | frames | array | tensor)    -> Video: sampled frames (T, H, W, 3) uint8 and their times

PyAV decodes. This file makes the choices that PyAV leaves open: which frames of a video are sampled, when each frame is
shown, and how much may be decoded (`MediaLimits`). The steps for a file:

    open -> list the packets (how many frames there are, and when) -> sample -> open again, decode forward -> stack

The file is decoded forward once, without seeking, and only the sampled frames are kept. `refvl.pixels.containers` is
called if the header of a file contradicts its packets.
"""

import math
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import index
from pathlib import Path

import numpy as np
import torch

from refvl.arguments import MAX_FRAMES
from refvl.checks import check_positive, check_positive_int, check_positive_ints
from refvl.pixels import containers, refusals
from refvl.pixels.containers import Listing, Packets
from refvl.pixels.images import LIMITS, MediaLimits, load_image
from refvl.pixels.spill import frames_on_disk
from refvl.printing import printable

DEFAULT_FPS = 2.0
FRAMES_IN_MEMORY = 2**24  # in bytes; a larger array of frames is kept in a temporary file
_NO_FRAMES = np.empty((0, 0, 0, 3), np.uint8)
_NO_TIMESTAMPS = 128  # AVFMT_NOTIMESTAMPS


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """The sampled frames of a video, and their positions in the video."""

    frames: np.ndarray  # (T, H, W, 3) uint8
    fps: float  # the rate of the sampled frames; one temporal patch lasts temporal_patch_size / fps seconds
    source_fps: float  # the rate of the file; if it varies, the average total_num_frames / duration
    indices: tuple[int, ...]  # the indices of the sampled frames, out of total_num_frames
    total_num_frames: int
    duration: float  # the length of the whole video in seconds
    seconds: tuple[float, ...] | None = None  # times of the sampled frames if the rate varies; None: index / source_fps
    source: str = ""  # the file that contains the video

    @property
    def timestamps(self) -> list[float]:
        """The time of each sampled frame, in seconds from the start."""
        return [i / self.source_fps for i in self.indices] if self.seconds is None else list(self.seconds)


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
    """Return the indices of the sampled frames: evenly spaced, `fps` per second (default 2), or `num_frames` in total.

    The number is clamped to [min_frames, max_frames], then rounded down to a multiple of temporal_patch_size
    (num_frames is rounded to the nearest multiple). Frame i is `i * total // number`. This is the rule of transformers'
    `Qwen2VLVideoProcessor.sample_frames`, which computes the indices in floating point. In transformers, some lengths
    give one index past the end (61 frames at num_frames=14), and beyond 16,000 frames some indices are too large by
    one. A video shorter than temporal_patch_size keeps its frames; in transformers, it raises an error.

    Raises ValueError if both fps and num_frames are given, if more frames are requested than exist, or if there are
    more than `MAX_FRAMES`. Raises TypeError if a limit is not an integer.

    >>> sample_frame_indices(132, 25.0)
    [0, 13, 26, 39, 52, 66, 79, 92, 105, 118]
    """
    limits = {"temporal_patch_size": temporal_patch_size, "min_frames": min_frames, "max_frames": max_frames}
    total, step, min_frames, max_frames = check_positive_ints(total_num_frames=total_num_frames, **limits)
    if total > MAX_FRAMES:
        raise ValueError(f"total_num_frames: must be at most {MAX_FRAMES:,}, got {total:,}")
    if num_frames is not None:
        if fps is not None:
            raise ValueError(f"fps, num_frames: expected at most one, got fps={fps} and num_frames={num_frames}")
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
    limits: MediaLimits = LIMITS,
) -> Video:
    """Return the sampled frames of a video.

    source: a path; a list of frames, each of a type that `load_image` accepts; an array (T, H, W, 3); a tensor, which
    may also be (T, 3, H, W); or a Video, which is returned unchanged. The sampling arguments are those of
    `sample_frame_indices`. Frames in memory are treated as already sampled, at `fps` per second (default 2), unless
    source_fps sets their recorded rate or num_frames sets the number to sample. For a file, source_fps overrides its
    times. sample: a function that replaces the sampling rule for a file; it maps (total_num_frames, source_fps) to
    increasing indices. limits: the limits on decoding. Memory grows with the frames that are kept and not with the
    length of the video.

    The times of a file are those of its packets. If they equal index / rate (within one tick of the file's clock), the
    header's rate is used. If the rate varies, the rule samples at the average rate, source_fps, and the timestamps of
    the selected frames are exact. The rotation or mirroring in a file's display matrix, as written by phones, is
    applied (transformers' PyAV reader ignores it).

    A truncated file is an error if its header contains the number of frames (MP4, AVI). Other files (Matroska,
    WebM, FLV) are read to their end, with a warning if the header declares at least 10 % more.

    Raises FileNotFoundError for a missing file and TypeError for any other type of source. Raises ValueError for a URL
    or for frames of unequal size. Also raises ValueError for a file that is damaged, truncated, larger than `limits`,
    or without video frames, and for a still image or a playlist.
    """
    if isinstance(source, Video):
        return source
    if source_fps is not None:
        source_fps = check_positive(source_fps, "source_fps")
    check_positive_ints(min_frames=min_frames, max_frames=max_frames)
    rule = partial(sample_frame_indices, fps=fps, num_frames=num_frames, min_frames=min_frames, max_frames=max_frames)
    if isinstance(source, (str, Path)):
        return _read_clip(source, partial(_checked_sample, sample) if sample else rule, source_fps, limits)

    frames = as_frames(source, limits=limits)
    if source_fps is None and num_frames is None:
        source_fps = check_positive(DEFAULT_FPS if fps is None else fps, "fps")
        return _make_video(frames, range(len(frames)), len(frames), source_fps)
    source_fps = DEFAULT_FPS if source_fps is None else source_fps
    indices = rule(len(frames), source_fps)
    return _make_video(frames[indices], indices, len(frames), source_fps)


def _read_clip(
    source: str | Path, sample: Callable[[int, float], Sequence[int]], source_fps: float | None, limits: MediaLimits
) -> Video:
    """Read the frames of a file that `sample` selects. source_fps: a rate that overrides the file's own times."""
    import av  # imported here because its libraries load slowly

    name = str(source)
    if not os.path.isfile(source) or refusals.URL.match(name):
        raise refusals.not_a_file(source, "video")
    if not refusals.PLAIN.fullmatch(name):
        name = printable(name)
    # an absolute path, because FFmpeg reads text before a colon as a protocol; titles may be in any encoding
    open_clip = partial(av.open, str(Path(source).absolute()), **containers.OPENING)
    try:
        with open_clip() as container:
            listing = _list_frames(container, name, limits)
        if source_fps is not None:
            listing = replace(listing, rate=source_fps, start=None)
        while True:
            indices = sample(listing.total, listing.rate)
            with open_clip() as container:
                frames, ticks, decoded = _decode_forward(container, indices, name, limits)
            if decoded > indices[-1]:
                break
            listing = containers.listing_as_decoded(listing, decoded, name)
    except (av.error.FFmpegError, UnicodeError) as error:
        raise containers.not_a_video(name, error) from error

    video = replace(_make_video(frames, indices, listing.total, listing.rate), source=name)
    times = sorted(tick for tick in ticks if tick is not None)
    if listing.start is None or len(times) < len(ticks):
        return video
    return replace(video, seconds=tuple((tick - listing.start) * listing.tick for tick in times))


def _list_frames(container, name: str, limits: MediaLimits) -> Listing:
    """Count the frames that an opened file shows, and find their times, from its packets and its header."""
    if not container.streams.video:
        raise ValueError(f"video: {name} has no video stream")
    stream = container.streams.video[0]
    codec = stream.codec_context
    if codec is None:
        raise ValueError(f"video: {name} is damaged: the codec of its frames is unknown")
    if codec.width * codec.height > limits.max_image_pixels:
        raise refusals.too_many_pixels(f"video: {name}", codec.width, codec.height, limits.max_image_pixels)

    starts, lengths = array("q"), array("q")
    is_timed = not container.format.flags & _NO_TIMESTAMPS  # a raw stream has no times, or invented ones
    for packet in container.demux(stream):
        if _is_shown(packet, codec.name):
            is_timed = is_timed and packet.pts is not None
            starts.append(packet.pts or 0)
            lengths.append(packet.duration or 0)
    total = len(starts)
    if total < 2:
        containers.refuse_still_image(container.name, name, total)
    packets = Packets(np.array(starts), np.array(lengths), is_timed)

    rate = float(stream.average_rate or stream.guessed_rate or 0)
    tick = float(stream.time_base)
    end = (packets.starts + packets.lengths).max() * tick
    if total < stream.frames - 1 or (container.duration or 0) / 1e6 > 1.1 * end:  # the header declares more
        containers.check_complete(container, packets, name)
    if rate and (not is_timed or _is_steady(np.sort(packets.starts), rate, tick)):
        return Listing(total, rate, tick, None, stream.frames > 0)
    return containers.listing_at_average_rate(container, packets, name)


def _is_shown(packet, codec: str) -> bool:
    """Return whether a packet contains a frame that is shown.

    Counting packets without a shown frame would shift all later frames in time.

    Packets may be empty, and an edit list hides some of them. VP8 has hidden frames, to which other frames refer.
    """
    return packet.size > 0 and not packet.is_discard and (codec != "vp8" or bool(bytes(packet)[0] & 16))


def _is_steady(times: np.ndarray, rate: float, tick: float) -> bool:
    """Return whether frame i is shown at i / rate, within the resolution of the file's clock. times: ticks, sorted."""
    late = (times - times[0]) * tick - np.arange(len(times)) / rate
    return bool(np.abs(late).max() <= min(1.001 * tick, 0.5 / rate))


def _decode_forward(
    container, indices: Sequence[int], name: str, limits: MediaLimits
) -> tuple[np.ndarray, list[int | None], int]:
    """Return upright frames (T, H, W, 3) uint8 at these increasing indices, their ticks, and how many were decoded."""
    wanted = set(indices)
    frames = _NO_FRAMES
    ticks: list[int | None] = []
    decoded = 0
    container.streams.video[0].thread_type = "AUTO"
    for decoded, frame in enumerate(container.decode(video=0), 1):
        if decoded - 1 in wanted:
            image = frame.to_ndarray(format="rgb24")
            if "DISPLAYMATRIX" in frame.side_data:
                image = containers.upright(image, frame.side_data["DISPLAYMATRIX"], name)
            frames = _put(image, len(ticks), frames, len(indices), f"video: {name}", limits)
            ticks.append(frame.pts)
        if decoded > indices[-1]:
            break
    return frames, ticks, decoded


def _put(image: np.ndarray, place: int, frames: np.ndarray, count: int, what: str, limits: MediaLimits) -> np.ndarray:
    """Put a frame (H, W, 3) at index `place` into the array of all `count` frames; the first call allocates it."""
    if place == 0:
        shape = (count, *image.shape)
        size = math.prod(shape)
        if size > limits.max_video_bytes:
            raise refusals.too_many_frames(what, shape, limits.max_video_bytes)
        frames = np.empty(shape, np.uint8) if size <= FRAMES_IN_MEMORY else frames_on_disk(shape, what)
    elif image.shape != frames.shape[1:]:
        raise refusals.unequal_frames(what, frames.shape[1:], image.shape)
    frames[place] = image
    return frames


def _make_video(frames: np.ndarray, indices: Sequence[int], total: int, source_fps: float) -> Video:
    fps = len(indices) / total * source_fps
    return Video(frames, fps, float(source_fps), tuple(indices), total, total / source_fps)


def _checked_sample(sample: Callable[[int, float], Sequence[int]], total: int, source_fps: float) -> list[int]:
    """Return the indices chosen by a caller's rule; raise ValueError unless they increase and are within the video."""
    indices = [index(i) for i in sample(total, source_fps)]
    if not indices or indices[0] < 0 or indices[-1] >= total or any(a >= b for a, b in pairwise(indices)):
        raise ValueError(f"sample: expected one or more increasing indices from 0 to {total - 1}, got {indices}")
    return indices


def as_frames(frames, *, limits: MediaLimits = LIMITS) -> np.ndarray:
    """Return frames in memory as one (T, H, W, 3) uint8 array; `load_video` lists the types that are accepted."""
    if isinstance(frames, Video):
        return frames.frames
    if not isinstance(frames, (np.ndarray, torch.Tensor, Sequence)) or isinstance(frames, (str, bytes)):
        raise TypeError(f"video: expected a path, a list of frames, an array or a Video, got {type(frames).__name__}")
    if not isinstance(frames, Sequence) and frames.ndim != 4:
        raise ValueError(f"video: expected an array of shape (T, H, W, 3), got {tuple(frames.shape)}")
    if not (isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.shape[-1] == 3):
        given, frames = frames, _NO_FRAMES
        for i, frame in enumerate(given):
            frames = _put(np.asarray(load_image(frame, limits=limits)), i, frames, len(given), "video", limits)
    if len(frames) == 0:
        raise ValueError("video: expected at least one frame, got none")
    _, height, width, _ = frames.shape
    if width * height <= 1:
        raise refusals.nothing_to_see("video: a frame", width, height)
    return frames
