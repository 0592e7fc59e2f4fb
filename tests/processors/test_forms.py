"""Messages as other libraries write them: the rows of the table in docs/migrate.md.

Oracles: for images, transformers' template, tokenizer and Pillow processor with images that were
opened by hand; for videos, the times of transformers' `VideoMetadata`, and frames by hand. The
rules of qwen-vl-utils are written out here.
"""

import base64
import io
import re
from pathlib import Path, PurePath
from types import SimpleNamespace as Object

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as upstream
from transformers.video_utils import VideoMetadata

from refvl import families
from refvl.paths import DATA
from refvl.pixels.by_hand import patchify_video

PATH = str(DATA / "pictures" / "coffee.jpg")
BYTES = Path(PATH).read_bytes()
TEXT = base64.b64encode(BYTES).decode()
RGB = np.array(Image.open(PATH).convert("RGB"))[:90, :120]
MASK = RGB[..., 0] > 128
FRAMES = np.random.default_rng(0).integers(0, 256, (6, 64, 96, 3), dtype=np.uint8)
TIMES = {"fps": 10.0, "frames_indices": [3, 5, 20, 21, 40, 58], "total_num_frames": 60}
TCHW = torch.from_numpy(FRAMES).permute(0, 3, 1, 2)
OPENED = Image.open(PATH).convert("RGB")


def shipped(name: str):
    folder = DATA / "checkpoints" / name
    return families.load_processor(folder, families.read_config(folder))


def run(processor, messages, **media):
    """refvl's (ids, rows of each item)."""
    messages = processor.messages(messages, **media)
    patches = processor.patchify(processor.decode(messages))
    return processor.tokenize(messages, [p.media_tokens for p in patches]), [p.pixel_values for p in patches]


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Why?"}]}]


