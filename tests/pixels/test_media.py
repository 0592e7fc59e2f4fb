"""Pictures and clips: which way up, how 16 bits become 8, which frames, and what is said about a bad file."""

import math
import os
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from display_matrices import QUARTER_TURNS, shown_by_ffmpeg, with_matrix
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from transformers.video_utils import load_video as upstream_load_video

import refvl
from refvl.paths import DATA
from refvl.pixels import media
from refvl.pixels.media import MediaLimits, as_frames, load_image, load_video, sample_frame_indices

PHOTO = DATA / "pictures" / "astronaut.jpg"
GRADIENT = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)  # no symmetry at all


def pixels(source):
    image = load_image(source)
    assert image.mode == "RGB"
    return np.asarray(image)


# --- pictures

UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_rotation(tmp_path, orientation):
    """Oracle: the eight orientations of the EXIF standard as NumPy flips; once is enough."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a.png"
    Image.fromarray(GRADIENT).save(path, exif=exif)
    upright = UPRIGHT[orientation](GRADIENT)
    assert np.array_equal(pixels(Image.open(path)), upright)
    assert np.array_equal(pixels(load_image(path)), upright)


def test_alpha_is_blended_onto_white():
    """Oracle: alpha * colour + (1 - alpha) * white; no colour shows under a transparent pixel."""
    opacity = np.random.default_rng(1).integers(0, 256, (6, 9, 1), dtype=np.uint8)
    opacity[0], opacity[1] = 0, 255
    rgba = np.concatenate([GRADIENT, opacity], axis=2)
    wanted = opacity / 255 * GRADIENT + (255.0 - opacity)
    for source in (rgba, Image.fromarray(rgba), torch.from_numpy(rgba).permute(2, 0, 1)):
        blended = pixels(source)
        assert np.abs(blended - wanted).max() <= 1
        assert (blended[0] == 255).all() and np.array_equal(blended[1], GRADIENT[1])


def test_transparent_palette_and_grey(tmp_path):
    """Both become white; a transparent level or colour: tests/robustness/test_properties.py."""
    palette = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    palette.save(tmp_path / "p.png", transparency=1)
    [colors] = pixels(tmp_path / "p.png").tolist()
    assert colors == [[10, 20, 30], [255, 255, 255], [70, 80, 90]]
    grey = Image.merge("LA", [Image.new("L", (2, 1), 80), Image.new("L", (2, 1), 0)])
    assert pixels(grey).min() == 255


def test_16_bit_grey_is_scaled(tmp_path):
    """Oracle: round(v * 255 / 65535) for all levels, from a file and from memory, in either byte order."""
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    scaled = np.round(levels * (255 / 65535)).astype(np.uint8)
    Image.fromarray(levels).save(tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").mode == "I;16"
    swapped = Image.frombytes("I;16B", (256, 256), levels.astype(">u2").tobytes())
    wide = Image.fromarray(levels.astype(np.int32))  # mode I
    for source in (tmp_path / "a.png", levels, torch.from_numpy(levels), swapped, wide):
        assert np.array_equal(pixels(source), np.dstack([scaled] * 3))


def test_other_modes():
    """Oracles: grey is the same in three channels, a palette is looked up, CMYK is (1 - ink)(1 - black)."""
    grey = GRADIENT[..., 0]
    assert np.array_equal(pixels(Image.fromarray(grey)), np.dstack([grey] * 3))
    assert np.array_equal(pixels(Image.fromarray(grey > 99))[..., 1], np.where(grey > 99, 255, 0))
    palette = Image.fromarray(GRADIENT).convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    assert np.array_equal(pixels(palette), GRADIENT)
    inks = np.dstack([GRADIENT, grey[::-1]])
    wanted = (255.0 - inks[..., :3]) * (255.0 - inks[..., 3:]) / 255
    assert np.abs(pixels(Image.fromarray(inks, "CMYK")) - wanted).max() <= 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.bfloat16])
def test_arrays_and_tensors_are_the_same_picture(dtype):
    """Channels last or, in a tensor, first. bfloat16 has 8 significant bits: 2 levels."""
    tensor = torch.from_numpy(GRADIENT)
    if dtype != torch.uint8:
        tensor = (tensor.double() / 255).to(dtype)
    sources = [tensor, tensor.permute(2, 0, 1)]
    if dtype != torch.bfloat16:
        sources.append(tensor.numpy())
    for source in sources:
        assert np.abs(pixels(source).astype(int) - GRADIENT).max() <= (dtype == torch.bfloat16)
    grey = GRADIENT[..., :1]
    for source in (grey, torch.from_numpy(grey).permute(2, 0, 1)):
        assert np.array_equal(pixels(source), pixels(GRADIENT[..., 0]))


@pytest.mark.parametrize("load, kind", [(load_image, "image"), (load_video, "video")])
def test_only_files_are_opened(tmp_path, load, kind):
    """A pipe would block, and a text is refused with the library's reason."""
    os.mkfifo(tmp_path / "pipe.png")
    for name in (tmp_path / "nothing.png", tmp_path, tmp_path / "pipe.png"):
        with pytest.raises(FileNotFoundError, match=f"{kind}: no such file: "):
            load(name)
    (tmp_path / "text.jpg").write_text("neither an image nor a video")
    with pytest.raises(ValueError, match=rf"{kind}: .*text\.jpg cannot be read: "):
        load(str(tmp_path / "text.jpg"))


