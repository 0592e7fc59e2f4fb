"""Clips, from disk or memory, to sampled frames; pictures are in `refvl.pixels.images`.

    load_image(path | PIL image | array | tensor) -> PIL.Image, mode RGB
    load_video(path | frames | array | tensor)    -> Video: sampled frames (T, H, W, 3) uint8 and their times

Decoding is Pillow's and PyAV's; what is ours is what they leave open: which frames of a clip are sampled and when each
is shown, and how much is decoded at all (`MediaLimits`). The packets of a video are listed first, which says how many
frames there are and when; then it is decoded forward once, without seeking, and only the frames that are asked for are
kept.
"""

import math
import operator
import os
import tempfile
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from refvl.checks import check_positive, check_positive_int, check_positive_ints, printable
from refvl.pixels.images import LIMITS as LIMITS
from refvl.pixels.images import MediaLimits as MediaLimits
from refvl.pixels.images import check_size, readable_formats, regular_file
from refvl.pixels.images import image_suffixes as image_suffixes
from refvl.pixels.images import load_image as load_image
from refvl.pixels.images import open_image as open_image

DEFAULT_FPS = 2.0
FRAMES_IN_MEMORY = 2**24  # bytes of a clip's frames; more lie in a file, whose pages the system may drop and read again
_NO_TIMESTAMPS = 128  # AVFMT_NOTIMESTAMPS


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """The sampled frames of a clip and where they stand in it."""

    frames: np.ndarray  # (T, H, W, 3) uint8
    fps: float  # of the sampled frames; one temporal patch lasts temporal_patch_size / fps seconds
    source_fps: float  # on average, where the rate varies: total_num_frames / duration
    indices: tuple[int, ...]  # of the sampled frames, among total_num_frames
    total_num_frames: int
    duration: float  # seconds, of the whole clip
    seconds: tuple[float, ...] | None = None  # of the sampled frames, where the rate varies; None: index / source_fps
    source: str = ""  # the file it came from

    @property
    def timestamps(self) -> list[float]:
        """Seconds from the start, one per sampled frame."""
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
    """Which frames of a clip are sampled: evenly spaced, `fps` per second (default 2), or `num_frames` in all.

    The number is brought into [min_frames, max_frames], then down to a multiple of temporal_patch_size (num_frames is
    rounded to the nearest one); frame i is `i * total // number`. This is the rule of transformers'
    `Qwen2VLVideoProcessor.sample_frames`, which counts in floating point: there some lengths give one index past the
    end (61 frames at num_frames=14), and beyond 16,000 frames single indices are one later. A clip shorter than
    temporal_patch_size, which fails there, keeps its frames.

    Raises ValueError when both fps and num_frames are given, or more frames are asked for than there are, TypeError for
    limits that are no integers.

    >>> sample_frame_indices(132, 25.0)
    [0, 13, 26, 39, 52, 66, 79, 92, 105, 118]
    """
    total, step, min_frames, max_frames = check_positive_ints(
        total_num_frames=total_num_frames, temporal_patch_size=temporal_patch_size,
        min_frames=min_frames, max_frames=max_frames,
    )  # fmt: skip
    if num_frames is not None:
        if fps is not None:
            raise ValueError(f"fps, num_frames: give one of them, got fps={fps} and num_frames={num_frames}")
        if check_positive_int(num_frames, "num_frames") > total:
            raise ValueError(f"num_frames: the clip has {total} frames, got {num_frames}")
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
    """The sampled frames of a clip.

    source: a path; a list of frames, each anything `load_image` takes; an array (T, H, W, 3) or tensor, which may also
    be (T, 3, H, W); or a Video, which is returned as it is. The sampling arguments are those of
    `sample_frame_indices`. Frames given in memory count as sampled already, `fps` per second (default 2), unless
    source_fps says how fast they were recorded or num_frames how many to take. source_fps overrides a file's own times.
    sample: another rule for a file, from (total_num_frames, source_fps) to increasing indices. limits: of what is
    decoded; memory grows with the frames kept, whatever the length of the clip.

    Times are those of a file's packets. Where they are index / rate (within a tick of the file's clock) the clip is
    what its header says. Where the rate varies, source_fps is the average that the rule samples by, and the timestamps
    of the chosen frames are true. The rotation that phones write into a file is applied (transformers' PyAV reader
    ignores it).

    A truncated file is an error where its header says how many frames there should be (MP4, AVI). Others (Matroska,
    WebM, FLV) are read as far as they go, with a warning where the header says that they go on for 10 % longer.

    Raises FileNotFoundError for a missing file, TypeError for another kind of source, ValueError for a URL, a file that
    is damaged, truncated, larger than `limits`, a still image or without video frames, and for frames of unequal size.
    """
    if isinstance(source, Video):
        return source
    source_fps = None if source_fps is None else check_positive(source_fps, "source_fps")
    check_positive_ints(min_frames=min_frames, max_frames=max_frames)
    rule = partial(sample_frame_indices, fps=fps, num_frames=num_frames, min_frames=min_frames, max_frames=max_frames)
    if isinstance(source, (str, Path)):
        return _decode_video(source, source_fps, sample or rule, limits)
    frames = as_frames(source, limits=limits)
    if source_fps is None and num_frames is None:
        source_fps = check_positive(DEFAULT_FPS if fps is None else fps, "fps")
        return _make_video(frames, range(len(frames)), len(frames), source_fps)
    source_fps = DEFAULT_FPS if source_fps is None else source_fps
    indices = rule(len(frames), source_fps)
    return _make_video(frames[indices], indices, len(frames), source_fps)


