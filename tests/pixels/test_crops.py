"""Where Step3-VL cuts a picture, and the pixels that its encoder gets."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from refvl.pixels.crops import (
    CropConfig,
    as_crop_layouts,
    choose_window,
    count_prompt_tokens,
    cut_crops,
    patchify_crops,
    plan_crops,
    prepare_pixels,
    square_patch_rows,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "step3_vl.json").read_text())
TINY = CropConfig(image_size=84, crop_size=56, max_side=336)

sides = st.integers(1, 5000)
pictures = st.tuples(sides, sides).filter(lambda size: max(size) <= 200 * min(size))


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


# --- sizes and layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["patcher"], ids=lambda c: f"{c['width']}x{c['height']}")
def test_plans_equal_golden(case):
    """Oracle: vLLM 0.33.0 `ImagePatcher` and its token counts."""
    plan = plan_crops(case["width"], case["height"])
    assert [*plan.padded] == case["padded"]
    assert [*plan.resized] == case["preprocess"]
    assert plan.window == case["window_size"]
    assert (plan.layout.crops, plan.layout.newlines) == (case["num_patches"], case["num_newlines"])
    assert count_prompt_tokens(plan.layout) == case["num_tokens"]
    if plan.window:
        assert [*plan.canvas] == case["crop"]
        assert [plan.layout.columns, plan.layout.rows] == case["xy_num"]
        corners = [[left, top, right - left, bottom - top] for left, top, right, bottom in plan.boxes]
        assert corners[: len(case["windows"])] == case["windows"]
    if "newline_mask" in case:
        assert [*plan.layout.newline_mask] == case["newline_mask"]


def test_crops_switched_off_equal_golden():
    """Oracle: vLLM 0.33.0 `ImagePatcher(enable_patch=False)`."""
    for width, height, crops, newlines in GOLDEN["patcher_disabled"]:
        layout = plan_crops(width, height, CropConfig(enable_crops=False)).layout
        assert (layout.crops, layout.newlines) == (crops, newlines) == (0, 0)


@pytest.mark.parametrize(
    ("width", "height", "window"),
    [
        (727, 727, 0),  # small and square: the overview shows all
        (728, 728, 0),
        (729, 729, 504),
        (727, 484, 484),  # ratio 1.502: elongated, its short side
        (300, 450, 0),  # ratio exactly 1.5
        (2016, 504, 504),  # ratio exactly 4
        (2100, 500, 500),  # above 4, the short side is less than 504
        (2000, 500, 504),
    ],
)
def test_windows_at_their_limits(width, height, window):
    """Oracle: the rule in words. Up to 728 none up to a ratio of 1.5, else the short side; above it 504, but above
    a ratio of 4 the short side if that is less. Both ways round."""
    assert choose_window(width, height) == choose_window(height, width) == window


@pytest.mark.parametrize(
    ("width", "height", "layout"),
    [
        (504 * 2 + 100, 504, (1, 2)),  # 0.198 of a window is squeezed into what is there
        (504 * 2 + 101, 504, (1, 3)),  # 0.2004 gets a window of its own
        (330, 150, (1, 3)),  # 0.2 on paper, 0.2000000000000002 in floating point
        (800, 400, (1, 2)),  # lower than the window: one row all the same
    ],
)
def test_remainders(width, height, layout):
    """Oracle: the rule in words, and upstream's floating point where they differ."""
    assert plan_crops(width, height).layout == layout


@given(pictures)
def test_windows_cover_the_canvas_row_by_row(size):
    """Each pixel of the canvas lies in one window; in reading order; a newline ends every row but the last."""
    plan = plan_crops(*size)
    (width, height), layout = plan.canvas, plan.layout
    covered = sum((min(r, width) - l) * (min(b, height) - t) for l, t, r, b in plan.boxes)
    assert covered == (width * height if layout.crops else 0)
    assert plan.boxes == sorted(set(plan.boxes), key=lambda box: (box[1], box[0]))
    assert all(r - l == b - t == plan.window for l, t, r, b in plan.boxes)
    assert max(plan.resized) <= 3024
    places = itertools.product(range(layout.rows), range(layout.columns))
    want = [column == layout.columns - 1 and row < layout.rows - 1 for row, column in places]
    assert list(layout.newline_mask) == want and sum(want) == layout.newlines


def test_a_long_side_is_brought_down_first():
    """4000 x 3000 -> 3024 x 2268; 4236 * (3024 / 4236) is 3023.99... in floating point, truncated as upstream does."""
    assert plan_crops(4000, 3000).resized == (3024, 2268)
    assert plan_crops(4236, 4236).resized == (3023, 3023)
    assert plan_crops(3024, 100).resized == (3024, 100)


# --- pixels -----------------------------------------------------------------------------------------------------------


