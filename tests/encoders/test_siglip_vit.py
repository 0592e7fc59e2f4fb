"""The tower of MiniCPM-V 2.0: equal to timm's."""

import pytest
import torch
from closeness import assert_agree
from towers import golden

from refvl.encoders import SiglipViT, SiglipViTConfig

GOLDEN, ARRAYS = golden("siglip_vit")


def tower(**kwargs):
    vit = SiglipViT.from_config(GOLDEN["config"], **kwargs)
    vit.load_weights((name.removeprefix("sd/"), x) for name, x in ARRAYS.items() if name.startswith("sd/"))
    return vit.eval()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["name"])
@pytest.mark.parametrize("drop", [False, True])
@torch.no_grad()
def test_golden(case, drop):
    """Oracle: timm 1.0.31 `forward_features`: the table's own size, another grid, and sides that need padding."""
    want = ARRAYS[f"{case['name']}/y_drop_last" if drop else f"{case['name']}/y"]
    got = tower(drop_last_layer=drop)(ARRAYS[f"{case['name']}/x"])
    assert got.shape == (1, case["tokens"], 48)
    assert_agree(got, want, tower())


def test_defaults_are_so400m():
    """The sizes of vit_so400m_patch14_siglip_384, which MiniCPM-V 2.0 names."""
    config = SiglipViTConfig()
    assert (config.hidden_size, config.depth, config.head_dim) == (1152, 27, 72)
    assert (config.intermediate_size, config.image_size) == (4304, 384)
    named = {"vision_encoder": "vit_so400m_patch14_siglip_384.webli", "image_size": 448}
    assert SiglipViTConfig.from_hf(named | {"num_heads": 36}) == config


def test_another_tower_is_named():
    with pytest.raises(ValueError, match="vision_encoder: must begin with .*siglip_384', got 'eva02'"):
        SiglipViT.from_config({"vision_encoder": "eva02"})
