"""Defaults of the configs are the sizes of a released model. Oracle: its config.json in data/configs.

Of Qwen2.5-VL, GLM-4.1V and GLM-OCR `test_grid_towers.py` shows it.
"""

from dataclasses import replace

from refvl.encoders import Qwen3VLVisionTransformer, Step3VisionEncoder
from refvl.encoders.minicpmv import MiniCPMVEncoderConfig
from refvl.families import read_config
from refvl.paths import DATA


def released(name: str):
    return read_config(DATA / "configs" / f"{name}.json")


def test_towers_without_sizes_are_the_released_ones():
    qwen = Qwen3VLVisionTransformer.config_class
    assert qwen() == qwen.from_hf(released("Qwen3-VL-8B-Instruct"))
    step3 = Step3VisionEncoder.config_class
    config = step3.from_hf(released("Step3"))  # which overrides vLLM's default
    assert step3() == replace(config, intermediate_size=3072)
    queries = MiniCPMVEncoderConfig.__dataclass_fields__["query_num"].default
    assert queries == released("MiniCPM-V-4_5").query_num


def test_configs_of_step3_without_sizes_are_the_released_ones():
    text, vision = released("Step3").get_text_config(), released("Step3").vision_config
    of_text = ["vocab_size", "hidden_size", "num_attention_heads", "head_dim", "moe_top_k", "moe_num_experts"]
    overridden = {"intermediate_size", "crop_size", "max_side", "layer_norm_eps"}
    of_vision = type(vision).__annotations__.keys() - overridden
    for config, names in ((text, of_text), (vision, of_vision)):
        default = type(config)()
        assert [n for n in names if getattr(default, n) != getattr(config, n)] == []
