"""What is tried: each kind makes one hostile case from a random generator. About half of the cases should be right."""

import copy
import io
import json
import math
import os
import shutil
import struct
import sys
import zlib
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path

import av
import numpy as np
import peft
import torch
from closeness import assert_logits_agree, logits_gain
from display_matrices import QUARTER_TURNS, shown_by_ffmpeg, with_matrix
from harness import Case
from PIL import Image
from safetensors.torch import load_file, save_file
from shipped import VARIANTS, is_read_here
from transformers import AutoModelForImageTextToText

import refvl
from refvl import positions
from refvl.graphs import generate_budgets, plan_batches
from refvl.language.loading import progress_bars
from refvl.paths import DATA
from refvl.pixels.crops import plan_crops
from refvl.pixels.media import load_image, load_video
from refvl.pixels.patch_configs import Glm4vPatchConfig
from refvl.pixels.patches import PatchConfig, plan_grid
from refvl.pixels.slices import SliceConfig, plan_slices
from refvl.processors import templates
from refvl.serving import adapters, parallel
from refvl.serving.export import encode_folder
from refvl.serving.options import GENERATE_OPTIONS
from refvl.study.recording import transformers_inputs
from refvl.tools.cli import main

CHECKPOINTS = sorted(
    name for name in {folder.name for folder in (DATA / "checkpoints").iterdir()} - VARIANTS if is_read_here(name)
)
ODD = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, math.nan, math.inf, "", "3", "caf\udce9",
    "x" * 600, b"\0", [], [[]], (), {}, {"a": 1}, [None], object, np.int64(2), np.float32(2.5), np.array([1, 2]),
    torch.tensor(4.7), torch.tensor([True]), torch.zeros(0), torch.zeros(2, 3), torch.zeros(1, device="meta"),
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def pick(rng: np.random.Generator, choices):
    """One of a sequence, as it is (numpy would turn it into an array)."""
    return choices[int(rng.integers(len(choices)))]


def mostly(rng: np.random.Generator, usual: tuple):
    """A usual value, one time in five something odd, so that several arguments can all be usual."""
    return pick(rng, ODD if rng.random() < 0.2 else usual)


@cache
def model(name: str, graphs: bool = False) -> refvl.VLM:
    return refvl.load(DATA / "checkpoints" / name, graphs=graphs, progress=False)


def damage(rng: np.random.Generator, data: bytes) -> bytes:
    """Truncated, with bits flipped, with bytes put in or left out, or as it was."""
    data = bytearray(data)
    match int(rng.integers(6)):
        case 0:
            return bytes(data[: int(rng.integers(len(data) + 1))])
        case 1 | 2:
            for _ in range(int(rng.integers(1, 12))):
                data[int(rng.integers(min(len(data), pick(rng, (64, 512, len(data))))))] ^= 1 << int(rng.integers(8))
        case 3:
            at = int(rng.integers(len(data)))
            data[at:at] = rng.bytes(int(rng.integers(1, 40)))
        case 4:
            at = int(rng.integers(len(data)))
            del data[at : at + int(rng.integers(1, 200))]
    return bytes(data)


def numbers(rng: np.random.Generator, count: int, high: int = 12) -> list:
    """Mostly small positive integers, now and then something odd."""
    return [pick(rng, ODD) if rng.random() < 0.06 else int(rng.integers(1, high)) for _ in range(count)]


def tensor(rng: np.random.Generator, shape) -> torch.Tensor:
    """Of a random dtype, with values that are not finite now and then."""
    dtype = pick(rng, DTYPES)
    x = torch.from_numpy(rng.standard_normal(shape))
    if rng.random() < 0.15 and x.numel():
        x.flatten()[int(rng.integers(x.numel()))] = pick(rng, (math.nan, math.inf, -math.inf, 1e30))
    x = x.to(dtype)
    if rng.random() < 0.04:
        x = x.to("meta")
    return x.to_sparse() if rng.random() < 0.03 and dtype == torch.float32 and not x.is_meta else x


# --- pictures and videos ----------------------------------------------------------------------------------------------


def some_image(rng: np.random.Generator) -> Image.Image:
    mode = pick(rng, ("RGB", "RGB", "L", "RGBA", "P", "1", "LA", "CMYK", "I", "F", "I;16", "YCbCr", "HSV", "LAB", "PA"))
    size = pick(rng, ((1, 1), (1, 2), (7, 5), (40, 30), (84, 84), (1, 400), (300, 2), (200, 150)))
    picture = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    try:
        return picture.convert(mode)
    except ValueError:  # a few modes have no direct conversion from RGB
        return picture.convert("L").convert(mode)


def image_file(rng: np.random.Generator, folder: Path) -> Case:
    """A file in one of Pillow's formats, damaged."""
    format, buffer = pick(rng, ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "TGA", "ICO")), io.BytesIO()
    image = some_image(rng)
    exif = b"Exif\0\0" + rng.bytes(int(rng.integers(1, 40))) if rng.random() < 0.3 else None
    options = {"exif": exif} if exif and format in ("PNG", "JPEG", "WEBP", "TIFF") else {}
    try:
        image.save(buffer, format, **options)
    except Exception:  # not every mode fits every format
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "PNG")
    suffix = pick(rng, (format.lower(), "png", "jpg", "pdf", "", "xyz"))
    path = folder / f"{pick(rng, ('a', 'ü', 'a b', 'x' * 200))}.{suffix}"
    path.write_bytes(damage(rng, buffer.getvalue()))

    def attempt():
        image = load_image(path if rng.random() < 0.5 else str(path))
        assert image.mode == "RGB" and image.width * image.height > 1

    return f"{format} of mode {image.mode}, {image.size}, as {path.name[-12:]}", attempt


