"""The GLM-4.1V tower: equal to transformers' on the same weights, its plan to vLLM's.

What every encoder keeps is in `contracts/test_encoders.py`.
"""

import json
import re
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_as_exact_as, assert_differ
from torch import nn
from towers import random_patches, run_theirs, same_weights, transformers_tower

from refvl.encoders import Glm4vVisionConfig, Glm4vVisionTransformer
from refvl.graphs import EncoderGraphManager

FOLDER = Path(__file__).parents[1] / "golden"
METADATA = json.loads((FOLDER / "vit_rope_metadata.json").read_text())
ARRAYS = np.load(FOLDER / "vit_rope_metadata.npz")
NAMES = json.loads((FOLDER / "weight_mapping.json").read_text())["glm4v"]

TINY = Glm4vVisionConfig.tiny()  # a table of 6 x 6 places
HALF_STEPS = 12 * TINY.depth  # results of a block that are rounded to half precision: norms, products, sums
GRIDS = {
    "the table's own size": [(1, 6, 6)],
    "one merged token": [(1, 2, 2)],
    "smaller than the table": [(1, 4, 2)],
    "larger than the table": [(1, 14, 16)],
    "odd aspect ratios": [(1, 2, 26), (1, 30, 2)],
    "one video": [(3, 4, 6)],
    "two equal images": [(1, 6, 8), (1, 6, 8)],
    "images and videos": [(1, 8, 12), (3, 6, 10), (1, 4, 4), (2, 6, 6)],
}


@pytest.fixture(scope="module")
def theirs():
    return transformers_tower("glm4v", TINY, std=0.12)


@pytest.fixture(scope="module")
def ours(theirs):
    return same_weights("glm4v", theirs, TINY)


# --- equal to transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRIDS)
@torch.no_grad()
def test_equals_transformers(name, ours, theirs):
    """Oracle: `Glm4vVisionModel`."""
    patches = random_patches(GRIDS[name], TINY)
    want = run_theirs(theirs, patches, GRIDS[name])
    assert_agree(ours(patches, GRIDS[name]), want, ours)
    assert want.std() > 0.3


@torch.no_grad()
def test_equals_transformers_model_on_clips(theirs):
    """Oracle: `Glm4vModel.get_video_features`, which takes the clip as it is."""
    from transformers.models.glm4v.modeling_glm4v import Glm4vModel

    class Model:
        visual = theirs

    grids = [(3, 6, 10), (2, 4, 4)]
    patches = random_patches(grids, TINY)
    features = Glm4vModel.get_video_features.__wrapped__.__wrapped__(Model, patches, torch.tensor(grids))
    ours = same_weights("glm4v", theirs, TINY)(patches, grids)
    assert_agree(ours, torch.cat(features.pooler_output), theirs)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm4v", {"attention_bias": True}),
        ("glm4v", {"spatial_merge_size": 3, "patch_size": 8, "temporal_patch_size": 1, "rms_norm_eps": 1e-3}),
        ("glm4v_moe", {"attention_bias": True, "image_size": 126}),
        ("glm4v_moe", {}),
    ],
    ids=str,
)
@torch.no_grad()
def test_other_configurations_equal_transformers(family, changes):
    """Oracle: as above, and `Glm4vMoeVisionModel`, the tower of GLM-4.5V; sides that 2 and 3 divide."""
    config, grids = replace(TINY, depth=2, **changes), [(1, 6, 12), (2, 12, 6)]
    tower, patches = transformers_tower(family, config, std=0.12), random_patches(grids, config)
    want = run_theirs(tower, patches, grids)
    assert_agree(same_weights("glm4v", tower, config)(patches, grids), want, tower)


@torch.no_grad()
def test_equals_transformers_at_full_width():
    """Oracle: as above, at the widths of GLM-4.1V-9B but for the merger's inner one: one block, an image of 10 x 14."""
    config = replace(Glm4vVisionConfig(), depth=1, intermediate_size=512)
    assert (config.hidden_size, config.num_heads, config.head_dim, config.out_hidden_size) == (1536, 12, 128, 4096)
    tower, grids = transformers_tower("glm4v", config, std=0.024), [(1, 10, 14)]
    patches = random_patches(grids, config)
    want = run_theirs(tower, patches, grids)
    assert_agree(same_weights("glm4v", tower, config)(patches, grids), want, tower)
    assert want.std() > 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_close(dtype, theirs):
    """Oracle: the float32 tower, whose outputs are of size 0.4; as near to it as transformers' is."""
    grids = GRIDS["images and videos"]
    patches = random_patches(grids, TINY)
    exact = run_theirs(theirs, patches, grids)
    half = same_weights("glm4v", theirs, TINY).to(dtype)(patches, grids)
    assert half.dtype == dtype
    assert_agree(half, exact.double(), HALF_STEPS)
    their_half = run_theirs(deepcopy(theirs).to(dtype), patches.to(dtype), grids)
    assert_as_exact_as(half, their_half, exact)


