"""The tiny Step3-VL: the files of `data/checkpoints/tiny-step3` except for the trained weights.

It reads pages (`pages.py`), whose letters are too small for the overview. `train_step3.py` trains it with and without
crops. Because pages are not scenes, and there are no videos, it has its own training script.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PretrainedConfig

from data.training import pages
from data.training.tiny_family import CLIP_MEAN, CLIP_STD, TinyFamily
from refvl.encoders.step3_vl import Step3VisionEncoder, resize_class_and_positions
from refvl.families import read_config
from refvl.pixels.crops import CropLayout, square_patch_rows
from refvl.positions import MediaSpan

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<|BOT|>", "<|EOT|>", "<im_start>", "<im_patch>",
    "<im_end>", "<patch_start>", "<patch_newline>", "<patch_end>",
)  # fmt: skip
BOS, _, PAD, *_ = SPECIAL_TOKENS
OVERVIEW = 84  # px
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    BOS
    + """\
{%- for message in messages -%}
{{- '<|BOT|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<im_patch>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|EOT|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|BOT|>assistant\\n' -}}
{%- endif -%}
"""
)


class TinyStep3(TinyFamily):
    """The tiny Step3-VL. enable_crops: False for prompts that contain only the overview."""

    name = "step3"
    special_tokens = SPECIAL_TOKENS
    end_of_turn = "<|EOT|>"
    end_of_media = {"image": "<im_patch>"}  # noqa: RUF012  as the template writes it: one token, without marks
    chat_template = CHAT_TEMPLATE
    pieces = PIECES
    texts = ("user\n", "assistant\n")
    clips = ()
    by_adam = ("embed_tokens", "lm_head", "position_embedding", "class_embedding", "moe.gate")

    def __init__(self, *, enable_crops: bool = True):
        self.enable_crops = enable_crops

    def config(self, tokenizer: Tokenizer) -> dict:
        """Return the dict of `config.json`.

        It sets `crop_size` and `max_side`, because they differ from the released ones.
        """
        token = tokenizer.token_to_id
        return {
            "architectures": ["Step3VLForConditionalGeneration"],
            "model_type": "step3_vl",
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "hidden_size": 96,
            "image_token_id": token("<im_patch>"),
            "understand_projector_stride": 2,
            "projector_bias": False,
            "text_config": {
                "architectures": ["Step3TextForCausalLM"],
                "model_type": "step3_text",
                "dtype": "bfloat16",
                "bos_token_id": token(BOS),
                "eos_token_id": token("<|EOT|>"),
                "pad_token_id": token(PAD),
                "hidden_size": 96,
                "intermediate_size": 256,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_attention_groups": 1,
                "head_dim": 32,
                "share_q_dim": 64,
                "max_position_embedding": 4096,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000.0,
                "moe_layers_enum": "1,2",
                "moe_num_experts": 8,
                "moe_top_k": 3,
                "moe_intermediate_size": 48,
                "share_expert_dim": 96,
                "norm_expert_weight": False,
                "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
            },
            "vision_config": {
                "model_type": "step3_vision_encoder",
                "hidden_size": 64,
                "intermediate_size": 192,
                "output_hidden_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_channels": 3,
                "image_size": OVERVIEW,
                "crop_size": pages.WINDOW,
                "max_side": 6 * pages.WINDOW,
                "patch_size": pages.CELL,
                "hidden_act": "quick_gelu",
                "layer_norm_eps": 1e-05,
            },
        }

    def phrases(self) -> list[tuple[str, str]]:
        return pages.all_phrases()

    def hf_config(self, config: dict) -> PretrainedConfig:
        return read_config(config)

    def side_files(self, config: dict) -> dict[str, dict]:
        text = config["text_config"]
        ends = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {
            "config.json": config,
            "generation_config.json": {**ends, "do_sample": False},
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": "<|EOT|>",
                "pad_token": PAD,
                "clean_up_tokenization_spaces": False,
                "model_max_length": text["max_position_embedding"],
                "padding_side": "left",
            },
        }

    def checkpoint_weights(self, weights: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
        renamed = {name.removeprefix("visual."): weight for name, weight in weights.items()}
        patch = "vision_model.embeddings.patch_embedding.weight"
        return renamed | {patch: renamed[patch].unflatten(1, (3, pages.CELL, pages.CELL))}

    def tower(self, config: dict) -> Step3VisionEncoder:
        return Step3VisionEncoder.from_config(config, attention="sdpa")

    def grid(self, shape) -> CropLayout:
        return CropLayout(shape[2] // pages.WINDOW, shape[3] // pages.WINDOW) if self.enable_crops else CropLayout(0, 0)

    def patchify(self, pixels: Tensor) -> tuple[Tensor, list]:
        """Do the work of `patchify_crops` for a whole batch: (B, 1, H, W, 3) uint8, where windows divide H and W."""
        mean, std = torch.tensor(CLIP_MEAN), torch.tensor(CLIP_STD)
        x = ((pixels[:, 0].float() / 255 - mean) / std).permute(0, 3, 1, 2)  # (B, 3, H, W)
        overview = F.interpolate(x, size=(OVERVIEW, OVERVIEW), mode="bilinear", antialias=True)
        rows = [square_patch_rows(overview, pages.CELL).unflatten(0, (len(x), -1))]
        if self.enable_crops:
            windows = x.unfold(2, pages.WINDOW, pages.WINDOW).unfold(3, pages.WINDOW, pages.WINDOW)
            crops = windows.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)  # (B * rows * columns, 3, 56, 56)
            rows = [square_patch_rows(crops, pages.CELL).unflatten(0, (len(x), -1)), *rows]
        return torch.cat(rows, dim=1).flatten(0, 1), [self.grid(pixels.shape)] * len(x)

    def plan(self, tower: Step3VisionEncoder, layouts: list, kept: dict):
        """Plan a batch; positions depend on weights, so their table is resized at every step."""
        with torch.no_grad():
            plan = super().plan(tower, layouts, kept)
        table, paths = tower.vision_model.embeddings.position_embedding.weight, tower.paths
        return replace(
            plan,
            local_position_embeds=resize_class_and_positions(table, paths["local"].side),
            global_position_embeds=resize_class_and_positions(table, paths["global"].side),
        )

    def place_media(
        self, ids: list[int], token: int, grid: CropLayout, seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return the ids and spans: one token per crop and 2 x 2 for the overview, each between separator tokens."""
        text = "".join("<patch_start><im_patch><patch_end>" + "<patch_newline>" * end for end in grid.newline_mask)
        start = ids.index(token)
        placed = [*ids[:start], *encode(text + "<im_start>" + "<im_patch>" * 4 + "<im_end>"), *ids[start + 1 :]]
        places = [i for i, other in enumerate(placed) if other == token]
        spans = [MediaSpan(place, 1, 1, 1) for place in places[: grid.crops]]
        return placed, [*spans, MediaSpan(places[grid.crops], 1, 2, 2)]

    def positions(self, length: int, spans: list[MediaSpan]) -> Tensor:
        return torch.arange(length).expand(3, -1)

    def text_positions(self, positions_3BL: Tensor) -> Tensor:
        return positions_3BL[0]


FAMILY = TinyStep3()
