"""The GLM-OCR tower: equal to transformers' on the same weights, its replays to itself. Its parts are GLM-4.1V's."""

from dataclasses import asdict, fields, replace

import pytest
import torch
from closeness import assert_agree
from torch import nn

from refvl.encoders import GlmOcrVisionConfig, GlmOcrVisionTransformer
from refvl.graphs import EncoderGraphManager

TINY = GlmOcrVisionConfig.tiny()
GRIDS = {
    "one image": [(1, 8, 12)],
    "one merged token": [(1, 2, 2)],
    "odd aspect ratios": [(1, 2, 26), (1, 30, 2)],
    "one video": [(3, 4, 6)],
    "images and videos": [(1, 8, 12), (3, 6, 10), (1, 4, 4), (2, 6, 6)],
}


def transformers_tower(config, *, std):
    """transformers' tower with normal weights (biases and norms too, so that each of them counts)."""
    from transformers.models.glm_ocr.configuration_glm_ocr import GlmOcrVisionConfig as UpstreamConfig
    from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrVisionModel

    tower = GlmOcrVisionModel(UpstreamConfig(**asdict(config))).eval()
    torch.manual_seed(0)
    for name, parameter in tower.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=std)
    return tower


def same_weights(tower, config):
    encoder = GlmOcrVisionTransformer.from_config(config).eval()
    encoder.load_weights(tower.state_dict().items())
    return encoder


@pytest.fixture(scope="module")
def theirs():
    return transformers_tower(TINY, std=0.12)


@pytest.fixture(scope="module")
def ours(theirs):
    return same_weights(theirs, TINY)


def random_patches(grids, config=TINY, seed=1):
    num_patches = sum(t * h * w for t, h, w in grids)
    return torch.randn(num_patches, config.patch_values, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run_theirs(tower, patches, grids):
    return tower(patches, torch.tensor(grids)).pooler_output


@pytest.mark.parametrize("name", GRIDS)
@torch.no_grad()
def test_equals_transformers(name, ours, theirs):
    """Oracle: `GlmOcrVisionModel`."""
    patches = random_patches(GRIDS[name])
    want = run_theirs(theirs, patches, GRIDS[name])
    assert_agree(ours(patches, GRIDS[name]), want, ours)
    assert want.std() > 0.3


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": False}, {"spatial_merge_size": 3, "patch_size": 8, "in_channels": 1, "rms_norm_eps": 1e-3}],
    ids=str,
)
@torch.no_grad()
def test_other_configurations_equal_transformers(changes):
    """Oracle: as above; sides that 2 and 3 divide."""
    config, grids = replace(TINY, depth=2, **changes), [(1, 6, 12), (2, 12, 6)]
    tower, patches = transformers_tower(config, std=0.1), random_patches(grids, config)
    want = run_theirs(tower, patches, grids)
    assert_agree(same_weights(tower, config)(patches, grids), want, tower)


@torch.no_grad()
def test_bfloat16_is_close(ours, theirs):
    """Oracle: the float32 tower."""
    grids = GRIDS["images and videos"]
    patches = random_patches(grids)
    half = same_weights(theirs, TINY).bfloat16()(patches, grids)
    assert_agree(half, ours(patches, grids).double(), 12 * TINY.depth)  # what a block rounds to bfloat16


@torch.no_grad()
def test_replay_equals_eager(ours):
    """Oracle: each item alone through the encoder; before each batch, all that a graph holds is NaN or wrong."""
    manager = EncoderGraphManager(ours, budgets=[8, 32], max_items=3, max_frames=4, progress=False)
    manager.capture()
    for grids in ([(1, 4, 6)], [(3, 2, 4), (1, 2, 2), (1, 8, 4)], [(1, 4, 6)], [(1, 12, 12), (2, 2, 2)]):
        for captured in manager.captured.values():
            captured.pixel_values.fill_(float("nan"))
            for out in (out for operation in captured.graph.operations for out in operation.outputs):
                out.fill_(float("nan") if out.is_floating_point() else 1)
        patches = random_patches(grids)
        rows = patches.split([t * h * w for t, h, w in grids])
        for output, part, grid in zip(manager.execute(patches, grids), rows, grids, strict=True):
            assert_agree(output, ours(part, [grid]), ours)
    assert (manager.stats().hits, manager.stats().misses) == (6, 1)


