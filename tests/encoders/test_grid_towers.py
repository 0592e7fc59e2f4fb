"""The towers on grids: equal to transformers' in any size, their plans equal to vLLM's metadata, and their configs.

What every encoder keeps is in `contracts/test_encoders.py`, strict loading in `test_weights.py`.
"""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree
from towers import CLASSES, random_patches, run_theirs, same_weights, transformers_tower
from transformers import AutoConfig

from refvl.encoders import Glm4vVisionTransformer, Qwen2_5_VisionTransformer
from refvl.encoders.qwen2_5_vl import clamp_overflow
from refvl.paths import DATA
from refvl.positions.rotary import rotary_cos_sin

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "vit_rope_metadata.json").read_text())
ARRAYS = np.load(FOLDER / "vit_rope_metadata.npz")
RELEASES = {"qwen2_5_vl": "Qwen2.5-VL-7B-Instruct", "glm4v": "GLM-4.1V-9B-Thinking", "glm_ocr": "GLM-OCR"}
STD = {"qwen2_5_vl": 0.08, "glm4v": 0.12, "glm_ocr": 0.12}  # of the weights
each_family = pytest.mark.parametrize("family", RELEASES)


def tiny(family):
    return CLASSES[family].config_class.tiny()


@cache
def theirs(family):
    return transformers_tower(family, tiny(family), std=STD[family])


def ours(family, **options):
    return same_weights(family, theirs(family), tiny(family), **options)


# --- equal to transformers --------------------------------------------------------------------------------------------


MERGE_3 = {"spatial_merge_size": 3, "patch_size": 8}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_5_vl", MERGE_3 | {"window_size": 112, "temporal_patch_size": 1, "fullatt_block_indexes": ()}),
        ("glm4v", {"attention_bias": True}),
        ("glm4v", MERGE_3 | {"temporal_patch_size": 1, "rms_norm_eps": 1e-3}),
        ("glm4v_moe", {"attention_bias": True, "image_size": 126}),  # the tower of GLM-4.5V
        ("glm4v_moe", {}),
        ("glm_ocr", {"attention_bias": False}),
        ("glm_ocr", MERGE_3 | {"in_channels": 1, "rms_norm_eps": 1e-3}),
    ],
    ids=str,
)
@torch.no_grad()
def test_other_configurations_equal_transformers(family, changes):
    """Oracle: as above; sides that 2 and 3 divide."""
    config, grids = replace(tiny(family), depth=2, **changes), [(1, 6, 12), (2, 12, 6), (1, 18, 30)]
    tower, patches = transformers_tower(family, config, std=0.1), random_patches(grids, config)
    want = run_theirs(tower, patches, grids)
    assert_agree(same_weights(family, tower, config)(patches, grids), want, tower)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "std", "changes"),
    [
        ("qwen2_5_vl", 0.016, {"depth": 2, "fullatt_block_indexes": (1,)}),  # one windowed block and one full
        ("glm4v", 0.024, {"depth": 1, "intermediate_size": 512}),  # the merger's inner width alone is smaller
    ],
    ids=["qwen2_5_vl", "glm4v"],
)
@torch.no_grad()
def test_equals_transformers_at_full_width(family, std, changes):
    """Oracle: as above, at the widths of the release: few blocks, an image of 10 x 14 patches."""
    config, grids = replace(CLASSES[family].config_class(), **changes), [(1, 10, 14)]
    tower, patches = transformers_tower(family, config, std=std), random_patches(grids, config)
    want = run_theirs(tower, patches, grids)
    assert_agree(same_weights(family, tower, config)(patches, grids), want, tower)
    assert want.std() > 0.3


# --- the plan ---------------------------------------------------------------------------------------------------------


def golden_plans(family):
    return [case for case in GOLDEN["cases"] if case["model"] == family]


def unpadded(cumulative):
    """vLLM pads cumulative lengths for a captured graph by repeating the last."""
    return sorted(set(cumulative))


@pytest.mark.parametrize("case", golden_plans("qwen2_5_vl"), ids=lambda c: c["name"])
def test_the_plan_of_qwen_equals_golden_metadata(case):
    """Oracle: vLLM 0.33.0 `prepare_encoder_metadata`; its padding and overridden
    maxima belong to graphs, not here."""
    plan = Qwen2_5_VisionTransformer.from_config(GOLDEN["qwen_config"]).plan(case["grid_thw"])
    assert plan.window_index.tolist() == case["window_index"]
    assert plan.reverse_index.tolist() == case["reverse_indices"]
    assert plan.cu_seqlens.tolist() == unpadded(case["cu_seqlens"])
    assert plan.cu_window_seqlens.tolist() == unpadded(case["cu_window_seqlens"])
    if case["attn_backend"] == "FLASH_ATTN" and not any("override" in name for name in case["kwargs"]):
        assert plan.max_seqlen == case["max_seqlen_full"]
        assert plan.max_window_seqlen == case["max_seqlen_window"]
    if "cos" in case:
        for ours, name in zip(plan.cos_sin(), ("cos", "sin"), strict=True):
            assert_agree(ours, torch.from_numpy(ARRAYS[case[name]]), 4)
            assert str(ours.dtype) == case["dtypes"][f"rotary_pos_emb_{name}"]
    kept = {"reverse_indices": plan.reverse_index}
    for name in ("window_index", "reverse_indices", "cu_seqlens", "cu_window_seqlens"):
        assert str(kept.get(name, getattr(plan, name, None)).dtype) == case["dtypes"][name]


