"""Video files whose header, packets and frames disagree, or whose frame rate varies.

`refvl.pixels.media` lists the packets of a file and decodes it. It calls this module if the header declares more frames
than exist, if there are fewer than two frames, or if the rate varies. Packets without a frame and files with a display
matrix are also handled here. The module also lists the formats that may be opened.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from refvl.pixels.formats import readable_formats
from refvl.printing import printable

FORMATS = (  # FFmpeg's names of formats that contain their own frames; playlists, which name other files, are excluded
    "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "flv", "live_flv", "mpeg", "mpegts", "mpegvideo", "mjpeg",
    "mjpeg_2000", "m4v", "h261", "h263", "h264", "hevc", "vvc", "av1", "obu", "ivf", "vc1", "ogg", "asf", "mxf", "gxf",
    "nut", "rm", "dv", "wtv", "swf", "yuv4mpegpipe", "dirac", "dnxhd", "cavsvideo", "flic", "gif", "apng",
    "ico", "fits", "bmp_pipe", "exr_pipe", "gif_pipe", "j2k_pipe", "jpeg_pipe", "jpegxl_pipe", "pam_pipe", "pbm_pipe",
    "pcx_pipe", "pgm_pipe", "png_pipe", "ppm_pipe", "psd_pipe", "qoi_pipe", "sgi_pipe", "tiff_pipe", "webp_pipe",
    "wav", "mp3", "aac", "flac",  # images and audio are opened only to give a clear error message
)  # fmt: skip
OPENING: Any = {"metadata_errors": "replace", "options": {"format_whitelist": ",".join(FORMATS)}}  # for `av.open`


@dataclass(frozen=True, slots=True)
class Listing:
    """The frames of a file as its packets list them, before any frame is decoded."""

    total: int  # the number of frames that are shown
    rate: float  # frames per second; the average if it varies
    tick: float  # the unit of the file's clock, in seconds
    start: int | None  # the tick of the first frame if the rate varies; None: frame i is shown at i / rate
    is_counted: bool  # whether the header contains the number of frames, so a missing frame is an error


@dataclass(frozen=True, slots=True, eq=False)
class Packets:
    """The presentation times of a stream's packets, in ticks and in decoding order."""

    starts: np.ndarray  # (packets,) int64
    lengths: np.ndarray  # (packets,) int64; 0: unknown
    is_timed: bool  # False if the container has no times, or has invented ones

    def seconds(self, tick: float) -> float:
        """Return the seconds from the start of the first frame to the end of the last, or 0 if unknown.

        tick: the length of a tick in seconds. If the last frame has no length, the mean length of the other frames is
        used.
        """
        if not self.is_timed:
            return 0.0
        last = self.starts.argmax()
        shown = int(self.starts[last] - self.starts.min())
        return (shown + (int(self.lengths[last]) or shown / max(1, len(self.starts) - 1))) * tick


def not_a_video(name: str, error: Exception) -> ValueError:
    """Return the error for a file that FFmpeg cannot open or decode, or that is not allowed."""
    import av

    if isinstance(error, av.error.ArgumentError):
        return ValueError(f"video: {name} is damaged or has an unsupported format; playlists are not supported")
    return ValueError(f"video: {name} is truncated or not a video ({printable(error)})")


def upright(image: np.ndarray, side_data, name: str) -> np.ndarray:
    """Return a decoded frame (H, W, 3) as its display matrix shows it: rotated by quarter turns, mirrored, or both.

    side_data: 3 x 3 int32 [a b u; c d v; x y w], by which (x, y) becomes (a x + c y, b x + d y). Scale and offset are
    not applied. Raises ValueError for an angle that is more than one degree away from a quarter turn. FFmpeg's programs
    do the same with their transpose, hflip and vflip filters.
    """
    (a, b, _), (c, d, _), _ = np.frombuffer(side_data, np.int32).reshape(3, 3).astype(float)
    is_turned = abs(b) + abs(c) > abs(a) + abs(d)
    to_x, to_y = (c, b) if is_turned else (a, d)  # the factors for the axes of the result
    others = (a, d) if is_turned else (b, c)
    if max(map(abs, others)) > np.sin(np.radians(1)) * min(abs(to_x), abs(to_y)):
        what = "a display matrix whose angle is not a multiple of 90 degrees"
        raise ValueError(f"video: {name} has {what}; rotate the frames and save the video again")
    image = image.swapaxes(0, 1) if is_turned else image
    return image[:: -1 if to_y < 0 else 1, :: -1 if to_x < 0 else 1]