def test_crops_lie_side_by_side_on_the_resized_canvas():
    """Oracle: Pillow's bilinear resize to 1008 x 1008; the overview is the picture as it was."""
    image = picture(1024, 768)
    overview, crops, plan = cut_crops(image)
    canvas = image.resize((1008, 1008), Image.Resampling.BILINEAR)
    assert plan.canvas == canvas.size and plan.layout == (2, 2)
    rows = [np.hstack([np.array(crop) for crop in crops[i : i + 2]]) for i in (0, 2)]
    assert np.array_equal(np.vstack(rows), np.array(canvas))
    assert np.array_equal(np.array(overview), np.array(image))


def test_a_thin_strip_is_padded_black_to_the_right_or_below():
    image = picture(20, 100)
    overview, crops, plan = cut_crops(image)
    assert (overview.size, crops, plan.layout) == ((100, 100), [], (0, 0))
    pixels = np.array(overview)
    assert np.array_equal(pixels[:, :20], np.array(image))
    assert not pixels[:, 20:].any()
    assert cut_crops(picture(100, 25))[2].padded == (100, 25)  # the ratio is 4, not above


def test_an_image_thinner_than_1_to_200_is_refused():
    """At the limit, a small image becomes a square of 6200 pixels per side; one pixel more is an error."""
    overview, _, plan = cut_crops(Image.new("RGB", (31, 6200), "white"))
    assert plan.padded == (6200, 6200) and overview.size == plan.resized == (3024, 3024)
    for size in ((31, 6201), (6201, 31)):
        with pytest.raises(ValueError, match=f"aspect ratio of at most 200, got {size[0]} x {size[1]} pixels"):
            plan_crops(*size)


def test_a_low_canvas_is_black_below():
    """800 x 400 is stretched to 1008 x 400; its two windows of 504 reach 104 rows beyond it."""
    _, crops, plan = cut_crops(picture(800, 400))
    assert (plan.canvas, [crop.size for crop in crops]) == ((1008, 400), [(504, 504)] * 2)
    assert not np.array(crops[0])[400:].any()
    assert np.array(crops[0])[:400].any(axis=(1, 2)).all()


def resize_1d(x, size):
    """Over the last axis: a triangle around each output's centre, as wide as one output (at least one input) pixel."""
    scale = x.shape[-1] / size
    reach = max(scale, 1.0)
    centres = (np.arange(size) + 0.5) * scale
    distance = np.abs(np.arange(x.shape[-1]) + 0.5 - centres[:, None]) / reach
    weights = np.clip(1 - distance, 0, None)
    return x @ (weights / weights.sum(1, keepdims=True)).T


@pytest.mark.parametrize(("width", "height"), [(100, 130), (31, 17), (84, 84), (40, 300)])
def test_pixels_are_normalised_then_resized(width, height):
    """Oracle: the antialiased bilinear filter written out, on normalised float64 pixels; larger, smaller and equal."""
    image = picture(width, height)
    got = prepare_pixels(image, 84)
    mean, std = np.array(TINY.image_mean), np.array(TINY.image_std)
    pixels = ((np.array(image) / 255 - mean) / std).transpose(2, 0, 1)
    want = resize_1d(resize_1d(pixels, 84).swapaxes(1, 2), 84).swapaxes(1, 2)
    # the filter's centres are rounded, and they lie anywhere between the picture's sides
    assert_agree(got, torch.from_numpy(want), 1, scale=max(width, height, 84) * np.abs(want).max())
    assert (got.shape, got.dtype) == ((3, 84, 84), torch.float32)


def test_patch_rows_of_a_picture_are_its_crops_then_its_overview():
    image = picture(120, 110)
    rows, layout = patchify_crops(image, TINY)
    overview, crops, plan = cut_crops(image, TINY)
    assert layout == plan.layout == (2, 2)
    pixels = [prepare_pixels(crop, 56, TINY) for crop in crops] + [prepare_pixels(overview, 84, TINY)]
    assert torch.equal(rows, torch.cat([square_patch_rows(part[None], 14) for part in pixels]))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layouts", "error", "message"),
    [
        (3, TypeError, "layouts: expected a sequence"),
        ([(1, 2), (1, 2, 3)], ValueError, r"layouts\[1\]: expected \(rows, columns\)"),
        ([(0, 2)], ValueError, r"above 0, or \(0, 0\) without crops, got \(0, 2\)"),
    ],
)
def test_layouts_that_are_none(layouts, error, message):
    with pytest.raises(error, match=message):
        as_crop_layouts(layouts)


def test_crops_are_whole_patches():
    with pytest.raises(ValueError, match="crop_size: must be a multiple of patch_size=14, got 500"):
        CropConfig(crop_size=500)


def test_the_config_of_a_model_says_the_sizes():
    vision = {"image_size": 84, "patch_size": 14, "crop_size": 56, "hidden_size": 48}
    want = CropConfig(image_size=84, crop_size=56)
    assert CropConfig.from_hf(vision) == CropConfig.from_hf({"vision_config": vision, "image_size": 7}) == want
    assert CropConfig.from_hf({"image_size": 728, "patch_size": 14}) == CropConfig()
