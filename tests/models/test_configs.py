"""data/configs: the released shapes. Oracles: transformers' classes on `meta`, published counts, the name-map spec."""

import json
import re
from functools import cache

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
)

import refvl
from refvl.paths import DATA
from refvl.positions import mrope_axis_of_pairs

CONFIGS = DATA / "configs"
NAME_MAPS = json.loads((CONFIGS.parents[1] / "tests" / "golden" / "weight_mapping.json").read_text())

# name -> (hidden, layers, heads, kv heads, intermediate, vocabulary, tied embeddings, vision intermediate);
# sources in data/configs/README.md
SHAPES = {
    "Qwen2.5-VL-3B-Instruct": (2048, 36, 16, 2, 11008, 151936, True, 3420),
    "Qwen2.5-VL-7B-Instruct": (3584, 28, 28, 4, 18944, 152064, False, 3420),
    "Qwen2.5-VL-32B-Instruct": (5120, 64, 40, 8, 27648, 152064, False, 3456),
    "Qwen2.5-VL-72B-Instruct": (8192, 80, 64, 8, 29568, 152064, False, 3456),
}
SPECIAL_TOKENS = {
    "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "image_token_id": 151655, "video_token_id": 151656,
}  # fmt: skip

qwen_models = pytest.mark.parametrize("name", SHAPES)


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


def flat_shapes(named_tensors) -> dict[str, tuple]:
    """name -> shape, a convolution kernel as the matrix it is here."""
    return {name: tuple(p.flatten(1).shape) if p.ndim > 2 else tuple(p.shape) for name, p in named_tensors}


def vision_names_of_the_spec(family: str) -> set[str]:
    """The checkpoint names of the tower in weight_mapping.json, without their prefix."""
    names = [row[1] for row in NAME_MAPS[family]]
    return {re.sub(r"^(model\.)?visual\.", "", name) for name in names if "visual." in name}


def readme_row(stem: str) -> str:
    return next(row for row in (CONFIGS / "README.md").read_text().splitlines() if row.startswith(f"| {stem}.json |"))


def test_every_config_has_its_row_here():
    rows = TOTALS.keys() | {"Step3", "Step3-VL-10B", "Step-3.7-Flash"}
    others = {path.stem for path in CONFIGS.glob("*.json") if not path.stem.startswith("MiniCPM")}
    assert others == rows  # MiniCPM-V's: tests/models/test_configs_minicpmv.py


@qwen_models
def test_transformers_reads_the_released_values(name):
    """Oracle: the table above, read back through transformers' own config class."""
    config = Qwen2_5_VLConfig(**read(name))
    text, vision = config.text_config, config.vision_config
    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied, vision_intermediate = SHAPES[name]
    assert (text.hidden_size, text.num_hidden_layers) == (hidden, layers)
    assert (text.num_attention_heads, text.num_key_value_heads) == (heads, kv_heads)
    assert (text.intermediate_size, text.vocab_size) == (intermediate, vocabulary)
    assert config.tie_word_embeddings is tied
    assert text.max_position_embeddings == 128_000
    assert text.rope_parameters["rope_theta"] == 1e6 and text.rope_parameters["mrope_section"] == [16, 24, 24]
    assert (vision.depth, vision.hidden_size, vision.num_heads) == (32, 1280, 16)
    assert (vision.intermediate_size, vision.out_hidden_size) == (vision_intermediate, hidden)
    assert (vision.window_size, vision.fullatt_block_indexes) == (112, [7, 15, 23, 31])
    assert (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size) == (14, 2, 2)
    assert vision.tokens_per_second == 2
    assert read(name).items() >= SPECIAL_TOKENS.items()


def test_tower_of_7b_has_the_reported_number_of_parameters():
    """Oracle: the count that fine-tuning scripts print for the released 7B tower."""
    assert count(build("Qwen2.5-VL-7B-Instruct").encoder) == 676_550_144


def test_the_name_map_of_the_spec_reaches_the_released_tower():
    """Oracle: weight_mapping.json (checkpoint names in three namings): each vision name lands on a parameter we have.

    In the checkpoint q, k and v may be separate; gate and up stay separate here, where upstream fuses them.
    """
    names = build("Qwen2.5-VL-7B-Instruct").encoder.state_dict().keys()
    bare = vision_names_of_the_spec("qwen2_5_vl")
    assert len(bare) == 9
    assert {re.sub(r"\.attn\.[qkv]\.", ".attn.qkv.", name) for name in bare} <= set(names)


