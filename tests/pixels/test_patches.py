"""Patch rows: equal to transformers' two backends, and to formulas slow enough to be obviously right.

The Pillow backend (`Qwen2VLImageProcessorPil`) is the oracle of images. The oracle of clips is the
torchvision backend; where torchvision is missing those tests are skipped, and the formulas of this
file still hold the same numbers.
"""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.glm4v import image_processing_pil_glm4v as upstream_glm
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as upstream

from refvl.paths import DATA
from refvl.pixels.by_hand import count_tokens, patch_rows, patchify_image, patchify_video, smart_resize, unpatchify
from refvl.pixels.media import load_image, load_video
from refvl.pixels.patch_configs import smart_resize_video
from refvl.pixels.patches import Levels, PatchConfig, level_table, plan_grid, resize_frames

pytestmark = pytest.mark.usefixtures("width_first")
GLM = json.loads((Path(__file__).parents[1] / "golden" / "glm_video.json").read_text())
PHOTOS = sorted((DATA / "pictures").iterdir())
SMALL = PatchConfig(patch_size=2, min_pixels=16, max_pixels=400)  # merged tokens of 4 x 4 pixels


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def outcome(function, *args, **kwargs):
    """The result, or the exception's type: two functions agree when both agree."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        return type(error)


# --- sizes


budgets = {"min_pixels": st.integers(1, 300_000), "extra": st.integers(0, 50_000_000)}


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), factor=st.sampled_from([4, 28, 32]), **budgets)
def test_smart_resize_is_transformers(height, width, factor, min_pixels, extra):
    """Oracle: `smart_resize` of transformers, errors included."""
    options = {"factor": factor, "min_pixels": min_pixels, "max_pixels": min_pixels + extra}
    want = outcome(upstream.smart_resize, height, width, **options)
    assert outcome(smart_resize, height, width, **options) == want


@given(
    T=st.integers(1, 700), height=st.integers(1, 3000), width=st.integers(1, 3000),
    Tp=st.integers(1, 4), **budgets,
)  # fmt: skip
def test_smart_resize_video_is_transformers(T, height, width, Tp, min_pixels, extra):
    """Oracle: `smart_resize` of transformers' GLM-4.1V, errors included."""
    arguments = (max(T, Tp), height, width)
    options = {"temporal_factor": Tp, "min_pixels": min_pixels, "max_pixels": min_pixels + extra}
    want = outcome(upstream_glm.smart_resize, *arguments, **options)
    assert outcome(smart_resize_video, *arguments, **options) == want


def test_aspect_ratio_above_200():
    with pytest.raises(ValueError, match=r"aspect ratio of at most 200, got 40 x 8041 pixels"):
        smart_resize(8041, 40)
    with pytest.raises(ValueError, match="aspect ratio"):
        patchify_image(np.zeros((10, 2001), np.uint8), PatchConfig())