def as_frames(frames, *, limits: MediaLimits = LIMITS) -> np.ndarray:
    """Frames in memory as one (T, H, W, 3) uint8 array; see `load_video` for what they may be."""
    if isinstance(frames, Video):
        return frames.frames
    if not isinstance(frames, (np.ndarray, torch.Tensor, Sequence)) or isinstance(frames, (str, bytes)):
        raise TypeError(f"video: expected a path, a list of frames, an array or a Video, got {type(frames).__name__}")
    if not isinstance(frames, Sequence) and frames.ndim != 4:
        raise ValueError(f"video: expected an array of shape (T, H, W, 3), got {tuple(frames.shape)}")
    if not (isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.shape[-1] == 3):
        images = (np.asarray(load_image(frame, limits=limits)) for frame in frames)
        frames = _stack(images, len(frames), "video", limits)
    if len(frames) == 0:
        raise ValueError("video: expected at least one frame, got none")
    check_size(frames.shape[2], frames.shape[1], "video: a frame")
    return frames


def _stack(images: Iterable[np.ndarray], count: int, what: str, limits: MediaLimits) -> np.ndarray:
    """Frames (H, W, 3) of one size, put one by one into the array that holds them all."""
    stacked = np.empty((0, 0, 0, 3), np.uint8)
    for i, image in enumerate(images):
        height, width, _ = image.shape
        if i == 0:
            limits.check_frames(count, width, height, what)
            stacked = _empty_frames((count, height, width, 3), what)
        elif image.shape != stacked.shape[1:]:
            sizes = f"{stacked.shape[2]} x {stacked.shape[1]} and {width} x {height}"
            raise ValueError(f"{what}: all frames must have one size, got {sizes} pixels (width x height)")
        stacked[i] = image
    return stacked


def _empty_frames(shape: tuple[int, ...], what: str) -> np.ndarray:
    """(T, H, W, 3) uint8, unwritten: in memory, or where they are many in a temporary file without a name."""
    if (size := math.prod(shape)) <= FRAMES_IN_MEMORY:
        return np.empty(shape, np.uint8)
    try:
        with tempfile.TemporaryFile() as file:
            if hasattr(os, "posix_fallocate"):  # so that a full disk is an error here, not a crash while it is written
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
            return np.memmap(file, np.uint8, "r+", shape=shape)
    except OSError as error:
        where = tempfile.gettempdir()
        raise OSError(f"{what}: its frames need {size:,} bytes in {where}, see TMPDIR ({error.strerror})") from error


