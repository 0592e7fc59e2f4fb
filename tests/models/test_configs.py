"""data/configs: the released shapes.

Oracles: transformers' classes on `meta`, and published counts.
"""

import json
import re
from functools import cache

import pytest
import torch
from random_models import NEEDS_5_23
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

import refvl
from refvl.language.step_vl import PerceptionEncoderConfig
from refvl.paths import DATA
from refvl.positions import mrope_axis_of_pairs

CONFIGS = DATA / "configs"


def read(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


@cache
def build(name: str):
    return refvl.load(str(CONFIGS / f"{name}.json"), weights="random", device="meta")


@cache
def build_theirs(name: str):
    """transformers' whole model of the config's model_type."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**read(name)))
    model.tie_weights()
    return model


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


def counted(name: str):
    """(model, numbers of its tower, of its text model), as the table in README has them."""
    vlm = build(name)
    tower, text = count(vlm.encoder), count(vlm.language_model)
    assert readme_row(name).endswith(f"| {tower + text:,} | {tower:,} |")
    return vlm, tower, text


def flat_shapes(named_tensors) -> dict[str, tuple]:
    """name -> shape, a convolution kernel as the matrix it is here."""
    return {name: tuple(p.flatten(1).shape) if p.ndim > 2 else tuple(p.shape) for name, p in named_tensors}


def readme_row(stem: str) -> str:
    return next(row for row in (CONFIGS / "README.md").read_text().splitlines() if row.startswith(f"| {stem}.json |"))


# What a count of parameters does not show: name -> (key of the text config, M-RoPE's theta, sections), and tokens
OTHER_VALUES = {
    "Qwen2.5-VL-7B-Instruct": (1e6, [16, 24, 24], 151655, 151656),
    "Qwen3-VL-8B-Instruct": (5e6, [24, 20, 20], 151655, 151656),
    "GLM-4.1V-9B-Thinking": (1e4, [8, 12, 12], 151343, 151344),
    "GLM-4.6V": (5e5, [8, 12, 12], 151363, 151364),
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_positions_and_tokens_are_the_released_ones(name):
    """Oracle: the table above; sources in data/configs/README.md."""
    config, (theta, section, image, video) = AutoConfig.for_model(**read(name)), OTHER_VALUES[name]
    rope = config.text_config.rope_parameters
    assert (rope["rope_theta"], rope["mrope_section"]) == (theta, section)
    assert (config.image_token_id, config.video_token_id) == (image, video)


# What public reports count in the released files, and to which decimal place; for 72B no report was found, only the
# rounded 73.4 billion. For GLM the routers' selection biases are included; for GLM-OCR without its
# multi-token-prediction layer, which no transformers model holds. Sources: data/configs/README.md
TOTALS = {
    "Qwen2.5-VL-3B-Instruct": (3_754_622_976, 0),
    "Qwen2.5-VL-7B-Instruct": (8_292_166_656, 0),
    "Qwen2.5-VL-32B-Instruct": (33_452_718_336, 0),
    "Qwen2.5-VL-72B-Instruct": (73.4e9, -8),
    "Qwen3-VL-2B-Instruct": (2_127_532_032, 0),
    "Qwen3-VL-4B-Instruct": (4_437_815_808, 0),
    "Qwen3-VL-8B-Instruct": (8_767_123_696, 0),
    "Qwen3-VL-32B-Instruct": (33_357_390_064, 0),
    "Qwen3-VL-30B-A3B-Instruct": (31_070_754_032, 0),
    "Qwen3-VL-235B-A22B-Instruct": (235_670_022_896, 0),
    "Qwen3.5-0.8B": (852_985_920, 0),
    "Qwen3.5-9B": (9_409_813_744, 0),
    "Qwen3.6-27B": (27_356_728_560, 0),  # of Qwen3.6 less the layer below
    "Qwen3.6-35B-A3B": (35_107_181_936, 0),
    "Qwen3.8-27B": (27_356_728_560, 0),
    "GLM-4.1V-9B-Thinking": (20_585_554_944 // 2, 0),  # bytes of the safetensors index, two for each bfloat16
    "GLM-4.5V": (107_710_933_120, 0),
    "GLM-4.6V-Flash": (10_292_777_472, 0),
    "GLM-4.6V": (107_710_933_120, 0),
    "GLM-OCR": (1_107_405_824, 0),
}
all_models = pytest.mark.parametrize("name", TOTALS)


@all_models
def test_a_release_is_as_reported_and_as_transformers_has_it(name):
    """Oracles: the table above, and README's; transformers' model: names, and shapes up to
    flattened kernels."""
    vlm, model = build(name), build_theirs(name)
    assert all(p.is_meta for p in vlm.encoder.parameters())
    assert flat_shapes(vlm.encoder.named_parameters()) == flat_shapes(model.model.visual.named_parameters())
    theirs = {n.replace("model.language_model.", "model."): p.shape for n, p in model.named_parameters()}
    ours = {n: p.shape for n, p in vlm.language_model.named_parameters()}
    assert ours == {n: shape for n, shape in theirs.items() if not n.startswith("model.visual.")}
    biases = sum(b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias"))
    found, (total, place) = count(vlm.encoder) + count(vlm.language_model) + biases, TOTALS[name]
    assert round(found, place) == total
    assert readme_row(name).endswith(f"| {found:,} | {count(vlm.encoder):,} |")


@all_models
def test_mrope_sections_fill_what_rotates(name):
    """Equation: t, h and w together have as many pairs as rotate, each its share; interleaved
    within their thirds."""
    text = build(name).config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rope = text.rope_parameters
    section, share = rope["mrope_section"], rope.get("partial_rotary_factor", 1.0)
    axes = mrope_axis_of_pairs(section, interleaved=rope.get("mrope_interleaved", False))
    assert len(axes) == head_dim * share / 2 and axes.bincount().tolist() == section


# Step3: transformers has no model of it. Names and shapes of one layer of each sort, as vLLM's loader takes them.
STEP3_LAYER = {
    "input_layernorm.weight": (7168,), "post_attention_layernorm.weight": (7168,),
    "self_attn.q_proj.weight": (2048, 7168), "self_attn.k_proj.weight": (256, 7168),
    "self_attn.v_proj.weight": (256, 7168), "self_attn.inter_norm.weight": (2048,),
    "self_attn.wq.weight": (64 * 256, 2048), "self_attn.o_proj.weight": (7168, 64 * 256),
}  # fmt: skip
STEP3_DENSE = {f"mlp.{n}_proj.weight": (18432, 7168) for n in ("gate", "up")} | {"mlp.down_proj.weight": (7168, 18432)}
STEP3_EXPERTS = {
    "moe.gate.weight": (48, 7168), "moe.gate_proj.weight": (48, 5120, 7168), "moe.up_proj.weight": (48, 5120, 7168),
    "moe.down_proj.weight": (48, 7168, 5120), "share_expert.gate_proj.weight": (5120, 7168),
    "share_expert.up_proj.weight": (5120, 7168), "share_expert.down_proj.weight": (7168, 5120),
}  # fmt: skip


def test_step3_has_the_reported_number_of_parameters():
    """Oracle: the model card: 321 billion, 316 of them the language model, 38 active for a token, 5
    dense layers."""
    vlm, tower, text = counted("Step3")
    assert (round((tower + text) / 1e9), round(text / 1e9), round(tower / 1e9)) == (321, 316, 5)
    config = vlm.config.text_config
    active = text - config.vocab_size * config.hidden_size  # the embedding is a table, nothing is computed with it
    for name, parameter in vlm.language_model.named_parameters():
        if re.search(r"moe\.\w+_proj", name):
            active -= parameter.numel() * (config.moe_num_experts - config.moe_top_k) // config.moe_num_experts
    assert round(active / 1e9) == 38
    assert config.num_hidden_layers - len(config.moe_layers) == 5


def test_step3_lists_the_tensors_of_the_loader():
    """Oracle: names and shapes that vLLM's loader splits, stacks and renames."""
    expected = {"model.embed_tokens.weight": (128815, 7168), "model.norm.weight": (7168,)}
    expected |= {"lm_head.weight": (128815, 7168)}
    for i in range(61):
        sort = STEP3_EXPERTS if 4 <= i <= 59 else STEP3_DENSE
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in (STEP3_LAYER | sort).items()}
    assert {name: tuple(p.shape) for name, p in build("Step3").language_model.named_parameters()} == expected