@pytest.mark.parametrize("case", golden_plans("glm4v"), ids=lambda c: c["name"])
def test_the_plan_of_glm_equals_golden_metadata(case):
    """Oracle: as above."""
    tower = Glm4vVisionTransformer.from_config(GOLDEN["glm_config"])
    table = torch.from_numpy(ARRAYS["glm_position_embedding_weight"])
    tower.embeddings.position_embedding.weight.data.copy_(table)
    plan = tower.plan(case["grid_thw"])
    if case["attn_backend"] == "FLASH_ATTN":
        assert plan.cu_seqlens.tolist() == unpadded(case["cu_seqlens"])
        assert plan.max_seqlen == case["max_seqlen"]
    else:
        assert plan.cu_seqlens.diff().tolist() == [n for n in case["sequence_lengths"] if n]
    if "pos_embeds" in case:
        cos, sin = rotary_cos_sin(plan.positions, plan.frequencies)
        found = {"pos_embeds": plan.position_embeds, "rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}
        for name, ours in found.items():
            assert_agree(ours, torch.from_numpy(ARRAYS[case[name]]), 4)
            assert str(ours.dtype) == case["dtypes"][name]
    assert str(plan.cu_seqlens.dtype) == case["dtypes"]["cu_seqlens"]


# --- float16 overflow: Qwen2.5-VL -------------------------------------------------------------------------------------


def upstream_clamp(x, offset=1000):
    """`cast_overflow_tensors` of vLLM, with its branch: clamp when anything is inf or nan."""
    if x.isinf().any() or x.isnan().any():
        bound = torch.finfo(x.dtype).max - offset
        x = torch.clamp(x, min=-bound, max=bound)
    return x


@pytest.mark.parametrize(
    "values",
    [[1.0, -2.0], [65504.0, -65504.0], [float("inf"), 65504.0], [float("-inf"), 0.0], [float("nan"), 65504.0]],
    ids=str,
)
def test_the_clamp_equals_upstream_s(values):
    """Oracle: `upstream_clamp` of one row.

    Values near the maximum are left alone unless something overflowed.
    """
    x = torch.tensor(values, dtype=torch.float16)
    beside = torch.full_like(x, 65504)
    rows = clamp_overflow(torch.stack([x, beside]))
    want = torch.stack([upstream_clamp(x), beside])
    torch.testing.assert_close(rows, want, atol=0, rtol=0, equal_nan=True)


@torch.no_grad()
def test_an_overflowing_tower_stays_finite():
    """Weights that overflow in the last block: the embeddings are those of the
    stream clamped by upstream's rule."""
    encoder = ours("qwen2_5_vl").half()
    encoder.blocks[-1].mlp.down_proj.bias[:3] = torch.tensor([60000.0, -60000.0, 0.0])
    encoder.blocks[-1].attn.proj.bias[:3] = torch.tensor([60000.0, -60000.0, 0.0])
    stream = []
    encoder.blocks[-1].register_forward_hook(lambda module, inputs, output: stream.append(output))
    grids = [(1, 8, 12)]
    out = encoder(random_patches(grids, encoder.config), grids)
    assert stream[0].isinf().any()
    want = encoder.merger(upstream_clamp(stream[0]))[encoder.plan(grids).reverse_index]
    assert torch.equal(out, want)
    assert out.isfinite().all()
    assert not encoder.merger(stream[0]).isfinite().all()


# --- configs ----------------------------------------------------------------------------------------------------------


@each_family
def test_config_from_every_source(family):
    """A whole model's dict, its vision_config, and transformers' objects of both describe one tower."""
    values = json.loads((DATA / "configs" / f"{RELEASES[family]}.json").read_text())
    config, whole = CLASSES[family].config_class, AutoConfig.for_model(**values)
    for source in (values, values["vision_config"], whole, whole.to_dict(), whole.vision_config, {}):
        assert config.from_hf(source) == config()  # the release's: test_defaults.py
    grey = {name: n for name, n in values["vision_config"].items() if name != "in_channels"} | {"in_chans": 1}
    assert 3 * config.from_hf(grey).patch_values == config().patch_values


BAD = [
    ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
    ({"hidden_size": 72}, "hidden_size: must be a multiple of 16 for 4 heads, got 72"),  # heads of 18
    ({"image_size": 13}, "image_size: must be at least patch_size=14, got 13"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_a_config_that_cannot_be_built_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        CLASSES["glm4v"].from_config(asdict(tiny("glm4v")) | changed)


def test_a_config_of_the_wrong_kind_is_named():
    with pytest.raises(TypeError, match="config: expected a dict or a transformers config, got str"):
        CLASSES["qwen2_5_vl"].from_config("Qwen/Qwen2.5-VL-3B-Instruct")