def _make_video(frames: np.ndarray, indices: Sequence[int], total: int, source_fps: float) -> Video:
    fps = len(indices) / total * source_fps
    return Video(frames, fps, float(source_fps), tuple(indices), total, total / source_fps)


@dataclass(frozen=True, slots=True)
class _Listing:
    """What the packets of a file say of its frames, none of which is decoded for it."""

    total: int  # frames that are shown
    rate: float  # per second; the average where it varies
    tick: float  # seconds
    start: int | None  # tick of the first frame where the rate varies; None: frame i is shown at i / rate
    is_counted: bool  # the header says how many frames there are


def _decode_video(
    source: str | Path, source_fps: float | None, sample: Callable[[int, float], Sequence[int]], limits: MediaLimits
) -> Video:
    av, (path, name) = _import_av(), regular_file(source, "video")
    try:
        listing = _list_frames(path, name, limits)
        if source_fps is not None:
            listing = replace(listing, rate=source_fps, start=None)
        while True:
            indices = _check_sample(sample(listing.total, listing.rate), listing.total)
            frames, ticks, decoded = _read_frames(path, name, indices, limits)
            if not 0 < decoded <= indices[-1] or listing.is_counted:
                break  # otherwise some packets held no frame of their own
            scale = 1.0 if listing.start is None else decoded / listing.total  # the time stays the same
            listing = replace(listing, total=decoded, rate=listing.rate * scale)
    except (av.error.FFmpegError, UnicodeError) as error:
        raise ValueError(f"video: {name} is truncated or not a video ({printable(error)})") from error
    if not decoded:
        raise ValueError(f"video: {name} has no frames that can be decoded")
    if decoded <= indices[-1]:
        raise ValueError(f"video: {name} is truncated: frame {decoded} of {listing.total} is missing")
    video = replace(_make_video(frames, indices, listing.total, listing.rate), source=name)
    times = sorted(tick for tick in ticks if tick is not None)
    if listing.start is None or len(times) < len(ticks):
        return video
    return replace(video, seconds=tuple((tick - listing.start) * listing.tick for tick in times))


def _check_sample(indices: Sequence[int], total: int) -> list[int]:
    indices = [operator.index(i) for i in indices]
    if not indices or indices[0] < 0 or indices[-1] >= total or any(a >= b for a, b in pairwise(indices)):
        raise ValueError(f"sample: expected increasing indices of 0 to {total - 1}, at least one, got {indices}")
    return indices


def _import_av():
    try:
        import av
    except ImportError as error:
        raise ImportError("video: reading a clip from a file needs PyAV: pip install av") from error
    return av


def _open_video(path: Path):
    """Absolute, because FFmpeg takes what stands before a colon for a protocol; titles may be in any encoding."""
    return _import_av().open(str(path.absolute()), metadata_errors="replace")


