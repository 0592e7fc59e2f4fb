"""Prompts as the tests write them, and as transformers' models take them."""

import torch
from torch import Tensor

from refvl.paths import DATA

PHOTOS = [DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea", "rocket")]


def hf_inputs(trace, ids: Tensor, types: Tensor) -> dict[str, Tensor]:
    """The prompt and pixels of a trace. ids: (L,) the full prompt. types: (L,) 1 for an image's
    tokens, 2 a video's."""
    inputs = {"input_ids": ids[None], "mm_token_type_ids": types[None], "attention_mask": torch.ones_like(ids)[None]}
    for kind, names in (
        ("image", ("pixel_values", "image_grid_thw")),
        ("video", ("pixel_values_videos", "video_grid_thw")),
    ):
        if patches := [p for p in trace.patches if p.media_tokens.kind == kind]:
            inputs[names[0]] = torch.cat([p.pixel_values for p in patches])
            inputs[names[1]] = torch.tensor([p.layout for p in patches])
    return inputs


def inputs_of(vlm, trace) -> dict[str, Tensor]:
    """The same for a model on grids."""
    placeholders = vlm.processor.placeholders(trace.full_ids)
    is_image, is_video = (placeholders == vlm.token_ids[kind] for kind in ("image", "video"))
    return hf_inputs(trace, trace.full_ids, is_image.int() + 2 * is_video.int())