# Qwen3-VL, Qwen3.5: name -> (text: hidden, layers, heads, kv heads), (tower: blocks, hidden, deepstack)
QWEN3 = {
    "Qwen3-VL-2B-Instruct": ((2048, 28, 16, 8), (24, 1024, (5, 11, 17))),
    "Qwen3-VL-4B-Instruct": ((2560, 36, 32, 8), (24, 1024, (5, 11, 17))),
    "Qwen3-VL-8B-Instruct": ((4096, 36, 32, 8), (27, 1152, (8, 16, 24))),
    "Qwen3-VL-32B-Instruct": ((5120, 64, 64, 8), (27, 1152, (8, 16, 24))),
    "Qwen3-VL-30B-A3B-Instruct": ((2048, 48, 32, 4), (27, 1152, (8, 16, 24))),
    "Qwen3-VL-235B-A22B-Instruct": ((4096, 94, 64, 4), (27, 1152, (8, 16, 24))),
    "Qwen3.5-0.8B": ((1024, 24, 8, 2), (12, 768, ())),
    "Qwen3.5-9B": ((4096, 32, 16, 4), (27, 1152, ())),
    "Qwen3.6-27B": ((5120, 64, 24, 4), (27, 1152, ())),
    "Qwen3.6-35B-A3B": ((2048, 40, 16, 2), (27, 1152, ())),
    "Qwen3.8-27B": ((5120, 64, 24, 4), (27, 1152, ())),
}


@pytest.mark.parametrize("name", QWEN3)
def test_transformers_reads_the_released_values_of_qwen3(name):
    """Oracle: the table above, and that rows of the tower are as wide as its deeper features make them."""
    vlm, (sizes, (blocks, width, deeper)) = build(name), QWEN3[name]
    c, tower = vlm.language_model.config, vlm.encoder.config
    assert sizes == (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads)
    assert (blocks, width, deeper) == (tower.depth, tower.hidden_size, tower.deepstack_visual_indexes)
    assert vlm.language_model.row_width == c.hidden_size * (1 + len(deeper)) and tower.out_hidden_size == c.hidden_size


# GLM: name -> (text: hidden, layers, heads, kv heads, intermediate, vocabulary, context, rope theta),
# (tower: hidden, heads, intermediate, output), (image and video token); sources in data/configs/README.md
GLM = {
    "GLM-4.1V-9B-Thinking": (
        (4096, 40, 32, 2, 13696, 151552, 65536, 1e4), (1536, 12, 13696, 4096), (151343, 151344),
    ),
    "GLM-4.5V": ((4096, 46, 96, 8, 10944, 151552, 65536, 1e4), (1536, 12, 10944, 4096), (151363, 151364)),
    "GLM-4.6V-Flash": ((4096, 40, 32, 2, 13696, 151552, 131072, 5e5), (1536, 12, 13696, 4096), (151363, 151364)),
    "GLM-4.6V": ((4096, 46, 96, 8, 10944, 151552, 131072, 5e5), (1536, 12, 10944, 4096), (151363, 151364)),
    "GLM-OCR": ((1536, 16, 16, 8, 4608, 59392, 131072, 1e4), (1024, 16, 4096, 1536), (59280, 59281)),
}  # fmt: skip
# The tower's tensors in the released GLM-4.5V files under `model.visual.`, N for the number of a block, F for the
# merger's intermediate size; GLM-4.1V's safetensors index has the same names
GLM_4V_TENSORS = {
    "patch_embed.proj.weight": (1536, 3, 2, 14, 14), "patch_embed.proj.bias": (1536,),
    "post_conv_layernorm.weight": (1536,), "embeddings.position_embedding.weight": (576, 1536),
    "blocks.N.norm1.weight": (1536,), "blocks.N.norm2.weight": (1536,),
    "blocks.N.attn.qkv.weight": (4608, 1536), "blocks.N.attn.proj.weight": (1536, 1536),
    "blocks.N.mlp.gate_proj.weight": (4096, 1536), "blocks.N.mlp.up_proj.weight": (4096, 1536),
    "blocks.N.mlp.down_proj.weight": (1536, 4096), "post_layernorm.weight": (1536,),
    "downsample.weight": (4096, 1536, 2, 2), "downsample.bias": (4096,), "merger.proj.weight": (4096, 4096),
    "merger.post_projection_norm.weight": (4096,), "merger.post_projection_norm.bias": (4096,),
    "merger.gate_proj.weight": ("F", 4096), "merger.up_proj.weight": ("F", 4096),
    "merger.down_proj.weight": (4096, "F"),
}  # fmt: skip

