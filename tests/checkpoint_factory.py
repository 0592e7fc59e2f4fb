"""Small checkpoints with random weights in the genuine layout, and transformers' model of the same
weights.

Weights are drawn wide, so that greedy decoding wanders through the vocabulary: a wrong position or
a shifted row changes the ids.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data.training.tiny_family import STEP3, find_family
from refvl.encoders import Step3VisionEncoder
from refvl.language.step3_vl import Step3ForCausalLM

TINY_QWEN, TINY_QWEN3 = find_family("qwen2_5_vl"), find_family("qwen3_vl")
tokenizer = cache(TINY_QWEN.tokenizer)


@cache
def tokenizer_with(tokens: tuple[str, ...]):
    made = TINY_QWEN.tokenizer()
    made.add_special_tokens(list(tokens))
    return made


def draw_wide(*modules: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            parameter.normal_(std=0.3 if parameter.ndim > 1 else 1.0, generator=generator)


def random_weights(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Under the checkpoint's original names, as transformers saves them."""
    model = Qwen2_5_VLForConditionalGeneration(TINY_QWEN.hf_config(config))
    draw_wide(model, seed=seed)
    return {original_name(name): tensor.clone() for name, tensor in model.state_dict().items()}


def original_name(name: str) -> str:
    """transformers' module name -> the name in the first released checkpoints."""
    return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def make_checkpoint(folder: Path, *, seed: int = 0, **changes) -> Path:
    """Write a random checkpoint to `folder`; changes go to the top of config.json (`text_config`
    ones are merged)."""
    config = TINY_QWEN.config()
    config["text_config"] |= changes.pop("text_config", {})
    config |= changes
    TINY_QWEN.write_checkpoint(folder, config, random_weights(config, seed))
    return folder


def write_json(folder: Path, files: dict[str, dict]) -> Path:
    """Write objects by the names of their files."""
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2))
    return folder


def change_json(file: Path, change: Callable[[dict], dict]) -> None:
    """Write what `change` returns for the object in a file."""
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def change_weights(folder: Path, change: Callable[[dict], dict]) -> Path:
    """Write what `change` returns for the weights by name, as one file."""
    weights = change(load_file(folder / "model.safetensors"))
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    return folder


def transformers_model(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    """The oracle: the same folder, loaded by transformers in float32."""
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


GLM_TEMPLATE = find_family("glm4v").chat_template()
GLM_SPECIAL_TOKENS = (
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>",
    "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>",
)  # fmt: skip
GLM_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]}
GLM_TEXT = {  # what the text models of each model_type have besides the common sizes
    "glm4v": {}, "glm46v": {}, "glmga": {},
    "glm4v_moe": {
        "head_dim": 24, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "glm_ocr": {
        "head_dim": 24, "rope_parameters": GLM_ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [4, 4, 4]},
    },
}  # fmt: skip


def glm_tokenizer():
    return tokenizer_with(GLM_SPECIAL_TOKENS)


def glm_config(model_type: str) -> dict:
    """The dict of a GLM config.json: two narrow layers, a position table of 6 x 6 places."""
    token = glm_tokenizer().token_to_id
    ends = {
        f"{kind}_{end}_token_id": token(f"<|{word}_of_{kind}|>")
        for kind in ("image", "video")
        for end, word in (("start", "begin"), ("end", "end"))
    }
    text = {
        "vocab_size": -(-glm_tokenizer().get_vocab_size() // 64) * 64, "hidden_size": 96, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "rope_parameters": GLM_ROPE, "pad_token_id": token("<|endoftext|>"), "eos_token_id": token("<|user|>"),
    }  # fmt: skip
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 80, "num_heads": 4, "out_hidden_size": 96}
    vision |= {} if model_type == "glm_ocr" else {"image_size": 84}
    return ends | {
        "model_type": model_type, "tie_word_embeddings": False, "text_config": text | GLM_TEXT[model_type],
        "image_token_id": token("<|image|>"), "video_token_id": token("<|video|>"), "vision_config": vision,
    }  # fmt: skip


def save_random_model(folder: Path, config: dict, seed: int) -> None:
    """Random weights for a whole model, in bfloat16, as transformers saves them."""
    sizes = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(config["model_type"], **sizes))
    draw_wide(model, seed=seed)
    model.to(torch.bfloat16).save_pretrained(folder)


def make_glm_checkpoint(folder: Path, model_type: str, processor_class: str, *, seed: int = 0) -> Path:
    """Write a random GLM checkpoint to `folder`, weights under the names that transformers saves."""
    config = glm_config(model_type)
    save_random_model(folder, config, seed)
    glm_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(GLM_TEMPLATE)
    ends = {name: config["text_config"][name] for name in ("pad_token_id", "eos_token_id")}
    name = "Glmga" if model_type == "glmga" else processor_class.removesuffix("Processor")
    picture, clip = {"shortest_edge": 2 * 84**2, "longest_edge": 2 * 112**2}, {"shortest_edge": 84**2}
    files = {
        "config.json": config, "generation_config.json": ends,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"},
        "preprocessor_config.json": {"image_processor_type": f"{name}ImageProcessor", "size": picture},
        "video_preprocessor_config.json": {
            "video_processor_type": f"{name}VideoProcessor", "size": clip | {"longest_edge": 10 * 90**2},
        },
    }  # fmt: skip
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        files[name]["processor_class"] = processor_class
    return write_json(folder, files)


