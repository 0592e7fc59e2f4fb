"""The tiny Qwen3-VL: the files of `data/checkpoints/tiny-qwen3_vl` except for the trained weights.

Like the tiny GLM's, its prompts contain timestamps, but before each frame, and to a tenth of a second. Qwen's tokenizer
splits them into digits, so <12.2 seconds> is one token longer than <7.2 seconds>. The separator after a frame is the
first token that can attend to both the timestamp and the event.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, normalizers
from torch import Tensor, nn

from data.training.scenes import FPS, LAST_SECOND
from data.training.tiny_family import TinyFamily, batch_rows
from data.training.tiny_qwen2_5_vl import PIECES, SPECIAL_TOKENS
from refvl.encoders import Qwen3VLVisionTransformer
from refvl.pixels.patch_configs import Qwen3VLPatchConfig, Qwen3VLVideoPatchConfig
from refvl.positions import MediaSpan

HALF = (0.5, 0.5, 0.5)  # mean and standard deviation of every channel
# 9 to 16 merged tokens of 32 x 32 px per image, and per frame of a video of ten. A scene of 84 x 84 px becomes 96 x 96,
# as does one of up to 17 frames.
PICTURE_PIXELS, CLIP_PIXELS = (96 * 96, 128 * 128), (2 * 96 * 96, 10 * 128 * 128)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def time_text(second: float) -> str:
    """Return the text before the two frames of a step, taken at `second` and half a second later: their mean time."""
    return f"<{second + 0.5 / FPS:.1f} seconds>"


class TinyQwen3VL(TinyFamily):
    name = "qwen3_vl"
    special_tokens = SPECIAL_TOKENS
    end_of_turn = "<|im_end|>"
    end_of_media = {"image": "<|vision_end|>", "video": "<|vision_end|>"}  # noqa: RUF012
    chat_template = CHAT_TEMPLATE
    pieces = PIECES
    normalizer = normalizers.NFC()
    texts = ("system\n", "user\n", "assistant\n", *map(time_text, range(LAST_SECOND + 1)))
    clips = ("motion", "change")
    reads_places = True
    spells_seconds = True
    reads_neighbours = True
    recipe = {  # noqa: RUF012
        "begin_with": "49f5f9e5dd02cfd79d1361e527b84d04e1dfe8b9a90338dd7c34dff4e604c21c", "seed": 4, "steps": 1400,
        "see": 100, "warmup": 30, "pictures": 12, "picture_batches": 2, "clips": 3, "asides": 2, "photos": 4,
        "lr": 1e-3, "muon_lr": 1.6e-3, "measure_on": 96, "measure_every": 200,
    }  # fmt: skip
    by_adam = ("embed_tokens", "lm_head", "pos_embed", "merger.linear_fc1", "deepstack_merger_list")  # wide matrices

    def config(self, tokenizer: Tokenizer) -> dict:
        """Return the dict of `config.json`.

        The position table has more places than a scene has patches, so scenes have to sample it. The language
        model's rope theta is small because its positions are few.
        """
        token = tokenizer.token_to_id
        vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "image_token_id": token("<|image_pad|>"),
            "model_type": "qwen3_vl",
            "text_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "bos_token_id": token("<|endoftext|>"),
                "dtype": "bfloat16",
                "eos_token_id": token("<|im_end|>"),
                "head_dim": 32,
                "hidden_act": "silu",
                "hidden_size": 128,
                "initializer_range": 0.02,
                "intermediate_size": 320,
                "max_position_embeddings": 4096,
                "model_type": "qwen3_vl_text",
                "num_attention_heads": 4,
                "num_hidden_layers": 3,
                "num_key_value_heads": 2,
                "pad_token_id": token("<|endoftext|>"),
                "rms_norm_eps": 1e-06,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [6, 5, 5],
                    "rope_theta": 5.0,
                    "rope_type": "default",
                },
                "use_cache": True,
                "vocab_size": vocab_size,
            },
            "tie_word_embeddings": False,
            "video_token_id": token("<|video_pad|>"),
            "vision_config": {
                "deepstack_visual_indexes": [1, 2],
                "depth": 4,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 96,
                "in_channels": 3,
                "initializer_range": 0.02,
                "intermediate_size": 256,
                "model_type": "qwen3_vl_vision",
                "num_heads": 4,
                "num_position_embeddings": 64,
                "out_hidden_size": 128,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            "vision_end_token_id": token("<|vision_end|>"),
            "vision_start_token_id": token("<|vision_start|>"),
        }

    def side_files(self, config: dict) -> dict[str, dict]:
        text = config["text_config"]
        common = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": HALF, "image_std": HALF}
        common |= {"processor_class": "Qwen3VLProcessor"}
        picture, clip = (
            {"size": {"longest_edge": high, "shortest_edge": low}, **common}
            for low, high in (PICTURE_PIXELS, CLIP_PIXELS)
        )
        return {
            "config.json": config,
            "generation_config.json": {
                "bos_token_id": text["bos_token_id"],
                "pad_token_id": text["pad_token_id"],
                "do_sample": False,
                "eos_token_id": [text["eos_token_id"], text["bos_token_id"]],
            },
            "tokenizer_config.json": {
                "tokenizer_class": "Qwen2Tokenizer",
                "add_prefix_space": False,
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "unk_token": None,
                "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in ("<|endoftext|>", "<|im_end|>")],
                "clean_up_tokenization_spaces": False,
                "errors": "replace",
                "model_max_length": text["max_position_embeddings"],
            },
            "preprocessor_config.json": picture | {"image_processor_type": "Qwen2VLImageProcessorFast"},
            "video_preprocessor_config.json": clip | {"video_processor_type": "Qwen3VLVideoProcessor"},
        }

    def checkpoint_weights(self, weights: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
        c, kernel = config["vision_config"], "visual.patch_embed.proj.weight"
        shape = (c["in_channels"], c["temporal_patch_size"], c["patch_size"], c["patch_size"])
        weights = weights | {kernel: weights[kernel].unflatten(1, shape)}
        return {
            re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name)): weight
            for name, weight in weights.items()
        }

    def tower(self, config: dict) -> Qwen3VLVisionTransformer:
        return Qwen3VLVisionTransformer.from_config(config["vision_config"], attention="sdpa")

    def init_weights(self, model: nn.Module) -> None:
        """Scale down DeepStack features, which nothing reads at first, so they would be noise later."""
        for merger in model.visual.deepstack_merger_list:
            merger.linear_fc2.weight.data.mul_(0.2)

    def patchify(self, pixels: Tensor) -> tuple[Tensor, list]:
        """Return patch rows and layouts; images are resized as in the processor, so 28 px of a token become 32.

        Sides that are multiples of 32 are final.
        """
        grid = self.grid(pixels.shape)
        height, width = (16 * patches for patches in grid[1:])
        frames = pixels.flatten(0, 1).permute(0, 3, 1, 2).contiguous()
        resized = F.interpolate(frames, (height, width), mode="bicubic", antialias=True).permute(0, 2, 3, 1)
        rows = batch_rows(resized.unflatten(0, pixels.shape[:2]), patch=16, mean=HALF, std=HALF)
        return rows, [grid] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        side = 14 if shape[2] % 32 else 16
        return max(1, shape[1] // 2), shape[2] // side, shape[3] // side

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        low, high = PICTURE_PIXELS if frames == 1 else CLIP_PIXELS
        config = Qwen3VLPatchConfig if frames == 1 else Qwen3VLVideoPatchConfig
        return config(min_pixels=low, max_pixels=high).target_size(height, width, frames)

    def plan(self, tower, layouts: list, kept: dict):
        """Plan items of the same layout. Positions depend on weights, so every step samples the table once."""
        with torch.no_grad():
            plan = super().plan(tower, layouts, kept)
        one = tower.plan(layouts[:1])
        return replace(plan, position_embeds=one.position_embeds.repeat(len(layouts), 1))

    def deeper_features(self, deeper_BLW: Tensor) -> dict:
        """Return DeepStack features as the arguments of transformers' text model."""
        visual_BL = deeper_BLW.detach().any(-1)
        return {
            "visual_pos_masks": visual_BL,
            "deepstack_visual_embeds": deeper_BLW[visual_BL].unflatten(-1, (2, -1)).unbind(1),
        }

    def place_media(
        self, ids: list[int], token: int, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return ids in which each step of a video is an image of its own after its timestamp, and their spans.

        Its separators replace the template's.
        """
        if not seconds:
            return super().place_media(ids, token, grid, seconds, encode)
        start, (_, h, w) = ids.index(token), self.merged(grid)
        placed, spans = ids[: start - 1], []
        for second in seconds:
            placed = [*placed, *encode(time_text(second)), *encode("<|vision_start|>")]
            spans.append(MediaSpan(len(placed), 1, h, w))
            placed = [*placed, *[token] * (h * w), *encode("<|vision_end|>")]
        return placed + ids[start + 2 :], spans

    def time_columns(self, spans: list[MediaSpan]) -> list[int]:
        """Return the column of the separator after each frame."""
        return [span.offset + span.num_tokens for span in spans]


FAMILY = TinyQwen3VL()