def test_step3_vl_10b_is_transformers_tower_and_qwen3():
    """Oracles: transformers' tower of Step-3.7 and its Qwen3 of the same sizes, parameter by
    parameter; the name."""
    vlm, tower, text = counted("Step3-VL-10B")
    assert round((tower + text) / 1e9) == 10
    assert (vlm.encoder.image_tokens, vlm.encoder.crop_tokens) == (169, 81)
    with torch.device("meta"):
        qwen3 = AutoModelForCausalLM.from_config(vlm.config.text_config)
    assert flat_shapes(qwen3.named_parameters()) == flat_shapes(vlm.language_model.named_parameters())
    if "step3p7" in CONFIG_MAPPING:
        with torch.device("meta"):
            theirs = AutoModel.from_config(CONFIG_MAPPING["step3p7"](text_config={"num_hidden_layers": 1}))
        assert count(theirs.vision_model) + count(theirs.multi_modal_projector) == tower
    released, defaults = vlm.config.vision_config, PerceptionEncoderConfig()
    for name in ("width", "layers", "heads", "patch_size", "image_size", "mlp_ratio"):
        assert getattr(defaults, name) == getattr(released, name)


@NEEDS_5_23
def test_step_3_7_flash_has_as_many_numbers_as_its_files():
    """Oracles: the number in the released GGUF files of the text model, and transformers' model of
    the same config."""
    vlm, tower, text = counted("Step-3.7-Flash")
    biases = sum(b.numel() for name, b in vlm.language_model.named_buffers() if name.endswith("correction_bias"))
    frequencies = vlm.config.text_config.head_dim // 2  # GGUF stores them as a tensor
    assert text + biases + frequencies == 196_956_130_432
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**read("Step-3.7-Flash")))
    assert count(theirs) == tower + text and tower == count(build("Step3-VL-10B").encoder)


