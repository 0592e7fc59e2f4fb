"""data/configs: the released shapes of MiniCPM-V. Oracles: transformers' text models, published counts, the name-map
spec, and the tensors that a public listing of the files of version 4.0 names.
"""

import json
import re
from collections import Counter
from functools import cache

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

import refvl
from refvl.families import find_family, read_config
from refvl.paths import DATA

CONFIGS = DATA / "configs"
NAME_MAP = json.loads((DATA.parent / "tests" / "golden" / "weight_mapping.json").read_text())["minicpmv"]
# name -> (version, text model, text: hidden, layers, heads, kv heads, intermediate, vocabulary, context; query tokens,
# layers of the tower); sources in data/configs/README.md
SHAPES = {
    "MiniCPM-V-2": ("2.0", GraniteForCausalLM, (2304, 40, 36, 36, 5760, 122753, 4096), 64, 26),
    "MiniCPM-Llama3-V-2_5": ("2.5", LlamaForCausalLM, (4096, 32, 32, 8, 14336, 128256, 8192), 96, 27),
    "MiniCPM-V-2_6": ("2.6", Qwen2ForCausalLM, (3584, 28, 28, 4, 18944, 151666, 32768), 64, 27),
    "MiniCPM-V-4": ("4.0", LlamaForCausalLM, (2560, 32, 32, 2, 10240, 73448, 32768), 64, 27),
    "MiniCPM-V-4_5": ("4.5", Qwen3ForCausalLM, (4096, 36, 32, 8, 12288, 151748, 40960), 64, 27),
}
# What public reports count, and to which decimal place: 2.6 to the last parameter, the others rounded as the hub does
TOTALS = {
    "MiniCPM-V-2": (3.43e9, -7),
    "MiniCPM-Llama3-V-2_5": (8.54e9, -7),
    "MiniCPM-V-2_6": (8_099_175_152, 0),
    "MiniCPM-V-4": (4.06e9, -7),
    "MiniCPM-V-4_5": (8.70e9, -7),
}
# The tensors of tower and resampler in the released files of 4.0, N for the number of a layer
TENSORS_4_0 = {
    "resampler.attn.in_proj_bias": (7680,), "resampler.attn.in_proj_weight": (7680, 2560),
    "resampler.attn.out_proj.bias": (2560,), "resampler.attn.out_proj.weight": (2560, 2560),
    "resampler.kv_proj.weight": (2560, 1152), "resampler.ln_kv.bias": (2560,), "resampler.ln_kv.weight": (2560,),
    "resampler.ln_post.bias": (2560,), "resampler.ln_post.weight": (2560,), "resampler.ln_q.bias": (2560,),
    "resampler.ln_q.weight": (2560,), "resampler.proj": (2560, 2560), "resampler.query": (64, 2560),
    "vpm.embeddings.patch_embedding.bias": (1152,), "vpm.embeddings.patch_embedding.weight": (1152, 3, 14, 14),
    "vpm.embeddings.position_embedding.weight": (4900, 1152), "vpm.encoder.layers.N.layer_norm1.bias": (1152,),
    "vpm.encoder.layers.N.layer_norm1.weight": (1152,), "vpm.encoder.layers.N.layer_norm2.bias": (1152,),
    "vpm.encoder.layers.N.layer_norm2.weight": (1152,), "vpm.encoder.layers.N.mlp.fc1.bias": (4304,),
    "vpm.encoder.layers.N.mlp.fc1.weight": (4304, 1152), "vpm.encoder.layers.N.mlp.fc2.bias": (1152,),
    "vpm.encoder.layers.N.mlp.fc2.weight": (1152, 4304), "vpm.post_layernorm.bias": (1152,),
    "vpm.post_layernorm.weight": (1152,),
} | {
    f"vpm.encoder.layers.N.self_attn.{x}_proj.{kind}": (1152, 1152)[: 2 if kind == "weight" else 1]
    for x in ("q", "k", "v", "out") for kind in ("weight", "bias")
}  # fmt: skip

names = pytest.mark.parametrize("name", SHAPES)
navit_names = pytest.mark.parametrize("name", [name for name in SHAPES if name != "MiniCPM-V-2"])


def read(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


@cache
def build(name: str):
    return refvl.load(CONFIGS / f"{name}.json", weights="random", device="meta", dtype="bfloat16")


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


def released_tensors(name: str) -> dict[str, tuple]:
    """Names and shapes under which the encoder expects weights: q, k and v apart, the patch kernel as a convolution."""
    found = {}
    for parameter, tensor in build(name).encoder.named_parameters():
        shape = tuple(tensor.shape)
        if "embedding.weight" in parameter and shape[1] == 588:
            shape = (shape[0], 3, 14, 14)
        if ".qkv." in parameter:
            for x in "qkv":
                found[
                    parameter.replace("qkv", f"{x}_proj").replace("attn", "self_attn", "self_attn" not in parameter)
                ] = (
                    shape[0] // 3,
                    *shape[1:],
                )
        else:
            found[parameter] = shape
    return found


@names
def test_configs_hold_the_released_values(name):
    """Oracle: the table above, read back through the config objects."""
    version, _, sizes, query_num, _ = SHAPES[name]
    config = read_config(read(name))
    text = config.get_text_config()
    assert find_family(config).version == find_family(read(name)).version == version and config.query_num == query_num
    assert sizes == (
        text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads,
        text.intermediate_size, text.vocab_size, text.max_position_embeddings,
    )  # fmt: skip
    assert not text.tie_word_embeddings
    slices = config.slice_config if version != "2.0" else read(name)
    assert (slices["max_slice_nums"], slices["scale_resolution"], slices["patch_size"]) == (9, 448, 14)


@names
def test_the_whole_model_has_the_reported_number_of_parameters(name):
    """Oracle: public counts; the README's table states ours."""
    vlm = build(name)
    total, place = TOTALS[name]
    encoder, text = count(vlm.encoder), count(vlm.language_model)
    assert round(encoder + text, place) == total
    [row] = [row for row in (CONFIGS / "README.md").read_text().splitlines() if row.startswith(f"| {name}.json |")]
    assert row.endswith(f"| {encoder + text:,} | {encoder:,} |")


@names
def test_the_text_model_is_transformers(name):
    """Oracle: the class that the release names: parameter names, with `llm.` before them in the files, and shapes."""
    version, cls, _, _, _ = SHAPES[name]
    config = read_config(read(name))
    with torch.device("meta"):
        expected = cls(config.get_text_config())
    ours = build(name).language_model
    assert type(ours.model) is type(expected.model), version
    shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (ours, expected)]
    assert shapes[0] == shapes[1]


