"""The tiny MiniCPM-V 4.5: the files of `data/checkpoints/tiny-minicpmv-4_5` except for the trained weights.

A scene of 84 x 84 px is larger than its overview of 56 x 56, so it is also cut into 2 x 2 slices of 56 x 56. No image
has more than four slices, because more would have positions that the model never saw in training. Frames of a video are
overviews; three of them share a set of queries, and only temporal ids distinguish them. A set has nine queries: while
the tower learns to see, query i of the overview has to name the object in place i.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from types import SimpleNamespace

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PretrainedConfig

from data.training.tiny_family import TinyFamily
from data.training.tiny_qwen2_5_vl import PIECES
from refvl.encoders.minicpmv import MiniCPMV4_5Encoder
from refvl.families import read_config
from refvl.pixels.slices import SliceConfig, SliceGroup, levels_of_slices, plan_slices
from refvl.positions import MediaSpan
from refvl.processors.minicpmv import MARKS, MiniCPMV4_5Processor, SlicedMedia
from refvl.processors.minicpmv_video import TENTHS

QUERIES, PACKING, FPS, PATCH = 9, 3, 2.0, 14
SLICES = SliceConfig(scale_resolution=56, max_slice_nums=4, use_image_id=True)
FRAMES = SliceConfig(scale_resolution=56, max_slice_nums=1)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKS.values())

# Content is a string, into which the processor has written the media. The parts of a list are for training, which
# inserts media itself.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- part.text if part.type == 'text' else '<image><unk></image>\\n' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


class TinyMiniCPMV(TinyFamily):
    name = "minicpmv"
    release = "minicpmv-4_5"
    special_tokens = SPECIAL_TOKENS
    end_of_turn = "<|im_end|>"
    end_of_media = {"image": "</image>", "video": "</image>"}  # noqa: RUF012
    chat_template = CHAT_TEMPLATE
    pieces = PIECES
    texts = ("system\n", "user\n", "assistant\n", *map(str, range(10)))
    by_adam = ("embed_tokens", "lm_head", "position_embedding", "resampler.query")
    prunable = False
    sliced = True
    packing = PACKING
    recipe = {  # noqa: RUF012
        "begin_with": "b7dfa7a60d02663875c1a4a1366efd810d2fca54a9526cc811d65dbb9e7bd266", "seed": 3, "steps": 1000,
        "see": 80, "warmup": 30, "pictures": 12, "picture_batches": 2, "clips": 9, "asides": 2, "photos": 4,
        "lr": 1.2e-3, "muon_lr": 2e-3, "measure_on": 96, "measure_every": 200,
    }  # fmt: skip

    def config(self, tokenizer: Tokenizer) -> dict:
        """Return the dict of `config.json`, flat as in the release.

        The position table is for 112 x 112 px, so it is sampled.
        """
        token = tokenizer.token_to_id
        return {
            "architectures": ["MiniCPMV"],
            "model_type": "minicpmv",
            "version": 4.5,
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "batch_vision_input": True,
            "bos_token_id": token("<|endoftext|>"),
            "drop_vision_last_layer": False,
            "eos_token_id": token("<|im_end|>"),
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 128,
            "image_size": 56,
            "intermediate_size": 320,
            "max_position_embeddings": 4096,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "pad_token_id": token("<|endoftext|>"),
            "patch_size": PATCH,
            "query_num": QUERIES,
            "rms_norm_eps": 1e-06,
            "rope_theta": 100.0,
            "slice_config": {
                "max_slice_nums": SLICES.max_slice_nums,
                "model_type": "minicpmv",
                "patch_size": PATCH,
                "scale_resolution": SLICES.scale_resolution,
            },
            "slice_mode": True,
            "tie_word_embeddings": False,
            "use_image_id": True,
            "use_sliding_window": False,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 96,
                "image_size": 112,
                "intermediate_size": 256,
                "layer_norm_eps": 1e-06,
                "num_attention_heads": 4,
                "num_channels": 3,
                "num_hidden_layers": 4,
                "patch_size": PATCH,
            },
            "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        }

    def side_files(self, config: dict) -> dict[str, dict]:
        return {
            "config.json": config,
            "generation_config.json": {
                "eos_token_id": [config["eos_token_id"], config["pad_token_id"]],
                "pad_token_id": config["pad_token_id"],
                "do_sample": False,
            },
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "unk_token": "<unk>",
                "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
                "clean_up_tokenization_spaces": False,
                "model_max_length": config["max_position_embeddings"],
            },
            "preprocessor_config.json": {
                "image_processor_type": "MiniCPMVImageProcessor",
                "max_slice_nums": SLICES.max_slice_nums,
                "scale_resolution": SLICES.scale_resolution,
                "patch_size": PATCH,
                "use_image_id": True,
                "image_feature_size": QUERIES,
                **MARKS,
                "slice_mode": True,
                "norm_mean": SLICES.image_mean,
                "norm_std": SLICES.image_std,
                "version": 4.5,
            },
            "video_preprocessor_config.json": {
                "fps": FPS,
                "max_frames": 16,
                "max_packing": PACKING,
                "packing": PACKING,
            },
        }

    def hf_config(self, config: dict) -> PretrainedConfig:
        return read_config(config)

    def media_token(self, config: dict, media: str) -> str:
        return "<unk>"  # found by its separators (see `place_media`)

    def pad_id(self, config: dict) -> int:
        return config["pad_token_id"]

    def checkpoint_weights(self, weights: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
        renamed = {}
        for name, weight in weights.items():
            name = re.sub(r"^visual\.", "", re.sub(r"^(model|lm_head)\.", r"llm.\1.", name))
            if name.endswith("patch_embedding.weight"):
                weight = weight.unflatten(1, (3, PATCH, PATCH))
            if ".qkv." in name:
                renamed |= {name.replace("qkv", f"{x}_proj"): w for x, w in zip("qkv", weight.chunk(3), strict=True)}
            else:
                renamed[name] = weight
        return renamed

    def tower(self, config: dict) -> MiniCPMV4_5Encoder:
        return MiniCPMV4_5Encoder.from_config(config, attention="sdpa")

    def patchify(
        self, pixels: Tensor, *, order: Sequence[int] | None = None, times: Sequence[int] | None = None
    ) -> tuple[Tensor, list]:
        """Return patch rows and layouts; images are sliced, and videos are packed, with a frame every half second.

        order: the order of the slices after the overview; times: temporal ids to use instead, one per frame.
        """
        config = SLICES if (is_picture := pixels.shape[1] == 1) else FRAMES
        plan = plan_slices(pixels.shape[3], pixels.shape[2], config)
        images, sizes = [Image.fromarray(frame.numpy()) for frame in pixels.flatten(0, 1)], plan.tgt_sizes
        rows = levels_of_slices(images, plan, config).normalize()
        if is_picture:
            layout = tuple(SliceGroup((size,)) for size in sizes)
        else:
            ids = [round(i / FPS * TENTHS) for i in range(pixels.shape[1])] if times is None else list(times)
            packs = [ids[i : i + PACKING] for i in range(0, len(ids), PACKING)]
            layout = tuple(SliceGroup(tuple(sizes) * len(pack), tuple(pack)) for pack in packs)
        if order is not None:
            parts = rows.unflatten(0, (len(pixels), len(sizes), -1))  # all slices have the overview's size
            rows = parts[:, [0, *(1 + i for i in order)]].flatten(0, 2)
        return rows, [layout] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        """Return the grid as in other families, except that t counts the sets of queries of a video."""
        return -(-shape[1] // PACKING), shape[2] // PATCH, shape[3] // PATCH

    def cells(self, shape) -> tuple[int, int]:
        """Each of the nine queries reads one place of the overview, whatever its size."""
        return 3, 3

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """Return whole patches; the processor accepts any size, but the grid counts patches."""
        return round(height / PATCH) * PATCH, round(width / PATCH) * PATCH

    def plan(self, tower: MiniCPMV4_5Encoder, layouts: list, kept: dict):
        """Plan a batch; plans of videos are not cached, because their times differ at every step."""
        return super().plan(tower, layouts, kept if layouts[0][0].temporal_ids is None else {})

    def place_media(
        self, ids: list[int], token: str, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return the ids that the processor writes for an image or a video, and the spans of its unknown tokens."""
        t, h, w = grid
        processor = MiniCPMV4_5Processor(SimpleNamespace(query_num=QUERIES), image_config=SLICES)
        if seconds:
            text = processor.write_video(SlicedMedia("video", (t, 1, QUERIES)))
        else:
            plan = plan_slices(w * PATCH, h * PATCH, SLICES)
            text = processor.write_image(SlicedMedia("image", (len(plan.tgt_sizes), 1, QUERIES), grid=plan.grid), 0)
        (begin, unknown, _), written = encode("<image><unk></image>"), encode(text)
        start = next(i for i in range(len(ids)) if ids[i : i + 2] == [begin, unknown])
        placed = [*ids[:start], *written, *ids[start + 3 :]]
        runs = groupby(range(len(placed)), lambda i: placed[i] == unknown)
        return placed, [MediaSpan(next(run), 1, 1, QUERIES) for is_run, run in runs if is_run]

    def time_columns(self, spans: list[MediaSpan]) -> list[int]:
        """Return the column of the separator after each set of queries."""
        return [span.offset + span.num_tokens for span in spans]

    def positions(self, length: int, spans: list[MediaSpan]) -> Tensor:
        """Return positions that are the token indices, including media."""
        return torch.arange(length).expand(3, -1)

    def text_positions(self, positions_3BL: Tensor) -> Tensor:
        return positions_3BL[0]


FAMILY = TinyMiniCPMV()
