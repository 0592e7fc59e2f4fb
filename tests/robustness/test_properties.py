"""Any input of a kind ends in a right result or in an error that says what is wrong: one property
per kind.

Oracles: the file before it was damaged, Pillow's and FFmpeg's own filters, formulas by hand,
transformers' own model with the same seed. With REFVL_EXAMPLES=500 in the environment, each
property is tried on that many examples.
"""

import io
import json
import os
import shutil
import struct
import sys
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image
from prompts import inputs_of
from shipped import VARIANTS, is_read_here, shipped

import refvl
from refvl.paths import DATA
from refvl.pixels.media import load_image, load_video
from refvl.tools.cli import main

CHECKPOINTS = sorted(
    name for name in {folder.name for folder in (DATA / "checkpoints").iterdir()} - VARIANTS if is_read_here(name)
)
EXAMPLES = int(os.environ.get("REFVL_EXAMPLES", "15"))
SCENE, CLIP = DATA / "pictures" / "scene.png", DATA / "clips" / "scene.mp4"
ODD = st.sampled_from(
    [
        None, True, -1, 0, 2**63, 0.5, float("nan"), float("inf"), "", "3", b"\0", [], [[]], {}, {"a": 1}, object,
        np.int64(2), np.array([1, 2]), torch.tensor(4.7), torch.zeros(0), torch.zeros(1, device="meta"),
    ]
)  # fmt: skip
few = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


def mostly(usual, odd=ODD):
    """A strategy for usual values, and for something odd one time in four."""
    return st.integers(0, 3).flatmap(lambda n: usual if n else odd)


@st.composite
def damages(draw):
    """A function that cuts a file, flips some of its bits, puts bytes in or takes some out, or
    leaves it as it is."""
    rng, how = np.random.default_rng(draw(seeds)), draw(st.integers(0, 4))

    def damage(data: bytes) -> bytes:
        at = int(rng.integers(len(data)))
        match how:
            case 0:
                return data[:at]
            case 1:
                changed = bytearray(data)
                for place in rng.integers(min(len(data), 512), size=5):
                    changed[place] ^= 1 << int(rng.integers(8))
                return bytes(changed)
            case 2:
                return data[:at] + rng.bytes(20) + data[at:]
            case 3:
                return data[:at] + data[at + 50 :]
        return data

    return damage


# --- images -----------------------------------------------------------------------------------------------------------


@few
@given(
    format=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "TGA", "ICO"]),
    mode=st.sampled_from(["RGB", "L", "RGBA", "P", "1", "LA", "CMYK", "I;16", "F"]),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    seed=seeds,
    damage=damages(),
)
def test_an_image_file_is_read_or_named(tmp_path, format, mode, size, seed, damage):
    """Oracle of a whole file: the size that Pillow reads.

    Whatever a decoder raises, refvl's error names the file.
    """
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    try:
        image.convert("L").convert(mode).save(buffer, format)
    except (OSError, ValueError, KeyError):  # not every mode fits every format
        image.save(buffer := io.BytesIO(), format)
    path = tmp_path / f"file.{format.lower()}"
    path.write_bytes(data := damage(buffer.getvalue()))
    try:
        loaded = load_image(path)
    except ValueError as error:
        assert str(path) in str(error) and (data != buffer.getvalue() or mode == "F")
        return
    assert loaded.mode == "RGB" and min(loaded.size) > 0
    assert data != buffer.getvalue() or loaded.size == Image.open(path).size


ARRAYS = npst.arrays(
    st.sampled_from([np.uint8, np.uint16, np.int32, np.float16, np.float64, np.bool_, np.complex64]),
    st.one_of(npst.array_shapes(max_dims=4, max_side=5), st.sampled_from([(5, 7), (5, 7, 3), (5, 7, 4), (5, 7, 1)])),
)


@given(array=ARRAYS, as_tensor=st.booleans())
@example(array=np.full((2, 2), -2e-308), as_tensor=True)  # in float32 it would be -0.0
def test_an_array_is_an_image_or_refused(array, as_tensor):
    """Oracle: what the docstring says, as a formula: integers up to 255 as they are, 16 bits
    divided by 257, floats and booleans times 255."""
    if as_tensor:
        assume(array.dtype != np.uint16)
    channels_last = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))
    scales = {"b": (255, 1), "f": (255, 1), "i": (1, 255), "u": (1 if array.dtype == np.uint8 else 1 / 257, 65535)}
    scale, most = scales.get(array.dtype.kind, (0, 0))
    fits = scale > 0 and bool(((array >= 0) & (array <= most)).all())
    try:
        loaded = np.asarray(load_image(torch.from_numpy(array) if as_tensor else array))
    except ValueError as error:
        assert str(error).startswith("image: ") and not (channels_last and fits)
        return
    assert fits and loaded.shape[-1] == 3
    if array.ndim == 2:
        assert np.abs(loaded[..., 0] - array.astype(float) * scale).max() <= 0.5 + 1e-6