def listing_at_average_rate(container, packets: Packets, name: str) -> Listing:
    """List a video whose rate varies or is not in the header, at the average rate of its packets.

    Raises ValueError if neither the header nor the packets contain a rate.
    """
    stream = container.streams.video[0]
    total = len(packets.starts)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    tick = float(stream.time_base)
    seconds = packets.seconds(tick)
    if rate and not seconds:
        return Listing(total, rate, tick, None, stream.frames > 0)
    if not seconds:
        raise ValueError(f"video: {name} has no frame rate in its header or packets")
    if "mp4" in container.format.name and stream.duration:
        seconds = stream.duration * tick  # packet lengths follow the order of decoding, not of display
    return Listing(total, total / seconds, tick, int(packets.starts.min()), stream.frames > 0)


def listing_as_decoded(listing: Listing, decoded: int, name: str) -> Listing:
    """List the frames again if fewer were decoded than listed, because some packets contain no frame of their own.

    Raises ValueError if nothing was decoded, or if the header counts the frames, because then the file is truncated.
    """
    if not decoded:
        raise ValueError(f"video: {name} has no frames that can be decoded")
    if listing.is_counted:
        raise ValueError(f"video: {name} is truncated: only {decoded} of {listing.total} frames can be decoded")
    scale = 1.0 if listing.start is None else decoded / listing.total  # the duration is the same for fewer frames
    return replace(listing, total=decoded, rate=listing.rate * scale)


def refuse_still_image(path: str, name: str, frames: int) -> None:
    """Raise ValueError for a still image, a video without frames, or an animation that PyAV cannot decode.

    PyAV opens a still image as a video with one frame, and an animated WebP as a video without frames.
    """
    try:
        with Image.open(path, formats=readable_formats()) as image:
            is_animated = getattr(image, "n_frames", 1) > 1
    except Exception:  # not an image
        if frames:
            return  # a very short video
        raise ValueError(f"video: {name} has no frames that can be decoded") from None
    animation, still = "an animation that PyAV cannot decode; convert it", "a still image; pass it as an image"
    raise ValueError(f"video: {name} is {animation if is_animated else still}")


def check_complete(container, packets: Packets, name: str) -> None:
    """Raise ValueError, or warn, if a file's header declares more frames than its packets contain."""
    stream = container.streams.video[0]
    frames = len(packets.starts)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if frames < stream.frames - 1 and rate:
        promised = stream.frames / rate
        if "mp4" in container.format.name and stream.duration:  # frames hidden by an edit list do not count
            promised = float(stream.duration * stream.time_base)
        seconds = packets.seconds(float(stream.time_base)) or frames / rate
        if promised - seconds > 1.5 / rate:
            lengths = f"its header declares {promised:.2f} s, but its packets last only {seconds:.2f} s"
            raise ValueError(f"video: {name} is truncated: {lengths} ({frames} frame(s))")
    if container.format.name in ("matroska,webm", "flv"):
        promised = (container.duration or 0) / 1e6
        seconds = _end_of_all_streams(container.name)
        if promised > 1.1 * seconds:
            lengths = f"its header declares {promised:.2f} s, but its packets end at {seconds:.2f} s"
            warnings.warn(f"video: {name} seems truncated: {lengths}; {frames} frame(s) are read", stacklevel=5)


def _end_of_all_streams(path: str) -> float:
    """Return the end of the last packet of any stream, in seconds, because sound may continue after the last frame."""
    import av

    end = 0.0
    with av.open(path, **OPENING) as container:
        for packet in container.demux():
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    return end
