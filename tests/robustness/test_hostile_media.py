"""Hostile, broken and merely odd files: the right picture, or one clear line that names the file."""

import os
import socket
import threading
import tracemalloc
import warnings
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from refvl.pixels.formats import image_suffixes
from refvl.pixels.media import MediaLimits, load_image, load_video
from refvl.pixels.patches import PatchConfig
from refvl.processors.chat import ChatProcessor

av = pytest.importorskip("av")

GRADIENT = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
BROKEN_EXIF = {
    "no header": b"Exif\0\0junkjunkjunk",
    "cut": b"Exif\0\0II*\0",
    "no entries": b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
}
SIDEWAYS = b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0"  # orientation 6, then an entry cut off


def one_line(error):
    text = str(error.value)
    text.encode()  # a terminal can show it
    assert "\n" not in text and len(text) < 600
    return text


# --- pictures


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning", "ignore:Tag data:UserWarning")
@pytest.mark.parametrize("block", BROKEN_EXIF)
@pytest.mark.parametrize("suffix", ["png", "webp", "jpg"])
def test_a_broken_exif_block_is_ignored(tmp_path, suffix, block):
    """Oracle: the file without the block, from a path and as an image that Pillow opened."""
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(GRADIENT).save(tmp_path / f"plain.{suffix}", **options)
    path = tmp_path / f"broken.{suffix}"
    Image.fromarray(GRADIENT).save(path, exif=BROKEN_EXIF[block], **options)
    plain = np.asarray(load_image(tmp_path / f"plain.{suffix}"))
    for source in (path, Image.open(path), load_image(path)):
        assert np.array_equal(np.asarray(load_image(source)), plain)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning", "ignore:Tag data:UserWarning")
def test_what_can_be_read_of_a_broken_exif_block_counts(tmp_path):
    """The rotation stands before the damage. Oracle: NumPy's rotation."""
    Image.fromarray(GRADIENT).save(tmp_path / "a.png", exif=SIDEWAYS)
    assert np.array_equal(np.asarray(load_image(tmp_path / "a.png")), np.rot90(GRADIENT, -1))


def test_decoders_may_raise_anything(tmp_path, monkeypatch):
    """A plugin's own error, from the header or from the pixels, names the file."""
    path = tmp_path / "a.png"
    Image.fromarray(GRADIENT).save(path)
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\0\0\0\x01" + data[12:])  # "Truncated IHDR chunk"
    with pytest.raises(ValueError, match=r"a\.png is not an image that Pillow can read"):
        load_image(path)
    path.write_bytes(data)
    for error in (KeyError("x"), MemoryError(), AssertionError("odd"), SyntaxError("not a TIFF file")):
        with monkeypatch.context() as patched:
            patched.setattr(
                "PIL.PngImagePlugin.PngImageFile.load_prepare", lambda self, error=error: (_ for _ in ()).throw(error)
            )
            with pytest.raises(ValueError, match=r"image: .*a\.png is truncated or damaged"):
                load_image(path)


def test_pictures_that_cannot_become_rgb_are_named(tmp_path, monkeypatch):
    """Pillow converts most modes, and says of the others that they cannot be converted."""
    Image.fromarray(GRADIENT).save(tmp_path / "a.png")

    def refuse(self, mode):
        raise ValueError("conversion not supported")

    monkeypatch.setattr(Image.Image, "convert", refuse)
    with pytest.raises(ValueError, match=r"image: .*a\.png cannot be converted to RGB: conversion not supported"):
        load_image(tmp_path / "a.png")


@pytest.mark.parametrize("top, wanted", [(200, 200), (255, 255), (256, 1), (51400, 200), (65535, 255)])
def test_integers_of_8_and_of_16_bits(tmp_path, top, wanted):
    """Oracle by hand: up to 255 levels are what they are, up to 65535 they are 257 to a level."""
    levels = Image.fromarray(np.array([[0, top]], np.int32))
    levels.save(tmp_path / "a.tif")
    assert levels.mode == Image.open(tmp_path / "a.tif").mode == "I"
    for source in (levels, tmp_path / "a.tif"):
        assert np.asarray(load_image(source))[0, :, 0].tolist() == [0, wanted]


