"""The tower of MiniCPM-V 2.0: equal to timm's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree

from refvl.encoders import SiglipViT, SiglipViTConfig

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "siglip_vit.json").read_text())
ARRAYS = np.load(FOLDER / "siglip_vit.npz")


def array(name):
    return torch.from_numpy(ARRAYS[name].astype(np.float32))


def weights(prefix=""):
    return {prefix + name.removeprefix("sd/"): array(name) for name in ARRAYS.files if name.startswith("sd/")}


def tower(**kwargs):
    vit = SiglipViT.from_config(GOLDEN["config"], **kwargs)
    vit.load_weights(weights().items())
    return vit.eval()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["name"])
@pytest.mark.parametrize("drop", [False, True])
@torch.no_grad()
def test_golden(case, drop):
    """Oracle: timm 1.0.31 `forward_features`: the table's own size, another grid, and sides that need padding."""
    want = array(f"{case['name']}/y_drop_last" if drop else f"{case['name']}/y")
    got = tower(drop_last_layer=drop)(array(f"{case['name']}/x"))
    assert got.shape == (1, case["tokens"], 48)
    assert_agree(got, want, tower())


def test_defaults_are_so400m():
    """The sizes of vit_so400m_patch14_siglip_384, which MiniCPM-V 2.0 names."""
    config = SiglipViTConfig()
    assert (config.hidden_size, config.depth, config.head_dim) == (1152, 27, 72)
    assert (config.intermediate_size, config.image_size) == (4304, 384)
    named = {"vision_encoder": "vit_so400m_patch14_siglip_384.webli", "image_size": 448}
    assert SiglipViTConfig.from_hf(named | {"num_heads": 36}) == config


@torch.no_grad()
def test_the_attention_pool_is_left_out_and_the_dropped_block_may_be_there():
    names = weights("vpm.")
    pool = {"vpm.attn_pool.latent": torch.zeros(1, 1, 48), "vpm.attn_pool.mlp.fc1.weight": torch.zeros(2, 48)}
    x = array("wide/x")
    whole = SiglipViT.from_config(GOLDEN["config"])
    whole.load_weights((names | pool).items())
    assert torch.equal(whole(x), tower()(x))
    short = SiglipViT.from_config(GOLDEN["config"], drop_last_layer=True)
    short.load_weights(item for item in names.items() if ".blocks.2." not in item[0])
    assert torch.equal(short(x), tower(drop_last_layer=True)(x))


def test_another_tower_is_named():
    with pytest.raises(ValueError, match="vision_encoder: must begin with .*siglip_384', got 'eva02'"):
        SiglipViT.from_config({"vision_encoder": "eva02"})