def test_sizes_and_token_counts_of_glm_are_golden():
    """Oracle: the functions of vLLM 0.33.0. Frames are padded to whole steps; an image counts as two frames."""
    for case in GLM["smart_resize"]:
        arguments = {name: value for name, value in case.items() if name != "out"}
        want = tuple(case["out"]) if isinstance(case["out"], list) else ValueError
        if case["num_frames"] >= case.get("temporal_factor", 2):
            assert outcome(smart_resize_video, **arguments) == want, arguments
    rows = [row for row in GLM["vision_info"] if row[3] == 2]  # released towers have two frames per step
    for _, P, m, Tp, width, height, frames, max_pixels, _, (new_width, new_height, tokens) in rows:
        options = {"temporal_factor": Tp, "factor": P * m, "max_pixels": max_pixels}
        size = smart_resize_video(max(frames, Tp), height, width, **options)
        assert size == (new_height, new_width)
        assert -(-frames // Tp) * (new_height // P) * (new_width // P) // m**2 == tokens


# --- images


def assert_equals_pil_backend(image, config):
    size = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    sides = {name: getattr(config, name) for name in ("patch_size", "temporal_patch_size", "merge_size")}
    theirs = upstream.Qwen2VLImageProcessorPil(size=size, **sides)(image, return_tensors="pt")
    patches, grid = patchify_image(image, config)
    assert [list(grid)] == theirs["image_grid_thw"].tolist()
    assert patches.dtype == torch.float32 and torch.equal(patches, theirs["pixel_values"])


@pytest.mark.parametrize("config", [PatchConfig(), PatchConfig(max_pixels=50_000), SMALL], ids=["own", "less", "small"])
def test_photos_bit_for_bit(config):
    """Oracle: transformers' Pillow backend, every bit of every patch."""
    for path in PHOTOS:
        assert_equals_pil_backend(load_image(path), config)


@settings(max_examples=25)
@given(height=st.integers(1, 90), width=st.integers(2, 90), seed=st.integers(0, 99))
def test_any_size_bit_for_bit(height, width, seed):
    """Oracle: transformers' Pillow backend; sides below a patch, and shrinking as well as growing."""
    for config in (PatchConfig(min_pixels=28 * 28, max_pixels=28 * 28 * 6), SMALL):
        assert_equals_pil_backend(Image.fromarray(noise(height, width, 3, seed=seed)), config)


# --- the order of rows


def rows_by_loops(pixels, config):
    """The definition: for every t, block, patch of the block, and within a row channel, time, y, x."""
    m, P, Tp = config.merge_size, config.patch_size, config.temporal_patch_size
    T, _, H, W = pixels.shape
    t, h, w = math.ceil(T / Tp), H // P, W // P
    rows = []
    for it, by, bx, y, x in itertools.product(range(t), range(h // m), range(w // m), range(m), range(m)):
        frames = pixels[[min(it * Tp + k, T - 1) for k in range(Tp)]]
        top, left = (by * m + y) * P, (bx * m + x) * P
        patch = frames[:, :, top : top + P, left : left + P]
        rows.append(patch.transpose(0, 1).flatten())
    return torch.stack(rows), (t, h, w)


@settings(max_examples=20)
@given(frames=st.integers(1, 5), P=st.integers(1, 3), Tp=st.integers(1, 3), m=st.integers(1, 3), data=st.data())
def test_merge_block_order(frames, P, Tp, m, data):
    """Oracle: five nested loops; any patch, block and time size, frame counts that need padding."""
    config = PatchConfig(patch_size=P, temporal_patch_size=Tp, merge_size=m)
    height, width = (data.draw(st.integers(1, 3)) * P * m for _ in range(2))
    pixels = torch.arange(frames * 3 * height * width).view(frames, 3, height, width)
    rows, grid = patch_rows(pixels, config)
    wanted, wanted_grid = rows_by_loops(pixels, config)
    assert grid == wanted_grid and torch.equal(rows, wanted)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((1, 3, 28, 30), "pixels: .*multiples of 28"),
        ((0, 3, 28, 28), "pixels: .*at least one frame"),
        ((1, 4, 28, 28), "pixels: .*dimension 1 must be 3"),
    ],
)
def test_what_makes_no_patches(shape, message):
    with pytest.raises(ValueError, match=message):
        patch_rows(torch.zeros(shape), PatchConfig())


def test_what_was_no_image():
    with pytest.raises(ValueError, match="patches: dimension 0 must be 32"):
        unpatchify(torch.zeros(16, 1176), (2, 4, 4), PatchConfig())
    with pytest.raises(ValueError, match="grid.*multiples of spatial_merge"):
        unpatchify(torch.zeros(12, 1176), (1, 3, 4), PatchConfig())
    with pytest.raises(ValueError, match="video: expected"):
        patchify_video([], PatchConfig.for_video())


# --- and back


@pytest.mark.parametrize("fused", [False, True])
def test_unpatchify_inverts_every_value(fused):
    """Oracle: the pixels that went in; all 256 values in every channel come back through normalise and cut."""
    frames = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=0).repeat(3, axis=3)
    frames[..., 1] += 85
    rows, grid = patch_rows(torch.from_numpy(frames).permute(0, 3, 1, 2), SMALL)
    levels = Levels(rows.unflatten(1, (3, 2, -1)), level_table(SMALL, fused=fused), frames=2)
    back = unpatchify(levels.normalize(), grid, SMALL)
    assert grid == (2, 8, 8) and back.dtype == np.uint8
    assert np.array_equal(back, frames[[0, 1, 2, 2]])  # the padding frame is the last again