MINICPM = {  # the text model, what public reports count, and to which decimal place
    "MiniCPM-V-2": (GraniteForCausalLM, 3.43e9, -7),
    "MiniCPM-Llama3-V-2_5": (LlamaForCausalLM, 8.54e9, -7),
    "MiniCPM-V-2_6": (Qwen2ForCausalLM, 8_099_175_152, 0),
    "MiniCPM-V-4": (LlamaForCausalLM, 4.06e9, -7),
    "MiniCPM-V-4_5": (Qwen3ForCausalLM, 8.70e9, -7),
}


@pytest.mark.parametrize("name", MINICPM)
def test_minicpm_is_as_reported_and_its_text_model_is_transformers(name):
    """Oracles: public counts; the text model's class that the release names, its parameters and shapes."""
    vlm, tower, text = counted(name)
    cls, total, place = MINICPM[name]
    assert round(tower + text, place) == total
    with torch.device("meta"):
        expected = cls(vlm.config.get_text_config())
    assert type(vlm.language_model.model) is type(expected.model)
    shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (vlm.language_model, expected)]
    assert shapes[0] == shapes[1]


@NEEDS_5_23
@pytest.mark.parametrize(
    ("name", "total"), [("MiniCPM-V-4_6", 1_300_428_016), ("MiniCPM-V-4.7-35B-A3B", 35_212_875_824)]
)
def test_folded_versions_have_the_reported_number_of_parameters(name, total):
    """Oracles: the totals in public listings of the releases, and transformers' models.

    The vocabulary of 4.7 is inferred: one token more or less changes the total by two rows of the
    text model.
    """
    _, tower, text = counted(name)
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(CONFIGS / f"{name}.json"))
    assert tower + text == count(theirs) == total
