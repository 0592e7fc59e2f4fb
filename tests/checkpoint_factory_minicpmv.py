"""Small MiniCPM-V checkpoints with random weights: the released files' flat config, names and side
files.

Names and shapes of vision and resampler are written out here, not taken from refvl. Weights are
drawn wide, so that greedy decoding wanders through the vocabulary.
"""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VERSIONS = ("2.0", "2.5", "2.6", "4.0", "4.5")
WITH_CLIPS = VERSIONS[2:]
PATCH, SIDE, QUERIES, HIDDEN = 14, 56, 4, 128  # the side of a slice in pixels; tokens in a set
MARKS = ("<unk>", "<s>", "</s>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
TURNS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<用户>", "<AI>")
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
TEMPLATES = {"2.0": None, "2.5": LLAMA_3, "2.6": CHATML, "4.0": CHATML, "4.5": CHATML}
FACTORS = [1.0 + i / 8 for i in range(16)]  # the release's two lists are equal, too
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 1.0, "short_factor": FACTORS,
    "long_factor": FACTORS,
}  # fmt: skip
TEXT = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
TEXT_OF_VERSION = {
    "2.0": {"num_key_value_heads": 4, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32, "rms_norm_eps": 1e-5},
    "2.5": {"rope_theta": 5e5},
    "2.6": {"rope_theta": 1e6},
    "4.0": {"rope_theta": 1e4, "head_dim": 32, "rope_scaling": LONGROPE},
    "4.5": {"rope_theta": 1e6, "head_dim": 48},
}
TEXT_CLASSES = {
    "2.0": (GraniteConfig, GraniteForCausalLM),
    "2.5": (LlamaConfig, LlamaForCausalLM),
    "2.6": (Qwen2Config, Qwen2ForCausalLM),
    "4.0": (LlamaConfig, LlamaForCausalLM),
    "4.5": (Qwen3Config, Qwen3ForCausalLM),
}