@navit_names
def test_every_layer_of_the_tower_is_there(name):
    depth = SHAPES[name][4]
    layers = {int(n.split(".")[3]) for n in released_tensors(name) if n.startswith("vpm.encoder.layers.")}
    assert layers == set(range(depth))


def test_tensors_of_4_0_are_those_of_its_files():
    """Oracle: a public listing of the safetensors files; those of 2.5 to 4.5 have the same names."""
    ours = {re.sub(r"layers\.\d+\.", "layers.N.", n): shape for n, shape in released_tensors("MiniCPM-V-4").items()}
    assert ours == TENSORS_4_0


@navit_names
def test_names_are_the_same_in_2_5_to_4_5(name):
    assert {re.sub(r"\.\d+\.", ".N.", n) for n in released_tensors(name)} == TENSORS_4_0.keys()


@navit_names
def test_the_name_map_of_the_spec_reaches_the_encoder(name):
    """Oracle: weight_mapping.json (checkpoint names of 2.5 and of 2.6 and later): vision lands on what we expect, text
    on the text model, speech on nothing."""
    family = "2.5" if SHAPES[name][0] == "2.5" else "2.6+"
    vision, text = released_tensors(name), {f"llm.{n}" for n, _ in build(name).language_model.named_parameters()}
    checkpoint_names = [row[1] for row in NAME_MAP if row[0] == family]
    assert len(checkpoint_names) == 14
    for checkpoint_name in checkpoint_names:
        is_speech = checkpoint_name.startswith(("apm.", "audio_"))
        assert (checkpoint_name in vision or checkpoint_name in text) != is_speech


@names
def test_the_encoder_is_of_the_release(name):
    encoder = build(name).encoder
    assert type(encoder) is find_family(read(name)).encoder and all(p.is_meta for p in encoder.parameters())


def test_every_minicpm_config_has_its_row_here():
    folded = {"MiniCPM-V-4_6", "MiniCPM-V-4.7-35B-A3B"}
    assert {path.stem for path in CONFIGS.glob("MiniCPM*.json")} == SHAPES.keys() | folded


# Version 4.6: the tensors in the released file by the start of their names, as a public listing of its header counts
TENSORS_4_6 = {
    "model.vision_tower.encoder": 432, "model.language_model.layers": 318, "model.vision_tower.vit_merger": 16,
    "model.merger.mlp": 6, "model.vision_tower.embeddings": 3, "model.vision_tower.post_layernorm": 2,
    "model.language_model.norm": 1, "model.language_model.embed_tokens": 1,
}  # fmt: skip


def test_4_6_has_the_tensors_of_its_files():
    """Oracles: that listing, the total that the hub reports, and transformers' model of the same config."""
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(CONFIGS / "MiniCPM-V-4_6.json"))
    starts = Counter(".".join(name.split(".")[:3]) for name, _ in theirs.named_parameters())
    assert starts == TENSORS_4_6

    vlm = build("MiniCPM-V-4_6")
    encoder, text = count(vlm.encoder), count(vlm.language_model)
    assert encoder + text == count(theirs) == 1_300_428_016
    [row] = [r for r in (CONFIGS / "README.md").read_text().splitlines() if r.startswith("| MiniCPM-V-4_6.json |")]
    assert row.endswith(f"| {encoder + text:,} | {encoder:,} |")
    shapes = {n.replace("model.language_model.", "model."): p.shape for n, p in theirs.named_parameters()}
    ours = {n: p.shape for n, p in vlm.language_model.named_parameters()}
    assert ours == {n: shape for n, shape in shapes.items() if not n.startswith(("model.vision", "model.merger"))}


@pytest.mark.skipif("minicpmv4_7" not in CONFIG_MAPPING, reason="this transformers has no MiniCPM-V 4.7")
def test_4_7_has_the_reported_number_of_parameters():
    """Oracles: the total in a public listing of the release, and transformers' model of the same config.

    The vocabulary is inferred from that total: one token more or less changes it by two rows of the text model.
    """
    name = "MiniCPM-V-4.7-35B-A3B"
    vlm = build(name)
    encoder, text = count(vlm.encoder), count(vlm.language_model)
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(CONFIGS / f"{name}.json"))
    assert encoder + text == count(theirs) == 35_212_875_824
    [row] = [r for r in (CONFIGS / "README.md").read_text().splitlines() if r.startswith(f"| {name}.json |")]
    assert row.endswith(f"| {encoder + text:,} | {encoder:,} |")
    assert count(vlm.language_model.get_output_embeddings()) == 248_144 * 2048