def test_shipped_files_are_found_by_name(tmp_path, monkeypatch):
    """From any folder, unless it has a file of that name. Oracle: the files of the repository."""
    monkeypatch.chdir(tmp_path)
    assert refvl.data("scene.mp4").read_bytes() == (DATA / "clips/scene.mp4").read_bytes()
    assert load_image("scene.png").info["source"] == str(DATA / "pictures/scene.png")
    with pytest.raises(FileNotFoundError, match=r"video: no such file: data/scen\.mp4; did you mean 'scene\.mp4'\?"):
        load_video("data/scen.mp4")
    Image.new("RGB", (3, 2)).save("scene.png")
    assert load_image("scene.png").size == (3, 2)


@pytest.mark.parametrize("top, wanted", [(200, 200), (255, 255), (256, 1), (51400, 200), (65535, 255)])
def test_integers_of_8_and_of_16_bits(tmp_path, top, wanted):
    """By hand: up to 255 levels are what they are, up to 65535 they are 257 to a level."""
    Image.fromarray(np.array([[0, top]], np.int32)).save(tmp_path / "a.tif")
    assert pixels(tmp_path / "a.tif")[0, :, 0].tolist() == [0, wanted]
    (tmp_path / "a.pgm").write_bytes(b"P5 2 1 65535\n" + np.array([0, 255], ">u2").tobytes())
    assert pixels(tmp_path / "a.pgm")[0, :, 0].tolist() == [0, 1]  # a file that says its depth
    Image.fromarray(np.array([[0, 0.5, 1]], np.float32)).save(tmp_path / "b.tif")
    assert pixels(tmp_path / "b.tif")[0, :, 0].tolist() == [0, 128, 255]


def test_limits_are_arguments(tmp_path):
    """Lowered and met exactly; a decoded image is not measured again, an opened file is."""
    path = tmp_path / "a.png"
    Image.fromarray(GRADIENT).save(path)
    small, exact = MediaLimits(max_image_pixels=53), MediaLimits(max_image_pixels=54)
    for source in (path, Image.open(path)):
        with pytest.raises(ValueError, match=r"a\.png cannot be read: it has 9 x 6 .*max_image_pixels=53"):
            load_image(source, limits=small)
    image = load_image(path, limits=exact)
    assert load_image(image, limits=small).size == load_image(GRADIENT, limits=small).size == (9, 6)


# --- which frames


def upstream_indices(total, source_fps, *, fps=None, num_frames=None, min_frames=4, max_frames=768):
    """What `Qwen2VLVideoProcessor.sample_frames` computes, in its own arithmetic, cut where it overshoots."""
    if num_frames is None:
        most = math.floor(min(max_frames, total) / 2) * 2
        number = min(max(total / source_fps * fps, min_frames), most, total)
        number = math.floor(number / 2) * 2
    else:
        number = round(num_frames / 2) * 2
    return torch.arange(0, total, total / number).int().tolist()[:number]