@torch.no_grad()
def test_the_same_picture_elsewhere_is_told_apart(ours):
    """Equal patches all over: only positions differ, and without the table and the angles all tokens would be equal."""
    patches = random_patches([(1, 1, 1)], TINY).expand(96, -1)
    tokens = ours(patches, [(1, 8, 12)])
    assert (tokens[1:] - tokens[0]).norm(dim=-1).min() > 1e-2


# --- the plan ---------------------------------------------------------------------------------------------------------


def golden_plans():
    return [case for case in METADATA["cases"] if case["model"] == "glm4v"]


@pytest.mark.parametrize("case", golden_plans(), ids=lambda c: c["name"])
def test_the_plan_equals_golden_metadata(case):
    """Oracle: vLLM 0.33.0 `prepare_encoder_metadata`; its padding belongs to graphs."""
    tower = Glm4vVisionTransformer.from_config(METADATA["glm_config"])
    table = torch.from_numpy(ARRAYS["glm_position_embedding_weight"])
    tower.embeddings.position_embedding.weight.data.copy_(table)
    plan = tower.plan(case["grid_thw"])
    if case["attn_backend"] == "FLASH_ATTN":
        assert plan.cu_seqlens.tolist() == sorted(set(case["cu_seqlens"]))
        assert plan.max_seqlen == case["max_seqlen"]
    else:
        assert plan.cu_seqlens.diff().tolist() == [n for n in case["sequence_lengths"] if n]
    if "pos_embeds" in case:
        for name, ours in {
            "pos_embeds": plan.position_embeds,
            "rotary_pos_emb_cos": plan.cos_sin()[0],
            "rotary_pos_emb_sin": plan.cos_sin()[1],
        }.items():
            assert_agree(ours, torch.from_numpy(ARRAYS[case[name]]), 4)
            assert str(ours.dtype) == case["dtypes"][name]
    assert str(plan.cu_seqlens.dtype) == case["dtypes"]["cu_seqlens"]


def test_the_golden_cases_are_all_there():
    assert [case["name"] for case in golden_plans()] == ["native", "video", "tiny", "two_flashinfer", "pad_frames"]


# --- graphs -----------------------------------------------------------------------------------------------------------

BUDGETS, MAX_ITEMS, MAX_FRAMES = [8, 16, 32], 3, 4


@pytest.fixture(scope="module")
def manager(ours):
    """One manager for all tests: what a test before left in its memory must not matter."""
    manager = EncoderGraphManager(ours, budgets=BUDGETS, max_items=MAX_ITEMS, max_frames=MAX_FRAMES, progress=False)
    manager.capture()
    return manager


@torch.no_grad()
def eager(encoder, patches, grids):
    """One tensor per item, each encoded alone."""
    counts = [t * h * w for t, h, w in grids]
    return [encoder(rows, [grid]) for rows, grid in zip(patches.split(counts), grids, strict=True)]


def test_stale_metadata_would_show(ours, manager):
    """Leave one field of the buffers as the batch before had it, and the outputs are wrong: each of them counts."""
    before, grids = [(1, 8, 4)], [(2, 4, 2), (1, 2, 6), (1, 2, 2)]
    patches, captured = random_patches(grids, TINY), manager.captured["", 8]
    wanted = torch.cat(eager(ours, patches, grids))
    for name in ("position_embeds", "positions", "cu_seqlens"):
        field = getattr(captured.metadata, name)
        manager.execute(random_patches(before, TINY), before)
        stale = field.clone()
        manager.execute(patches, grids)
        assert [batch.budget for batch in manager.last_batches] == [8]
        field.copy_(stale)
        assert_differ(captured.graph.replay()[: len(wanted)], wanted, ours, name)


