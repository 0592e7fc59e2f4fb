"""Pictures and clips, from disk or memory, to plain RGB.

    load_image(path | PIL image | array | tensor) -> PIL.Image, mode RGB
    load_video(path | frames | array | tensor)    -> Video: sampled frames (T, H, W, 3) uint8 and their times

Decoding is Pillow's and PyAV's; what is ours is what they leave open: which way up a picture is, what stands behind a
transparent pixel, how 16 bits become 8, which frames of a clip are looked at. Video is decoded forward once, without
seeking, and only the frames that are asked for are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps

from refvl.checks import check_positive_int

DEFAULT_FPS = 2.0
_KINDS = "a path, a PIL image, a numpy array or a torch tensor"


def image_suffixes() -> frozenset[str]:
    """Suffixes (".png") of the files that Pillow opens as images by itself.

    Left out are formats that it only writes (PDF), only recognises and hands to other software (HDF5, WMF), runs
    another program for (EPS), or whose pixels it cannot decode (MPEG).
    """
    registered = Image.registered_extensions()
    return frozenset(suffix for suffix, name in registered.items() if _is_decodable(name))


def _is_decodable(name: str) -> bool:
    if name == "MPO":  # several photos in one file, which the plugin for JPEG opens
        return True
    factory = Image.OPEN[name][0] if name in Image.OPEN else None
    is_stub = isinstance(factory, type) and issubclass(factory, ImageFile.StubImageFile)
    return factory is not None and not is_stub and name not in ("EPS", "MPEG")


def load_image(source) -> Image.Image:
    """One picture as a PIL image of mode RGB.

    source: a path; a PIL image; an array (H, W), (H, W, 1 | 3 | 4) or a tensor, which may also be (1 | 3 | 4, H, W),
    of uint8, uint16, or floats in [0, 1].

    The EXIF rotation is applied. Transparent pixels are blended onto white, as transformers 5.23 does; 5.17 drops the
    alpha channel, which shows whatever colour the file has where nothing was meant to be seen. 16-bit grey is scaled to
    8 bits (Pillow alone would clip it to white). Of an animation the first frame is taken.

    Raises FileNotFoundError for a missing file, TypeError for another kind of source, ValueError for a file that is
    truncated or not an image, an array of another shape, dtype or range, an empty picture, and one of a single pixel.
    """
    if isinstance(source, (str, Path)):
        image = _open_image(Path(source))
    elif isinstance(source, Image.Image):
        image = source
    elif isinstance(source, (np.ndarray, torch.Tensor)):
        image = Image.fromarray(_as_uint8(_channels_last(source)))
    else:
        raise TypeError(f"image: expected {_KINDS}, got {type(source).__name__}")
    name = str(source) if isinstance(source, (str, Path)) else f"the {type(source).__name__}"
    _check_size(image.width, image.height, f"image: {name}")
    try:
        image.load()
    except Exception as error:  # a damaged file makes Pillow's decoders raise all kinds of errors
        raise ValueError(f"image: {name} is truncated or damaged ({error})") from error
    return _to_rgb(ImageOps.exif_transpose(image))


def _open_image(path: Path) -> Image.Image:
    _check_is_file(path, "image")
    try:
        return Image.open(path)
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"image: {path} is not a picture that Pillow can read ({error})") from error


def _check_is_file(path: Path, name: str) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{name}: no such file: {path}")
    if not path.is_file():
        raise ValueError(f"{name}: expected a file, got the folder {path}")


def _check_size(width: int, height: int, what: str) -> None:
    if width * height <= 1:
        raise ValueError(f"{what} is {width} x {height} pixels; there must be at least two to see anything")


def _channels_last(source) -> np.ndarray:
    """A tensor or array as (H, W) or (H, W, 3 | 4); a tensor's channels may come first, as torch has them."""
    array = source
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu()
        array = (source.float() if source.is_floating_point() else source).numpy()
        if array.ndim == 3 and array.shape[0] in (1, 3, 4):
            array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        allowed = "(H, W) or (H, W, 1 | 3 | 4)" + (", or (1 | 3 | 4, H, W)" if array is not source else "")
        raise ValueError(f"image: expected an array of shape {allowed}, got {tuple(source.shape)}")
    return array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def _as_uint8(array: np.ndarray) -> np.ndarray:
    """uint8 as it is, uint16 scaled by 1/257, floats in [0, 1] scaled by 255, both rounded."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if array.dtype.kind != "f":
        raise ValueError(f"image: expected dtype uint8, uint16 or float, got {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() <= 1):  # written so that NaN fails
        raise ValueError(f"image: floats must lie in [0, 1], got values from {array.min()} to {array.max()}")
    return (array.astype(np.float64) * 255).round().astype(np.uint8)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # more than 8 bits of grey
        array = np.asarray(image)
        if image.mode == "I" and array.min() >= 0 and array.max() <= 65535:  # Pillow's other way to hold 16 bits
            array = array.astype(np.uint16)
        image = Image.fromarray(_as_uint8(array))
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """The sampled frames of a clip and where they stand in it."""

    frames: np.ndarray  # (T, H, W, 3) uint8
    fps: float  # of the sampled frames; one temporal patch lasts temporal_patch_size / fps seconds
    source_fps: float
    indices: tuple[int, ...]  # of the sampled frames, among total_num_frames
    total_num_frames: int
    duration: float  # seconds, of the whole clip

    @property
    def timestamps(self) -> list[float]:
        """Seconds from the start, one per sampled frame."""
        return [index / self.source_fps for index in self.indices]


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
    """Which frames of a clip are looked at: evenly spaced, `fps` per second (default 2), or `num_frames` in all.

    The number is brought into [min_frames, max_frames], then down to a multiple of temporal_patch_size (num_frames is
    rounded to the nearest one); frame i is `i * total // number`. This is the rule of transformers'
    `Qwen2VLVideoProcessor.sample_frames`, which counts in floating point: there some lengths give one index past the
    end (61 frames at num_frames=14), and beyond 16,000 frames single indices are one later. A clip shorter than
    temporal_patch_size, which fails there, keeps its frames.

    Raises ValueError when both fps and num_frames are given, or more frames are asked for than there are.

    >>> sample_frame_indices(132, 25.0)
    [0, 13, 26, 39, 52, 66, 79, 92, 105, 118]
    """
    total = check_positive_int(total_num_frames, "total_num_frames")
    step = check_positive_int(temporal_patch_size, "temporal_patch_size")
    if num_frames is not None:
        if fps is not None:
            raise ValueError(f"fps, num_frames: give one of them, got fps={fps} and num_frames={num_frames}")
        if check_positive_int(num_frames, "num_frames") > total:
            raise ValueError(f"num_frames: the clip has {total} frames, got {num_frames}")
        wanted = round(num_frames / step) * step
    else:
        fps, source_fps = _check_rate(DEFAULT_FPS if fps is None else fps, "fps"), _check_rate(source_fps, "source_fps")
        if max_frames < step:
            raise ValueError(f"max_frames: must be at least temporal_patch_size={step}, got {max_frames}")
        wanted = int(min(max(total / source_fps * fps, min_frames), max_frames, total)) // step * step
    number = min(max(wanted, step), total // step * step) or total
    return [i * total // number for i in range(number)]


def _check_rate(value, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number of frames per second, got {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: must be positive, got {value}")
    return float(value)


def load_video(
    source,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    source_fps: float | None = None,
    sample: Callable[[int, float], Sequence[int]] | None = None,
) -> Video:
    """The sampled frames of a clip.

    source: a path; a list of frames, each anything `load_image` takes; an array (T, H, W, 3) or tensor, which may also
    be (T, 3, H, W); or a Video, which is returned as it is. The sampling arguments are those of
    `sample_frame_indices`. Frames given in memory count as sampled already, `fps` per second (default 2), unless
    source_fps says how fast they were recorded or num_frames how many to take. source_fps overrides a file's own rate.
    sample: another rule for a file, from (total_num_frames, source_fps) to increasing indices.

    The rotation that phones write into a file is applied (transformers' PyAV reader ignores it). A container that does
    not count its frames (Matroska) is decoded twice, and as far as it goes; otherwise decoding stops at the last frame
    that is wanted.

    Raises FileNotFoundError for a missing file, TypeError for another kind of source, ValueError for a file that is
    damaged, truncated or has no video frames, and for frames of unequal size.
    """
    if isinstance(source, Video):
        return source
    source_fps = None if source_fps is None else _check_rate(source_fps, "source_fps")
    options = {"fps": fps, "num_frames": num_frames, "min_frames": min_frames, "max_frames": max_frames}
    if isinstance(source, (str, Path)):
        return _decode(Path(source), source_fps, sample or partial(sample_frame_indices, **options))
    frames = as_frames(source)
    if source_fps is None and num_frames is None:
        source_fps = DEFAULT_FPS if fps is None else fps
        return _make_video(frames, range(len(frames)), len(frames), _check_rate(source_fps, "fps"))
    source_fps = DEFAULT_FPS if source_fps is None else source_fps
    indices = sample_frame_indices(len(frames), source_fps, **options)
    return _make_video(frames[indices], indices, len(frames), source_fps)


def as_frames(frames) -> np.ndarray:
    """Frames in memory as one (T, H, W, 3) uint8 array; see `load_video` for what they may be."""
    if isinstance(frames, Video):
        return frames.frames
    if isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.ndim == 4 and frames.shape[-1] == 3:
        pass
    elif isinstance(frames, (np.ndarray, torch.Tensor)) and frames.ndim != 4:
        raise ValueError(f"video: expected an array of shape (T, H, W, 3), got {tuple(frames.shape)}")
    elif isinstance(frames, (np.ndarray, torch.Tensor, Sequence)) and not isinstance(frames, (str, bytes)):
        images = [load_image(frame) for frame in frames]
        if len(sizes := {image.size for image in images}) > 1:
            raise ValueError(f"video: all frames must have one size, got (width, height) {sorted(sizes)}")
        frames = np.stack([np.asarray(image) for image in images]) if images else np.empty((0, 0, 0, 3), np.uint8)
    else:
        raise TypeError(f"video: expected a path, a list of frames, an array or a Video, got {type(frames).__name__}")
    if len(frames) == 0:
        raise ValueError("video: expected at least one frame, got none")
    _check_size(frames.shape[2], frames.shape[1], "video: a frame")
    return frames


def _make_video(frames, indices: Sequence[int], total: int, source_fps: float) -> Video:
    fps = len(indices) / total * source_fps
    return Video(frames, fps, float(source_fps), tuple(indices), total, total / source_fps)


def _decode(path: Path, source_fps: float | None, sample: Callable[[int, float], Sequence[int]]) -> Video:
    av = _import_av()
    _check_is_file(path, "video")
    try:
        total, rate = _probe(path)
        source_fps = source_fps or rate
        indices = sample(total, source_fps)
        frames, found = _read_frames(path, indices)
    except av.error.FFmpegError as error:
        raise ValueError(f"video: {path} is truncated or not a video ({error})") from error
    if found < len(indices):
        raise ValueError(f"video: {path} is truncated: frame {indices[found]} of {total} is missing")
    return _make_video(frames, indices, total, source_fps)


def _import_av():
    try:
        import av
    except ImportError as error:
        raise ImportError("video: reading a clip from a file needs PyAV: pip install av") from error
    return av


def _probe(path: Path) -> tuple[int, float]:
    """Frames that decoding will show, and their rate per second (the average, as transformers takes it)."""
    with _import_av().open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"video: {path} has no video stream")
        stream = container.streams.video[0]
        total, rate = stream.frames, float(stream.average_rate or stream.guessed_rate or 0)
        shown = float(stream.duration * stream.time_base) * rate if stream.duration else total
    if not rate:
        raise ValueError(f"video: {path} does not say its frame rate")
    if not total or shown < total - 1:  # Matroska does not count; a trimmed phone clip hides frames behind an edit list
        total = _count_frames(path)
    if not total:
        raise ValueError(f"video: {path} has no frames that can be decoded")
    return total, rate


def _count_frames(path: Path) -> int:
    """One decoding pass that keeps nothing."""
    with _import_av().open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def _read_frames(path: Path, indices: Sequence[int]) -> tuple[np.ndarray | None, int]:
    """The frames with these increasing indices, (T, H, W, 3) uint8, upright; and how many of them were there."""
    wanted, frames, found = set(indices), None, 0
    with _import_av().open(str(path)) as container:
        container.streams.video[0].thread_type = "AUTO"
        for i, frame in enumerate(container.decode(video=0)):
            if i in wanted:
                image = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                frames = np.empty((len(indices), *image.shape), np.uint8) if frames is None else frames
                frames[found], found = image, found + 1
            if i == indices[-1]:
                break
    return frames, found
