"""Tokens of a picture and the attention of a tower. Oracle: vLLM's golden counts, transformers' towers and processors,
and `refvl.attention`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import CLIPVisionConfig, Qwen2_5_VLConfig

from refvl import attention
from refvl.encoders import get_vision_encoder_info, get_vit_attn_backend

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "vision_utils.json").read_text())["encoder_info"]
MODEL_TYPES = {"clip": "clip_vision_model", "siglip": "siglip_vision_model", "pixtral": "pixtral"}


def model_config(encoder, image_size, patch_size, **others):
    vision = SimpleNamespace(model_type=MODEL_TYPES[encoder], image_size=image_size, patch_size=patch_size)
    return SimpleNamespace(vision_config=vision, **others)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['encoder']} {c['config']}")
def test_equals_golden_data(case):
    """Oracle: vLLM 0.33.0, [width, height, tokens, (across, down)]."""
    info = get_vision_encoder_info(model_config(case["encoder"], **case["config"]))
    assert type(info).__name__ == case["auto_class"]
    for name in ("get_image_size", "get_patch_size", "get_patch_grid_length"):
        assert getattr(info, name)() == case[name]
    for width, height, tokens, *grid in case["tokens"]:
        assert info.get_num_image_tokens(image_width=width, image_height=height) == tokens
        if grid:
            assert list(info.get_patch_grid_size(image_width=width, image_height=height)) == grid[0]


def test_a_thread_keeps_one_token():
    info = get_vision_encoder_info(model_config("pixtral", 1024, 16))
    assert info.get_patch_grid_size(image_width=1, image_height=3000) == (1, 64)
    assert info.get_patch_grid_size(image_width=3000, image_height=1) == (64, 1)


@pytest.mark.parametrize("config", [Qwen2_5_VLConfig(), CLIPVisionConfig()], ids=["Qwen", "a vision config"])
def test_unknown_towers_are_named(config):
    with pytest.raises(ValueError, match="vision_config: model_type must be one of .*clip_vision_model"):
        get_vision_encoder_info(config)


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("head_size", [64, 72, 80, 512])
def test_the_best_backend_is_taken(head_size, device, dtype):
    """Oracle: the list of `refvl.attention`, fastest first; naming a device needs none to be there."""
    best = attention.available_backends(device, dtype, head_size)[0]
    assert get_vit_attn_backend(head_size, dtype, device) == best
    assert best == ("varlen" if device == "cuda" and dtype == torch.bfloat16 and head_size < 512 else "sdpa")
