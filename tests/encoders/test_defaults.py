"""Defaults of the configs are the sizes of a released model. Oracle: its config.json in data/configs."""

from dataclasses import fields, replace

import pytest

from refvl import encoders
from refvl.encoders.minicpmv import MiniCPMVEncoderConfig
from refvl.encoders.siglip_vit import SiglipViTConfig
from refvl.families import read_config
from refvl.paths import DATA

RELEASES = {
    "Qwen2.5-VL-7B-Instruct": encoders.Qwen2_5_VisionTransformer,
    "Qwen3-VL-8B-Instruct": encoders.Qwen3VLVisionTransformer,
    "GLM-4.1V-9B-Thinking": encoders.Glm4vVisionTransformer,
    "GLM-OCR": encoders.GlmOcrVisionTransformer,
    "Step3": encoders.Step3VisionEncoder,
}


def released(name: str):
    return read_config(DATA / "configs" / f"{name}.json")


@pytest.mark.parametrize("name", RELEASES)
def test_a_tower_without_sizes_is_the_released_one(name):
    config_class = RELEASES[name].config_class
    config = config_class.from_hf(released(name))
    if name == "Step3":  # vLLM's default, which the release overrides
        config = replace(config, intermediate_size=3072)
    assert config_class() == config


def test_a_text_model_of_step3_without_sizes_is_the_released_one():
    config = released("Step3").get_text_config()
    default = type(config)()
    names = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "moe_top_k", "moe_num_experts")
    assert {name: getattr(default, name) for name in names} == {name: getattr(config, name) for name in names}


def test_a_vision_config_of_step3_without_sizes_is_the_released_one():
    config = released("Step3").vision_config
    default = type(config)()
    names = type(config).__annotations__.keys() - {"intermediate_size", "crop_size", "max_side", "layer_norm_eps"}
    assert {name: getattr(default, name) for name in names} == {name: getattr(config, name) for name in names}


def test_minicpmv_without_sizes_is_the_released_one():
    default = {field.name: field.default for field in fields(MiniCPMVEncoderConfig)}
    assert default["query_num"] == released("MiniCPM-V-4_5").query_num
    assert SiglipViTConfig().image_size == 384  # so400m_patch14_siglip_384, which MiniCPM-V 2.0 names