# --- weights ----------------------------------------------------------------------------------------------------------

SMALL = replace(TINY, depth=1, hidden_size=16, intermediate_size=20, out_hidden_size=12, patch_size=4, image_size=12)
KERNELS = {"patch_embed.proj.weight": (16, 3, 2, 4, 4), "downsample.weight": (12, 16, 2, 2)}


def new_encoder(config=SMALL):
    """A tower whose parameters are all NaN: a parameter that loading forgets stays NaN."""
    encoder = Glm4vVisionTransformer.from_config(config)
    for parameter in encoder.parameters():
        nn.init.constant_(parameter, float("nan"))
    return encoder


def released(config=SMALL):
    """Module name -> random tensor, convolution kernels in their own shape: as in released checkpoints."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in new_encoder(config).named_parameters()} | KERNELS
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def separate_qkv(state):
    parts = {}
    for name, tensor in state.items():
        pieces = tensor.chunk(3) if ".qkv." in name else [tensor]
        parts |= {name.replace(".qkv.", f".{p}."): x for p, x in zip("qkv", pieces, strict=False)}
    return parts


def fused_gate_up(state):
    fused = {}
    for name, tensor in state.items():
        if ".gate_proj." in name:
            name, tensor = name.replace("gate", "gate_up"), torch.cat([tensor, state[name.replace("gate", "up")]])
        if ".up_proj." not in name:
            fused[name] = tensor
    return fused


def prefixed(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


NAMINGS = {
    "released": lambda state: prefixed("model.visual.", state),
    "short prefix": lambda state: prefixed("visual.", state),
    "the tower alone": lambda state: state,
    "separate q, k, v": lambda state: prefixed("model.visual.", separate_qkv(state)),
    "fused gate and up": lambda state: prefixed("visual.", fused_gate_up(state)),
    "both, reversed": lambda state: dict(reversed(prefixed("visual.", fused_gate_up(separate_qkv(state))).items())),
}


def load_error(encoder, weights):
    """The lines of the one error: kind of complaint -> its text."""
    with pytest.raises(ValueError, match="the weights do not match the model") as caught:
        encoder.load_weights(weights.items())
    title, *lines = str(caught.value).splitlines()
    assert title.startswith("Glm4vVisionTransformer: ")
    return dict(re.match(r"  (\w+) \(\d+\): (.*)", line).groups() for line in lines)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_fills_every_parameter(naming, bias):
    """Oracle: the tensors themselves; q, k, v are the rows of qkv, gate and up those of gate_up, in this order."""
    config = replace(SMALL, attention_bias=bias)
    encoder, state = new_encoder(config), released(config)
    renamed = NAMINGS[naming](state)
    assert any("gate_up_proj" in name for name in renamed) == ("fused" in naming or "both" in naming)
    assert encoder.load_weights(renamed.items()) == set(state) == set(dict(encoder.named_parameters()))
    for name, parameter in encoder.named_parameters():
        assert torch.equal(parameter, state[name].reshape(parameter.shape)), name


def test_the_names_are_transformers(theirs):
    """The parameters have the names and sizes of `Glm4vVisionModel`, kernels flattened."""
    state = {name: tensor.numel() for name, tensor in theirs.state_dict().items()}
    assert {name: p.numel() for name, p in Glm4vVisionTransformer(TINY).named_parameters()} == state


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row[1])
def test_golden_names(row):
    """Oracle: vLLM 0.33.0's name maps, where gate and up are one matrix. The language model's names are refused."""
    _, name, _, target, shard = row
    complaints = load_error(new_encoder(), {name: torch.empty(0)})
    if not target.startswith("visual."):
        assert complaints["unexpected"] == name
        return
    half = ("gate_proj", "up_proj")[shard] if "gate_up_proj" in target else None
    ours = target.removeprefix("visual.").replace("gate_up_proj", half or "gate_up_proj")
    assert set(complaints) == {"misshapen", "missing"}
    assert complaints["misshapen"].startswith(name + " is (0,), expected ")
    assert ours not in complaints["missing"].split(", ")


def test_what_does_not_fit_is_listed():
    """Every complaint in one error, and nothing is copied."""
    encoder, state = new_encoder(), prefixed("visual.", fused_gate_up(released()))
    del state["visual.embeddings.position_embedding.weight"]
    state |= {
        "visual.blocks.0.mlp.gate_up_proj.weight": torch.zeros(22, 16),
        "visual.merger.ln_q.weight": torch.zeros(12),
        "visual.downsample.weight": torch.zeros(12, 16, 3, 3),
    }
    complaints = load_error(encoder, state)
    assert complaints["missing"] == "embeddings.position_embedding.weight"
    assert complaints["unexpected"] == "visual.merger.ln_q.weight"
    assert complaints["misshapen"] == ", ".join(
        [
            "visual.blocks.0.mlp.gate_proj.weight is (11, 16), expected (12, 16)",
            "visual.blocks.0.mlp.up_proj.weight is (11, 16), expected (12, 16)",
            "visual.downsample.weight is (12, 16, 3, 3), expected (12, 16, 2, 2)",
        ]
    )
    assert all(parameter.isnan().all() for parameter in encoder.parameters())


def test_gate_and_up_given_twice_are_refused():
    state = released()
    complaints = load_error(new_encoder(), state | fused_gate_up(state))
    assert set(complaints) == {"repeated"}
    assert len(complaints["repeated"].split(", ")) == 4


# --- building and calling ---------------------------------------------------------------------------------------------

CONFIG_JSON = {  # as GLM-4.1V-9B's config.json has it
    "hidden_size": 1536, "depth": 24, "num_heads": 12, "attention_bias": False, "intermediate_size": 13696,
    "hidden_act": "silu", "hidden_dropout_prob": 0.0, "initializer_range": 0.02, "image_size": 336, "patch_size": 14,
    "out_hidden_size": 4096, "rms_norm_eps": 1e-05, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def test_config_from_every_source():
    """A dict from config.json, the whole model's dict, and transformers' configs describe one tower."""
    from transformers.models.glm4v import Glm4vConfig

    whole = Glm4vConfig()
    for source in (CONFIG_JSON, {"model_type": "glm4v", "vision_config": CONFIG_JSON}, whole, whole.vision_config):
        assert Glm4vVisionConfig.from_hf(source) == Glm4vVisionConfig()
    assert Glm4vVisionConfig().num_positions == 24 * 24
    assert Glm4vVisionConfig.from_hf(CONFIG_JSON | {"in_chans": 1}).patch_values == 1 * 2 * 14 * 14


def test_from_config_takes_all_of_them(theirs):
    shapes = {name: p.shape for name, p in Glm4vVisionTransformer.from_config(TINY).named_parameters()}
    for config in (asdict(TINY), theirs.config, theirs.config.to_dict()):
        encoder = Glm4vVisionTransformer.from_config(config, attention="sdpa")
        assert encoder.config == TINY
        assert encoder.attention == "sdpa"
        assert {name: p.shape for name, p in encoder.named_parameters()} == shapes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: the tower is written for 'silu', got 'gelu'"),
        ({"hidden_size": 66}, "hidden_size: must be num_heads times .* got 66 for 4 heads"),
        ({"num_heads": 32}, "hidden_size: must be num_heads times .* multiple of 4, got 64 for 32 heads"),
        ({"image_size": 13}, "image_size: must be at least patch_size=14, got 13"),
    ],
)
def test_a_config_that_cannot_be_built_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        Glm4vVisionTransformer.from_config(asdict(TINY) | changed)


def test_a_config_of_the_wrong_kind_is_named():
    with pytest.raises(TypeError, match="config: expected a dict or a transformers config, got str"):
        Glm4vVisionTransformer.from_config("zai-org/GLM-4.1V-9B-Thinking")


# --- with a GPU: python -m pytest -m gpu ------------------------------------------------------------------------------


@pytest.mark.gpu
@torch.no_grad()
def test_graphs_equal_eager_on_the_gpu(theirs):
    """Oracle: the float32 tower on the CPU; CUDA graphs of the bfloat16 tower come as near as it rounds."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    grids = GRIDS["images and videos"]
    patches = random_patches(grids, TINY)
    exact = run_theirs(theirs, patches, grids)
    encoder = same_weights("glm4v", theirs, TINY).to("cuda", torch.bfloat16)
    manager = EncoderGraphManager(encoder, budgets=[32, 64], max_items=4, max_frames=4, progress=False)
    for _ in range(2):
        outputs = torch.cat(manager.execute(patches.cuda(), grids)).cpu()
        assert_agree(outputs, exact.double(), HALF_STEPS)
    assert manager.stats().misses == 0