# --- clips


def assert_equals_torchvision_backend(processor, frames, config):
    size = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    names = ("patch_size", "temporal_patch_size", "merge_size", "cap_pixels_per_frame", "max_video_tokens")
    theirs = processor(size=size, **{name: getattr(config, name) for name in names})
    channels_first = torch.from_numpy(frames).permute(0, 3, 1, 2)
    want = theirs([channels_first], do_sample_frames=False, return_tensors="pt")
    patches, grid = patchify_video(frames, config)
    assert [list(grid)] == want["video_grid_thw"].tolist()
    assert patches.dtype == torch.float32 and torch.equal(patches, want["pixel_values_videos"])


def test_clips_bit_for_bit(torchvision_processor, clip):
    """Oracle: transformers' torchvision backend; odd frame counts, growing and shrinking, budgets and their cap."""
    shapes = [(1, 30, 40), (2, 56, 84), (3, 200, 31), (5, 28, 28), (9, 400, 300)]
    less = PatchConfig.for_video(min_pixels=1000, max_pixels=20_000, max_video_tokens=20)
    for frames in (load_video(clip).frames, *(noise(*shape, 3) for shape in shapes)):
        for config in (PatchConfig.for_video(), less, replace(less, cap_pixels_per_frame=False)):
            assert_equals_torchvision_backend(torchvision_processor, frames, config)


def test_clip_is_nearly_pillow(clip):
    """Oracle: Pillow's bicubic, frame by frame: torch rounds its 8-bit filter a little differently, by one level."""
    frames = load_video(clip, num_frames=4).frames
    size = PatchConfig.for_video().target_size(*frames.shape[1:3], len(frames))
    ours = resize_frames(frames, size).permute(0, 2, 3, 1).numpy()
    theirs = np.stack([Image.fromarray(f).resize(size[::-1], Image.Resampling.BICUBIC) for f in frames])
    assert ours.dtype == np.uint8 and np.abs(ours.astype(int) - theirs).max() <= 1


def test_clip_is_resize_normalize_cut():
    """Oracle: the three steps of the file's diagram written out, with the fused normalisation in float64."""
    config = PatchConfig.for_video(min_pixels=784, max_pixels=10_000)
    frames = noise(5, 50, 80, 3)
    pixels = resize_frames(frames, config.target_size(50, 80, 5)).double()
    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in (config.image_mean, config.image_std))
    wanted, grid = rows_by_loops((pixels / 255 - mean) / std, config)
    patches, got = patchify_video(frames, config)
    assert got == grid == (3, 4, 6)
    assert_agree(patches, wanted, 4)


def test_frame_budget_is_a_share_of_the_context():
    """Oracle: the arithmetic of qwen-vl-utils by hand: 768 frames share 115,200 tokens, two frames to a token."""
    config = PatchConfig.for_video()
    assert config.frame_budget(10) == config.max_pixels == 768 * 28 * 28
    assert config.frame_budget(768) == 300 * 28 * 28
    assert config.frame_budget(100_000) == int(128 * 28 * 28 * 1.05)  # never below the least a frame may have
    assert PatchConfig.for_video(cap_pixels_per_frame=False).frame_budget(768) == 768 * 28 * 28


