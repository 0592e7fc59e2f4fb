"""Pictures and clips, from disk or memory, to plain RGB.

    load_image(path | PIL image | array | tensor) -> PIL.Image, mode RGB
    load_video(path | frames | array | tensor)    -> Video: sampled frames (T, H, W, 3) uint8 and their times

Decoding is Pillow's and PyAV's; what is ours is what they leave open: which way up a picture is, what stands behind a
transparent pixel, how 16 bits become 8, which frames of a clip are sampled and when each is shown, and how much is
decoded at all (`MediaLimits`). The packets of a video are listed first, which says how many frames there are and when;
then it is decoded forward once, without seeking, and only the frames that are asked for are kept.
"""

import math
import operator
import os
import re
import stat
import tempfile
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile

from refvl.checks import blame, check_positive, check_positive_int, check_positive_ints, check_values, printable

DEFAULT_FPS = 2.0
FRAMES_IN_MEMORY = 2**24  # bytes of a clip's frames; more lie in a file, whose pages the system may drop and read again
_URL = re.compile(r"data:|[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # Path turns :// into :/
_NEVER_DECODED = {"EPS", "MPEG"}  # drawn by Ghostscript, another program; Pillow only tells the size
_NO_TIMESTAMPS = 128  # AVFMT_NOTIMESTAMPS
_TO_UPRIGHT = {  # by how the camera was held, as EXIF counts; 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """How much is decoded at most, checked before memory is taken for it; a limit that is in the way can be raised.

    Pillow has a limit of its own, `PIL.Image.MAX_IMAGE_PIXELS`: it warns above 89 million pixels and refuses twice as
    many, so beyond that both have to be raised.
    """

    max_image_pixels: int = 2**26  # width x height of a file's picture or frame: 8192 x 8192, 201 MB as RGB
    max_video_bytes: int = 2**31  # of the frames of a clip that are kept, 3 bytes per pixel

    def __post_init__(self):
        check_positive_ints(max_image_pixels=self.max_image_pixels, max_video_bytes=self.max_video_bytes)

    def check_pixels(self, width: int, height: int, what: str) -> None:
        """Raise ValueError for a picture or a frame with more than max_image_pixels."""
        if width * height > self.max_image_pixels:
            raise ValueError(
                f"{what} has {width} x {height} = {width * height:,} pixels, max_image_pixels is "
                f"{self.max_image_pixels:,}; raise it with limits=MediaLimits(max_image_pixels=...)"
            )

    def check_frames(self, frames: int, width: int, height: int, what: str) -> None:
        """Raise ValueError where so many frames need more than max_video_bytes."""
        if (needed := frames * width * height * 3) > self.max_video_bytes:
            raise ValueError(
                f"{what}: {frames} frames of {width} x {height} pixels need {needed:,} bytes, max_video_bytes is "
                f"{self.max_video_bytes:,}; take fewer frames, or raise it with limits=MediaLimits(max_video_bytes=...)"
            )


LIMITS = MediaLimits()


def load_image(source, *, limits: MediaLimits = LIMITS) -> Image.Image:
    """One picture as a PIL image of mode RGB; `.info["source"]` says which file it came from.

    source: a path; a PIL image; an array (H, W), (H, W, 1 | 3 | 4) or a tensor, which may also be (1 | 3 | 4, H, W),
    of uint8, uint16, or floats in [0, 1]. limits: of what is read from a file; arrays are as large as they are.

    The EXIF rotation is applied; an EXIF block that cannot be read is ignored, as other tools do. Transparent pixels
    are blended onto white, as transformers 5.23 does; 5.17 drops the alpha channel, which shows whatever colour the
    file has where nothing was meant to be seen. Of an animation the first frame is taken.

    16-bit grey is scaled to 8 bits (Pillow alone would clip it to white). Pillow's mode "I" does not say how many bits
    its integers have: those of a PNG or PPM file are 16, others are taken for 8 bits where none is above 255, and for
    16 up to 65535. Mode "F" holds floats in [0, 1].

    Raises FileNotFoundError for a missing file, TypeError for another kind of source, ValueError for a URL, a file that
    is truncated, larger than `limits` or not an image, levels outside those ranges, an array of another shape, dtype or
    range, an empty picture, and one of a single pixel.
    """
    if isinstance(source, (str, Path)):
        path, name = _regular_file(source, "image")
        with open_image(path, name, limits) as image:
            return _decode_image(image, name, name, limits)
    name = f"the {type(source).__name__}"
    if isinstance(source, Image.Image):
        origin = source.info.get("source") or getattr(source, "filename", "")
        return _decode_image(source, name, printable(origin), limits)
    if not isinstance(source, (np.ndarray, torch.Tensor)):
        kinds = "a path, a PIL image, a numpy array or a torch tensor"
        raise TypeError(f"image: expected {kinds}, got {type(source).__name__}")
    return _decode_image(Image.fromarray(_as_uint8(_channels_last(source), "image")), name, "", limits)


def image_suffixes() -> frozenset[str]:
    """Suffixes, such as ".png", of the files that `load_image` reads.

    Those of Pillow's formats that have a reader, without stubs (BUFR, GRIB, HDF5, WMF), which need a handler that
    somebody else installs, EPS, which is drawn by another program, and MPEG, of which Pillow only tells the size.
    """
    return frozenset(suffix for suffix, format in Image.registered_extensions().items() if format in _readable())


@cache
def _readable() -> tuple[str, ...]:
    """Names of Pillow's formats that decode here and now, in the order in which it tries them."""
    Image.init()
    readers = {name: Image.OPEN[name][0] for name in Image.ID if name in Image.OPEN and name not in _NEVER_DECODED}
    stub = ImageFile.StubImageFile
    return tuple(
        name for name, reader in readers.items() if not (isinstance(reader, type) and issubclass(reader, stub))
    )


def open_image(source: Path | IO[bytes], name: str, limits: MediaLimits) -> Image.Image:
    """A file or its bytes as a picture that is not decoded yet; ValueError, naming it, where Pillow cannot read it."""
    try:
        return Image.open(source, formats=_readable())
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"image: {name} has more pixels than max_image_pixels={limits.max_image_pixels:,} and PIL.Image."
            f"MAX_IMAGE_PIXELS allow ({error}); raise both, the first with limits=MediaLimits(max_image_pixels=...)"
        ) from error
    except Image.UnidentifiedImageError as error:
        raise ValueError(f"image: {name} is not a picture that Pillow can read") from error
    except Exception as error:  # a plugin may raise anything
        raise ValueError(f"image: {name} is not a picture that Pillow can read ({printable(error)})") from error


def _decode_image(image: Image.Image, name: str, origin: str, limits: MediaLimits) -> Image.Image:
    """An opened picture, upright and RGB. name: for messages; origin: the file it came from, "" for none."""
    _check_size(image.width, image.height, f"image: {name}")
    if isinstance(image, ImageFile.ImageFile):  # others are decoded already
        limits.check_pixels(image.width, image.height, f"image: {name}")
    with blame(f"image: {name} is truncated or damaged"):
        image.load()
    rotation = None
    with suppress(Exception):  # an EXIF block that is damaged in any way; the pixels are there
        rotation = _TO_UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    if image.mode.startswith("I") or image.mode == "F":  # more than 8 bits of grey
        image = Image.fromarray(_as_uint8(_grey_levels(image, name), f"image: {name}"))
    with blame(f"image: {name} cannot be turned into RGB"):
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert("RGB")
    image = image if rotation is None else image.transpose(rotation)
    image.info = {"source": origin} if origin else {}  # without EXIF: once is enough
    return image


def _regular_file(source: str | Path, kind: str) -> tuple[Path, str]:
    """The path of an ordinary file, and its name for messages: a pipe would block when opened, a device never end."""
    name = printable(source)
    if _URL.match(str(source)):
        raise ValueError(f"{kind}: URLs are not read; download the file and give its path, got {name}")
    try:
        mode = os.stat(source).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{kind}: no such file: {name}") from None
    except (OSError, ValueError) as error:  # too long, not allowed, with a zero byte
        raise ValueError(f"{kind}: {name} cannot be opened ({getattr(error, 'strerror', error)})") from error
    if not stat.S_ISREG(mode):
        what = "folder" if stat.S_ISDIR(mode) else "pipe or device"
        raise ValueError(f"{kind}: expected a file, got the {what} {name}")
    return Path(source), name


def _check_size(width: int, height: int, what: str) -> None:
    if width * height <= 1:
        raise ValueError(f"{what} is {width} x {height} pixels; there must be at least two to see anything")


def _channels_last(source) -> np.ndarray:
    """A tensor or array as (H, W) or (H, W, 3 | 4); a tensor's channels may come first, as torch has them."""
    array = source
    if isinstance(source, torch.Tensor):
        source = check_values(source, "image").detach().cpu()
        array = (source.float() if source.is_floating_point() else source).numpy()
        if array.ndim == 3 and array.shape[0] in (1, 3, 4):
            array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        allowed = "(H, W) or (H, W, 1 | 3 | 4)" + (", or (1 | 3 | 4, H, W)" if array is not source else "")
        raise ValueError(f"image: expected an array of shape {allowed}, got {tuple(source.shape)}")
    return array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def _grey_levels(image: Image.Image, name: str) -> np.ndarray:
    """Mode "I" as 8 or 16 bits, by the rule of `load_image`; the other wide modes are what they say."""
    levels = np.asarray(image)
    if image.mode != "I":
        return levels
    low, high = int(levels.min()), int(levels.max())
    if low < 0 or high > 65535:
        raise ValueError(
            f"image: {name} holds integers from {low} to {high}; grey levels lie in [0, 255] or [0, 65535]: "
            "scale them, and give the array as uint8 or uint16"
        )
    return levels.astype(np.uint16 if high > 255 or image.format in ("PNG", "PPM") else np.uint8)


def _as_uint8(array: np.ndarray, what: str) -> np.ndarray:
    """uint8 as it is, uint16 scaled by 1/257, floats in [0, 1] scaled by 255, both rounded."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if array.dtype.kind != "f":
        raise ValueError(f"{what}: expected dtype uint8, uint16 or float, got {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() <= 1):  # written so that NaN fails
        raise ValueError(
            f"{what}: floats must lie in [0, 1], got values from {array.min()} to {array.max()}; scale them first, "
            "for example by 1 / 255, and give the array"
        )
    return (array.astype(np.float64) * 255).round().astype(np.uint8)


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
    _check_size(frames.shape[2], frames.shape[1], "video: a frame")
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
    av, (path, name) = _import_av(), _regular_file(source, "video")
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
        with Image.open(path, formats=_readable()) as image:
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
