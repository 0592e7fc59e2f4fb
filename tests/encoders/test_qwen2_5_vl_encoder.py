"""The Qwen2.5-VL tower: equal to transformers' on the same weights, its plan equal to vLLM's metadata.

What every encoder keeps is in `contracts/test_encoders.py`.
"""

import json
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_as_exact_as
from towers import random_patches, run_theirs, same_weights, transformers_tower

from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.encoders.qwen2_5_vl import clamp_overflow

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "vit_rope_metadata.json").read_text())
ARRAYS = np.load(FOLDER / "vit_rope_metadata.npz")

FAMILY = "qwen2_5_vl"
TINY = Qwen2_5_VisionConfig.tiny()  # windows of 2 x 2 merged tokens
HALF_STEPS = 12 * TINY.depth  # results of a block that are rounded to half precision: norms, products, sums
GRIDS = {
    "one image": [(1, 8, 12)],
    "one merged token": [(1, 2, 2)],
    "one window": [(1, 4, 4)],
    "exact windows": [(1, 8, 16)],
    "odd sides": [(1, 14, 6), (1, 2, 26)],
    "one video": [(3, 6, 10)],
    "a video of exact windows": [(2, 16, 8)],
    "two equal images": [(1, 6, 6), (1, 6, 6)],
    "images and videos": [(1, 8, 12), (3, 6, 10), (1, 4, 4), (2, 16, 8)],
}


@pytest.fixture(scope="module")
def theirs():
    return transformers_tower(FAMILY, TINY, std=0.08)


@pytest.fixture(scope="module")
def ours(theirs):
    return same_weights(FAMILY, theirs, TINY)


# --- equal to transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRIDS)
@torch.no_grad()
def test_equals_transformers(name, ours, theirs):
    """Oracle: `Qwen2_5_VisionTransformerPretrainedModel`."""
    patches = random_patches(GRIDS[name], TINY)
    want = run_theirs(theirs, patches, GRIDS[name])
    assert_agree(ours(patches, GRIDS[name]), want, ours)
    assert want.std() > 0.5


@torch.no_grad()
def test_equals_transformers_with_released_windows_and_merge_size_3():
    """Oracle: as above; 112 px windows, patches of 8 px, blocks of 3 x 3, no full block."""
    config = replace(
        TINY,
        depth=2,
        window_size=112,
        patch_size=8,
        spatial_merge_size=3,
        temporal_patch_size=1,
        fullatt_block_indexes=(),
    )
    grids = [(1, 12, 24), (2, 9, 15)]
    tower, patches = transformers_tower(FAMILY, config, std=0.08), random_patches(grids, config)
    ours = same_weights(FAMILY, tower, config)
    assert_agree(ours(patches, grids), run_theirs(tower, patches, grids), tower)


@torch.no_grad()
def test_equals_transformers_at_full_width():
    """Oracle: as above, at the widths of the 7B checkpoint: one windowed block and one full, an image of 10 x 14."""
    config = replace(Qwen2_5_VisionConfig(), depth=2, fullatt_block_indexes=(1,))
    assert (config.hidden_size, config.num_heads, config.intermediate_size, config.out_hidden_size) == (
        1280, 16, 3420, 3584,
    )  # fmt: skip
    tower, grids = transformers_tower(FAMILY, config, std=0.016), [(1, 10, 14)]
    patches = random_patches(grids, config)
    want = run_theirs(tower, patches, grids)
    assert_agree(same_weights(FAMILY, tower, config)(patches, grids), want, tower)
    assert want.std() > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_close(dtype, theirs):
    """Oracle: the float32 tower, whose outputs are of size 1; as near to it as transformers' is."""
    grids = GRIDS["images and videos"]
    patches = random_patches(grids, TINY)
    exact = run_theirs(theirs, patches, grids)
    half = same_weights(FAMILY, theirs, TINY).to(dtype)(patches, grids)
    assert half.dtype == dtype
    assert_agree(half, exact.double(), HALF_STEPS)
    their_half = run_theirs(deepcopy(theirs).to(dtype), patches.to(dtype), grids)
    assert_as_exact_as(half, their_half, exact)


# --- the plan ---------------------------------------------------------------------------------------------------------


def qwen_cases():
    return [case for case in GOLDEN["cases"] if case["model"] == "qwen2_5_vl"]


def unpadded(cumulative):
    """vLLM pads cumulative lengths for a captured graph by repeating the last."""
    return sorted(set(cumulative))


@pytest.mark.parametrize("case", qwen_cases(), ids=lambda c: c["name"])
def test_the_plan_equals_golden_metadata(case):
    """Oracle: vLLM 0.33.0 `prepare_encoder_metadata`; its padding and overridden maxima belong to graphs, not here."""
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
    for name, ours in {"window_index": plan.window_index, "reverse_indices": plan.reverse_index}.items():
        assert str(ours.dtype) == case["dtypes"][name]
    assert str(plan.cu_seqlens.dtype) == case["dtypes"]["cu_seqlens"]
    assert str(plan.cu_window_seqlens.dtype) == case["dtypes"]["cu_window_seqlens"]


def test_the_golden_cases_are_all_there():
    assert len(qwen_cases()) == 11
    assert sum("cos" in case for case in qwen_cases()) == 4


# --- float16 overflow -------------------------------------------------------------------------------------------------