def _list_frames(path: Path, name: str, limits: MediaLimits) -> _Listing:
    """How many frames a file shows, and at what rate, from its packets and what its header says."""
    with _open_video(path) as container:
        if not container.streams.video:
            raise ValueError(f"video: {name} has no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise ValueError(f"video: {name} is damaged: what its frames were encoded with is not known")
        limits.check_pixels(stream.codec_context.width, stream.codec_context.height, f"video: {name}")
        starts, lengths, file_end = array("q"), array("q"), 0.0  # file_end: of all streams, in seconds
        is_timed = not container.format.flags & _NO_TIMESTAMPS  # a bare stream has no times, or made-up ones
        for packet in container.demux():
            length = packet.duration or 0
            if packet.pts is not None:
                file_end = max(file_end, float((packet.pts + length) * packet.time_base))
            if packet.stream_index == stream.index and _is_shown(packet, stream.codec_context.name):
                is_timed = is_timed and packet.pts is not None
                starts.append(packet.pts or 0)
                lengths.append(length)
        _refuse_still_image(path, name, len(starts))
        if not starts:
            raise ValueError(f"video: {name} has no frames that can be decoded")
        rate, tick = float(stream.average_rate or stream.guessed_rate or 0), float(stream.time_base)
        times, seconds = np.sort(starts), _ticks_shown(np.array(starts), np.array(lengths)) * tick if is_timed else 0.0
        _check_complete(container, stream, name, len(times), seconds, file_end)
        if seconds and "mp4" in container.format.name and stream.duration:
            seconds = stream.duration * tick  # there a packet lasts until the next one is decoded, not shown
        counted = stream.frames > 0
    if rate and (not seconds or _is_steady(times, rate, tick)):
        return _Listing(len(times), rate, tick, None, counted)
    if not seconds:
        raise ValueError(f"video: {name} does not say its frame rate")
    return _Listing(len(times), len(times) / seconds, tick, int(times[0]), counted)


def _is_shown(packet, codec: str) -> bool:
    """Neither empty, nor hidden by an edit list, nor a frame that VP8 only refers to, which has a packet of its own."""
    return packet.size > 0 and not packet.is_discard and (codec != "vp8" or bool(bytes(packet)[0] & 16))


def _ticks_shown(starts: np.ndarray, lengths: np.ndarray) -> float:
    """From the first frame to the end of the last, in ticks; one without a length has the mean of the others."""
    last = starts.argmax()
    shown = int(starts[last] - starts.min())
    return shown + (int(lengths[last]) or shown / max(1, len(starts) - 1))


def _is_steady(times: np.ndarray, rate: float, tick: float) -> bool:
    """Whether frame i is shown at i / rate, as exactly as the file's clock can tell."""
    late = (times - times[0]) * tick - np.arange(len(times)) / rate
    return bool(np.abs(late).max() <= min(1.001 * tick, 0.5 / rate))


def _check_complete(container, stream, name: str, frames: int, seconds: float, file_end: float) -> None:
    """Raise ValueError, or warn, where the header of a file promises more than its packets hold."""
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if frames < stream.frames - 1 and rate:
        promised, seconds = stream.frames / rate, seconds or frames / rate
        if "mp4" in container.format.name and stream.duration:  # without the frames that an edit list hides
            promised = float(stream.duration * stream.time_base)
        if promised - seconds > 1.5 / rate:
            raise ValueError(
                f"video: {name} is truncated: of {promised:.2f} s by its header there are {seconds:.2f} s, "
                f"{frames} frame(s)"
            )
    promised = (container.duration or 0) / 1e6
    if container.format.name in ("matroska,webm", "flv") and promised > 1.1 * file_end:
        warnings.warn(
            f"video: {name} seems to be truncated: of {promised:.2f} s by its header there are {file_end:.2f} s, "
            f"{frames} frame(s), which are read",
            stacklevel=5,
        )


def _refuse_still_image(path: Path, name: str, frames: int) -> None:
    """PyAV shows a still image as a clip of one frame, and of an animated WebP none."""
    if frames > 1:
        return
    try:
        with Image.open(path, formats=readable_formats()) as image:
            animated = getattr(image, "n_frames", 1) > 1
    except Exception:  # not an image, then: a very short clip
        return
    animation, still = "an animation that PyAV cannot decode; convert it", "a still image; give it as an image"
    raise ValueError(f"video: {name} is {animation if animated else still}")


def _read_frames(
    path: Path, name: str, indices: Sequence[int], limits: MediaLimits
) -> tuple[np.ndarray, list[int | None], int]:
    """The frames with these increasing indices, (T, H, W, 3) uint8, upright; their ticks; how many were decoded."""
    wanted, ticks, decoded = set(indices), [], 0

    def upright() -> Iterator[np.ndarray]:
        nonlocal decoded
        with _open_video(path) as container:
            container.streams.video[0].thread_type = "AUTO"
            for decoded, frame in enumerate(container.decode(video=0), 1):
                if decoded - 1 in wanted:
                    ticks.append(frame.pts)
                    yield np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                if decoded > indices[-1]:
                    break

    return _stack(upright(), len(indices), f"video: {name}", limits), ticks, decoded