glm_models = pytest.mark.parametrize("name", GLM)
glm_4v_models = pytest.mark.parametrize("name", [name for name in GLM if name != "GLM-OCR"])


@glm_models
def test_transformers_reads_the_released_values_of_glm(name):
    """Oracle: the table above, read back through transformers' own config class of the model_type."""
    config = AutoConfig.for_model(**read(name))
    text, vision = config.text_config, config.vision_config
    text_sizes, vision_sizes, media_tokens = GLM[name]
    assert text_sizes == (
        text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads,
        text.intermediate_size, text.vocab_size, text.max_position_embeddings, text.rope_parameters["rope_theta"],
    )  # fmt: skip
    assert vision_sizes == (vision.hidden_size, vision.num_heads, vision.intermediate_size, vision.out_hidden_size)
    assert (vision.depth, vision.image_size, vision.patch_size) == (24, 336, 14)
    assert (vision.temporal_patch_size, vision.spatial_merge_size) == (2, 2)
    assert media_tokens == (config.image_token_id, config.video_token_id)
    first = 59256 if name == "GLM-OCR" else 151339  # begin and end of image, begin and end of video, in a row
    bounds = (config.image_start_token_id, config.image_end_token_id)
    assert (*bounds, config.video_start_token_id, config.video_end_token_id) == tuple(range(first, first + 4))
    rope = text.rope_parameters
    assert rope["partial_rotary_factor"] == (1.0 if name == "GLM-OCR" else 0.5)
    assert config.tie_word_embeddings is False
    assert config.architectures == [type(build_theirs(name)).__name__]


def test_glm_ocr_tower_has_the_reported_number_of_parameters():
    """Oracle: the count by role in the header of the released file."""
    assert count(build("GLM-OCR").encoder) == 434_120_192


@pytest.mark.parametrize(("name", "tensors"), [("GLM-4.1V-9B-Thinking", 704), ("GLM-4.5V", 18_106)])
def test_glm_has_the_reported_number_of_tensors(name, tensors):
    """Oracle: the tensors in the released files, where each expert has its own gate, up and down."""
    experts = getattr(AutoConfig.for_model(**read(name)).text_config, "n_routed_experts", 0)
    stored = {"experts.gate_up_proj": 2 * experts, "experts.down_proj": experts}
    names = build_theirs(name).state_dict()
    assert sum(stored.get(".".join(key.split(".")[-2:]), 1) for key in names) == tensors


@glm_4v_models
def test_tower_lists_the_tensors_of_the_released_files(name):
    """Oracle: names and shapes in the released files, as reported; the tower's names are theirs less `model.visual.`"""
    config = read(name)["vision_config"]
    sizes = {"F": config["intermediate_size"]}
    expected = {}
    for key, shape in GLM_4V_TENSORS.items():
        tensor = torch.empty([sizes.get(side, side) for side in shape], device="meta")
        blocks = range(config["depth"]) if ".N." in key else [""]
        expected |= {key.replace("N", str(block)) if ".N." in key else key: tensor for block in blocks}
    assert flat_shapes(build(name).encoder.named_parameters()) == flat_shapes(expected.items())


@glm_models
def test_the_name_map_of_the_spec_reaches_the_released_tower_of_glm(name):
    """Oracle: weight_mapping.json: each of its vision names is a parameter, but for the table that GLM-OCR lacks."""
    bare = vision_names_of_the_spec("glm4v")
    assert len(bare) == 11
    names = {re.sub(r"\.attn\.[qkv]\.", ".attn.qkv.", key) for key in bare}
    missing = names - build(name).encoder.state_dict().keys()
    assert missing == ({"embeddings.position_embedding.weight"} if name == "GLM-OCR" else set())


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
    """Oracles: the table above, and README's; transformers' model: names, and shapes up to flattened kernels."""
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