@few
@given(
    depth=st.sampled_from([(8, 1), (16, 1), (8, 3), (16, 3)]),
    size=st.tuples(st.integers(1, 5), st.integers(2, 8)),
    top=st.sampled_from([4, 2**8, 2**16]),
    seed=seeds,
)
def test_a_transparent_level_or_colour_is_white(tmp_path, depth, size, top, seed):
    """Oracle: the samples, written into a PNG chunk by chunk (PNG, section 11.3.2.1), blended by hand.

    Of colours of 16 bits, Pillow keeps the upper 8.
    """
    rng, (bits, channels) = np.random.default_rng(seed), depth
    most = 2**bits - 1
    samples = rng.integers(0, min(top, most + 1), (*size, channels))
    hidden = samples[0, int(rng.integers(size[1]))]
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", size[1], size[0], bits, 0 if channels == 1 else 2, 0, 0, 0),
        b"tRNS": np.asarray(hidden, ">u2").tobytes(),
        b"IDAT": zlib.compress(b"".join(b"\0" + row.astype(f">u{bits // 8}").tobytes() for row in samples)),
        b"IEND": b"",
    }
    packed = (struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks.items())
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    shown = np.asarray(load_image(tmp_path / "a.png"))
    if depth == (16, 3):
        samples, hidden, most = samples >> 8, hidden >> 8, 255
    blended = np.where((samples == hidden).all(-1, keepdims=True), most, samples) / most * 255
    assert np.array_equal(shown, np.broadcast_to(np.round(blended), shown.shape))


# --- videos -----------------------------------------------------------------------------------------------------------


@cache
def clip(suffix: str) -> bytes:
    """Twelve grey frames, lighter and lighter."""
    av = pytest.importorskip("av")
    codec = {"avi": "mpeg4", "webm": "libvpx", "gif": "gif"}.get(suffix, "libx264")
    with av.open(buffer := io.BytesIO(), "w", format={"mkv": "matroska"}.get(suffix, suffix)) as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "rgb8" if suffix == "gif" else "yuv420p"
        for i in range(12):
            picture = np.full((48, 64, 3), i * 20, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


SAMPLING = st.fixed_dictionaries({}, optional={name: mostly(st.integers(1, 12)) for name in ("fps", "num_frames")})


@few
@given(suffix=st.sampled_from(["mp4", "mkv", "avi", "webm", "gif", "mov"]), damage=damages(), options=SAMPLING)
def test_a_video_file_is_read_or_named(tmp_path, suffix, damage, options):
    """Oracle of a whole file: the frames' own brightness.

    An error names the file or the argument.
    """
    path = tmp_path / f"clip.{suffix}"
    path.write_bytes(data := damage(clip(suffix)))
    try:
        video = load_video(path, **options)
    except (ValueError, TypeError) as error:
        assert str(path) in str(error) or any(name in str(error) for name in options)
        assert data != clip(suffix) or options
        return
    assert len(video.frames) == len(video.indices) == len(video.timestamps) > 0
    assert video.timestamps == sorted(video.timestamps)
    if data == clip(suffix):
        assert np.abs(video.frames.mean((1, 2, 3)) - 20 * np.array(video.indices)).max() < 8


PLAYLISTS = {
    "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{video}\n#EXT-X-ENDLIST\n",
    "b.mp4": "ffconcat version 1.0\nfile {video}\n",
    "c.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_opens_no_other_file(tmp_path, name):
    """FFmpeg alone would play the first two."""
    (tmp_path / "other.mp4").write_bytes(clip("mp4"))
    (tmp_path / name).write_text(PLAYLISTS[name].format(video="other.mp4"))
    with pytest.raises(ValueError, match=f"video: .*{name} cannot be read"):
        load_video(tmp_path / name)


# --- questions --------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        "What", "color?", "\n", "ü", "漢", "{{ x }}", "{% if %}", "<|im_end|>", "<image>", "<|image_pad|>", "</slice>",
        "<|vision_end|>", "<unk>", "<im_patch>", "<|user|>", "<|begin_of_video|>",
    ]
)  # fmt: skip
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, mostly(TEXTS)),
    st.builds(lambda image: {"type": "image", "image": image}, mostly(st.sampled_from([str(SCENE), SCENE]))),
    st.sampled_from([{"type": "audio"}, {"type": "image"}, {"type": "video", "video": str(CLIP)}, None]),
)
TURNS = st.builds(
    lambda role, content: {"role": role, "content": content},
    mostly(st.sampled_from(["user", "system", "assistant"])),
    mostly(st.one_of(TEXTS, st.lists(PARTS, min_size=1, max_size=3))),
)


