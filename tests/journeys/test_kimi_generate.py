"""Kimi K2.5 from folder to text. Oracles: transformers' tower, text model, prompts and pixels, on the same folder.

transformers 5.23 fails on videos, whose chunks it counts as frames where it splits them and where it averages them: its
tower and projector run chunk by chunk here, and its whole model is given their rows.
"""

import ast
import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from closeness import assert_agree
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from random_models import NEEDS_5_23, random_folder, random_model
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

import refvl
from refvl.merge import FramewiseMedia
from refvl.pixels.padded import PaddedPatchConfig, padded_levels
from refvl.processors.kimi_k25 import clock
from refvl.study.arithmetic import prefill_operations
from refvl.study.costs import kv_cache_bytes_per_token, set_pixel_limits

pytestmark = NEEDS_5_23
RANDOM = np.random.default_rng(0)
SMALL = Image.fromarray(RANDOM.integers(0, 256, (60, 90, 3), dtype=np.uint8))  # padded
LARGE = Image.fromarray(RANDOM.integers(0, 256, (150, 210, 3), dtype=np.uint8))  # scaled down, then padded
CLIPS = {n: RANDOM.integers(0, 256, (n, 60, 90, 3), dtype=np.uint8) for n in (1, 4, 6, 9)}
REQUESTS = {
    "text": ([], []),
    "an image": ([SMALL], []),
    "images": ([LARGE, SMALL], []),
    "one chunk": ([], [CLIPS[4]]),
    "a chunk of two": ([], [CLIPS[6]]),
    "a chunk of one": ([], [CLIPS[9]]),
    "an image and clips": ([LARGE], [CLIPS[1], CLIPS[6]]),
}
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForImageTextToText.from_pretrained(random_folder("Kimi K2.5"), dtype=torch.float32).eval()


