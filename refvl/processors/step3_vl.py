"""The prompts of Step3-VL and Step-3.7: an image is its crops in row-major order, followed by the overview.

    <patch_start> 81 x <im_patch> <patch_end>  <patch_start> 81 x <im_patch> <patch_end> <patch_newline>
    <patch_start> 81 x <im_patch> <patch_end>  <patch_start> 81 x <im_patch> <patch_end>
    <im_start> 169 x <im_patch> <im_end>

The example shows 2 x 2 crops; the prompt itself contains no line breaks. The chat template writes one <im_patch> for an
image, and the text above replaces it. Positions are the token indices, so only the special tokens indicate where a crop
is. Videos are not supported. Upstream: `Step3VLProcessor` (vLLM).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image
from transformers import PretrainedConfig

from refvl.merge import MediaTokens
from refvl.pixels.crops import CropConfig, CropLayout, patchify_crops, plan_crops
from refvl.pixels.patches import Patches
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

    Sizes come from the config, because the release has no preprocessor file. Layouts: `CropLayout`.
    """

    no_video = "videos: Step3-VL accepts images only; pass the frames of a video as images"

    def __init__(self, config: PretrainedConfig, tokenizer=None):
        """Build a processor.

        If tokenizer is None, the processor is for planning only: it counts tokens but cannot build a prompt.
        """
        self.config, self.tokenizer = config, tokenizer
        self.image_config = CropConfig.from_hf(config)
        self.video_config = None
        self.crop_tokens = self.image_config.crop_tokens
        self.image_tokens = self.image_config.image_tokens
        self.token_ids = {"image": config.image_token_id, "video": NO_VIDEO_ID}

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "Step3VLProcessor":
        """Load the tokenizer and chat template from a checkpoint folder.

        Raise ValueError naming the folder if they are missing.
        """
        return cls(config, load_tokenizer(folder))

    @cached_property
    def mark_ids(self) -> dict[str, int]:
        """The ids of the five special tokens. Raises ValueError if the tokenizer lacks any of them."""
        vocabulary = self.tokenizer.get_vocab()
        if lacking := [mark for mark in MARKS if mark not in vocabulary]:
            raise ValueError(f"tokenizer: expected the special tokens of Step3-VL, got none for {lacking}")
        return {mark: vocabulary[mark] for mark in MARKS}

    @property
    def largest_picture(self) -> int:
        """The number of tokens of a square image with the largest allowed side."""
        plan = plan_crops(self.image_config.max_side, self.image_config.max_side, self.image_config)
        return self.media_tokens("image", plan.layout).num_tokens

    def _image_layout(self, image: Image.Image) -> CropLayout:
        return plan_crops(*image.size, self.image_config).layout

    def _patchify_image(self, image: Image.Image) -> Patches:
        rows, layout = patchify_crops(image, self.image_config)
        return Patches(image, rows, layout, self.media_tokens("image", layout))

    def media_tokens(self, kind: str, layout: CropLayout, second_per_grid: float = 1.0) -> CroppedMedia:
        """Return the squares of an image, in tokens. Raises ValueError for a video."""
        if kind != "image":
            raise ValueError(self.no_video)
        tokens = layout.crops * self.crop_tokens + self.image_tokens
        crop_side = math.isqrt(self.crop_tokens)
        image_side = math.isqrt(self.image_tokens)
        return CroppedMedia(kind, (1, 1, tokens), layout=layout, crop_side=crop_side, image_side=image_side)

    def expand(self, token: int, medium: CroppedMedia) -> list[int]:
        """Return the ids of crops and overview between their special tokens; `token` fills them."""
        ids = self.mark_ids
        crop = [ids["<patch_start>"], *[token] * self.crop_tokens, ids["<patch_end>"]]
        overview = [ids["<im_start>"], *[token] * self.image_tokens, ids["<im_end>"]]
        lines = [*crop * medium.layout.columns, ids["<patch_newline>"]] * medium.layout.rows
        return lines[:-1] + overview  # the last row ends without a newline