def test_the_transparent_grey_of_16_bits_is_white(tmp_path):
    """Oracle: FFmpeg's own decoder gives grey with alpha, blended onto white by hand; a neighbouring grey is kept."""
    levels = Image.fromarray(np.array([[0, 1000, 1001, 30000, 65535]], np.uint16))
    levels.save(tmp_path / "a.png", transparency=1000)
    with av.open(str(tmp_path / "a.png")) as container:
        grey, alpha = next(container.decode(video=0)).to_ndarray(format="rgba64le")[0, :, [0, 3]] / 65535
    wanted = np.round((grey * alpha + 1 - alpha) * 255)
    assert list(alpha) == [1, 0, 1, 1, 1]
    for source in (tmp_path / "a.png", Image.open(tmp_path / "a.png")):
        assert np.asarray(load_image(source))[0, :, 0].tolist() == wanted.tolist()


PLAYLISTS = {
    "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{video}\n#EXT-X-ENDLIST\n",
    "b.mp4": "ffconcat version 1.0\nfile {video}\n",
    "c.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    "d.mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" profiles="urn:mpeg:dash:'
    'profile:isoff-on-demand:2011"><Period><AdaptationSet><Representation id="1"><BaseURL>{video}</BaseURL>'
    "</Representation></AdaptationSet></Period></MPD>",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_playlists_open_no_other_file(tmp_path, name):
    """What a playlist names is a pipe: whoever opened it would wait for ever; FFmpeg alone plays the first two."""
    os.mkfifo(tmp_path / "other.mp4")
    (tmp_path / name).write_text(PLAYLISTS[name].format(video="other.mp4"))
    with pytest.raises(ValueError, match=f"video: .*{name} is (damaged or has an unsupported format|truncated or not)"):
        load_video(tmp_path / name)


def test_the_depth_of_a_ppm_is_known(tmp_path):
    """A dark picture of 16 bits stays dark: Pillow says mode I, the file says 65535 levels."""
    (tmp_path / "a.pgm").write_bytes(b"P5 2 1 65535\n" + np.array([0, 255], ">u2").tobytes())
    assert Image.open(tmp_path / "a.pgm").mode == "I"
    assert np.asarray(load_image(tmp_path / "a.pgm"))[0, :, 0].tolist() == [0, 1]


def test_float_pictures(tmp_path):
    """Mode F holds [0, 1]; anything else is refused with its range and a way out."""
    Image.fromarray(np.array([[0, 0.5, 1]], np.float32)).save(tmp_path / "a.tif")
    assert np.asarray(load_image(tmp_path / "a.tif"))[0, :, 0].tolist() == [0, 128, 255]
    for name, values in (("b.tif", [[0, 255]]), ("c.tif", [[-1, 1]]), ("d.tif", [[0, np.nan]])):
        Image.fromarray(np.array(values, np.float32)).save(tmp_path / name)
        with pytest.raises(
            ValueError, match=rf"{name}: expected floats in \[0, 1\], got values from .*; scale them"
        ) as error:
            load_image(tmp_path / name)
        one_line(error)
    for name, values in (("e.tif", [[0, 65536]]), ("f.tif", [[-1, 1]])):
        Image.fromarray(np.array(values, np.int32)).save(tmp_path / name)
        with pytest.raises(
            ValueError, match=rf"{name} contains integers from {values[0][0]} to {values[0][1]}; expected grey levels"
        ):
            load_image(tmp_path / name)


NO_PICTURES = {
    "a.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n",
    "a.pdf": b"%PDF-1.4\n",
    "a.mpg": b"\0\0\x01\xb3\x04\0\x30\x14" + bytes(64),
    "a.h5": b"\x89HDF\r\n\x1a\n" + bytes(64),
    "a.grib": b"GRIB" + bytes(3) + b"\x01" + bytes(64),
    "a.bufr": b"BUFR" + bytes(64),
    "a.wmf": b"\xd7\xcd\xc6\x9a\0\0" + bytes(64),
}


@pytest.mark.parametrize("name", NO_PICTURES)
def test_files_that_pillow_knows_and_does_not_decode(tmp_path, name):
    """One line that does not ask for a loader, and no suffix that would list them; nothing is run for EPS."""
    (tmp_path / name).write_bytes(NO_PICTURES[name])
    with pytest.raises(ValueError, match=f"image: .*{name} is not an image that Pillow can read$") as error:
        load_image(tmp_path / name)
    one_line(error)
    suffix = f".{name.split('.')[1]}"
    assert suffix in Image.registered_extensions() and suffix not in image_suffixes()


def test_suffixes_are_of_pictures():
    """What Pillow writes and reads back is listed. Oracle: Pillow itself, on every suffix that it can save."""
    assert {
        ".png",
        ".jpg",
        ".jpeg",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".ppm",
        ".tga",
        ".jp2",
    } <= image_suffixes()
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in image_suffixes())