RATES = [1.0, 10.0, 24000 / 1001, 25.0, 30000 / 1001, 60.0, 239.76]
by_rate = st.fixed_dictionaries({
    "fps": st.sampled_from([0.1, 0.5, 1, 2.0, 7.3, 30]),
    "min_frames": st.integers(2, 12),
    "max_frames": st.sampled_from([5, 16, 768]),
})  # fmt: skip
by_number = st.fixed_dictionaries({"num_frames": st.integers(2, 768)})


@given(total=st.integers(2, 16_000), source_fps=st.sampled_from(RATES), options=by_rate | by_number)
def test_frames_are_sampled_as_upstream(total, source_fps, options):
    """Oracle: upstream's floating-point rule."""
    most = options.get("num_frames", 2)
    assume(max(most, round(most / 2) * 2) <= total)
    indices = sample_frame_indices(total, source_fps, **options)
    assert indices == upstream_indices(total, source_fps, **options)
    assert indices == sorted(set(indices)) and indices[-1] < total


def test_examples_by_hand():
    assert sample_frame_indices(100, 25.0, num_frames=1) == [0, 50]  # a temporal patch has two frames
    for total, wanted in ((1, [0]), (2, [0, 1]), (3, [0, 1])):  # as many whole temporal patches as there are
        assert sample_frame_indices(total, 25.0) == sample_frame_indices(total, 25.0, num_frames=total) == wanted


# --- clips