def image_in_memory(rng: np.random.Generator, folder: Path) -> Case:
    """An array, a tensor, a PIL image, or something that is none."""
    shape = tuple(int(n) for n in rng.integers(0, 6, int(rng.integers(1, 5))))
    shape = pick(rng, (shape, (5, 7), (5, 7, 3), (3, 5, 7), (5, 7, 4), (1, 5, 7)))
    array = pick(rng, (rng.random, lambda s: rng.integers(0, 256, s, dtype=np.uint8), rng.standard_normal))(shape)
    dtypes = (np.uint8, np.uint16, np.int32, np.float16, np.float32, np.float64, np.bool_, np.complex64, object)
    with np.errstate(all="ignore"):
        array = array.astype(pick(rng, dtypes)) if rng.random() < 0.4 else array
    sources = (array, some_image(rng), tensor(rng, shape), pick(rng, ODD), folder, "https://example.com/a.png")
    source = pick(rng, sources)

    def attempt():
        image = load_image(source)
        assert image.mode == "RGB" and image.width * image.height > 1

    return (
        f"{type(source).__name__} {getattr(source, 'dtype', '')} {getattr(source, 'shape', repr(source)[:60])}",
        attempt,
    )


def picture_size(rng: np.random.Generator, folder: Path) -> Case:
    """Sizes from one pixel to far too many: every family plans them."""
    width, height = (pick(rng, (*ODD, *[int(2 ** rng.uniform(0, 17)) for _ in range(60)])) for _ in range(2))
    frames = pick(rng, (1, 1, 2, 5, 600, *ODD))

    def attempt():
        match int(rng.integers(4)):
            case 0:
                t, h, w = plan_grid(height, width, PatchConfig(), frames)
                assert h % 2 == w % 2 == 0 and t * h * w > 0
            case 1:
                t, h, w = plan_grid(height, width, Glm4vPatchConfig(), frames)
                assert h % 2 == w % 2 == 0 and t * h * w > 0
            case 2:
                assert all(min(size) >= 1 for size in plan_slices(width, height, SliceConfig()).tgt_sizes)
            case 3:
                rows, columns = plan_crops(width, height).layout
                assert (rows == 0) == (columns == 0)  # planning takes no memory; cutting refuses too many

    return f"{width!r} x {height!r} px, {frames!r} frames", attempt