def test_every_listed_suffix_that_pillow_writes_is_read(tmp_path):
    """Oracle: the size that Pillow tells, over all formats that are both written and listed."""
    read = 0
    for suffix in sorted(image_suffixes() & {s for s, f in Image.registered_extensions().items() if f in Image.SAVE}):
        for mode in ("RGB", "L", "1", "P"):
            try:
                Image.new(mode, (64, 64)).save(tmp_path / f"a{suffix}")
            except (OSError, ValueError, KeyError):
                continue
            picture = tmp_path / f"a{suffix}"
            assert load_image(picture).size == Image.open(picture).size  # .icns is enlarged on the way
            read += 1
            break
    assert read > 20


# --- paths


@pytest.mark.parametrize("load", [load_image, load_video])
@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/x.png",
        "HTTP://example.com/x",
        "s3://bucket/x.mp4",
        "file:///x.png",
        "data:image/png;base64,iVBO" + "x" * 9999,
    ],
)
def test_urls_are_not_read(load, url):
    with pytest.raises(ValueError, match="expected a path, got the URL ") as error:
        load(url)
    assert url[:40] in one_line(error)


@pytest.mark.parametrize("load, kind", [(load_image, "image"), (load_video, "video")])
def test_only_ordinary_files_are_opened(tmp_path, load, kind):
    """A pipe would block for ever: the test would hang. Devices and sockets never end, folders hold nothing."""
    os.mkfifo(tmp_path / "pipe.png")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.relpath(tmp_path / "socket.png"))  # a long absolute path does not fit into an address
    for path in (tmp_path / "pipe.png", tmp_path / "socket.png", "/dev/zero", "/dev/null"):
        result: list[str] = []

        def run(path=path, result=result):
            try:
                load(path)
            except ValueError as error:
                result.append(str(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(60)
        assert result and f"{kind}: expected a file, got the pipe or device {path}" in result[0]
    listener.close()


@pytest.mark.parametrize("load", [load_image, load_video])
@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 3000 + "y.png", "a\0b.png", "\ud800.png", "caf\udce9.png"])
def test_odd_names(tmp_path, load, name):
    """Too long, with a zero byte, with half a character: one line that can be printed, and is not 5,000 characters."""
    with pytest.raises((ValueError, FileNotFoundError), match="image: |video: ") as error:
        load(f"{tmp_path}/{name}")
    assert "\0" not in one_line(error)


def test_names_that_are_not_utf8_and_names_with_colons(tmp_path):
    """Old disks have Latin-1 names; FFmpeg takes what stands before a colon for a protocol."""
    write_clip(tmp_path / "plain.mp4", 8)
    for name in (b"caf\xe9", b"12:30", b"http:x"):
        stem = os.path.join(os.fsencode(tmp_path), name)
        Image.fromarray(GRADIENT).save(tmp_path / "plain.png")
        os.link(tmp_path / "plain.png", stem + b".png")
        os.link(tmp_path / "plain.mp4", stem + b".mp4")
        image = load_image(os.fsdecode(stem + b".png"))
        assert np.array_equal(np.asarray(image), GRADIENT)
        image.info["source"].encode()
        assert load_video(os.fsdecode(stem + b".mp4")).total_num_frames == 8
        (tmp_path / "broken").write_bytes(b"no")
        os.replace(tmp_path / "broken", stem + b".jpg")
        with pytest.raises(ValueError, match="is not an image") as error:
            load_image(os.fsdecode(stem + b".jpg"))
        one_line(error)


