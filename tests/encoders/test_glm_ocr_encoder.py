"""The GLM-OCR tower: configurations, names and weights. What every encoder keeps is in `contracts/test_encoders.py`."""

from dataclasses import asdict, replace

import pytest
import torch
from closeness import assert_agree
from towers import random_patches, run_theirs, same_weights, transformers_tower

from refvl.encoders import GlmOcrVisionConfig, GlmOcrVisionTransformer

TINY = GlmOcrVisionConfig.tiny()


@pytest.fixture(scope="module")
def theirs():
    return transformers_tower("glm_ocr", TINY, std=0.12)


@pytest.fixture(scope="module")
def ours(theirs):
    return same_weights("glm_ocr", theirs, TINY)


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": False}, {"spatial_merge_size": 3, "patch_size": 8, "in_channels": 1, "rms_norm_eps": 1e-3}],
    ids=str,
)
@torch.no_grad()
def test_other_configurations_equal_transformers(changes):
    """Oracle: `GlmOcrVisionModel`; sides that 2 and 3 divide."""
    config, grids = replace(TINY, depth=2, **changes), [(1, 6, 12), (2, 12, 6)]
    tower, patches = transformers_tower("glm_ocr", config, std=0.1), random_patches(grids, config)
    want = run_theirs(tower, patches, grids)
    assert_agree(same_weights("glm_ocr", tower, config)(patches, grids), want, tower)


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