def upstream_clamp(x, offset=1000):
    """`cast_overflow_tensors` of vLLM, with its branch: clamp when anything is inf or nan."""
    if x.isinf().any() or x.isnan().any():
        bound = torch.finfo(x.dtype).max - offset
        x = torch.clamp(x, min=-bound, max=bound)
    return x


@pytest.mark.parametrize(
    "values",
    [[1.0, -2.0], [65504.0, -65504.0], [float("inf"), 65504.0, 1.0], [float("-inf"), 0.0], [float("nan"), 65504.0]],
    ids=str,
)
def test_the_clamp_equals_upstream_s(values):
    """Oracle: `upstream_clamp` of one row. Values near the maximum are left alone unless something overflowed."""
    x = torch.tensor(values, dtype=torch.float16)
    torch.testing.assert_close(clamp_overflow(x), upstream_clamp(x), atol=0, rtol=0, equal_nan=True)
    beside = torch.full_like(x, 65504)
    rows = clamp_overflow(torch.stack([x, beside]))
    torch.testing.assert_close(rows, torch.stack([upstream_clamp(x), beside]), atol=0, rtol=0, equal_nan=True)


def test_other_dtypes_are_not_clamped():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([float("inf"), 1.0], dtype=dtype)
        assert clamp_overflow(x) is x


@torch.no_grad()
def test_an_overflowing_tower_stays_finite(theirs):
    """Weights that overflow in the last block: the embeddings are those of the stream clamped by upstream's rule."""
    encoder = same_weights(FAMILY, theirs, TINY).half()
    encoder.blocks[-1].mlp.down_proj.bias[:3] = torch.tensor([60000.0, -60000.0, 0.0])
    encoder.blocks[-1].attn.proj.bias[:3] = torch.tensor([60000.0, -60000.0, 0.0])
    stream = []
    encoder.blocks[-1].register_forward_hook(lambda module, inputs, output: stream.append(output))
    grids = [(1, 8, 12)]
    out = encoder(random_patches(grids, TINY), grids)
    assert stream[0].isinf().any()
    want = encoder.merger(upstream_clamp(stream[0]))[encoder.plan(grids).reverse_index]
    assert torch.equal(out, want)
    assert out.isfinite().all()
    assert not encoder.merger(stream[0]).isfinite().all()


# --- building and calling ---------------------------------------------------------------------------------------------

CONFIG_JSON = {  # as the 3B checkpoint's config.json has it
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip


def test_config_from_every_source():
    """A dict from config.json, the whole model's dict, and transformers' configs describe one tower."""
    from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig

    want = replace(Qwen2_5_VisionConfig(), out_hidden_size=2048)
    whole = Qwen2_5_VLConfig(vision_config={k: v for k, v in CONFIG_JSON.items() if k != "in_chans"})
    sources = [CONFIG_JSON, {"model_type": "qwen2_5_vl", "hidden_size": 2048, "vision_config": CONFIG_JSON}, whole]
    for source in [*sources, whole.vision_config]:
        assert Qwen2_5_VisionConfig.from_hf(source) == want
    one_channel = Qwen2_5_VisionConfig.from_hf(CONFIG_JSON | {"in_chans": 1})
    assert one_channel.patch_values == 1 * 2 * 14 * 14


def test_from_config_takes_all_of_them(theirs):
    shapes = {name: p.shape for name, p in Qwen2_5_VisionTransformer.from_config(TINY).named_parameters()}
    for config in (asdict(TINY), theirs.config, theirs.config.to_dict()):
        encoder = Qwen2_5_VisionTransformer.from_config(config, attention="sdpa")
        assert encoder.config == TINY
        assert encoder.attention == "sdpa"
        assert {name: p.shape for name, p in encoder.named_parameters()} == shapes


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"hidden_act": "gelu"}, ValueError, "hidden_act: the tower is written for 'silu', got 'gelu'"),
        ({"hidden_size": 66}, ValueError, "hidden_size: must be num_heads times .* got 66 for 4 heads"),
        ({"num_heads": 32}, ValueError, "hidden_size: must be num_heads times .* multiple of 4, got 64 for 32 heads"),
    ],
)
def test_a_config_that_cannot_be_built_is_named(changed, error, message):
    with pytest.raises(error, match=message):
        Qwen2_5_VisionTransformer.from_config(asdict(TINY) | changed)


def test_a_config_of_the_wrong_kind_is_named():
    with pytest.raises(TypeError, match="config: expected a dict or a transformers config, got str"):
        Qwen2_5_VisionTransformer.from_config("Qwen/Qwen2.5-VL-3B-Instruct")


# --- with a GPU: python -m pytest -m gpu ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["varlen", "flash"])
@torch.no_grad()
def test_backends_agree_on_the_gpu(backend, theirs):
    """Oracle: the float32 tower on the CPU; in bfloat16 each kernel comes as near to it and to sdpa as it rounds."""
    from refvl.attention import available_backends

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if backend not in available_backends("cuda", torch.bfloat16):
        pytest.skip(f"{backend} is not available here")
    grids = GRIDS["images and videos"]
    patches = random_patches(grids, TINY)
    exact = run_theirs(theirs, patches, grids)
    outs = {}
    for name in (backend, "sdpa"):
        encoder = same_weights(FAMILY, theirs, TINY, attention=name).to("cuda", torch.bfloat16)
        outs[name] = encoder(patches.cuda(), grids).cpu()
        assert_agree(outs[name], exact.double(), HALF_STEPS)
    assert_agree(outs[backend], outs["sdpa"], HALF_STEPS)