@few
@given(
    name=st.sampled_from(CHECKPOINTS),
    prompt=mostly(st.one_of(TEXTS, st.lists(TURNS, min_size=1, max_size=3))),
    rate=mostly(st.sampled_from([0.0, 0.5])),
)
def test_a_conversation_is_answered_or_refused(name, prompt, rate):
    """Special tokens in texts, media anywhere, parts that are none: what is answered has a position
    per token."""
    try:
        trace = shipped(name).trace(prompt, max_new_tokens=2, pruning_rate=rate)
    except (ValueError, TypeError, FileNotFoundError) as error:
        assert ": " in str(error)
        return
    assert isinstance(trace.text, str)
    assert len(trace.media) == len(trace.embeds) == len(trace.patches)
    assert trace.positions.shape == (3, len(trace.input_ids)) and trace.token_ids


OPTIONS = {
    "do_sample": [True, False], "temperature": [0.3, 4.0], "top_k": [1, 50], "top_p": [0.3, 1.0], "min_p": [0.1],
    "repetition_penalty": [0.7, 1.4], "no_repeat_ngram_size": [1, 2], "bad_words_ids": [[[5]], [[5, 6], [7]]],
    "suppress_tokens": [[5, 6, 7]], "min_new_tokens": [2], "num_beams": [2, 3], "length_penalty": [0.5, -1.0],
    "early_stopping": [True, "never"], "renormalize_logits": [True], "eos_token_id": [7, [7, 8]],
    "stop_strings": [["e"]], "typical_p": [0.2], "sequence_bias": [[[[5], 9.0]]],
}  # fmt: skip
ASKED = ("tiny-qwen2_5_vl", "tiny-qwen3_vl", "tiny-glm4v")


@cache
def asked(name: str):
    """transformers' own model of a shipped checkpoint, and a question as both take it."""
    from transformers import AutoModelForImageTextToText

    trace = shipped(name).trace("What is it?", images=[SCENE], max_new_tokens=1)
    theirs = AutoModelForImageTextToText.from_pretrained(DATA / "checkpoints" / name, dtype=torch.float32).eval()
    return theirs, inputs_of(shipped(name), trace)


@few
@given(
    name=st.sampled_from(ASKED),
    options=st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    length=st.integers(1, 5),
)
def test_options_of_generate_mean_what_they_mean_in_transformers(name, options, length):
    """Oracle: transformers' own model with the same seed.

    What it refuses, refvl refuses as well.
    """
    theirs, inputs = asked(name)
    options |= {"max_new_tokens": length}
    usual = {"do_sample": False, "tokenizer": shipped(name).processor.tokenizer}
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            expected = theirs.generate(**inputs, **(usual | options))
    except (ValueError, TypeError):
        with pytest.raises((ValueError, TypeError)):
            shipped(name).generate(**inputs, **options)
        return
    torch.manual_seed(0)
    assert torch.equal(shipped(name).generate(**inputs, **options), expected)


# --- checkpoints and the command line ---------------------------------------------------------------------------------


def mutate(rng: np.random.Generator, value):
    """JSON with something replaced, removed or of another kind."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = sorted(value)[int(rng.integers(len(value)))]
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutate(rng, value[key])}
    odd = (None, -1, 0, 3, 10**9, 0.5, "x", "../x", [], {}, [1], {"a": 1}, True)
    return odd[int(rng.integers(len(odd)))]


@few
@given(name=st.sampled_from(CHECKPOINTS), seed=seeds, damage=damages(), data=st.data())
def test_a_changed_checkpoint_answers_or_is_refused(tmp_path_factory, name, seed, damage, data):
    """One file is missing, damaged or says something else: an answer, or one error, and no code
    that runs."""
    source, folder = DATA / "checkpoints" / name, tmp_path_factory.mktemp("changed")
    for file in source.iterdir():
        (folder / file.name).symlink_to(file) if file.suffix == ".safetensors" else shutil.copy(file, folder)
    file = folder / data.draw(st.sampled_from(sorted(f.name for f in source.iterdir() if f.is_file())))
    content = file.read_bytes()
    file.unlink()
    how = data.draw(st.sampled_from(["missing", "damaged", "changed"]))
    if how == "damaged":
        file.write_bytes(damage(content))
    elif how == "changed" and file.suffix == ".json":
        file.write_text(json.dumps(mutate(np.random.default_rng(seed), json.loads(content))))
    try:
        answer = refvl.load(folder, progress=False).chat("What color?", images=[SCENE], max_new_tokens=1)
    except Exception as error:  # whatever transformers makes of the folder, but said, and without a crash
        assert str(error)
        return
    assert isinstance(answer, str)


COMMANDS = {
    "an unknown option": ["chat", "tiny-qwen2_5_vl", "What?", "--nope"],
    "a number that is none": ["chat", "tiny-qwen2_5_vl", "What?", "--max-new-tokens", "x"],
    "escape codes in a name": ["info", "\x1b[2Jnowhere\x9b1m"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_line_says_what_is_wrong_in_one_line(case, monkeypatch, capsys):
    """A status above 0, an error for a person, and nothing that commands the terminal."""
    monkeypatch.setattr(sys, "argv", ["refvl", *COMMANDS[case]])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code in (1, 2) and err.strip() and "Traceback" not in err
    assert not {c for c in out + err if not c.isprintable() and c not in "\n\t"}