def test_files_that_may_not_be_read(tmp_path, monkeypatch):
    """Reported with the file's name, as other damage is. (Root may read everything, so the system call is replaced.)"""
    Image.fromarray(GRADIENT).save(tmp_path / "a.png")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("refvl.pixels.media.os.stat", refuse)
    with pytest.raises(ValueError, match=r"image: .*a\.png cannot be opened \(Permission denied\)"):
        load_image(tmp_path / "a.png")


# --- limits


def peak_bytes(function):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as error:
            function()
        return tracemalloc.get_traced_memory()[1], str(error.value)
    finally:
        tracemalloc.stop()


def png_of(path, width, height):
    """A PNG header and nothing else: what a picture would cost is known before a pixel is read."""
    Image.new("1", (1, 2)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    path.write_bytes(data)
    return path


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("width, height", [(13_000, 13_000), (8193, 8192), (60_000, 60_000), (2**31 - 1, 1)])
def test_large_pictures_are_refused_by_their_header(tmp_path, width, height):
    """One rule, whether Pillow's own limit steps in or not; the argument to raise is named."""
    path = png_of(tmp_path / "bomb.png", width, height)
    peak, message = peak_bytes(lambda: load_image(path))
    assert (
        "bomb.png" in message
        and "max_image_pixels" in message
        and "limits=MediaLimits(max_image_pixels=...)" in message
    )
    assert peak < 2**20


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_opened_picture_is_measured_too(tmp_path):
    """Image.open reads the header only."""
    with pytest.raises(
        ValueError, match=r"the PngImageFile has 13000 x 13000 = 169,000,000 pixels, but max_image_pixels"
    ):
        load_image(Image.open(png_of(tmp_path / "bomb.png", 13_000, 13_000)))


def test_limits_are_arguments(tmp_path):
    """Raised, lowered, met exactly; what is decoded already is not measured again."""
    Image.fromarray(GRADIENT).save(tmp_path / "a.png")
    small, exact = MediaLimits(max_image_pixels=53), MediaLimits(max_image_pixels=54)
    with pytest.raises(ValueError, match=r"a\.png has 9 x 6 = 54 pixels, but max_image_pixels is 53; raise it"):
        load_image(tmp_path / "a.png", limits=small)
    image = load_image(tmp_path / "a.png", limits=exact)
    assert load_image(image, limits=small).size == load_image(GRADIENT, limits=small).size == (9, 6)
    with pytest.raises(TypeError, match="max_video_bytes: expected an integer"):
        MediaLimits(max_video_bytes=1e9)


def test_frames_in_a_list_are_counted_before_they_are_kept(tmp_path):
    Image.new("L", (1000, 1000)).save(tmp_path / "a.png")
    peak, message = peak_bytes(
        lambda: load_video([tmp_path / "a.png"] * 500, limits=MediaLimits(max_video_bytes=10**9))
    )
    assert "500 frames of 1000 x 1000 pixels need 1,500,000,000 bytes, but max_video_bytes is 1,000,000,000" in message
    assert peak < 10**8


class Processor(ChatProcessor):
    """Decodes and cuts; no model behind it."""

    def __init__(self):
        self.image_config = PatchConfig()

    def media_tokens(self, kind, layout, second_per_grid=1.0):
        return None


def test_a_processor_passes_its_limits_on(tmp_path):
    processor = Processor()
    Image.fromarray(GRADIENT).save(tmp_path / "a.png")
    messages = processor.messages("what?", images=[tmp_path / "a.png"])
    assert processor.decode(messages)[0].size == (9, 6)
    processor.limits = MediaLimits(max_image_pixels=10)
    with pytest.raises(ValueError, match="max_image_pixels is 10"):
        processor.decode(messages)
    assert ChatProcessor.limits == MediaLimits()


def test_errors_behind_decoding_name_the_file_and_its_size(tmp_path):
    """The size is the one that an image viewer shows, width first, after the rotation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4000, 10)).save(tmp_path / "thin.png")
    Image.new("RGB", (4000, 10)).save(tmp_path / "upright.png", exif=exif)
    processor = Processor()
    for name, size in (("thin", "4000 x 10"), ("upright", "10 x 4000")):
        media = processor.decode(processor.messages("what?", images=[tmp_path / f"{name}.png"]))
        with pytest.raises(
            ValueError, match=rf"{name}\.png: .* expected an aspect ratio of at most 200, got 400.0 for {size} pixels"
        ):
            processor.patchify(media)
    with pytest.raises(ValueError, match="^item 2: width, height: expected an aspect ratio .* 4000 x 10 pixels"):
        processor.patchify([load_image(GRADIENT), load_image(np.zeros((10, 4000, 3), np.uint8))])
    with pytest.raises(ValueError, match=r"thin\.png: width, height: expected an aspect ratio"):
        processor.patchify([load_image(Image.open(tmp_path / "thin.png"))])


# --- clips


def write_clip(path, number=20, fps=10, codec="libx264", times=None, size=(64, 48), **metadata):
    """Frame i has brightness 10 i. times: in milliseconds, where the rate varies."""
    with av.open(str(path), "w") as container:
        container.metadata.update(metadata)
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i in range(number):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), 10 * (i % 25), np.uint8), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def cut(path, part):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    return path


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.parametrize("part", [0.3, 0.5, 0.7, 0.9])
def test_a_truncated_avi_is_no_shorter_clip(tmp_path, codec, part):
    """The header says 40 frames."""
    path = cut(write_clip(tmp_path / "a.avi", 40, codec=codec), part)
    with pytest.raises(ValueError, match=r"video: .*a\.avi is truncated"):
        load_video(path)


@pytest.mark.parametrize("name, codec", [("a.mkv", "libx264"), ("a.webm", "libvpx-vp9"), ("a.flv", "flv1")])
def test_what_is_left_of_other_containers_is_read_with_a_warning(tmp_path, name, codec):
    path = write_clip(tmp_path / name, 60, codec=codec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_video(path).duration == 6.0
    with pytest.warns(
        UserWarning, match=rf"{name} seems truncated: its header declares 6.00 s, but its packets end at \d\.\d+ s"
    ):
        video = load_video(cut(path, 0.6))
    assert (
        1 < video.duration < 5
        and video.source_fps == pytest.approx(10, rel=0.1)
        and len(video.frames) == len(video.indices)
    )


def test_titles_in_another_encoding_do_not_matter(tmp_path):
    """A Latin-1 title, which is no UTF-8, used to stop the reader."""
    path = write_clip(tmp_path / "a.mp4", 8, title="caffe", comment="caffe")
    data = path.read_bytes()
    assert data.count(b"caffe") == 2
    path.write_bytes(data.replace(b"caffe", b"caf\xe9\xe8"))
    assert load_video(path).total_num_frames == 8


def test_a_clip_that_changes_its_size(tmp_path):
    """Two MPEG-1 streams, one behind the other."""
    parts = [write_clip(tmp_path / f"{w}.m1v", 10, fps=25, codec="mpeg1video", size=(w, 48)) for w in (64, 96)]
    (tmp_path / "a.m1v").write_bytes(b"".join(part.read_bytes() for part in parts))
    assert load_video(parts[0]).frames.shape == (4, 48, 64, 3)
    with pytest.raises(ValueError, match=r"a\.m1v: expected frames of one size, got 64 x 48 and 96 x 48 pixels"):
        load_video(tmp_path / "a.m1v", num_frames=20)


def test_still_images_are_no_clips(tmp_path):
    for name in ("a.png", "a.jpg", "a.webp", "a.gif", "a.bmp", "a.tif"):
        Image.fromarray(GRADIENT).resize((64, 48)).save(tmp_path / name)
        with pytest.raises(ValueError, match=rf"video: .*{name} is a still image; pass it as an image"):
            load_video(tmp_path / name)
    frames = [Image.new("RGB", (64, 48), (20 * i, 0, 0)) for i in range(5)]
    for name in ("moving.gif", "moving.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=100)
    assert load_video(tmp_path / "moving.gif").total_num_frames == 5
    with pytest.raises(ValueError, match=r"moving\.webp is an animation that PyAV cannot decode"):
        load_video(tmp_path / "moving.webp")


def test_frames_are_counted_before_they_are_kept(tmp_path):
    """The clip's size, the frames, the bytes and the argument to raise."""
    path, limits = write_clip(tmp_path / "a.mp4", 20), MediaLimits(max_video_bytes=10 * 64 * 48 * 3)
    assert len(load_video(path, num_frames=10, limits=limits).frames) == 10
    with pytest.raises(
        ValueError, match=r"a\.mp4: 12 frames of 64 x 48 pixels need 110,592 bytes, but max_video_bytes is 92,160"
    ):
        load_video(path, num_frames=12, limits=limits)
    with pytest.raises(ValueError, match=r"a\.mp4 has 64 x 48 = 3,072 pixels, but max_image_pixels is 3,071"):
        load_video(path, limits=MediaLimits(max_image_pixels=3071))


def test_memory_grows_with_the_frames_kept(tmp_path):
    """Of 400 frames of 320 x 240 (92 MB) four are kept (0.9 MB): Python's peak stays below ten frames."""
    path = write_clip(tmp_path / "a.mkv", 400, size=(320, 240))
    load_video(path, num_frames=4)  # what is imported once is not counted
    tracemalloc.start()
    video = load_video(path, num_frames=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert video.indices == (0, 100, 200, 300) and peak < 10 * 320 * 240 * 3


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"sample": lambda total, fps: []},
            ValueError,
            "sample: expected one or more increasing indices from 0 to 19, got",
        ),
        ({"sample": lambda total, fps: [3, 2]}, ValueError, "sample: expected one or more increasing indices from"),
        ({"sample": lambda total, fps: [0, 20]}, ValueError, "sample: expected one or more increasing indices from"),
        ({"sample": lambda total, fps: [-1, 2]}, ValueError, "sample: expected one or more increasing indices from"),
        ({"min_frames": "a"}, TypeError, "min_frames: expected an integer, got str 'a'"),
        ({"max_frames": None}, TypeError, "max_frames: expected an integer, got NoneType"),
        ({"max_frames": 2.5}, TypeError, "max_frames: expected an integer"),
        ({"fps": np.bool_(True)}, TypeError, "fps: expected a number"),
    ],
)
def test_arguments_of_the_wrong_kind(tmp_path, arguments, error, message):
    """For a file and, but for `sample`, for frames in memory."""
    sources = [write_clip(tmp_path / "a.mp4", 20)]
    sources += [] if "sample" in arguments else [np.zeros((20, 4, 4, 3), np.uint8)]
    for source in sources:
        with pytest.raises(error, match=message):
            load_video(source, **arguments)


def test_numbers_of_numpy_are_numbers(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 20)
    video = load_video(path, fps=np.int64(5), min_frames=np.int32(2), max_frames=np.int64(8))
    assert video.indices == load_video(path, fps=5, min_frames=2, max_frames=8).indices == (0, 2, 5, 7, 10, 12, 15, 17)
    assert load_video(path, num_frames=np.int64(4)).indices == (0, 5, 10, 15)
    assert load_video(path, sample=lambda total, fps: np.array([1, 5])).indices == (1, 5)
    assert load_video(torch.zeros(8, 3, 4, 4), fps=np.float32(4)).duration == 2.0
