"""The prompts of Step3-VL and Step-3.7: an image is its crops in row-major order, followed by the overview.

    <patch_start> 81 x <im_patch> <patch_end>  <patch_start> 81 x <im_patch> <patch_end> <patch_newline>
    <patch_start> 81 x <im_patch> <patch_end>  <patch_start> 81 x <im_patch> <patch_end>
    <im_start> 169 x <im_patch> <im_end>

The example shows 2 x 2 crops; the prompt itself contains no line breaks. The chat template
writes one <im_patch> per image, and text as above replaces this token. Positions are the token
indices, so only the special tokens indicate where a crop is. Videos are not supported.
Upstream: `Step3VLProcessor` (vLLM).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from refvl.merge import MediaTokens
from refvl.pixels.crops import CropConfig, CropLayout, patchify_crops, plan_crops
from refvl.processors.chat import ChatProcessor
from refvl.processors.tokenizers import load_tokenizer

MARKS = ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
NO_VIDEO_ID = -1  # no token represents a video


@dataclass(frozen=True, slots=True, kw_only=True)
class CroppedMedia(MediaTokens):
    """An image as squares, each in a separate run of tokens: crops first, the overview last.

    `thw` is (1, 1, the number of tokens).
    """

    layout: CropLayout
    crop_side: int  # in merged tokens
    image_side: int

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        return [(1, self.crop_side, self.crop_side)] * self.layout.crops + [(1, self.image_side, self.image_side)]


class Step3VLProcessor(ChatProcessor):
    """Step3-VL's processor.

    Sizes come from the config, because the release has no preprocessor file. Layouts are
    `CropLayout`s.
    """

    no_video = "videos: Step3-VL accepts images only; pass the frames of a video as images"

    def __init__(self, config: PretrainedConfig, tokenizer=None):
        """Build a processor.

        If tokenizer is None, the processor can only plan: it counts tokens but builds no prompts.
        """
        self.config, self.tokenizer = config, tokenizer
        self.image_config = CropConfig.from_hf(config)
        self.video_config = None
        self.crop_tokens = self.image_config.crop_tokens
        self.image_tokens = self.image_config.image_tokens
        self.token_ids = {"image": config.image_token_id, "video": NO_VIDEO_ID}

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "Step3VLProcessor":
        """Build a processor from a folder's tokenizer and chat template.

        Raises ValueError if the tokenizer cannot be read or has no template.
        """
        return cls(config, load_tokenizer(folder))

    @cached_property
    def mark_ids(self) -> dict[str, int]:
        """The id of each special token in `MARKS`."""
        vocabulary = self.tokenizer.get_vocab()
        return {mark: vocabulary[mark] for mark in MARKS}

    @property
    def largest_picture(self) -> int:
        """The number of tokens of a square image with the largest allowed side."""
        plan = plan_crops(self.image_config.max_side, self.image_config.max_side, self.image_config)
        return self.media_tokens("image", plan.layout).num_tokens

    def layout_of(self, medium: Any) -> CropLayout:
        """Return the numbers of rows and columns of an image's crops."""
        return plan_crops(medium.width, medium.height, self.image_config).layout

    def rows_of(self, medium: Any) -> Tensor:
        """Return the patch rows of all crops, then of the overview."""
        return patchify_crops(medium, self.image_config)[0]

    def media_tokens(self, kind: str, layout: CropLayout, second_per_grid: float = 1.0) -> CroppedMedia:
        """Return the extents of an image: its squares, in tokens."""
        tokens = layout.crops * self.crop_tokens + self.image_tokens
        crop_side = math.isqrt(self.crop_tokens)
        image_side = math.isqrt(self.image_tokens)
        return CroppedMedia(kind, (1, 1, tokens), layout=layout, crop_side=crop_side, image_side=image_side)

    def expand(self, token: int, medium: CroppedMedia) -> list[int]:
        """Return the ids of an image's crops and overview: `token`, repeated, between special tokens."""
        ids = self.mark_ids
        crop = [ids["<patch_start>"], *[token] * self.crop_tokens, ids["<patch_end>"]]
        overview = [ids["<im_start>"], *[token] * self.image_tokens, ids["<im_end>"]]
        lines = [*crop * medium.layout.columns, ids["<patch_newline>"]] * medium.layout.rows
        return lines[:-1] + overview  # the last row ends without a newline