def test_forward_reads_nothing_back():
    """On the meta device no value exists: any item(), tolist(), nonzero or branch on a tensor would raise."""
    with torch.device("meta"):
        encoder = GlmOcrVisionTransformer.from_config(TINY)
    plan = encoder.plan(GRIDS["images and videos"])
    assert all(getattr(plan, f.name).is_meta for f in fields(plan) if f.type is torch.Tensor)
    out = encoder(torch.empty(len(plan.cos), TINY.patch_values, device="meta"), metadata=plan)
    assert out.shape == (len(plan.cos) // 4, TINY.out_hidden_size)


@pytest.mark.parametrize("prefix", ["", "visual.", "model.visual."])
def test_both_namings_fill_every_parameter(prefix, theirs, ours):
    """Oracle: transformers' weights; q, k, v are the rows of qkv, gate and up those of gate_up, in this order."""
    state = theirs.state_dict()
    renamed = {}
    for name, tensor in state.items():
        if ".qkv." in name:
            renamed |= {name.replace("qkv", part): x for part, x in zip("qkv", tensor.chunk(3), strict=True)}
        elif ".gate_proj." in name:
            up = state[name.replace("gate", "up")]
            renamed[name.replace("gate", "gate_up")] = torch.cat([tensor, up])
        elif ".up_proj." not in name:
            renamed[name] = tensor
    encoder = GlmOcrVisionTransformer(TINY)
    assert encoder.load_weights((prefix + name, tensor) for name, tensor in renamed.items()) == set(state)
    assert all(torch.equal(a, b) for a, b in zip(encoder.parameters(), ours.parameters(), strict=True))


def test_the_weights_of_the_other_tower_are_refused():
    """GLM-4.1V's have a position table and a norm that this tower lacks, and lack its norms of q and k."""
    from refvl.encoders import Glm4vVisionConfig, Glm4vVisionTransformer

    other = Glm4vVisionTransformer(Glm4vVisionConfig.tiny()).state_dict()
    with pytest.raises(ValueError, match="GlmOcrVisionTransformer: the weights do not match") as caught:
        GlmOcrVisionTransformer(TINY).load_weights(other.items())
    assert "embeddings.position_embedding.weight" in str(caught.value)
    assert "blocks.0.attn.q_norm.weight" in str(caught.value)


def test_config_from_every_source(theirs):
    from transformers.models.glm_ocr import GlmOcrConfig

    whole = GlmOcrConfig()
    for source in (whole, whole.to_dict(), whole.vision_config, {}):
        assert GlmOcrVisionConfig.from_hf(source) == GlmOcrVisionConfig()
    assert GlmOcrVisionConfig.from_hf(theirs.config) == TINY


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: the tower is written for 'silu', got 'gelu'"),
        ({"hidden_size": 66}, "hidden_size: must be num_heads times .* got 66 for 4 heads"),
    ],
)
def test_a_config_that_cannot_be_built_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        GlmOcrVisionTransformer.from_config(asdict(TINY) | changed)


@pytest.mark.parametrize(
    ("shape", "kwargs", "message"),
    [
        ((96, 1176), {}, "give exactly one of grid_thw and metadata"),
        ((95, 1176), {"grid_thw": [(1, 8, 12)]}, "pixel_values: dimension 0 must be 96, got 95"),
        ((96, 1176), {"grid_thw": [(1, 9, 12)]}, r"grid_thw\[0\]: .* multiples of spatial_merge_size=2"),
    ],
)
def test_inputs_that_do_not_fit_are_named(shape, kwargs, message, ours):
    with pytest.raises(ValueError, match=message):
        ours(torch.zeros(shape), **kwargs)


@torch.no_grad()
def test_no_items_give_no_embeddings(ours):
    assert ours(torch.empty(0, TINY.patch_values), []).shape == (0, TINY.out_hidden_size)
