"""The Step3-VL encoder: equal to vLLM's on golden weights, and its pieces.

What every encoder keeps is in `contracts/test_encoders.py`.
"""

from dataclasses import replace

import pytest
import torch
from closeness import assert_agree
from towers import golden
from transformers import PretrainedConfig

from refvl.encoders import Step3VisionConfig, Step3VisionEncoder
from refvl.encoders.step3_vl import resize_class_and_positions
from refvl.pixels.crops import CropLayout, square_patch_rows

GOLDEN, ARRAYS = golden("step3_vl")
EXTRA = {name: GOLDEN[name] for name in ("understand_projector_stride", "hidden_size", "projector_bias")}
TINY = Step3VisionConfig.tiny()  # the golden sizes


WEIGHTS = {name.removeprefix("sd/"): x for name, x in ARRAYS.items() if name.startswith("sd/")}


@pytest.fixture(scope="module")
def encoder():
    """Golden weights, and crops of 56 pixels instead of 504."""
    encoder = Step3VisionEncoder.from_config(GOLDEN["vision_config"] | {"crop_size": 56}, **EXTRA)
    encoder.load_weights(WEIGHTS.items())
    return encoder.eval()


# --- equal to vLLM ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_squares_equal_golden(encoder):
    """Oracle: vLLM 0.33.0, tower to projector; overviews of 84 pixels and crops of 56."""
    for squares, want in (("pixel_values", "image_features"), ("patch_pixel_values", "patch_features")):
        got = encoder(ARRAYS[squares])
        assert_agree(got, ARRAYS[want], encoder)
        assert ARRAYS[want].abs().mean() > 1
    flat = encoder(ARRAYS["pixel_values"]).flatten(0, 1)
    assert_agree(flat, ARRAYS["batched_encoder_forward"], encoder)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["name"])
@torch.no_grad()
def test_pictures_with_crops_equal_golden(case, encoder):
    """Oracle: vLLM 0.33.0 `_process_image_input`: crops of a picture first, overview last."""
    overviews = square_patch_rows(ARRAYS["pixel_values"], 14).split(36)
    crops = iter(square_patch_rows(ARRAYS["patch_pixel_values"], 14).split(16))
    rows = [
        [*(next(crops) for _ in range(n)), overview] for n, overview in zip(case["num_patches"], overviews, strict=True)
    ]
    layouts = [(min(n, 1), n) for n in case["num_patches"]]
    got = encoder(torch.cat([row for picture in rows for row in picture]), layouts)
    assert [encoder.item_size(layout)[1] for layout in layouts] == case["lens"]
    for i, embeds in enumerate(got.split(case["lens"])):
        assert_agree(embeds, ARRAYS[f"{case['name']}/out{i}"], encoder)


@pytest.mark.parametrize("positions", [36, 16, 64, 25])
def test_position_tables_equal_golden(positions):
    """Oracle: vLLM 0.33.0 `get_abs_pos`: smaller, larger and the same."""
    got = resize_class_and_positions(ARRAYS["abs_pos/in"][0], int(positions**0.5))
    want = ARRAYS[f"abs_pos/out{positions}"][0]
    # places as large as the table's side of 6 are rounded, and the 16 weights change by up to 8 per place
    assert_agree(got, want, 2, scale=8 * 6 * float(want.abs().max()))


@pytest.mark.parametrize(("size", "patch_size", "stride", "tokens"), GOLDEN["spatial_tokens"])
def test_token_counts_equal_golden(size, patch_size, stride, tokens):
    """Oracle: vLLM 0.33.0 `_compute_spatial_tokens`."""
    config = replace(TINY, patch_size=patch_size, understand_projector_stride=stride)
    assert config.tokens_of(size) == tokens


# --- pictures, stacks, plans ------------------------------------------------------------------------------------------


def test_the_plan_by_hand():
    """Two crops of one token and an overview of four, then an overview alone; rows 16, 16, 36 and 36."""
    plan = Step3VisionEncoder(TINY).plan([(1, 2), (0, 0)])
    assert plan.summary == "2 crops, 2 overviews"
    assert plan.local_rows.tolist() == list(range(32))
    assert plan.global_rows.tolist() == list(range(32, 104))
    assert plan.order.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    plan = Step3VisionEncoder(TINY).plan([(0, 0), (1, 1)])
    assert plan.local_rows.tolist() == list(range(36, 52))
    assert plan.order.tolist() == [1, 2, 3, 4, 0, 5, 6, 7, 8]  # token 0 of the crop stands fifth


# --- weights and configurations ---------------------------------------------------------------------------------------


def test_parameters_have_the_names_and_shapes_of_the_checkpoint(encoder):
    """Oracle: the golden state dict; the patch embedding's kernel is kept as a matrix."""
    ours = {name: [*p.shape] for name, p in encoder.named_parameters()}
    kernel = "vision_model.embeddings.patch_embedding.weight"
    assert ours.pop(kernel) == [48, 3 * 14 * 14]
    assert ours == {name: shape for name, shape in GOLDEN["param_shapes"].items() if name != kernel}


def test_a_prefix_of_the_names_is_dropped():
    assert Step3VisionEncoder(TINY).load_weights((f"model.{name}", x) for name, x in WEIGHTS.items()) == set(WEIGHTS)


def test_configs_of_every_kind():
    """A vision config with the three values beside it, a whole model's as a dict or an object: the same sizes."""
    vision = GOLDEN["vision_config"] | {"crop_size": 56, "some_other_key": 1}
    assert Step3VisionConfig.from_hf(vision, **EXTRA) == TINY
    whole = {"vision_config": vision, **EXTRA, "text_config": {"hidden_size": 1}}
    assert Step3VisionConfig.from_hf(whole) == Step3VisionConfig.from_hf(PretrainedConfig(**whole)) == TINY
    del whole["hidden_size"]
    assert Step3VisionConfig.from_hf(whole).out_hidden_size == 1
    assert Step3VisionConfig.from_hf(whole, hidden_size=2).out_hidden_size == 2
    assert Step3VisionConfig.from_hf({}) == Step3VisionConfig()
    assert Step3VisionConfig.from_hf(vision | {"crop_size": 28}, **EXTRA).crop_size == 28


@pytest.mark.parametrize("name", ["image_size", "crop_size"])
def test_configs_that_cannot_be(name):
    with pytest.raises(ValueError, match=f"{name}: must be at least two patches of 14 px, got 27 px"):
        Step3VisionConfig.from_hf({name: 27})


def test_layouts_come_back_normalised(encoder):
    assert encoder.check_layouts([[1, 2], (0, 0)]) == [CropLayout(1, 2), CropLayout(0, 0)]
    assert encoder.item_size((1, 2)) == (2 * 16 + 36, 2 * 1 + 4, 3)
    assert encoder.item_size((0, 0)) == (36, 4, 1)