QWEN3_TEXT = {  # what the text models of each model_type have besides the tiny Qwen3-VL's sizes
    "qwen3_vl": {},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_theta": 5.0, "rope_type": "default",
            "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip
QWEN3_TEXT["qwen3_5_moe"] = QWEN3_TEXT["qwen3_5"] | {
    "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip


def qwen3_config(model_type: str) -> dict:
    """The dict of a Qwen3-VL or Qwen3.5 config.json: the tiny Qwen3-VL's towers, three layers of
    each text model."""
    config = TINY_QWEN3.config()
    config["text_config"] |= QWEN3_TEXT[model_type]
    config["vision_config"] |= {"model_type": f"{model_type}_vision"}
    if model_type.startswith("qwen3_5"):
        config["vision_config"]["deepstack_visual_indexes"] = []
    return {name: value for name, value in config.items() if name != "architectures"} | {"model_type": model_type}


def make_qwen3_checkpoint(folder: Path, model_type: str, *, seed: int = 0) -> Path:
    """Write a random Qwen3-VL or Qwen3.5 checkpoint to `folder`, weights as transformers saves
    them."""
    config = qwen3_config(model_type)
    save_random_model(folder, config, seed)
    TINY_QWEN3.copy_files(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


STEP3_TEMPLATE = "{{- bos_token -}}\n{%-" + STEP3.chat_template().partition("{%-")[2]
STEP3_SPECIAL_TOKENS = (
    "<|begin_of_sentence|>", "<|end_of_sentence|>", "<|BOT|>", "<|EOT|>", "<im_start>", "<im_patch>", "<im_end>",
    "<patch_start>", "<patch_newline>", "<patch_end>",
)  # fmt: skip


@cache
def step3_tokenizer():
    """One that writes the begin of sentence by itself, as the released one does."""
    tokenizer = TINY_QWEN.tokenizer()
    tokenizer.add_special_tokens(list(STEP3_SPECIAL_TOKENS))
    begin = STEP3_SPECIAL_TOKENS[0]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return tokenizer


def step3_config() -> dict:
    """The dict of a Step3 config.json: a dense layer and one with experts, overviews of 4 tokens,
    crops of 1."""
    token = step3_tokenizer().token_to_id
    return {
        "architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl", "tie_word_embeddings": False,
        "image_token_id": token("<im_patch>"), "understand_projector_stride": 2, "projector_bias": False,
        "hidden_size": 96,
        "text_config": {
            "model_type": "step3_text", "vocab_size": -(-step3_tokenizer().get_vocab_size() // 64) * 64,
            "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_attention_groups": 1, "head_dim": 24, "share_q_dim": 40, "max_position_embedding": 2048,
            "moe_layers_enum": "1", "moe_num_experts": 6, "moe_top_k": 3, "moe_intermediate_size": 48,
            "share_expert_dim": 64, "rope_theta": 100.0, "rms_norm_eps": 1e-5,
            "bos_token_id": token("<|begin_of_sentence|>"), "eos_token_id": token("<|EOT|>"),
            "pad_token_id": token("<|end_of_sentence|>"),
        },
        "vision_config": {
            "hidden_size": 48, "intermediate_size": 80, "output_hidden_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "image_size": 84, "crop_size": 56, "max_side": 336, "patch_size": 14,
        },
    }  # fmt: skip


def make_step3_checkpoint(folder: Path, *, seed: int = 0, naming=lambda name: name) -> Path:
    """Write a random Step3 checkpoint to `folder`; `naming`: name in the released checkpoint ->
    name in this one."""
    config, folder = step3_config(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hf_config = AutoConfig.for_model(**config)
    parts = Step3VisionEncoder.from_config(hf_config), Step3ForCausalLM(hf_config.text_config)
    draw_wide(*parts, seed=seed)
    weights = {}
    for name, parameter in (pair for part in parts for pair in part.named_parameters()):
        if name == "vision_model.embeddings.patch_embedding.weight":
            parameter = parameter.unflatten(1, (3, 14, 14))
        weights[naming(name)] = parameter.detach().to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return write_step3_files(folder, config)


def write_step3_files(folder: Path, config: dict) -> Path:
    """config.json, tokenizer and template."""
    step3_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(STEP3_TEMPLATE)
    ends = {name: config["text_config"][name] for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
    files = {
        "config.json": config, "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_sentence|>",
            "eos_token": "<|EOT|>", "pad_token": "<|end_of_sentence|>",
        },
    }  # fmt: skip
    return write_json(folder, files)


def step_vl_config(model_type: str) -> dict:
    """The dict of config.json of Step3-VL-10B ("step_robotics") or Step-3.7 ("step3p7"), under the
    released names."""
    token = step3_tokenizer().token_to_id
    text = {
        "vocab_size": -(-step3_tokenizer().get_vocab_size() // 64) * 64, "hidden_size": 96, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "max_position_embeddings": 2048, "rope_theta": 100.0, "bos_token_id": token("<|begin_of_sentence|>"),
        "eos_token_id": token("<|EOT|>"), "pad_token_id": token("<|end_of_sentence|>"),
    }  # fmt: skip
    if model_type == "step3p7":
        text |= {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 16,
            "attention_other_setting": {"num_attention_heads": 6}, "moe_layers_enum": "1,2", "moe_num_experts": 4,
            "moe_top_k": 2, "moe_intermediate_size": 32, "share_expert_dim": 48,
        }  # fmt: skip
    vision = {
        "width": 48, "layers": 3, "heads": 4, "mlp_ratio": 80 / 48, "image_size": 112, "crop_size": 56, "max_side": 336,
        "patch_size": 14, "ls_init_value": 0.1, "hidden_act": "quick_gelu",
    }  # fmt: skip
    return {
        "model_type": model_type, "image_token_id": token("<im_patch>"), "projector_bias": False, "text_config": text,
        "vision_config": vision,
    }  # fmt: skip


def make_step_vl_checkpoint(folder: Path, model_type: str, *, seed: int = 0) -> Path:
    """Write a random checkpoint in the released layout, which is how transformers saves Step-3.7:
    rotary neighbours.

    Step3-VL-10B is Step-3.7's tower with Qwen3 as its text model.
    """
    save_random_model(folder, step_vl_config("step3p7"), seed)
    if model_type == "step_robotics":
        file = folder / "model.safetensors"
        tower = {name: tensor for name, tensor in load_file(file).items() if name.startswith("vi")}
        text = Qwen3ForCausalLM(Qwen3Config(**step_vl_config(model_type)["text_config"]))
        draw_wide(text, seed=seed + 1)
        save_file(tower | text.to(torch.bfloat16).state_dict(), file, metadata={"format": "pt"})
    return write_step3_files(folder, step_vl_config(model_type))


def step_vision_model(folder: Path):
    """The oracle: the tower in `folder`, read by transformers, and the weight of the projector."""
    from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionConfig, Step3p7VisionModel

    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    tower = {name.removeprefix("vision_model."): w for name, w in weights.items() if name.startswith("vision_model.")}
    config = Step3p7VisionConfig(**json.loads((folder / "config.json").read_text())["vision_config"])
    model = Step3p7VisionModel.from_pretrained(None, config=config, state_dict=tower)
    return model.eval(), weights["vit_large_projector.weight"]


FOLDED_MARKS = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")


def folded_tokenizer():
    return tokenizer_with(FOLDED_MARKS)


def folded_config(model_type: str, mode: str = "16x") -> dict:
    """The dict of config.json of MiniCPM-V 4.6 ("minicpmv4_6") or 4.7: Qwen3.5's text model, a
    small SigLIP."""
    config, token = qwen3_config("qwen3_5"), folded_tokenizer().token_to_id
    text = config["text_config"] | {"vocab_size": -(-folded_tokenizer().get_vocab_size() // 64) * 64}
    names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
    marks = dict(zip(names, [*map(token, FOLDED_MARKS[:4]), *folded_tokenizer().encode("\n").ids], strict=True))
    return {
        "model_type": model_type, "image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>"),
        "tie_word_embeddings": False, "insert_layer_id": 1, "downsample_mode": mode, "text_config": text,
        "vision_config": {
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": 98, "patch_size": 14,
        },
        **(marks if model_type == "minicpmv4_7" else {}),
    }  # fmt: skip


def make_folded_checkpoint(folder: Path, model_type: str, *, mode: str = "16x", seed: int = 0) -> Path:
    """Write a random MiniCPM-V 4.6 or 4.7 checkpoint to `folder`, as transformers saves it, which
    is the release's."""
    config = folded_config(model_type, mode)
    save_random_model(folder, config, seed)
    folded_tokenizer().save(str(folder / "tokenizer.json"))
    template = TINY_QWEN3.chat_template().replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    (folder / "chat_template.jinja").write_text(template)
    settings = {"max_slice_nums": 4, "scale_resolution": 112, "patch_size": 14, "downsample_mode": mode}
    names = ("image_start_token", "image_end_token", "slice_start_token", "slice_end_token")
    marks = dict(zip((*names, "image_id_start_token", "image_id_end_token"), FOLDED_MARKS, strict=True))
    extra = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"} | marks
    ends = {name: config["text_config"][name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files = {
        "config.json": config, "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "extra_special_tokens": extra,
        },
        "preprocessor_config.json": {"image_processor_type": "MiniCPMV4_6ImageProcessor", **settings},
        "video_preprocessor_config.json": {"video_processor_type": "MiniCPMV4_6VideoProcessor", **settings},
    }  # fmt: skip
    return write_json(folder, files)
