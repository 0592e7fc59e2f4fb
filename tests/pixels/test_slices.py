"""Slices. Oracles: vLLM's golden grids, transformers' MiniCPM-V 4.6 image processor, torch's unfold.

Version 4.6 rounds sides to four patches, the versions here to one: where it is the oracle, its
rounding is told so.
"""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.minicpmv4_6 import image_processing_pil_minicpmv4_6 as theirs

from refvl.paths import DATA
from refvl.pixels.images import load_image
from refvl.pixels.slices import SliceConfig, image_of_rows, patchify_slices, plan_slices, slice_grid, slice_image

pytestmark = pytest.mark.usefixtures("width_first")
GOLDEN = json.loads((DATA.parent / "tests" / "golden" / "minicpmv_slicing.json").read_text())
PHOTOS = sorted((DATA / "pictures").glob("*.jpg"))
CONFIG = SliceConfig()
sides = st.integers(1, 2000)


@pytest.fixture
def processor(monkeypatch):
    """transformers' processor with sides that are multiples of one patch instead of four."""
    original = theirs.ensure_divide
    monkeypatch.setattr(
        theirs, "ensure_divide", lambda length, divisor: original(length, 14 if divisor == 56 else divisor)
    )
    return theirs.MiniCPMV4_6ImageProcessorPil()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(("width", "height", "most", "grid", "tokens"), GOLDEN["slices"])
def test_grids_and_token_counts_equal_golden(width, height, most, grid, tokens):
    config = SliceConfig(max_slice_nums=most)
    assert slice_grid(width, height, config) == (tuple(grid) if grid else None)
    assert 64 * len(plan_slices(width, height, config).tgt_sizes) == tokens


SIZES = [(2, 1), (30, 400), (447, 449), (448, 448), (700, 500), (1000, 320), (320, 1000), (1344, 1345)]
IMAGES = {f"{size}": noise(*size) for size in SIZES} | {path.stem: load_image(path) for path in PHOTOS}


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_pixels_equal_transformers_bit_for_bit(processor, image):
    expected = processor(image, return_tensors="pt")
    rows, tgt_sizes = patchify_slices(image, CONFIG)
    assert [list(size) for size in tgt_sizes] == expected["target_sizes"].tolist()
    assert list(slice_grid(*image.size, CONFIG) or (0, 0)) == expected["grids"][0][::-1]  # theirs: rows, columns
    strip = rows.unflatten(1, (3, 14, 14)).permute(1, 2, 0, 3).flatten(2)  # patches side by side, as upstream
    assert torch.equal(strip, expected["pixel_values"][0])


@given(sides, sides, st.integers(1, 12))
def test_no_grid_of_an_allowed_number_fits_the_ratio_better(width, height, most):
    grid = slice_grid(width, height, SliceConfig(max_slice_nums=most))
    wanted = min(-(-width * height // 448**2), most)
    if wanted <= 1:
        assert grid is None
        return
    numbers = {n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= most}
    assert grid[0] * grid[1] in numbers

    def error(columns, rows):
        return abs(np.log(width / height) - np.log(columns / rows))

    every = [(c, n // c) for n in numbers for c in range(1, n + 1) if n % c == 0]
    assert error(*grid) <= min(error(*g) for g in every) + 1e-12


def test_only_what_has_no_slices_is_enlarged():
    """By hand: 500 x 420 px is sliced, and its overview brought down; 20 x 20 px is brought up."""
    assert plan_slices(500, 420, CONFIG).overview == (490, 406)
    small = SliceConfig(scale_resolution=50, patch_size=10)
    assert plan_slices(20, 20, small).overview == (50, 50)
    plan = plan_slices(90, 100, small)
    assert plan.cell == plan.overview == (50, 50) and plan.grid == (2, 2)


def test_a_slice_can_be_looked_at_again():
    image = noise(500, 420)
    rows, tgt_sizes = patchify_slices(image, CONFIG)
    at = 0
    for (h, w), expected in zip(tgt_sizes, slice_image(image, CONFIG), strict=True):
        assert np.array_equal(image_of_rows(rows[at : at + h * w], (h, w), CONFIG), np.asarray(expected))
        at += h * w
    assert at == len(rows)


RELEASED = {
    "image_processor_type": "MiniCPMVImageProcessor", "max_slice_nums": 4, "scale_resolution": 448, "patch_size": 14,
    "use_image_id": True, "image_feature_size": 64, "im_start": "<image>", "slice_mode": True,
    "norm_mean": [0.4, 0.5, 0.6], "norm_std": [0.5, 0.5, 0.5], "version": 2.6,
}  # fmt: skip


def test_settings_come_from_the_folder(tmp_path):
    """Version 2.0 has no file of its own and says them in its config."""
    config = {"max_slice_nums": 7, "patch_size": 16, "slice_mode": True}
    assert SliceConfig.from_folder(tmp_path, config) == SliceConfig(max_slice_nums=7, patch_size=16)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(RELEASED))
    want = SliceConfig(max_slice_nums=4, use_image_id=True, image_mean=(0.4, 0.5, 0.6))
    assert SliceConfig.from_folder(tmp_path, config) == want


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SliceConfig(image_mean=(0.5,)), "image_mean: expected one value per RGB channel"),
        (lambda: SliceConfig.from_dict({"slice_mode": False}), "slice_mode: expected True, the only supported value"),
        (lambda: SliceConfig.from_dict({"size": {"height": 2}}), "size: expected no such setting, got"),
        (lambda: image_of_rows(torch.zeros(4, 588), (2, 3), CONFIG), "rows: dimension 0 must be 6"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_line_is_no_picture():
    """A strip one pixel wide would be sliced into an overview of 14 x 3,667,000 pixels."""
    with pytest.raises(ValueError, match=r"at most 10,000 \(max_aspect_ratio of SliceConfig\), got 1 x 20000 pixels"):
        slice_image(Image.new("RGB", (1, 20_000)), SliceConfig())
    assert len(slice_image(Image.new("RGB", (1, 20_000)), SliceConfig(max_aspect_ratio=20_000))) == 1