# --- counting without pixels


@settings(max_examples=30)
@given(height=st.integers(2, 60), width=st.integers(2, 60), frames=st.integers(1, 5))
def test_count_tokens_is_what_patchify_gives(height, width, frames):
    """Oracle: the patch rows themselves, four to a token."""
    patches, grid = patchify_image(noise(height, width, 3), SMALL)
    assert grid == plan_grid(height, width, SMALL)
    assert len(patches) == 4 * count_tokens(height, width, SMALL)
    config = PatchConfig.for_video(patch_size=2, min_pixels=16, max_pixels=400, max_video_tokens=30)
    patches, grid = patchify_video(noise(frames, height, width, 3), config)
    assert grid == plan_grid(height, width, config, frames)
    assert len(patches) == 4 * count_tokens(height, width, config, frames)
    with pytest.raises(ValueError, match="num_frames: must be at least 1, got 0"):
        count_tokens(height, width, config, 0)


# --- configuration files


def write(folder, **files):
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "values",
    [
        {"min_pixels": 1000, "max_pixels": 2000},
        {"size": {"shortest_edge": 1000, "longest_edge": 2000}},
        {"size": {"min_pixels": 1000, "max_pixels": 2000}},
        {"min_pixels": 1000, "max_pixels": 2000, "size": {"shortest_edge": 5, "longest_edge": 6}},
        {"min_pixels": 1000, "max_pixels": None, "size": {"shortest_edge": 5, "longest_edge": 2000}},
    ],
)
def test_old_and_new_names_of_the_budget(tmp_path, values):
    config = PatchConfig.from_folder(write(tmp_path, preprocessor_config=values | {"patch_size": 16}))
    assert config == PatchConfig(min_pixels=1000, max_pixels=2000, patch_size=16)


def test_first_file_counts(tmp_path):
    """Oracle: the order of transformers' `get_video_processor_dict` and `get_image_processor_dict`."""
    nested = {"image_processor": {"patch_size": 12}, "video_processor": {"patch_size": 13}}
    for name, values, wanted in (
        ("preprocessor_config", {"patch_size": 10}, [10, 10]),
        ("video_preprocessor_config", {"patch_size": 11}, [10, 11]),
        ("processor_config", {"processor_class": "Qwen2_5_VLProcessor"}, [10, 11]),
        ("processor_config", nested, [12, 13]),
    ):
        write(tmp_path, **{name: values})
        assert [PatchConfig.from_folder(tmp_path, kind).patch_size for kind in ("image", "video")] == wanted


def test_missing_keys_take_the_defaults_of_their_kind(tmp_path):
    write(tmp_path, preprocessor_config={"unknown": 1, "cap_pixels_per_frame": None})
    assert PatchConfig.from_folder(tmp_path) == PatchConfig()
    assert PatchConfig.from_folder(tmp_path, "video") == PatchConfig.for_video()


def test_image_defaults_are_those_of_transformers(tmp_path):
    """Oracle: the file that `Qwen2VLImageProcessorPil` saves."""
    upstream.Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    assert PatchConfig.from_folder(tmp_path, "image") == PatchConfig()


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not valid JSON"),
        ('{"do_resize": false}', "do_resize: .* got False"),
        ('{"resample": 2}', "resample: .* got 2"),
        ('{"size": {"height": 224, "width": 224}}', "size: expected .*'longest_edge'.*, got .*'height': 224"),
        ('{"min_pixels": 9, "max_pixels": 8}', "min_pixels: must not exceed max_pixels=8, got 9"),
        ('{"image_mean": [0.5]}', "image_mean: expected one value per RGB channel"),
    ],
)
def test_configuration_errors(tmp_path, text, message):
    with pytest.raises(FileNotFoundError, match="no image settings"):
        PatchConfig.from_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        PatchConfig.from_folder(tmp_path)