@cache
def clips() -> list[tuple[str, bytes]]:
    """A few seconds in several containers."""
    made = [("mp4", (DATA / "clips" / "scene.mp4").read_bytes())]
    for suffix, codec in (("mkv", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx"), ("gif", "gif"), ("mov", "libx264")):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format={"mkv": "matroska"}.get(suffix, suffix)) as container:
            stream = container.add_stream(codec, rate=8)
            stream.width, stream.height = 64, 48
            stream.pix_fmt = "rgb8" if suffix == "gif" else "yuv420p"
            for i in range(12):
                picture = np.full((48, 64, 3), i * 20, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        made.append((suffix, buffer.getvalue()))
    return made


def sampling(rng: np.random.Generator) -> dict:
    names = ("fps", "num_frames", "min_frames", "max_frames", "source_fps")
    chosen = [name for name in names if rng.random() < 0.2]
    return {name: mostly(rng, (1, 2, 4, 6, 30)) for name in chosen}


def video_file(rng: np.random.Generator, folder: Path) -> Case:
    """A clip in one of six containers, damaged, sampled in some way."""
    (suffix, data), options = pick(rng, clips()), sampling(rng)
    path = folder / f"clip.{suffix}"
    path.write_bytes(damage(rng, data))

    def attempt():
        video = load_video(path, **options)
        assert video.frames.ndim == 4 and len(video.frames) == len(video.indices) > 0
        assert all(a <= b for a, b in zip(video.timestamps, video.timestamps[1:]))  # noqa: B905

    return f"{suffix}, {options}", attempt


def video_in_memory(rng: np.random.Generator, folder: Path) -> Case:
    """Frames as arrays, tensors or lists, sampled in some way."""
    shape = tuple(int(n) for n in rng.integers(0, 5, 4))
    shape = pick(rng, (shape, (0, 6, 8, 3), (3, 6, 8)) if rng.random() < 0.3 else ((4, 6, 8, 3), (4, 3, 6, 8)))
    frames = rng.integers(0, 256, shape, dtype=np.uint8)
    sources = (frames, list(frames), tensor(rng, shape), [some_image(rng) for _ in range(3)], pick(rng, ODD))
    source, options = pick(rng, sources), sampling(rng)

    def attempt():
        video = load_video(source, **options)
        assert video.frames.dtype == np.uint8 and video.frames.shape[-1] == 3 and len(video.frames) > 0

    return f"{type(source).__name__} {getattr(source, 'shape', repr(source)[:60])}, {options}", attempt


# --- sizes, positions, budgets ----------------------------------------------------------------------------------------


def grids_of(rng: np.random.Generator):
    """(t, h, w) rows: right, odd, or no rows at all."""
    if rng.random() < 0.1:
        return pick(rng, ODD)
    rows = [[int(rng.integers(1, 4)), 2 * int(rng.integers(1, 6)), 2 * int(rng.integers(1, 6))] for _ in range(2)]
    if rng.random() < 0.5:
        rows[0][int(rng.integers(3))] = pick(rng, ODD)
    if rng.random() < 0.1:
        rows[0] = rows[0][:2]
    try:
        return torch.tensor(rows) if rng.random() < 0.3 else [tuple(row) for row in rows]
    except Exception:
        return rows


def grids(rng: np.random.Generator, folder: Path) -> Case:
    """Grids for the functions of positions and for the encoders' plans."""
    rows = grids_of(rng)
    m = 2 if rng.random() < 0.8 else pick(rng, ODD)
    theta = 1e4 if rng.random() < 0.8 else pick(rng, ODD)
    plan = [model(name).encoder.plan for name in ("tiny-qwen2_5_vl", "tiny-glm4v")]
    table = tensor(rng, (16, 8))
    calls = (
        lambda: positions.get_window_index(rows, spatial_merge_size=m),
        lambda: positions.vision_rotary_cos_sin(rows, head_dim=16, spatial_merge_size=m, theta=theta),
        lambda: positions.interpolate_position_table(table, rows, spatial_merge_size=m),
        lambda: plan[0](rows),
        lambda: plan[1](rows),
        lambda: model("tiny-minicpmv-4_5").encoder.plan(rows),
        lambda: model("tiny-step3").encoder.plan(rows),
    )
    return f"{rows!r}, m {m!r}, theta {theta!r}", pick(rng, calls)


def media_positions(rng: np.random.Generator, folder: Path) -> Case:
    """Spans, grids, factors and rates for M-RoPE and EVS."""
    thw, q = tuple(numbers(rng, 3, 5)), mostly(rng, (0.0, 0.3, 0.5, 0.99))
    offset, t, h, w = numbers(rng, 4, 6)
    factor = mostly(rng, (1.0, 2.0, 0.5, 1e300))
    tokens = int(np.prod([n if type(n) is int and 0 < n < 10 else 1 for n in thw]))
    embeds = tensor(rng, (tokens, 6))

    def retention():
        mask = positions.compute_retention_mask(embeds, thw, 1, q)
        assert int(mask.sum()) == positions.compute_retained_tokens_count(thw[1] * thw[2], thw[0], q)
        assert bool(mask[: thw[1] * thw[2]].all())

    def mrope():
        span = positions.MediaSpan(offset, t, h, w, factor)
        rows, delta = positions.get_mrope_input_positions(mostly(rng, (100, 200)), [span])
        assert rows.dtype == torch.int64 and rows.min() >= 0 and abs(delta) < 2**40

    def media():
        rows = positions.compute_mrope_for_media(thw, 1, mostly(rng, (1.0, 2.0)), factor)
        assert rows.min() >= 0

    attempt = pick(rng, (retention, mrope, media))
    return f"{attempt.__name__} thw {thw!r}, q {q!r}, span {(offset, t, h, w, factor)!r}, {embeds.dtype}", attempt


def budgets(rng: np.random.Generator, folder: Path) -> Case:
    """Packing, balancing and frame sampling."""
    tokens, of_graphs = numbers(rng, int(rng.integers(0, 9)), 70), numbers(rng, int(rng.integers(1, 4)), 90)
    limit, policy = mostly(rng, (1, 2, 8)), mostly(rng, ("greedy", "optimal", "optimal"))
    fps, total = mostly(rng, (1.0, 2.0, 24.0)), mostly(rng, (1, 5, 60, 4000))

    def packing():
        batches = plan_batches(tokens, of_graphs, limit, policy=policy)
        assert sorted(i for batch in batches for i in batch.indices) == list(range(len(tokens)))

    def doubling():
        made = generate_budgets(mostly(rng, (8, 64)), mostly(rng, (64, 600)))
        assert made == sorted(set(made))

    def balance():
        order, counts, _ = parallel.get_load_balance_assignment(tokens, limit)
        assert sorted(order) == list(range(len(tokens))) and sum(counts) == len(tokens)

    def frames():
        variant = mostly(rng, ("glm4v", "glm46v", "glmga"))
        sample = positions.sample_video_frames(variant, fps=fps, total_num_frames=total)
        assert len(sample.indices) == 2 * len(sample.timestamps) and all(0 <= i < total for i in sample.indices)

    attempt = pick(rng, (packing, doubling, balance, frames))
    what = (
        f"{attempt.__name__} tokens {tokens!r}, budgets {of_graphs!r}, limit {limit!r}, {policy!r}, {fps!r}, {total!r}"
    )
    return what, attempt


# --- models -----------------------------------------------------------------------------------------------------------


def rows(rng: np.random.Generator, folder: Path) -> Case:
    """Patch rows of some dtype and shape for an encoder, alone, in graphs, or shared by ranks."""
    name, graphs = pick(rng, CHECKPOINTS), rng.random() < 0.3
    vlm = model(name, graphs)
    layout = vlm.processor.patchify([Image.new("RGB", pick(rng, ((84, 84), (112, 84), (84, 168))))])[0].layout
    count, _, _ = vlm.encoder.item_size(layout)
    width = row_width(name)
    shapes = [(count, width)] * 4 + [(count + 1, width), (count, 7), (count,), (0, width)]
    shape = pick(rng, shapes)
    x = tensor(rng, shape)
    layouts = [layout] if rng.random() < 0.8 else grids_of(rng)
    run = pick(rng, (vlm.encoder, vlm.graphs.execute if graphs else partial(parallel_run, vlm.encoder)))

    def attempt():
        with torch.no_grad():
            embeds = run(x, layouts)
        embeds = embeds if isinstance(embeds, torch.Tensor) else torch.cat(list(embeds))
        assert len(embeds) == vlm.encoder.item_size(layout)[1]

    return f"{name}, graphs {graphs}, {x.dtype} {tuple(x.shape)} {x.layout} on {x.device}, {layouts!r}", attempt


@cache
def row_width(name: str) -> int:
    """Values in a patch row of a shipped model."""
    vlm = model(name)
    return vlm.processor.patchify([Image.new("RGB", (84, 84))])[0].pixel_values.shape[1]


def parallel_run(encoder, x, layouts):
    return parallel.run_dp_sharded_mrope_vision_model(encoder, x, layouts)


SPECIALS = (
    "</image>", "<image>", "<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|video_pad|>", "<|begin_of_video|>",
    "<|vision_end|>", "<unk>", "<im_patch>", "<patch_newline>", "<|user|>", "</slice>", "<image_id>",
)  # fmt: skip


def some_text(rng: np.random.Generator) -> str:
    words = ("What", "color", "is", "the", "circle", "?", "\n", "ü", "漢", "\u200b", "{{ x }}", "{% if %}", *SPECIALS)
    return " ".join(str(pick(rng, words)) for _ in range(int(rng.integers(0, 9))))


def some_content(rng: np.random.Generator, depth: int = 0):
    if rng.random() < 0.08:
        return pick(rng, ODD)
    if rng.random() < 0.4:
        return some_text(rng)
    picture = DATA / "pictures" / "scene.png"
    parts = [
        pick(rng, (
            {"type": "text", "text": some_text(rng)}, {"type": "text", "text": some_text(rng)},
            {"type": "image", "image": str(picture)}, {"type": "image", "path": picture},
            {"type": "image", "image": pick(rng, ODD)}, {"type": "text", "text": pick(rng, ODD)}, {"type": "audio"},
            {"type": "video", "video": str(DATA / "clips" / "scene.mp4")}, {"type": "image"}, pick(rng, ODD),
        ))
        for _ in range(int(rng.integers(1, 4)))
    ]  # fmt: skip
    return [parts] if rng.random() < 0.03 else parts


def messages(rng: np.random.Generator, folder: Path) -> Case:
    """A conversation with marks of the models in its texts, media in odd places, and parts that are none."""
    name, graphs = pick(rng, CHECKPOINTS), rng.random() < 0.2
    roles = ("user", "user", "user", "system", "assistant", pick(rng, ODD))
    turns = [{"role": pick(rng, roles), "content": some_content(rng)} for _ in range(int(rng.integers(1, 4)))]
    prompt = pick(rng, (turns, turns, turns, some_text(rng), pick(rng, ODD)))
    media = {"images": pick(rng, ([DATA / "pictures" / "scene.png"], pick(rng, ODD)))} if rng.random() < 0.3 else {}
    rate = pick(rng, (0.0, 0.0, 0.5, *ODD)) if rng.random() < 0.3 else 0.0

    def attempt():
        trace = model(name, graphs).trace(prompt, max_new_tokens=2, pruning_rate=rate, **media)
        assert isinstance(trace.text, str) and len(trace.media) == len(trace.embeds) == len(trace.patches)
        assert trace.positions.shape == (3, len(trace.input_ids))

    return f"{name}: {prompt!r} {media!r} {rate!r}", attempt


def generate_tensors(rng: np.random.Generator, folder: Path) -> Case:
    """Ids, masks, grids, rows and embeddings for `VLM.generate`, one of them off."""
    name = pick(rng, ("tiny-qwen2_5_vl", "tiny-glm4v", "tiny-step3"))
    vlm = model(name)
    picture = "page.png" if name == "tiny-step3" else "scene.png"
    trace = vlm.trace("What?", images=[DATA / "pictures" / picture], max_new_tokens=1)
    ids = trace.full_ids[None].clone()
    arguments = {"input_ids": ids, "pixel_values": trace.patches[0].pixel_values, "image_grid_thw": trace.layouts}
    if rng.random() < 0.3:
        del arguments["pixel_values"]
        arguments["image_embeds"] = trace.embeds[0].clone()
    match int(rng.integers(8)):
        case 0:
            arguments["input_ids"][0, int(rng.integers(ids.shape[1]))] = pick(rng, (-1, 2**40, 10**6, 0))
        case 1:
            mask = torch.ones_like(ids, dtype=pick(rng, (torch.int64, torch.float32, torch.bool)))
            mask[0, int(rng.integers(ids.shape[1]))] = pick(rng, (0, 2, -1))
            arguments["attention_mask"] = mask
        case 2:
            arguments[pick(rng, sorted(arguments))] = pick(rng, ODD)
        case 3:
            arguments[pick(rng, ("second_per_grid_ts", "max_new_tokens", "pruning_rate", "num_beams"))] = pick(rng, ODD)
        case 4:
            key = pick(rng, [k for k in ("pixel_values", "image_embeds") if k in arguments])
            arguments[key] = tensor(rng, tuple(arguments[key].shape))
        case 5:
            arguments["input_ids"] = pick(rng, (ids[:, :0], ids[:, :3], ids.to(torch.uint8), ids.float(), ids[0]))
        case 6:
            arguments |= {pick(rng, ("image", "graph", "temprature", "mask")): pick(rng, ODD)}

    def attempt():
        with torch.no_grad():
            out = vlm.generate(**({"max_new_tokens": 2} | arguments))
        assert out.shape[0] == 1 and out.shape[1] > arguments["input_ids"].shape[1]

    return f"{name}: { {k: getattr(v, 'shape', v) for k, v in arguments.items()} }", attempt


def mutate(rng: np.random.Generator, value, depth: int = 0):
    """JSON with something replaced, removed or of another kind."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = pick(rng, sorted(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutate(rng, value[key], depth + 1)}
    return pick(rng, (None, -1, 0, 3, 10**9, 0.5, "x", "../x", [], {}, [1], {"a": 1}, True))


def checkpoint_folder(rng: np.random.Generator, folder: Path) -> Case:
    """A shipped checkpoint with one of its files changed, missing or cut."""
    source = DATA / "checkpoints" / pick(rng, CHECKPOINTS)
    for file in source.iterdir():
        (folder / file.name).symlink_to(file) if file.suffix == ".safetensors" else shutil.copy(file, folder)
    name = pick(rng, sorted(file.name for file in source.iterdir() if not file.name.startswith("training")))
    path = folder / name
    match int(rng.integers(4)):
        case 0:
            path.unlink()
            how = "missing"
        case 1:
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(damage(rng, data))
            how = "damaged"
        case _:
            how = "changed"
            if path.suffix == ".json" and not name.startswith("tokenizer.json"):
                path.write_text(json.dumps(mutate(rng, json.loads(path.read_text()))))
            else:
                names = ("../a.safetensors", "model.safetensors", "/a", 3, None)
                index = {"weight_map": {"visual.x": pick(rng, names)}}
                (folder / "model.safetensors.index.json").write_text(json.dumps(mutate(rng, index)))
                how = "beside an index"

    def attempt():
        vlm = refvl.load(folder, progress=False)
        answer = vlm.chat("What color is the circle?", images=[DATA / "pictures" / "scene.png"], max_new_tokens=1)
        assert isinstance(answer, str)

    return f"{source.name}/{name} {how}", attempt


def arguments(rng: np.random.Generator, folder: Path) -> Case:
    """Odd arguments to load, chat and chat_batch."""
    vlm, picture = model("tiny-qwen2_5_vl"), DATA / "pictures" / "scene.png"
    names = ("device", "dtype", "attention", "weights", "graphs", "graph", "torch_dtype", "revision", "foo")
    usual = {"device": "cpu", "dtype": "float32", "attention": "sdpa", "graphs": False, "revision": "main"}
    options = {name: mostly(rng, (usual.get(name, True),)) for name in names if rng.random() < 0.15}
    source = mostly(rng, (DATA / "checkpoints" / "tiny-qwen2_5_vl",))
    keywords = {
        "max_new_tokens": (1, 2), "pruning_rate": (0.0, 0.5), "stream": (True, False), "num_beams": (1, 2),
        "image": (2,), "do_sample": (True, False), "temperature": (0.5, 2), "videos": ([], None),
    }  # fmt: skip
    said = {name: mostly(rng, keywords[name]) for name in keywords if rng.random() < 0.15}
    request = {"prompt": "What?", "images": [picture]} | ({pick(rng, ("image", "x")): 1} if rng.random() < 0.3 else {})
    calls = {
        "load": lambda: refvl.load(source, **({"progress": False} | options)),
        "chat": lambda: vlm.chat("What?", **({"images": [picture], "max_new_tokens": 2} | said)),
        "chat_batch": lambda: vlm.chat_batch(mostly(rng, ([request], [request, request])), max_new_tokens=2),
        "encode": lambda: vlm.encode(images=mostly(rng, ([picture],))),
    }
    name = pick(rng, sorted(calls))

    def attempt():
        result = calls[name]()
        if not isinstance(result, (str, list, refvl.VLM)):
            "".join(result)  # a stream

    return f"{name}: {source!r} {options!r} {said!r}", attempt


def run_command(words: list[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `refvl WORDS` in this process."""
    before, sys.argv = sys.argv, ["refvl", *words]
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    try:
        with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = before
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in streams)
    return code, out, err


def command_line(rng: np.random.Generator, folder: Path) -> Case:
    """Words on the command line: whatever happens is told in one line, and never in a traceback."""
    words = [
        pick(rng, ("chat", "trace", "info", "encode", "--help", "--version", "nothing")),
        pick(rng, (str(DATA / "checkpoints" / "tiny-qwen2_5_vl"),) * 4 + ("nowhere", "", str(folder), "a/b/c")),
        pick(rng, ("What?", "", "caf\udce9", str(DATA / "pictures"), str(folder), "x" * 300)),
    ]
    extra = (
        ["--image", str(DATA / "pictures" / "scene.png")], ["--image", "https://example.com/x.png"],
        ["--image", "/dev/zero"], ["--image", str(folder / "pipe.png")],
        ["--video", str(DATA / "clips" / "scene.mp4")], ["--video", str(DATA / "pictures" / "scene.png")],
        ["--max-new-tokens", "2"], ["--max-new-tokens", "x"], ["--pruning-rate", "0.5"], ["--pruning-rate", "7"],
        ["--dtype", "float33"], ["--dtype", "bfloat16"], ["--device", "cuda"], ["--attention", "none"], ["--nope"],
        ["--max-pixels", "1" + "0" * int(rng.integers(1, 40))], ["--min-pixels", "9" * 12], ["--num-frames", "9" * 30],
        ["--prefill-chunk", "9" * 30], ["--fps", "1e300"], ["--shard-size", "9" * 30],
        ["--out", str(folder / "out")], ["--out", "/proc/xyz"], ["--out", __file__],
    )  # fmt: skip
    for _ in range(int(rng.integers(0, 4))):
        words += pick(rng, extra)
    os.mkfifo(folder / "pipe.png")

    def attempt():
        code, _, err = run_command(words)
        assert code in (0, 1, 2), f"exit code {code}"
        assert not code or err.strip(), "failed silently"
        assert "Traceback" not in err, err[-500:]
        return "clear" if code else "right"

    return " ".join(words), attempt


# --- areas with an oracle that renders independently ------------------------------------------------------------------


def display_matrix(rng: np.random.Generator, folder: Path) -> Case:
    """A grey video that is shown rotated, mirrored or both; oracle: FFmpeg's own filters. Oblique ones are refused."""
    frames = rng.integers(0, 256, (int(rng.integers(2, 5)), 16, 16), dtype=np.uint8).repeat(2, 1).repeat(3, 2)
    path, buffer = folder / "clip.mp4", io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:], "yuv420p"
        for frame in frames:
            picture = np.repeat(frame[..., None], 3, axis=-1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    matrix = np.array(pick(rng, QUARTER_TURNS)) * pick(rng, (1, 1, 0.5, 3))
    if rng.random() < 0.3:
        matrix = matrix + rng.uniform(-1, 1, 4).round(2) * pick(rng, (0.001, 1))
    path.write_bytes(with_matrix(buffer.getvalue(), *matrix))

    def attempt():
        shown = load_video(path, num_frames=len(frames) // 2 * 2).frames
        assert np.array_equal(shown, shown_by_ffmpeg(path)[: len(shown)])

    return f"{len(frames)} frames shown by {matrix}", attempt


def transparent_png(rng: np.random.Generator, folder: Path) -> Case:
    """A PNG written chunk by chunk, in which a level or colour is transparent; oracle: its samples, blended by hand."""
    depth, channels = pick(rng, ((8, 1), (16, 1), (16, 1), (8, 3)))
    top, size = 2**depth - 1, (int(rng.integers(1, 6)), int(rng.integers(2, 9)))
    samples = pick(rng, (rng.integers(0, top + 1, (*size, channels)), rng.integers(0, 4, (*size, channels))))
    hidden = samples[0, int(rng.integers(size[1]))] if rng.random() < 0.8 else rng.integers(0, top + 1, channels)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", size[1], size[0], depth, 0 if channels == 1 else 2, 0, 0, 0),
        b"tRNS": np.asarray(hidden, ">u2").tobytes(),
        b"IDAT": zlib.compress(b"".join(b"\0" + row.astype(f">u{depth // 8}").tobytes() for row in samples)),
        b"IEND": b"",
    }
    packed = (struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks.items())
    path = folder / "a.png"
    data, cut = b"\x89PNG\r\n\x1a\n" + b"".join(packed), rng.random() < 0.4
    path.write_bytes(damage(rng, data) if cut else data)

    def attempt():
        shown = np.asarray(load_image(path))
        blended = np.where((samples == hidden).all(-1, keepdims=True), top, samples) / top * 255
        assert cut or np.array_equal(shown, np.broadcast_to(np.round(blended), shown.shape))

    return f"{depth} bits, {channels} channels, {size}, {hidden} is transparent, damaged {cut}", attempt


def statement(rng: np.random.Generator, depth: int = 0) -> str:
    """A piece of a chat template: usual, and one time in ten greedy or failing."""
    values = (
        "x", "y", "n.v", "messages", "messages[0].content", "'ab'", "1", "eos_token", "x ~ y", "[x, y]", "x|tojson",
        "x|string|upper", "x|length", "x|join(x)", "namespace(v=x)", "dict(a=x)", "x if y else n", "cycler(1)",
        *(("m.content", "m.role", "loop.index", "m|string ~ x") if depth == 1 else ()),
    )  # fmt: skip
    odd_values = (
        "m.content", "loop.index", "x + x", "x + y", "x * 10**10", "x * 40", "x|tojson|tojson", "x.split('a')",
        "x.split('b')[-1]", "x.replace('a', 'bb')", "x.ljust(10**9)", "range(90000)", "x|length - 1",
        "x|center(10**9)", "1 / 0", "2.0 ** 9999", "x.y.z", "''.__class__", "raise_exception('no')",
        "'%999999999d' % 1", "lipsum(n=9999)", "x[::-1]",
    )  # fmt: skip
    odd, inner = rng.random() < 0.1, "" if depth > 2 else "".join(statement(rng, depth + 1) for _ in range(2))
    value, walked = pick(rng, odd_values if odd else values), ("m.content", "range(99999)", "x")
    forms = (
        f"{{{{ {value} }}}}", f"{{{{ {value} }}}}", f"{{% set x = {value} %}}", f"{{% set y = {value} %}}" + inner,
        f"{{% set n = namespace(v={value}) %}}" + inner, f"{{% set n.v = {value} %}}",
        f"{{% for m in {pick(rng, walked) if odd else 'messages'} %}}{inner}{{% endfor %}}",
        f"{{% if {value} %}}{inner}{{% endif %}}", f"{{% macro f(x) %}}{inner}{{% endmacro %}}{{{{ f({value}) }}}}",
        f"{{% set x %}}{inner}{{% endset %}}",
    )  # fmt: skip
    return pick(rng, (*forms, "{% set x = x + x %}" * 40, "{% for %}", "<|im_start|>") if odd else forms)


def chat_template(rng: np.random.Generator, folder: Path) -> Case:
    """A template that a folder could come with, and a conversation; oracle: transformers' own rendering."""
    source = "{% set x = 'ab' %}{% set y = messages[0].role %}{% set n = namespace(v=1) %}"
    source += "".join(statement(rng) for _ in range(int(rng.integers(1, 4))))
    said = [
        {"role": pick(rng, ("user", "assistant")), "content": some_text(rng)} for _ in range(int(rng.integers(1, 4)))
    ]
    processor = copy.copy(model("tiny-qwen3_vl").processor)
    processor.tokenizer = tokenizer = copy.copy(processor.tokenizer)
    tokenizer.chat_template = source
    render = partial(tokenizer.apply_chat_template, said, tokenize=False, add_generation_prompt=True)
    if not (plain := templates.is_plain(source)):
        tokenizer.apply_chat_template = partial(templates.render_in_child, tokenizer.apply_chat_template)

    def attempt():
        text = processor.apply_template(said)
        assert len(text) <= templates.CHARACTERS
        with suppress(MemoryError):  # of the oracle, which knows no budget but the harness's
            assert text == render() or "0x" in text or "lipsum" in source

    return f"plain {plain}: {source}", attempt


def terminal(rng: np.random.Generator, folder: Path) -> Case:
    """Names with markup, emoji codes and what commands a terminal; oracle: Python's `unicode_escape`."""
    pieces = (
        "[red]",
        "[/b]",
        ":smile:",
        "\x1b[2J",
        "\x9b1m",
        "\u202e",
        "\r",
        "\b",
        "a",
        "ü",
        "漢",
        "\udce9",
        "[",
        "\\",
    )
    name = "".join(pick(rng, pieces) for _ in range(int(rng.integers(1, 6)))).replace("/", "")
    place = folder / name
    place.symlink_to(DATA / "checkpoints" / pick(rng, CHECKPOINTS))
    text, picture = f"q {name}", str(folder / f"{name}.png")
    words = pick(rng, (
        ["info", str(place)], ["info", str(place)], ["info", str(place), "--image", picture], ["chat", picture, "Hi"],
        [name], ["compare", str(place), picture], ["chat", str(place), text, "--image", picture], ["info", f"--{name}"],
        ["encode", str(place), picture, "--out", str(folder / "out")], ["trace", str(place), text, "--source", picture],
    ))  # fmt: skip

    def attempt():
        code, out, err = run_command(words)
        assert code in (0, 1, 2), f"exit code {code}"
        assert "Traceback" not in err, err[-500:]
        commands = {c for c in out + err if not c.isprintable() and c not in "\n\t"}
        assert not commands, f"{commands!r} reached the terminal"
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
        squeezed = "".join((out + err).split())
        assert code or shown in squeezed, f"{shown} is not in {squeezed[:200]}"
        return "clear" if code else "right"

    return repr(words), attempt


def out_folder(rng: np.random.Generator, folder: Path) -> Case:
    """`encode` into a folder with files of the user's; oracle: their bytes before, and `VLM.encode` of the pictures."""
    source, out, name = folder / "in", folder / "out", pick(rng, CHECKPOINTS)
    source.mkdir()
    count = int(rng.integers(0, 4))
    for i in range(count):
        shutil.copy(DATA / "pictures" / pick(rng, ("scene.png", "page.png")), source / f"{i}.png")
    if rng.random() < 0.3:
        (source / "x.png").write_bytes(rng.bytes(40))
    out.mkdir()
    names = (
        "thesis.txt",
        "images.csv",
        "a.safetensors.bak",
        "sub/thesis.txt",
        "unfinished.txt",
        "encode.log",
        ".hidden",
    )
    for mine in {pick(rng, names) for _ in range(int(rng.integers(0, 4)))}:
        (out / mine).parent.mkdir(exist_ok=True)
        (out / mine).write_bytes(rng.bytes(20))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    size = pick(rng, (1, 2, 64, 0, -1, 10**30))

    def attempt():
        try:
            manifest = encode_folder(model(name), source, out, shard_size=size, progress=False)
            assert len(manifest["images"]) == count
            for entry in manifest["images"].values():
                assert (out / entry["shard"]).is_file() if "shard" in entry else True
        finally:
            assert all(path.read_bytes() == data for path, data in before.items()), "a user's file has changed"

    return f"{name}, {count} pictures, shards of {size}, beside {sorted(path.name for path in before)}", attempt


USUAL_OPTIONS = {  # of generate, with values that transformers takes
    "do_sample": (True, True, False), "temperature": (0.3, 1.0, 4.0), "top_k": (1, 5, 50), "top_p": (0.3, 0.9, 1.0),
    "min_p": (0.1, 0.9), "typical_p": (0.2, 0.9), "epsilon_cutoff": (0.01,), "eta_cutoff": (0.01,),
    "repetition_penalty": (0.7, 1.4), "no_repeat_ngram_size": (1, 2), "bad_words_ids": ([[5]], [[5, 6], [7]]),
    "sequence_bias": ([[[5], 9.0]],), "suppress_tokens": ([5, 6, 7],), "begin_suppress_tokens": ([5],),
    "forced_eos_token_id": (7,), "min_new_tokens": (2, 3), "length_penalty": (0.5, -1.0), "num_beams": (2, 3),
    "early_stopping": (True, False, "never"), "num_return_sequences": (1, 2), "renormalize_logits": (True,),
    "exponential_decay_length_penalty": ((1, 1.5),), "eos_token_id": (7, [7, 8]), "pad_token_id": (0, 3),
    "remove_invalid_values": (True,), "encoder_repetition_penalty": (1.0, 1.4), "guidance_scale": (1.5,),
    "min_length": (20, 40), "top_h": (0.3, 0.9),
    "cache_implementation": ("dynamic", "static"), "prompt_lookup_num_tokens": (2,), "stop_strings": (["e"],),
    "use_cache": (True,), "low_memory": (True,), "token_healing": (False,),
}  # fmt: skip

FAIL_THERE = {"guidance_scale", "prompt_lookup_num_tokens"}  # in transformers: without media, or if one is drafted


@cache
def asked(name: str) -> tuple:
    """transformers' own model of a shipped checkpoint, a question as both take it, and its gain."""
    trace = model(name).trace("What is it?", images=[DATA / "pictures" / "scene.png"], max_new_tokens=1)
    with progress_bars(False):
        theirs = AutoModelForImageTextToText.from_pretrained(DATA / "checkpoints" / name, dtype=torch.float32).eval()
    return theirs, trace, transformers_inputs(model(name), trace), logits_gain(model(name), trace)


def generate_options(rng: np.random.Generator, folder: Path) -> Case:
    """Up to three options of `generate`, few of them odd; oracle: transformers' own model with the same seed."""
    vlm = model(checkpoint := pick(rng, [name for name in CHECKPOINTS if name.startswith(("tiny-glm", "tiny-qwen"))]))
    theirs, trace, inputs, gain = asked(checkpoint)
    options = {"max_new_tokens": int(rng.integers(1, 6))}
    for _ in range(int(rng.integers(1, 4))):
        name = pick(rng, sorted(USUAL_OPTIONS) if rng.random() < 0.8 else sorted(GENERATE_OPTIONS))
        options[name] = pick(rng, USUAL_OPTIONS[name] if name in USUAL_OPTIONS and rng.random() < 0.8 else ODD)
    shown = {"return_dict_in_generate": True, "output_scores": True}
    by_them = {
        name: value for name, value in options.items() if name != "use_cache" or value is True
    }  # others lose media

    def attempt():
        torch.manual_seed(0)
        ours = vlm.generate(**inputs, **(shown | options))
        ids = getattr(ours, "sequences", ours)
        new = ids.shape[1] - len(trace.full_ids)
        assert torch.equal(ids[0, :-new], trace.full_ids) and 0 < new <= options["max_new_tokens"]
        torch.manual_seed(0)
        usual = {"do_sample": False, "tokenizer": vlm.processor.tokenizer} | shown
        with torch.no_grad(), suppress(*(ValueError, RuntimeError) if FAIL_THERE & options.keys() else ()):
            output = theirs.generate(**inputs, **(usual | by_them))
            expected = getattr(output, "sequences", output)
            assert torch.equal(ids, expected), f"{ids.tolist()} beside {expected.tolist()}"
            both = [getattr(made, "scores", None) or () for made in (ours, output)]
            for scores, wanted in zip(*both, strict=True):
                kept = wanted.isfinite()
                assert torch.equal(kept, scores.isfinite()), "other tokens are left out"
                assert_logits_agree(vlm, trace, scores[kept], wanted[kept], gain)

    return f"{checkpoint}: {options!r}", attempt


def layer_of(vlm: refvl.VLM, name: str) -> torch.nn.Linear:
    """The layer whose own name ends a name in an adapter."""
    name = name.replace("merger.mlp.0.", "merger.")  # MiniCPM-V 4.6 and 4.7 store a list of one
    parts, roots = name.split("."), (vlm.encoder, vlm.language_model, vlm.language_model.model)
    paths = [(root, ".".join(parts[i:])) for i in range(len(parts)) for root in roots]
    return next(root.get_submodule(path) for root, path in paths if path in dict(root.named_modules()))


def adapter(rng: np.random.Generator, folder: Path) -> Case:
    """A folder with a LoRA adapter, often damaged; oracle: B A, scaled, added to the weights by hand."""
    plain, rank, file = model(pick(rng, CHECKPOINTS)), int(rng.integers(1, 5)), folder / adapters.WEIGHTS
    weights, names = {}, sorted({pick(rng, adapters.layers(plain)) for _ in range(int(rng.integers(1, 6)))})
    for name in names:
        layer = layer_of(plain, name)
        for half, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
            weights[f"base_model.model.{name}.lora_{half}.weight"] = torch.from_numpy(rng.normal(0, 0.1, shape)).float()
    alphas = {pick(rng, names): 2} if rng.random() < 0.3 else {}
    config = peft.LoraConfig(r=rank, lora_alpha=pick(rng, (1, 4, 16)), use_rslora=rng.random() < 0.3)
    values = config.to_dict() | {"target_modules": names, "alpha_pattern": alphas}
    key, how = pick(rng, sorted(weights)), int(rng.integers(6))
    match how:
        case 0:
            values = mutate(rng, values)
        case 1:
            weights[key] = tensor(rng, pick(rng, (weights[key].shape, weights[key].shape, (rank, 3))))
        case 2:
            weights[pick(rng, (key.replace("model", "x", 1), key[:-7], key.replace("lora_", "lora_C")))] = weights.pop(
                key
            )
    save_file({key: x.to_dense() for key, x in weights.items() if not x.is_meta}, file)
    (folder / adapters.CONFIG).write_text(json.dumps(values, default=list))
    if how == 3:
        file.write_bytes(damage(rng, file.read_bytes()))

    def attempt():
        attached, merged = copy.deepcopy(plain), copy.deepcopy(plain)
        adapters.attach(attached, folder)
        stored = load_file(file)
        for name in names:
            a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
            alpha = values.get("alpha_pattern", {}).get(name, values.get("lora_alpha", 8))
            scale = alpha / (len(a) ** 0.5 if values.get("use_rslora") else len(a))
            with torch.no_grad():
                layer_of(merged, name).weight += scale * b.float() @ a.float()
        question = {"prompt": "What is it?", "images": [DATA / "pictures" / "scene.png"], "max_new_tokens": 1}
        ours, expected = attached.trace(**question), merged.trace(**question)
        if expected.first_logits.isfinite().all():
            assert_logits_agree(merged, expected, ours.first_logits, expected.first_logits)

    return f"{plain.family.name}, {names}, {key}, {how}: {values!r}", attempt


KINDS = (
    image_file, image_in_memory, picture_size, video_file, video_in_memory, grids, media_positions, budgets, rows,
    messages, generate_tensors, checkpoint_folder, arguments, command_line, display_matrix, transparent_png,
    chat_template, terminal, out_folder, generate_options, adapter,
)  # fmt: skip