def rows_of(theirs, patches) -> torch.Tensor:
    """What transformers' tower and projector make of a medium, chunk by chunk, patches in reading order."""
    t, h, w = patches.layout
    pixels = patches.pixel_values.view(t, h // 2, w // 2, 2, 2, -1).transpose(2, 3).reshape(-1, 3, 14, 14)
    chunks = [(part, torch.tensor([[len(part) // (h * w), h, w]])) for part in pixels.split(4 * h * w)]
    pooled = [theirs.model.vision_tower(part, grid).pooler_output for part, grid in chunks]
    return theirs.model.mm_projector(torch.cat(pooled)).squeeze(1)


@pytest.mark.thorough
@pytest.mark.parametrize(("images", "videos"), REQUESTS.values(), ids=REQUESTS)
@torch.inference_mode()
def test_rows_and_ids_are_transformers(theirs, images, videos):
    vlm = random_model("Kimi K2.5")
    trace = vlm.trace("What is it?", images=images, videos=videos, max_new_tokens=NEW_TOKENS)
    of_media: dict[str, list] = {}
    for patches, ours in zip(trace.patches, trace.embeds, strict=True):
        rows = rows_of(theirs, patches)
        assert_agree(ours, rows, vlm.encoder)
        of_media.setdefault(patches.media_tokens.kind, []).append(rows)
    given = {kind: BaseModelOutputWithPooling(pooler_output=rows) for kind, rows in of_media.items()}
    inputs = {"input_ids": trace.full_ids[None], "attention_mask": torch.ones_like(trace.full_ids)[None]}
    new = theirs.generate(**inputs, mm_encoder_outputs=given, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert trace.token_ids == new[0, len(trace.full_ids) :].tolist()
    assert len(set(trace.token_ids)) > 3, "the oracle must be able to disagree"
    assert torch.equal(trace.positions, torch.arange(len(trace.full_ids)).expand(3, -1))


def test_both_namings_load(theirs, tmp_path):
    """The released file turns neighbours, transformers' state halves. Oracle: the same parameters, bit for bit."""
    encoder = random_model("Kimi K2.5").encoder
    names = load_file(random_folder("Kimi K2.5") / "model.safetensors")
    assert "vision_tower.encoder.blocks.0.wqkv.weight" in names and "mm_projector.proj.2.weight" in names
    again = type(encoder).from_config(encoder.config)
    tower = [(name, weight) for name, weight in theirs.state_dict().items() if "vision_tower" in name or "mm_" in name]
    assert any(".layers.0.attn.q_proj." in name for name, _ in tower)
    again.load_weights(tower)
    assert all(torch.equal(weight, encoder.state_dict()[name]) for name, weight in again.state_dict().items())


def test_chunks_of_neighbours_are_another_tower():
    """The trap: every shape fits. Without the sorting of rows the embeddings are far off."""
    encoder = random_model("Kimi K2.5").encoder
    wrong = type(encoder).from_config(encoder.config)
    weights = load_file(random_folder("Kimi K2.5") / "model.safetensors").items()
    tower = [(name.replace(".wqkv.", ".attn.qkv."), w) for name, w in weights if name[:2] in ("vi", "mm")]
    wrong.load_weights(tower)
    rows = torch.randn(4 * 24, 588, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        right, off = encoder(rows, [(4, 4, 6)]), wrong(rows, [(4, 4, 6)])
    assert (right - off).norm() > 0.01 * right.norm()


@torch.no_grad()
def test_frames_of_a_chunk_see_each_other():
    """Four equal frames are no image: each has a place in time. Frames of another chunk change nothing."""
    encoder = random_model("Kimi K2.5").encoder
    rows = torch.randn(24, 588, generator=torch.Generator().manual_seed(0))
    image, still = encoder(rows, [(1, 4, 6)]), encoder(rows.repeat(4, 1), [(4, 4, 6)])
    assert image.shape == still.shape and (image - still).norm() > 0.01 * image.norm()
    clip = torch.randn(8 * 24, 588, generator=torch.Generator().manual_seed(1))
    other = torch.cat([clip[: 7 * 24], -clip[7 * 24 :]])
    a, b = (encoder(x, [(8, 4, 6)]).chunk(2) for x in (clip, other))
    assert_agree(a[0], b[0], encoder)
    assert (a[1] - b[1]).norm() > 0.01 * a[1].norm()


def test_prompts_are_transformers():
    """Oracle: what transformers' processor writes for a video, in the folder's tokenizer."""
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

    processor = random_model("Kimi K2.5").processor
    fill = processor.tokenizer.convert_ids_to_tokens(processor.token_ids["video"])
    made = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=4), video_token=fill)
    indices = [0, 12, 25, 37, 50, 62, 75, 87, 100]
    inputs = {
        "num_chunks_per_video": [3], "video_grid_thw": np.array([(4, 6, 8), (4, 6, 8), (1, 6, 8)]),
        "video_metadata": [VideoMetadata(total_num_frames=120, fps=23.976, frames_indices=indices)],
    }  # fmt: skip
    written = Kimi_K25Processor.replace_video_token(made, inputs, 0)
    medium = FramewiseMedia("video", (3, 3, 4), timestamps=tuple(i / 23.976 for i in indices[::4]))
    ids = processor.expand(processor.token_ids["video"], medium)
    assert ids == processor.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert clock(3723.4567) == "01:02:03.456"


@given(total=st.integers(1, 4000), fps=st.sampled_from([1.0, 2.0, 10.0, 23.976, 29.97, 60.0]))
def test_frames_are_sampled_as_transformers_does(total, fps):
    """Below two frames a second transformers refuses; here a clip has no more frames than it has."""
    processor = random_model("Kimi K2.5").processor
    ours = list(processor.frame_indices(total, fps))
    if len(ours) < total or fps == 2:
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        assert ours == default_sample_indices_fn(metadata, fps=2).tolist()
    assert list(processor.frame_indices(total, fps, num_frames=total)) == list(range(total))


def test_options_of_a_video_are_checked():
    processor = random_model("Kimi K2.5").processor
    with pytest.raises(
        ValueError, match="prompt: expected either fps or num_frames for a video, got \\['min_frames'\\]"
    ):
        processor.load_video("clip.mp4", {"min_frames": 2})
    with pytest.raises(ValueError, match="num_frames: expected at most 5, the number of frames available, got 6"):
        processor.frame_indices(5, 2.0, num_frames=6)
    assert processor.frame_indices(10, 10.0, fps=4.0) == [0, 2, 5, 7]


def upstream_resize():
    """transformers' `navit_resize`, cut out of its file: the module wants torchvision, this function does not."""
    file = Path(transformers.__file__).parent / "models" / "kimi_k25" / "image_processing_kimi_k25.py"
    tree = ast.parse(file.read_text())
    [function] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "navit_resize"]
    exec(compile(ast.Module([function], []), file.name, "exec"), names := {"math": math})
    return names["navit_resize"]


@given(height=st.integers(1, 9000), width=st.integers(1, 9000), patches=st.integers(1, 20000), side=st.integers(1, 600))
def test_sizes_are_transformers(height, width, patches, side):
    """Oracle: transformers' own; and a square image is never larger than `max_image_tokens` says."""
    config = PaddedPatchConfig(max_pixels=patches * 196, max_side=side)
    inner, outer = upstream_resize()(height, width, 14, 2, patches, side)
    assert (config.inner_size(height, width), config.target_size(height, width)) == (inner, outer)
    assert math.prod(config.target_size(height, height)) // 784 <= config.max_image_tokens


def test_sizes_without_settings_are_transformers():
    """Oracle: the defaults in the class of transformers' processor."""
    file = Path(transformers.__file__).parent / "models" / "kimi_k25" / "image_processing_kimi_k25.py"
    [processor] = [n for n in ast.parse(file.read_text()).body if getattr(n, "name", "") == "Kimi_K25ImageProcessor"]
    values = {}
    for statement in processor.body:
        if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                values[target.id] = ast.literal_eval(statement.value)
    config = PaddedPatchConfig.from_dict({"max_patches": values["max_patches"]})
    assert config == PaddedPatchConfig() == PaddedPatchConfig(values["patch_size"])
    assert config.max_side == values["size"]["max_height"] == values["size"]["max_width"]


@pytest.mark.parametrize("size", [(60, 90), (28, 56), (150, 210), (13, 400), (2, 1), (500, 500)])
def test_pixels_are_transformers_bit_for_bit(size):
    """Oracle: transformers' two processors, which need torchvision."""
    pytest.importorskip("torchvision")
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    folder, processor = random_folder("Kimi K2.5"), random_model("Kimi K2.5").processor
    frames = RANDOM.integers(0, 256, (6, *size, 3), dtype=np.uint8)
    [image, clip] = processor.patchify(processor.decode(processor.messages("?", [frames[0]], [frames])))
    pictures = Kimi_K25ImageProcessor.from_pretrained(folder)(Image.fromarray(frames[0]), return_tensors="pt")
    videos = Kimi_K25VideoProcessor.from_pretrained(folder)(
        [torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    assert [list(image.layout)] == pictures["image_grid_thw"].tolist()
    t, h, w = clip.layout
    assert [[4, h, w], [t - 4, h, w]] == videos["video_grid_thw"].tolist()
    for ours, want in ((image, pictures["pixel_values"]), (clip, videos["pixel_values_videos"])):
        t, h, w = ours.layout
        rows = ours.pixel_values.view(t, h // 2, w // 2, 2, 2, -1).transpose(2, 3).reshape(want.shape)
        assert torch.equal(rows, want)


def test_small_images_are_padded_with_black():
    """Equation: an image stays as it is, top left; black is -1 after the normalisation."""
    picture = RANDOM.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    levels, grid = padded_levels(picture[None], PaddedPatchConfig())
    assert grid == (1, 2, 4)
    blocks = levels.values.view(1, 2, 2, 2, 3, 14, 14)  # block row, block column, row, column
    pixels = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 28, 56)
    assert np.array_equal(pixels[:, :20, :30].permute(1, 2, 0).numpy(), picture)
    assert not pixels[:, 20:].any() and not pixels[:, :, 30:].any()
    assert levels.normalize().min() == -1.0


def test_limits_are_checked():
    with pytest.raises(ValueError, match="min_pixels: expected 1, because images are never enlarged, got 4"):
        PaddedPatchConfig(min_pixels=4)
    with pytest.raises(ValueError, match="merge_size of images, merge_size of videos, temporal_patch_size: expected"):
        processor = random_model("Kimi K2.5").processor
        type(processor)(processor.config, video_config=PaddedPatchConfig(chunk_frames=2))
    processor = refvl.load({"model_type": "kimi_k25"}, weights="random", device="meta", text=False).processor
    before = processor.layout_of(Image.new("1", (900, 900)))
    set_pixel_limits(processor, max_pixels=300 * 300)
    assert math.prod(before) > 4 * math.prod(processor.layout_of(Image.new("1", (900, 900))))


@torch.inference_mode()
def test_the_cache_is_as_large_as_it_says():
    """Oracle: the tensors of a cache that a prompt has filled: of keys and values, only what they are made of."""
    model = random_model("Kimi K2.5").language_model
    cache = model(inputs_embeds=torch.randn(1, 10, 96), use_cache=True).past_key_values
    stored = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    assert sum(x.nbytes for x in stored) == 10 * kv_cache_bytes_per_token(model.config, torch.float32)


@torch.no_grad()
def test_attention_over_keys_and_values_of_two_widths_is_counted():
    """Oracle: torch's counter over the run; attention is what grows with the square of the tokens."""
    model, counted = random_model("Kimi K2.5").language_model, []
    for tokens in (32, 64):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model.model(inputs_embeds=torch.randn(1, tokens, 96))
        counted.append(counter.get_total_flops())
    once, twice = (prefill_operations(model, tokens) for tokens in (32, 64))
    assert twice - 2 * once == counted[1] - 2 * counted[0]