SIZED = OPENED.resize(upstream.smart_resize(200, 333, 28, 4 * 28**2, 16_384 * 28**2)[::-1])
SMALL = OPENED.resize(upstream.smart_resize(*OPENED.size[::-1], 28, 4 * 28**2, 50_000)[::-1])
IMAGES = {  # the row -> (a part, the image that it stands for)
    "OpenAI, `image_url`": ({"type": "image_url", "image_url": {"url": PATH, "detail": "auto"}}, OPENED),
    "OpenAI, `input_image`": ({"type": "input_image", "image_url": PATH}, OPENED),
    "`file://`": ({"type": "image", "image": Path(PATH).as_uri()}, OPENED),
    "`data:`": ({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{TEXT}"}}, OPENED),
    "base64": ({"type": "image", "base64": TEXT}, OPENED),
    "bytes": ({"type": "image", "image": BYTES}, OPENED),
    "an open file": ({"type": "image", "image": io.BytesIO(BYTES)}, OPENED),
    "any path": ({"image": PurePath(PATH), "cache_control": {}}, OPENED),
    "an array (C, H, W)": ({"type": "image", "image": RGB.transpose(2, 0, 1)}, Image.fromarray(RGB)),
    "an array of integers": ({"type": "image", "image": RGB.astype(np.int64)}, Image.fromarray(RGB)),
    "a mask": ({"type": "image", "image": MASK}, Image.fromarray(MASK).convert("RGB")),
    "one pixel": ({"type": "image", "image": OPENED.resize((1, 1))}, OPENED.resize((1, 1))),
    "`min_pixels`, `max_pixels`": ({"type": "image", "image": PATH, "max_pixels": 50_000}, SMALL),
    "`resized_height`, `resized_width`": (
        {"type": "image", "image": PATH, "resized_height": 200, "resized_width": 333}, SIZED,
    ),
}  # fmt: skip
VIDEOS = {  # the row -> a part with FRAMES
    "`video_metadata`": {"type": "video", "video": [*FRAMES], "video_metadata": TIMES},
    "`(frames, metadata)`": {"type": "video", "video": (FRAMES.transpose(0, 3, 1, 2), VideoMetadata(**TIMES))},
    "torchcodec": {"video": Object(data=TCHW, pts_seconds=torch.tensor(TIMES["frames_indices"]).double() / 10)},
    "decord": {"type": "video", "video": Object(asnumpy=lambda: FRAMES), "video_metadata": TIMES},
    "a generator": {"type": "video", "video": (frame for frame in FRAMES), "video_metadata": TIMES},
}
CLIP = str(DATA / "clips" / "bigbuckbunny.mp4")  # 132 frames, 25 per second
CLIPS = {  # the row -> (a part, the first frame, the last, how many): those of `np.linspace` in qwen-vl-utils
    "OpenAI, `video_url`": ({"type": "video_url", "video_url": {"url": CLIP}}, (0, 131, 10)),
    "`nframes`": ({"type": "video", "video": CLIP, "nframes": 6}, (0, 131, 6)),
    "`video_start`, `video_end`": ({"video": CLIP, "video_start": 1, "video_end": 2.5, "fps": 4}, (25, 62, 6)),
}


@pytest.mark.parametrize("row", IMAGES)
def test_images_are_those_of_transformers(row):
    part, image = IMAGES[row]
    processor = shipped("tiny-qwen2_5_vl")
    pixels = upstream.Qwen2VLImageProcessorPil.from_pretrained(DATA / "checkpoints" / "tiny-qwen2_5_vl")
    theirs = pixels(image, return_tensors="pt")
    tokens = "<|image_pad|>" * (int(theirs["image_grid_thw"].prod()) // 4)
    text = processor.tokenizer.apply_chat_template(user({"type": "image"}), tokenize=False, add_generation_prompt=True)
    ids, [rows] = run(processor, user(part))
    assert ids == processor.tokenizer(text.replace("<|image_pad|>", tokens))["input_ids"]
    assert torch.equal(rows, theirs["pixel_values"])


@pytest.mark.parametrize("row", VIDEOS)
def test_chosen_frames_keep_their_times(row):
    """As transformers' VideoMetadata: the mean time of the frames of a grid step."""
    processor = shipped("tiny-qwen3_vl")
    ids, [rows] = run(processor, user(VIDEOS[row]))
    theirs, (_, h, w) = patchify_video(FRAMES, processor.video_config)
    seconds = np.array(VideoMetadata(**TIMES).timestamps).reshape(3, 2).mean(1)
    frame = "<|vision_start|>" + "<|video_pad|>" * (h * w // 4) + "<|vision_end|>"
    assert "".join(f"<{second:.1f} seconds>{frame}" for second in seconds) in processor.tokenizer.decode(ids)
    assert torch.equal(rows, theirs)


@pytest.mark.parametrize("row", CLIPS)
def test_frames_of_a_file(row):
    """Oracles: PyAV's frames, and the mean time of the frames of a grid step."""
    processor = shipped("tiny-qwen3_vl")
    part, span = CLIPS[row]
    chosen = np.linspace(*span).round().astype(int)
    av = pytest.importorskip("av")
    with av.open(CLIP) as container:
        frames = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])[chosen]
    ids, [rows] = run(processor, user(part))
    text = processor.tokenizer.decode(ids)
    seconds = (chosen / 25).reshape(-1, 2).mean(1)
    assert re.findall(r"<([\d.]+) seconds>", text) == [f"{second:.1f}" for second in seconds]
    assert torch.equal(rows, patchify_video(frames, processor.video_config)[0])


def test_a_clip_has_the_size_that_qwen_vl_utils_gives_it():
    """`fetch_video`: 128 to 768 tokens per frame, and at most the given area."""
    processor = shipped("tiny-qwen2_5_vl")
    clip = TCHW.repeat_interleave(8, 2).repeat_interleave(8, 3)
    size = upstream.smart_resize(*clip.shape[2:], 28, 128 * 28**2, 360 * 420)
    smaller = F.interpolate(clip, size, mode="bicubic", antialias=True)
    _, [rows] = run(processor, user({"type": "video", "video": clip, "max_pixels": 360 * 420}))
    assert torch.equal(rows, patchify_video(smaller, processor.video_config)[0])
    size = upstream.smart_resize(300, 400, 28, 4 * 28**2, 16_384 * 28**2)
    smaller = F.interpolate(clip, size, mode="bicubic", antialias=True)
    _, [rows] = run(processor, user({"video": clip, "resized_height": 300, "resized_width": 400}))
    assert torch.equal(rows, patchify_video(smaller, processor.video_config)[0])
    with pytest.raises(TypeError, match="resized_width: expected an integer, got NoneType"):
        run(processor, user({"video": clip, "resized_height": 300}))
    ids, _ = run(processor, user({"type": "video", "video": [*clip], "sample_fps": 4}))
    assert run(processor, user({"type": "video", "video": clip, "fps": 4}))[0] == ids


def test_parts_without_a_source_take_the_images_in_order():
    processor = shipped("tiny-qwen2_5_vl")
    parts = {"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}
    theirs = run(processor, user({"type": "image", "image": OPENED}, parts[1], {"type": "image", "image": SMALL}))
    ids, rows = run(processor, user(*parts), images=[OPENED, SMALL])
    assert ids == theirs[0] and all(map(torch.equal, rows, theirs[1]))
    with pytest.raises(ValueError, match="a part such as {'type': 'image'} for each image"):
        run(processor, user(*parts), images=[OPENED] * 3)


def test_the_template_reads_the_rest_and_text_stays_text():
    """Oracle: transformers, which also drops a key that is None; a special token in a tool's words is text."""
    processor = shipped("tiny-qwen2_5_vl")
    tokenizer = processor.tokenizer
    tokenizer.chat_template += "{{ tools | tojson if tools }}{{ messages[0].name, messages[1].tool_calls }}"
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [{"role": "user", "content": "Hi", "name": "Ada"}, {"role": "assistant", "tool_calls": calls}]
    theirs = tokenizer.apply_chat_template(messages, tools=[{"d": "red"}], tokenize=False, add_generation_prompt=True)
    ours = processor.messages([messages[0], messages[1] | {"content": None}])
    assert processor.tokenize(ours, [], tools=[{"d": "red"}]) == tokenizer(theirs)["input_ids"]
    injected = processor.tokenize(ours, [], tools=[{"d": "<|im_end|>"}])
    assert injected.count(tokenizer.eos_token_id) == tokenizer(theirs)["input_ids"].count(tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": "https://example.com/a.png"}, "image: .* opens no URLs; download the file"),
        ({"type": "image", "image": TEXT[:-7] + "#"}, r"got /9j/\S{36}\.\.\. \([\d,]+ characters\)$"),
        ({"type": "video", "video": f"data:video/mp4;base64,{TEXT}"}, "video: .* file in memory; write it to disk"),
        ({"type": "video", "video": CLIP, "video_start": 9}, "no frame of 5.28 s is between 9 and inf s"),
        ({"type": "video", "video": [*FRAMES], "video_end": 1}, "expected a file, got frames"),
        ({"type": "video", "video": CLIP, "total_pixels": 3}, "write max_pixels, the area of a frame"),
        ({"image": PATH, "resized_width": 3, "resized_height": 0}, "resized_height: must be at least 1, got 0"),
        ({"type": "video", "video": [*FRAMES], "video_metadata": {"fps": 2, "frames_indices": [3]}}, "expected 6 inc"),
    ],
)
def test_what_is_refused_says_what_to_write(part, message):
    with pytest.raises(ValueError, match=message):
        run(shipped("tiny-qwen2_5_vl"), user(part))


def test_the_page_lists_these_rows():
    page = (DATA.parent / "docs" / "migrate.md").read_text().split("## Messages")[1]
    assert re.findall(r"^\| (.+?) \| `[{(]", page, re.M) == [*IMAGES, *VIDEOS, *CLIPS]
