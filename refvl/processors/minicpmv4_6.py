"""The prompts of MiniCPM-V 4.6 and 4.7: a slice of an image or frame has one token per cell of its grid.

    image   <image_id>0</image_id><image> tokens </image><slice> tokens </slice><slice> tokens </slice>
            <slice> tokens </slice><slice> tokens </slice>               one line per row of slices
    video   the same, frame after frame without line breaks; in 4.7 without a number

The chat template writes one placeholder per item, and the text above replaces it. Upstream:
`MiniCPMV4_6Processor` and its image and video processors (transformers 5.23); stacked frames
(`stack_frames`) are not supported.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from transformers import PretrainedConfig

from refvl.checks import read_json
from refvl.merge import MediaTokens
from refvl.pixels.media import Video
from refvl.pixels.patches import Levels
from refvl.pixels.slices import SliceConfig, SliceLayout, levels_of_slices, plan_slices
from refvl.processors.minicpmv import MARKS
from refvl.processors.minicpmv_video import FrameConfig, TakesVideos
from refvl.processors.tokenizers import load_tokenizer


@dataclass(frozen=True, slots=True)
class SampledFrames(FrameConfig):
    """The rule for sampling videos: one frame per second, but at most max_frames, evenly spaced."""

    max_frames: int = 128
    max_slice_nums: int = 9

    def changed_by(self, folder: Path) -> "SampledFrames":
        """Return a copy with the values that video_preprocessor_config.json sets."""
        file = folder / "video_preprocessor_config.json"
        values = read_json(file) if file.is_file() else {}
        if values.get("stack_frames", 1) != 1:
            raise ValueError(f"{file}: stack_frames must be 1, got {values['stack_frames']}")
        given = {"max_frames": values.get("max_num_frames"), "max_slice_nums": values.get("max_slice_nums")}
        return replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class FoldedMedia(MediaTokens):
    """One media item as slices, each in a separate run of tokens.

    `thw` is (1, 1, the number of tokens of all slices).
    """

    sizes: tuple[tuple[int, int], ...] = ()  # the (h, w), in tokens, of each overview and slice
    grid: tuple[int, int] | None = None  # (columns, rows) of the slices of an image, or of every frame
    number: int = 0  # the item's index among the images, or videos, of the prompt

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        return [(1, h, w) for h, w in self.sizes]


class MiniCPMV4_6Processor(TakesVideos):
    """The processor of 4.6. Layouts are tuples of `SliceGroup`s, one per overview and slice."""

    frames: ClassVar[SampledFrames] = SampledFrames()
    numbered: ClassVar[tuple[str, ...]] = ("image", "video")
    video_config: SampledFrames

    def __init__(self, config: PretrainedConfig, tokenizer=None, image_config=None, video_config=None):
        """Build a processor.

        If tokenizer is None, the processor can only plan: it counts tokens but builds no prompts.
        """
        self.config, self.tokenizer, self.assumed = config, tokenizer, image_config is None
        self.merge_size = 2 if config.downsample_mode == "4x" else 4  # the side of a merge block, in patches
        settings = image_config or SliceConfig(patch_size=14, use_image_id=True)
        self.image_config = replace(settings, multiple=self.merge_size)
        self.video_config = video_config or self.frames
        self.token_ids = {"image": config.image_token_id, "video": config.video_token_id}

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "MiniCPMV4_6Processor":
        """Build a processor from a folder's tokenizer, template and limits."""
        image_config = SliceConfig.from_folder(folder, {"use_image_id": True})
        return cls(config, load_tokenizer(folder), image_config, cls.frames.changed_by(folder))

    @property
    def largest_picture(self) -> int:
        """The number of tokens of the largest square image."""
        side = self.image_config.scale_resolution * self.image_config.max_slice_nums
        return self.media_tokens("image", plan_slices(side, side, self.image_config).layout).num_tokens

    def media_tokens(self, kind: str, layout: SliceLayout, second_per_grid: float = 1.0) -> FoldedMedia:
        """Return an item's extents: a run of tokens per slice; second_per_grid is not used."""
        m = self.merge_size
        sizes = tuple((h // m, w // m) for group in layout for h, w in group.slices)
        return FoldedMedia(kind, (1, 1, sum(h * w for h, w in sizes)), sizes=sizes)

    def layout_of(self, medium: Any) -> SliceLayout:
        """Return one group per overview and slice of an image, or of every frame in order."""
        plan = self.plan_of(medium)
        return plan.layout * len(medium.frames) if isinstance(medium, Video) else plan.layout

    def extents_of(self, medium: Any, layout: SliceLayout) -> FoldedMedia:
        """Return the extents of an item, with the grid of the slices of an image or of every frame."""
        kind = "video" if isinstance(medium, Video) else "image"
        return replace(self.media_tokens(kind, layout), grid=self.plan_of(medium).grid)

    def video_pieces(self, video: Video, max_tokens: int) -> Iterator[tuple[SliceLayout, Levels]]:
        """Yield (layout, patch rows) for consecutive parts of a video; see `ChatProcessor.pieces`."""
        layout = self.plan_of(video).layout
        at_once = max(1, max_tokens // self.media_tokens("video", layout).num_tokens)
        for start in range(0, len(video.frames), at_once):
            part = video.frames[start : start + at_once]
            yield layout * len(part), levels_of_slices(map(Image.fromarray, part), self.frame_config)

    @staticmethod
    def sample(total: int, source_fps: float, config: FrameConfig) -> list[int]:
        """Return the indices of one frame per second.

        For a video longer than max_frames seconds, return max_frames indices, evenly spaced
        among those of every 0.1 s.
        """
        duration = total / source_fps
        if duration <= config.max_frames:
            return [int(second * source_fps) for second in range(math.ceil(duration))]
        tenths = [min(int(round(i * 0.1, 1) * source_fps), total - 1) for i in range(int(duration / 0.1))]
        return [tenths[i] for i in np.linspace(0, len(tenths) - 1, config.max_frames, dtype=int)]

    def tokenize(self, messages: Sequence[dict], media: Sequence[Any], **options) -> list[int]:
        """Return the (L,) prompt ids of checked messages, numbering media by kind; see `ChatProcessor.tokenize`."""
        counts, numbered = Counter[str](), []
        for medium in media:
            numbered.append(replace(medium, number=counts[medium.kind]))
            counts[medium.kind] += 1
        return super().tokenize(messages, numbered, **options)

    def expand(self, token: int, medium: FoldedMedia) -> list[int]:
        """Return the ids of an item's overviews and slices: `token` for every cell, between special tokens."""
        numbered = self.image_config.use_image_id and medium.kind in self.numbered
        text = write_media(medium, self.tokenizer.convert_ids_to_tokens(token), medium.number if numbered else None)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class MiniCPMV4_7Processor(MiniCPMV4_6Processor):
    """The processor of 4.7, which does not number videos."""

    numbered = ("image",)


def write_media(medium: FoldedMedia, fill: str, number: int | None) -> str:
    """Return the prompt's text for an item (an image, or every frame of a video); `fill` is the token of a cell."""
    m, (columns, rows) = MARKS, medium.grid or (0, 0)
    text = "" if number is None else f"{m['im_id_start']}{number}{m['im_id_end']}"
    pieces = [fill * (h * w) for h, w in medium.sizes]
    for start in range(0, len(pieces), 1 + columns * rows):
        overview, *slices = pieces[start : start + 1 + columns * rows]
        written = [m["slice_start"] + piece + m["slice_end"] for piece in slices]
        lines = ["".join(written[row * columns : (row + 1) * columns]) for row in range(rows)]
        text += m["im_start"] + overview + m["im_end"] + "\n".join(lines)
    return text