@cache
def tokenizer() -> Tokenizer:
    """All bytes and no merges, and the tokens of all versions."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*MARKS, *TURNS])
    return made


def token(text: str) -> int:
    return tokenizer().token_to_id(text)


def minicpmv_config(version: str) -> dict:
    """The dict of a flat config.json, as released; numbered where the release is."""
    vocab_size = -(-tokenizer().get_vocab_size() // 64) * 64
    text = TEXT | TEXT_OF_VERSION[version] | {"vocab_size": vocab_size}
    slices = {"max_slice_nums": 4, "scale_resolution": SIDE, "patch_size": PATCH}
    config = text | {
        "architectures": ["MiniCPMV"],
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig", "AutoModel": "modeling_minicpmv.MiniCPMV"},
        "model_type": "minicpmv", "torch_dtype": "float32", "query_num": QUERIES, "image_size": SIDE,
        "drop_vision_last_layer": False, "batch_vision_input": version != "2.0", "slice_mode": True,
        "bos_token_id": token("<s>"), "eos_token_id": token("</s>"),
    }  # fmt: skip
    if version == "2.0":
        vision = {"img_size": 70, "patch_size": PATCH, "embed_dim": 32, "depth": 3, "num_heads": 2, "mlp_ratio": 1.5}
        return config | slices | {"version": "2.0", "drop_vision_last_layer": True, "vision_config": vision}
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 70, "patch_size": PATCH, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
        "model_type": "siglip_vision_model", "num_channels": 3,
    }  # fmt: skip
    numbered = {"version": float(version)} if version != "2.5" else {}
    flags = {"use_image_id": version in WITH_CLIPS, "vision_config": vision, "slice_config": slices}
    return config | flags | numbered


def text_config(version: str):
    """transformers' config of the same sizes, spelled out by hand.

    MiniCPM (2.0) is Granite: residuals are scaled by scale_depth / sqrt(layers), and logits divided
    by hidden / dim_model_base. Embeddings are given to it scaled.
    """
    config, cls = minicpmv_config(version), TEXT_CLASSES[version][0]
    theta = {"rope_theta": config.get("rope_theta", 1e4)}
    rope = {"rope_type": "default"} | config.get("rope_scaling", {}) | theta
    sizes = {name: config[name] for name in (*TEXT, "vocab_size", "head_dim") if name in config}
    if version == "2.0":
        sizes |= {"residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 128 / 32, "attention_multiplier": 32**-0.5}
    return cls(**sizes, rope_parameters=rope)


def text_shapes(version: str) -> dict[str, tuple]:
    """Of the text model under `llm.`."""
    with torch.device("meta"):
        model = TEXT_CLASSES[version][1](text_config(version))
    return {f"llm.{name}": tuple(p.shape) for name, p in model.named_parameters()}


def vision_shapes(version: str) -> dict[str, tuple]:
    """Of `vpm.`: timm's names for 2.0, those of Idefics2's SigLIP for the others."""
    v = minicpmv_config(version)["vision_config"]
    if version == "2.0":
        D, depth = v["embed_dim"], v["depth"] - 1  # the last one is dropped
        inner = int(D * v["mlp_ratio"])
        shapes = {"patch_embed.proj.weight": (D, 3, PATCH, PATCH), "patch_embed.proj.bias": (D,)}
        shapes |= {"pos_embed": (1, 25, D)}
        block = {"norm1": (D,), "norm2": (D,), "attn.qkv": (3 * D, D), "attn.proj": (D, D)}
        block |= {"mlp.fc1": (inner, D), "mlp.fc2": (D, inner)}
        blocks, last = "blocks", "norm"
    else:
        D, inner, depth = v["hidden_size"], v["intermediate_size"], v["num_hidden_layers"]
        shapes = {"embeddings.patch_embedding.weight": (D, 3, PATCH, PATCH), "embeddings.patch_embedding.bias": (D,)}
        shapes |= {"embeddings.position_embedding.weight": (25, D)}
        block = {"layer_norm1": (D,), "layer_norm2": (D,)}
        block |= {f"self_attn.{x}_proj": (D, D) for x in ("q", "k", "v", "out")}
        block |= {"mlp.fc1": (inner, D), "mlp.fc2": (D, inner)}
        blocks, last = "encoder.layers", "post_layernorm"
    for i in range(depth):
        for name, shape in block.items():
            shapes |= {f"{blocks}.{i}.{name}.weight": shape, f"{blocks}.{i}.{name}.bias": shape[:1]}
    shapes |= {f"{last}.weight": (D,), f"{last}.bias": (D,)}
    return {f"vpm.{name}": shape for name, shape in shapes.items()}


def resampler_shapes(version: str) -> dict[str, tuple]:
    """Of `resampler.`; 2.0 keeps its table of positions in the file as well."""
    shapes = {"query": (QUERIES, HIDDEN), "proj": (HIDDEN, HIDDEN), "kv_proj.weight": (HIDDEN, 32)}
    shapes |= {"attn.in_proj_weight": (3 * HIDDEN, HIDDEN), "attn.in_proj_bias": (3 * HIDDEN,)}
    shapes |= {"attn.out_proj.weight": (HIDDEN, HIDDEN), "attn.out_proj.bias": (HIDDEN,)}
    shapes |= {f"ln_{x}.{kind}": (HIDDEN,) for x in ("q", "kv", "post") for kind in ("weight", "bias")}
    shapes |= {"pos_embed": (QUERIES, HIDDEN)} if version == "2.0" else {}
    return {f"resampler.{name}": shape for name, shape in shapes.items()}


def random_weights(version: str, seed: int = 0) -> dict[str, Tensor]:
    """Under the names of the released files."""
    generator = torch.Generator().manual_seed(seed)
    shapes = text_shapes(version) | vision_shapes(version) | resampler_shapes(version)

    def draw(name: str, shape: tuple) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return 0.3 * noise if len(shape) > 1 else noise if name.endswith("bias") else 1 + 0.5 * noise

    return {name: draw(name, shape) for name, shape in shapes.items()}


def make_minicpmv_checkpoint(folder: Path, version: str, *, seed: int = 0, **changes) -> Path:
    """Write a random checkpoint to `folder`; changes go to the top of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(version, seed), folder / "model.safetensors", {"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "config.json": minicpmv_config(version) | changes,
        "generation_config.json": {"bos_token_id": token("<s>"), "eos_token_id": token("</s>")},
        "tokenizer_config.json": {
            "tokenizer_class": "MiniCPMVTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
            "add_bos_token": version in ("2.0", "2.5", "4.0"),
            "auto_map": {"AutoTokenizer": ["tokenization_minicpmv_fast.MiniCPMVTokenizerFast", None]},
        } | ({"chat_template": TEMPLATES[version]} if TEMPLATES[version] else {}),
    }  # fmt: skip
    if version != "2.0":
        files["preprocessor_config.json"] = {
            "image_processor_type": "MiniCPMVImageProcessor", "max_slice_nums": 4, "scale_resolution": SIDE,
            "patch_size": PATCH, "use_image_id": version in WITH_CLIPS, "image_feature_size": QUERIES,
            "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>",
            "unk": "<unk>", "im_id_start": "<image_id>", "im_id_end": "</image_id>", "slice_mode": True,
            "norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5],
            "auto_map": {"AutoImageProcessor": "image_processing_minicpmv.MiniCPMVImageProcessor"},
        }  # fmt: skip
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2))
    return folder
