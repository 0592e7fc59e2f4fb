"""The tiny GLM-4.1V: the files of `data/checkpoints/tiny-glm4v` except for the trained weights.

Its prompts contain timestamps: each step of a video is followed by its timestamp, and the model learns to answer when
an event happened (`scenes.draw_change`).
"""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from data.training.tiny_family import CLIP_MEAN, CLIP_STD, TinyFamily
from refvl.encoders import Glm4vVisionTransformer
from refvl.pixels.patch_configs import Glm4vPatchConfig
from refvl.positions import MediaSpan

SPECIAL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>",
    "<|video|>", "<think>", "</think>", "<answer>", "</answer>",
)  # fmt: skip
ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>", "</answer>")  # each of these tokens ends an answer
# Budgets count all frames, and an image counts as two: 9 to 18 merged tokens per image, and 9 to 16 per frame of a
# video of ten. A scene of up to 17 frames keeps its size.
PICTURE_PIXELS, CLIP_PIXELS = (2 * 84 * 84, 2 * 84 * 168), (2 * 84 * 84, 10 * 112 * 112)

# GLM's rule for splitting text before bytes are merged: the same as Qwen2's, but up to three digits stay together.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|begin_of_video|><|video|><|end_of_video|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


class TinyGlm4v(TinyFamily):
    name = "glm4v"
    special_tokens = SPECIAL_TOKENS
    end_of_turn = "<|user|>"
    end_of_media = {"image": "<|end_of_image|>", "video": "<|end_of_video|>"}  # noqa: RUF012
    chat_template = CHAT_TEMPLATE
    pieces = PIECES
    clips = ("motion", "change")
    reads_places = True
    recipe = {  # noqa: RUF012
        "begin_with": "fc33ca2863ace02ab159f5d66e22ad233595d33c6008f0e1527d505376d12978", "seed": 6, "steps": 1200,
        "see": 150, "warmup": 30, "pictures": 12, "picture_batches": 2, "clips": 3, "asides": 2, "photos": 4,
        "lr": 2e-3, "muon_lr": 3e-3, "measure_on": 96, "measure_every": 250,
    }  # fmt: skip
    by_adam = ("embed_tokens", "lm_head", "position_embedding", "downsample")  # three tables, and a wide kernel

    def config(self, tokenizer: Tokenizer) -> dict:
        """Return the dict of `config.json`.

        The position table was "learned on" 112 x 112 px, so scenes have to sample it. The language model's rope
        theta is small because its positions are few.
        """
        token = tokenizer.token_to_id
        vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
        return {
            "architectures": ["Glm4vForConditionalGeneration"],
            "model_type": "glm4v",
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "image_start_token_id": token("<|begin_of_image|>"),
            "image_end_token_id": token("<|end_of_image|>"),
            "video_start_token_id": token("<|begin_of_video|>"),
            "video_end_token_id": token("<|end_of_video|>"),
            "image_token_id": token("<|image|>"),
            "video_token_id": token("<|video|>"),
            "text_config": {
                "model_type": "glm4v_text",
                "dtype": "bfloat16",
                "attention_bias": True,
                "attention_dropout": 0.0,
                "pad_token_id": token("<|endoftext|>"),
                "eos_token_id": [token(end) for end in ENDS],
                "hidden_act": "silu",
                "hidden_size": 128,
                "intermediate_size": 320,
                "max_position_embeddings": 4096,
                "num_attention_heads": 4,
                "num_hidden_layers": 3,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-05,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 3, 3],
                },
                "vocab_size": vocab_size,
            },
            "vision_config": {
                "model_type": "glm4v_vision",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "depth": 4,
                "hidden_act": "silu",
                "hidden_size": 96,
                "image_size": 112,
                "in_channels": 3,
                "intermediate_size": 256,
                "num_heads": 4,
                "out_hidden_size": 128,
                "patch_size": 14,
                "rms_norm_eps": 1e-05,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        }

    def side_files(self, config: dict) -> dict[str, dict]:
        text = config["text_config"]
        pixels = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
        pixels |= {"do_convert_rgb": True, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
        pixels |= {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        picture, clip = (
            {"size": {"shortest_edge": low, "longest_edge": high}} for low, high in (PICTURE_PIXELS, CLIP_PIXELS)
        )
        return {
            "config.json": config,
            "generation_config.json": {
                "eos_token_id": text["eos_token_id"],
                "pad_token_id": text["pad_token_id"],
                "do_sample": False,
            },
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>",
                "additional_special_tokens": list(SPECIAL_TOKENS[:16]),
                "clean_up_tokenization_spaces": False,
                "do_lower_case": False,
                "model_max_length": text["max_position_embeddings"],
                "padding_side": "left",
                "remove_space": False,
            },
            "preprocessor_config.json": {
                "image_processor_type": "Glm4vImageProcessor",
                "processor_class": "Glm4vProcessor",
                **pixels,
                **picture,
            },
            "video_preprocessor_config.json": {
                "video_processor_type": "Glm4vVideoProcessor",
                "processor_class": "Glm4vProcessor",
                "do_sample_frames": True,
                "fps": 2,
                "max_duration": 300,
                **pixels,
                **clip,
            },
        }

    def checkpoint_weights(self, weights: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
        c, renamed = config["vision_config"], {}
        kernels = {
            "visual.patch_embed.proj.weight": (
                c["in_channels"], c["temporal_patch_size"], c["patch_size"], c["patch_size"],
            ),
            "visual.downsample.weight": (c["hidden_size"], c["spatial_merge_size"], c["spatial_merge_size"]),
        }  # fmt: skip
        for name, weight in weights.items():
            weight = weight.unflatten(1, kernels[name]) if name in kernels else weight
            renamed[re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name))] = weight
        return renamed

    def tower(self, config: dict) -> Glm4vVisionTransformer:
        return Glm4vVisionTransformer.from_config(config["vision_config"], attention="sdpa")

    def init_weights(self, model: nn.Module) -> None:
        """Set the norms after attention and MLP to 0.2, because full-size updates would drown out the words."""
        for layer in model.model.layers:
            nn.init.constant_(layer.post_self_attn_layernorm.weight, 0.2)
            nn.init.constant_(layer.post_mlp_layernorm.weight, 0.2)

    def plan(self, tower, layouts: list, kept: dict):
        """Plan items of the same layout. Positions depend on weights, so every step samples the table once."""
        with torch.no_grad():
            plan = super().plan(tower, layouts, kept)
        one = tower.plan(layouts[:1])
        return replace(plan, position_embeds=one.position_embeds.repeat(len(layouts), 1))

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        low, high = PICTURE_PIXELS if frames == 1 else CLIP_PIXELS
        return Glm4vPatchConfig(min_pixels=low, max_pixels=high).target_size(height, width, frames)

    def place_media(
        self, ids: list[int], token: int, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return ids in which each step of a video is an image of its own before its timestamp, and their spans."""
        if not seconds:
            return super().place_media(ids, token, grid, seconds, encode)
        start, (_, h, w) = ids.index(token), self.merged(grid)
        begin, end = encode("<|begin_of_image|>"), encode("<|end_of_image|>")
        placed, spans = ids[:start], []
        for second in seconds:
            spans.append(MediaSpan(len(placed) + 1, 1, h, w))
            placed = [*placed, *begin, *[token] * (h * w), *end, *encode(str(int(second)))]
        return placed + ids[start + 1 :], spans

    def time_columns(self, spans: list[MediaSpan]) -> list[int]:
        """Return the column of each timestamp, which follows the end of its image."""
        return [span.offset + span.num_tokens + 1 for span in spans]


FAMILY = TinyGlm4v()