# What the hub counts in the files of these releases
WITH_SEVERAL_TOKENS = {
    "Qwen3.6-27B": 27_781_427_952, "Qwen3.6-35B-A3B": 35_951_822_704, "Qwen3.8-27B": 27_781_427_952,
}  # fmt: skip


@pytest.mark.parametrize(("name", "total"), WITH_SEVERAL_TOKENS.items())
def test_the_hub_also_counts_the_layer_that_predicts_several_tokens(name, total):
    """Oracle: that layer by hand: two inputs joined, gated attention, an MLP or experts, and seven norms."""
    text = read(name)["text_config"]
    width, heads, kv_heads, head_dim = (
        text[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    attention = width * head_dim * (2 * heads + 2 * kv_heads + heads)
    if experts := text.get("num_experts"):
        shared = 3 * width * text["shared_expert_intermediate_size"] + width  # with its gate
        mlp = experts * (3 * width * text["moe_intermediate_size"] + width) + shared
    else:
        mlp = 3 * width * text["intermediate_size"]
    layer = 2 * width * width + attention + mlp + 5 * width + 2 * head_dim
    assert TOTALS[name][0] + layer == total


@all_models
def test_mrope_sections_fill_what_rotates(name):
    """Equation: t, h and w together have as many pairs as rotate, each its share; interleaved within their thirds."""
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
    """Oracle: the model card: 321 billion, 316 of them the language model, 38 active for a token, 5 dense layers."""
    vlm = build("Step3")
    tower, text = count(vlm.encoder), count(vlm.language_model)
    assert (round((tower + text) / 1e9), round(text / 1e9), round(tower / 1e9)) == (321, 316, 5)
    assert readme_row("Step3").endswith(f"| {tower + text:,} | {tower:,} |")
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


def test_the_name_map_of_the_spec_reaches_the_released_step3():
    """Oracle: weight_mapping.json: each of its checkpoint names is a parameter here, under the same name."""
    vlm = build("Step3")
    names = {*vlm.encoder.state_dict(), *vlm.language_model.state_dict()}
    of_the_spec = {row[1] for row in NAME_MAPS["step3_vl"]}
    assert len(of_the_spec) == 7 and of_the_spec <= names


def test_step3_counts_tokens_as_released():
    """Oracle: vLLM's processor: 169 tokens for an overview and 81 for a crop."""
    config = build("Step3").encoder.config
    assert (config.image_tokens, config.crop_tokens) == (169, 81)


def test_step3_vl_10b_is_transformers_tower_and_qwen3():
    """Oracles: transformers' tower of Step-3.7 and its Qwen3 of the same sizes, parameter by parameter; the name."""
    vlm = build("Step3-VL-10B")
    tower, text = count(vlm.encoder), count(vlm.language_model)
    assert readme_row("Step3-VL-10B").endswith(f"| {tower + text:,} | {tower:,} |")
    assert round((tower + text) / 1e9) == 10
    assert (vlm.encoder.image_tokens, vlm.encoder.crop_tokens) == (169, 81)
    with torch.device("meta"):
        qwen3 = AutoModelForCausalLM.from_config(vlm.config.text_config)
    assert flat_shapes(qwen3.named_parameters()) == flat_shapes(vlm.language_model.named_parameters())
    if "step3p7" in CONFIG_MAPPING:
        with torch.device("meta"):
            theirs = AutoModel.from_config(CONFIG_MAPPING["step3p7"](text_config={"num_hidden_layers": 1}))
        assert count(theirs.vision_model) + count(theirs.multi_modal_projector) == tower


@pytest.mark.skipif("step3p7" not in CONFIG_MAPPING, reason="this transformers has no Step-3.7")
def test_step_3_7_flash_has_as_many_numbers_as_its_files():
    """Oracles: the number in the released GGUF files of the text model, and transformers' model of the same config."""
    vlm = build("Step-3.7-Flash")
    tower, text = count(vlm.encoder), count(vlm.language_model)
    assert readme_row("Step-3.7-Flash").endswith(f"| {tower + text:,} | {tower:,} |")
    biases = sum(b.numel() for name, b in vlm.language_model.named_buffers() if name.endswith("correction_bias"))
    frequencies = vlm.config.text_config.head_dim // 2  # GGUF stores them as a tensor
    assert text + biases + frequencies == 196_956_130_432
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**read("Step-3.7-Flash")))
    assert count(theirs) == tower + text and tower == count(build("Step3-VL-10B").encoder)