def write_clip(path, frames, fps=10, codec="libx264", times=None, **options):
    """Encode (T, H, W, 3) frames; H and W even. times: when each is shown, in milliseconds."""
    quality = {"crf": "10"} if codec.startswith("lib") else {"q:v": "2"}
    av = pytest.importorskip("av")
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=fps, options=quality)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def counting_frames(number=20, height=48, width=64):
    """Frame i has brightness 10 i, with a bright top right corner."""
    frames = np.zeros((number, height, width, 3), np.uint8)
    frames += 10 * np.arange(number, dtype=np.uint8)[:, None, None, None]
    frames[:, : height // 2, width // 2 :] = 255
    return frames


def brightness(frames):
    """Of the bottom left pixel: which frame of `counting_frames` it is."""
    return [round(float(frame[-8:, :8].mean()) / 10) for frame in frames]


def test_clip_is_what_transformers_reads(clip):
    """Oracle: transformers' own PyAV reader, with the same indices."""
    video = load_video(clip)
    frames, metadata = upstream_load_video(
        str(clip), backend="pyav", sample_indices_fn=lambda metadata, **_: list(video.indices)
    )
    assert np.array_equal(video.frames, frames)
    assert video.fps == metadata.sampled_fps and video.source_fps == metadata.fps == 25.0
    assert video.timestamps == metadata.timestamps
    assert video.total_num_frames == metadata.total_num_frames == 132
    assert video.duration == metadata.duration == 5.28


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_every_frame_in_order(tmp_path, name):
    """A container that counts its frames and one that does not; the frames say which they are."""
    path = write_clip(tmp_path / name, counting_frames())
    video = load_video(path, fps=5)
    assert video.indices == tuple(range(0, 20, 2))
    assert brightness(video.frames) == list(video.indices)
    assert (video.fps, video.source_fps) == (5.0, 10.0)
    assert (video.total_num_frames, video.duration) == (20, 2.0)
    assert video.timestamps == pytest.approx([i / 5 for i in range(10)])
    assert len(load_video(path, num_frames=6).frames) == 6
    assert len(load_video(path, fps=10, max_frames=8).frames) == 8
    assert load_video(path, source_fps=5).duration == 4.0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_short_files(tmp_path, number):
    video = load_video(write_clip(tmp_path / "a.mp4", counting_frames(number)))
    assert len(video.frames) == min(number, 2) and video.fps == min(number, 2) / number * 10


JUMPS = [0, 100, 2000, 2100, 4000, 9000, 9010, 9030]  # milliseconds; the headers say 30 frames a second, or less


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
@pytest.mark.parametrize("start", [0, 5000])
def test_times_are_those_of_the_frames(tmp_path, name, start):
    """Oracle: the times the clip was written with. Sampling counts frames; timestamps and rates are true.

    A clip that starts late starts at zero; an edit list of MP4 counts what is before as well.
    """
    times = [time + start for time in JUMPS]
    path = write_clip(tmp_path / name, counting_frames(8), 30, times=times)
    for number in (8, 4):
        video = load_video(path, num_frames=number)
        assert video.indices == tuple(range(0, 8, 8 // number))
        assert brightness(video.frames) == list(video.indices)
        assert video.timestamps == pytest.approx([JUMPS[i] / 1000 for i in video.indices], abs=1e-9)
        assert video.duration == pytest.approx(9.03, abs=0.04)  # and the last frame
        assert video.source_fps == pytest.approx(8 / video.duration)
        assert video.fps == pytest.approx(number / video.duration)
    assert load_video(path, source_fps=4).timestamps == [0, 0.5, 1, 1.5]  # a given rate counts


@pytest.mark.parametrize("rate", [25, Fraction(30000, 1001)])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts", "a.avi", "a.flv"])
def test_a_constant_rate_is_the_header_s(tmp_path, name, rate):
    """Oracle: index / rate, though clocks that tick in milliseconds say something else of 29.97."""
    codec = "flv1" if name == "a.flv" else "libx264"
    video = load_video(write_clip(tmp_path / name, counting_frames(90), rate, codec=codec), num_frames=30)
    assert video.source_fps == pytest.approx(float(rate), rel=1e-4)  # FLV says 29.97 as 989 / 33
    assert video.seconds is None and video.timestamps == [i / video.source_fps for i in video.indices]
    assert video.total_num_frames == 90 and video.indices == tuple(range(0, 90, 3))


def test_packets_without_a_frame(tmp_path, monkeypatch):
    """Where the packets promise more frames than decoding shows, the decoder is believed."""
    path = write_clip(tmp_path / "a.mkv", counting_frames(20))
    listed = media.Listing(total=25, rate=10.0, tick=0.001)
    monkeypatch.setattr(media, "_list_frames", lambda *_: listed)
    video = load_video(path, num_frames=20)
    assert video.total_num_frames == 20 and brightness(video.frames) == list(range(20))


@pytest.mark.parametrize("matrix", QUARTER_TURNS, ids=str)
def test_display_matrices(tmp_path, matrix):
    """Oracle: the filters transpose, hflip and vflip as FFmpeg's program chooses them.

    Phones write such matrices.
    """
    plain = write_clip(tmp_path / "plain.mp4", counting_frames(4))
    shown = tmp_path / "shown.mp4"
    shown.write_bytes(with_matrix(plain.read_bytes(), *matrix))
    wanted = shown_by_ffmpeg(shown)
    assert np.array_equal(load_video(shown, num_frames=len(wanted)).frames, wanted)
    assert (matrix == (1, 0, 0, 1)) == np.array_equal(wanted, shown_by_ffmpeg(plain)), "each looks different"


def test_trimmed_phone_clip(tmp_path):
    """A clip trimmed on a phone keeps its frames and hides some behind an edit list: sample what is shown."""
    data = write_clip(tmp_path / "a.mp4", counting_frames()).read_bytes()
    at = data.index(b"elst") + 12  # version and flags, number of entries, then the duration in milliseconds
    assert struct.unpack(">I", data[at : at + 4]) == (2000,)
    (tmp_path / "b.mp4").write_bytes(data[:at] + struct.pack(">I", 1000) + data[at + 4 :])
    video = load_video(tmp_path / "b.mp4", fps=10)
    assert video.total_num_frames == 10 and brightness(video.frames) == list(range(10)) and video.duration == 1.0


def test_frames_in_memory():
    """Taken as sampled already, unless a source rate or a number of frames is given."""
    frames = counting_frames()
    images = [Image.fromarray(frame) for frame in frames]
    tensor = torch.from_numpy(frames).permute(0, 3, 1, 2)
    for source in (frames, images, frames / 255, tensor):
        video = load_video(source)
        assert np.array_equal(video.frames, frames) and video.frames.dtype == np.uint8
        assert (video.fps, video.source_fps, video.duration) == (2.0, 2.0, 10.0)
        assert video.indices == tuple(range(20))
    assert load_video(frames, fps=4).duration == 5.0
    sampled = load_video(frames, source_fps=10)
    assert sampled.indices == (0, 5, 10, 15) and sampled.fps == 2.0
    assert brightness(sampled.frames) == [0, 5, 10, 15]
    assert load_video(frames, num_frames=4).indices == (0, 5, 10, 15)
    assert load_video(sampled) is sampled and as_frames(sampled) is sampled.frames


def test_other_types_are_named():
    with pytest.raises(TypeError, match="image: expected a path, a PIL image, an array"):
        load_image(3)
    with pytest.raises(TypeError, match="video: expected a path, a list of frames, an array or"):
        load_video(3)


@pytest.mark.parametrize(
    "load, source, message",
    [
        (load_image, np.zeros((5, 6, 2)), r"or \(1 \| 3 \| 4, H, W\), got \(5, 6, 2\)"),
        (load_image, np.full((4, 5), 256), r"expected integers in \[0, 255\], .* got int64"),
        (load_image, np.full((4, 5), 1.5), "got float64"),
        (load_image, np.zeros((0, 5, 3), np.uint8), "5 x 0 pixels"),
        (load_video, [], "video: expected at least one frame"),
        (load_video, GRADIENT, r"an array of shape \(T, H, W, 3\), got \(6, 9, 3\)"),
        (load_video, [GRADIENT, GRADIENT[1:]], r"one size, got \(6, 9, 3\) and \(5, 9, 3\)"),
    ],
)
def test_bad_media_are_named(load, source, message):
    with pytest.raises(ValueError, match=message):
        load(source)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fps": 2, "num_frames": 4}, "fps, num_frames: expected at most one"),
        ({"num_frames": 11}, "num_frames: expected at most 10, .* got 11"),
        ({"num_frames": 0}, "num_frames: must be at least 1"),
        ({"fps": 0}, "fps: must be a finite number above 0, got 0"),
        ({"max_frames": 1}, "max_frames: must be at least temporal_patch_size=2, got 1"),
    ],
)
def test_bad_sampling_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        sample_frame_indices(10, 25.0, **options)


def test_frames_are_counted_before_they_are_kept(tmp_path):
    """The bytes and the argument to raise; the same for a list of files, before the second is opened."""
    path, limits = write_clip(tmp_path / "a.mp4", counting_frames()), MediaLimits(max_video_bytes=10 * 64 * 48 * 3)
    assert len(load_video(path, num_frames=10, limits=limits).frames) == 10
    for source in (path, [Image.fromarray(frame) for frame in counting_frames(12)]):
        with pytest.raises(ValueError, match="12 frames need 110,592 bytes, but max_video_bytes is 92,160"):
            load_video(source, num_frames=12, limits=limits)
    with pytest.raises(ValueError, match=r"a\.mp4 has frames of 64 x 48 pixels, but max_image_pixels is 3,071"):
        load_video(path, limits=MediaLimits(max_image_pixels=3071))


def test_files_without_pictures(tmp_path):
    """Sound alone, and a stream that was announced and never written."""
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        container.add_stream("pcm_s16le", rate=8000)
        container.start_encoding()
    with av.open(str(tmp_path / "empty.avi"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        container.start_encoding()
    for name, message in (("sound.wav", "no video stream"), ("empty.avi", "no readable frames or no")):
        with pytest.raises(ValueError, match=f"{name} has {message}"):
            load_video(tmp_path / name)


@pytest.mark.parametrize("part", [0.02, 0.5, 0.95])
def test_truncated_clip(tmp_path, clip, part):
    """Cut anywhere before the last frame that is wanted: with the index in front, and (x264's default) at the end."""
    written_last, cut = write_clip(tmp_path / "last.mp4", counting_frames()), tmp_path / "cut.mp4"
    for path in (clip, written_last):
        cut.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
        with pytest.raises(ValueError, match=r"cut\.mp4 (is truncated|has no readable frames|cannot be read)"):
            load_video(cut)
