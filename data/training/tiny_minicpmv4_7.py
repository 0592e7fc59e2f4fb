"""The tiny MiniCPM-V 4.7: the files of `data/checkpoints/tiny-minicpmv-4_7` except for the trained weights.

The model accepts only images.

A scene of 84 x 84 px is cut into 3 x 3 slices of 28 x 28, one for each place, after an overview of 28 x 28. Patches
have 7 px, so the fold and the merger turn the 4 x 4 patches of a slice into one token. The tower encodes every slice
alone, so only the canvas indicates where a slice is. All layers of the text model use attention, because a linear layer
cannot keep several questions in one sequence apart.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PretrainedConfig

from data.training.tiny_family import TinyFamily
from data.training.tiny_qwen2_5_vl import PIECES
from data.training.tiny_qwen3_vl import CHAT_TEMPLATE
from refvl.encoders import MiniCPMV4_7Encoder
from refvl.families import read_config
from refvl.pixels.slices import SliceConfig, SliceGroup, levels_of_slices, plan_slices
from refvl.positions import CanvasMarks, MediaSpan, canvas_positions
from refvl.processors.minicpmv4_6 import FoldedMedia, write_media

PATCH = 7
SLICES = SliceConfig(scale_resolution=28, max_slice_nums=9, patch_size=PATCH, multiple=4, use_image_id=True)
MARKS = ("<image>", "</image>", "<slice>", "</slice>")
FILL = "<|image_pad|>"
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", FILL, "<|video_pad|>", *MARKS, "<image_id>", "</image_id>",
)  # fmt: skip
ROPE = {
    "mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_theta": 5.0, "rope_type": "default",
    "partial_rotary_factor": 1.0,
}  # fmt: skip


class TinyMiniCPMV4_7(TinyFamily):
    name = "minicpmv4_7"
    release = "minicpmv-4_7"
    special_tokens = SPECIAL_TOKENS
    end_of_turn = "<|im_end|>"
    end_of_media = {"image": FILL}  # noqa: RUF012
    chat_template = CHAT_TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    pieces = PIECES
    texts = ("system\n", "user\n", "assistant\n", *map(str, range(10)))
    by_adam = ("embed_tokens", "lm_head", "position_embedding", "merger.linear")
    recipe = {  # noqa: RUF012
        "begin_with": "2f99566e1268d93dad9f0a1932f228a8f1e4e0db6c0fdb82a4c0805c095c9858", "seed": 6, "steps": 1000,
        "few": 0.5, "see": 150, "warmup": 30, "pictures": 12, "picture_batches": 2, "asides": 2, "photos": 4,
        "lr": 2e-3, "muon_lr": 3e-3, "measure_on": 96, "measure_every": 200,
    }  # fmt: skip
    clips = ()
    prunable = False
    reads_places = reads_canvas = True
    moves_with_token = (-1, 0, 1)  # a slice with its separators

    def config(self, tokenizer: Tokenizer) -> dict:
        """Return the dict of `config.json`."""
        token = tokenizer.token_to_id
        names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id")
        text = {
            "model_type": "qwen3_5_text", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
            "layer_types": ["full_attention"] * 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_parameters": ROPE,
            "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64, "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"), "pad_token_id": token("<|endoftext|>"),
        }  # fmt: skip
        vision = {
            "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
            "image_size": 8 * PATCH, "patch_size": PATCH,
        }  # fmt: skip
        return {
            "architectures": ["MiniCPMV4_7ForConditionalGeneration"], "model_type": "minicpmv4_7",
            "image_token_id": token(FILL), "video_token_id": token("<|video_pad|>"), "tie_word_embeddings": False,
            "insert_layer_id": 1, "downsample_mode": "16x", "text_config": text, "vision_config": vision,
            **dict(zip(names, map(token, MARKS), strict=True)), "newline_id": tokenizer.encode("\n").ids[0],
        }  # fmt: skip

    def side_files(self, config: dict) -> dict[str, dict]:
        text = config["text_config"]
        names = ("max_slice_nums", "scale_resolution", "patch_size", "use_image_id")
        return {
            "config.json": config,
            "generation_config.json": {
                "eos_token_id": [text["eos_token_id"], text["pad_token_id"]], "pad_token_id": text["pad_token_id"],
                "do_sample": False,
            },
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False, "model_max_length": text["max_position_embeddings"],
            },
            "preprocessor_config.json": {
                "image_processor_type": "MiniCPMV4_6ImageProcessor", "downsample_mode": "16x",
                **{name: getattr(SLICES, name) for name in names},
            },
        }  # fmt: skip

    def checkpoint_weights(self, weights: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
        renamed = {}
        for name, weight in weights.items():
            name = re.sub(r"^model\.", "model.language_model.", name)
            name = re.sub(r"^visual\.merger\.", "model.merger.mlp.0.", name)
            name = re.sub(r"^visual\.", "model.vision_tower.", name)
            if name.endswith("patch_embedding.weight"):
                weight = weight.unflatten(1, (3, PATCH, PATCH))
            if ".qkv." in name:
                renamed |= {name.replace("qkv", f"{x}_proj"): w for x, w in zip("qkv", weight.chunk(3), strict=True)}
            else:
                renamed[name] = weight
        return renamed

    def hf_config(self, config: dict) -> PretrainedConfig:
        return read_config(config)

    def tower(self, config: dict) -> MiniCPMV4_7Encoder:
        return MiniCPMV4_7Encoder.from_config(config, attention="sdpa")

    def patchify(self, pixels: Tensor, *, order: Sequence[int] | None = None) -> tuple[Tensor, list]:
        """Return patch rows and layouts of sliced images. order: the order of the slices after the overview."""
        plan = plan_slices(pixels.shape[3], pixels.shape[2], SLICES)
        images = [Image.fromarray(picture.numpy()) for picture in pixels.flatten(0, 1)]
        rows = levels_of_slices(images, plan, SLICES).normalize()
        if order is not None:
            parts = rows.unflatten(0, (len(pixels), len(plan.tgt_sizes), -1))  # all slices have the overview's size
            rows = parts[:, [0, *(1 + i for i in order)]].flatten(0, 2)
        return rows, [tuple(SliceGroup((size,)) for size in plan.tgt_sizes)] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        return 1, shape[2] // PATCH, shape[3] // PATCH

    def cells(self, shape) -> tuple[int, int]:
        """Return the rows and columns of slices, of one token each."""
        columns, rows = plan_slices(shape[3], shape[2], SLICES).grid or (1, 1)
        return rows, columns

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        return round(height / PATCH) * PATCH, round(width / PATCH) * PATCH

    def place_media(
        self, ids: list[int], token: int, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return the ids that the processor writes for an image, and the spans of its overview and slices."""
        plan = plan_slices(grid[2] * PATCH, grid[1] * PATCH, SLICES)
        sizes = [(h // 4, w // 4) for h, w in plan.tgt_sizes]
        medium = FoldedMedia("image", (1, 1, sum(h * w for h, w in sizes)), sizes=tuple(sizes), grid=plan.grid)
        start = ids.index(token)
        placed = [*ids[:start], *encode(write_media(medium, FILL, number=0)), *ids[start + 1 :]]
        runs = [next(run) for is_run, run in groupby(range(len(placed)), lambda i: placed[i] == token) if is_run]
        return placed, [MediaSpan(offset, 1, h, w) for offset, (h, w) in zip(runs, sizes, strict=True)]

    def positions(self, length: int, spans: list[MediaSpan]) -> Tensor:
        """Return positions on the canvas. Separators enclose each span; a larger gap to the next slice ends a line."""
        marks = CanvasMarks(1, 2, 3, 4, 5)
        ids = torch.zeros(length, dtype=torch.int64)
        for i, span in enumerate(spans):
            end = span.offset + span.num_tokens
            ids[span.offset - 1], ids[end] = (3, 4) if i else (1, 2)
            if i and i + 1 < len(spans) and spans[i + 1].offset - end > 2:
                ids[end + 1] = marks.newline
        return canvas_positions(ids, spans, marks)


FAMILY = TinyMiniCPMV4_7()
