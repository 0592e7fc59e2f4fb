"""MiniCPM-V's videos, from version 2.6 on: each sampled frame is an overview without slices.

    video file -> sampled frames        by the rule on the version's model card (see `sample`)
               -> one set of query tokens per frame, or, in 4.5, per pack of up to `max_packing` frames

The frames of a pack share one set of query tokens. Each frame has a temporal id, its time in
tenths of a second; the resampler adds an encoding of the id to the keys.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from refvl.checks import read_json
from refvl.pixels.media import Video
from refvl.pixels.patches import Levels
from refvl.pixels.slices import (
    SliceConfig,
    SliceGroup,
    SliceLayout,
    SlicePlan,
    count_sets,
    levels_of_slices,
    plan_slices,
)
from refvl.processors.chat import ChatProcessor

TENTHS = 10  # temporal ids count tenths of a second


@dataclass(frozen=True, slots=True)
class FrameConfig:
    """The rule for sampling videos. The default limits are those in the examples on the model cards."""

    fps: float = 1.0
    max_frames: int = 64  # the maximum number of sets of query tokens; a pack of frames has one set
    max_packing: int = 1  # the maximum number of frames that share a set
    max_slice_nums: int = 1  # the maximum number of slices of a frame; 1: an overview alone
    # frames per set; None: the smallest number that keeps the video within max_frames sets
    packing: int | None = None

    def changed_by(self, folder: Path) -> "FrameConfig":
        """Return a copy with the values of video_preprocessor_config.json; released folders have no such file."""
        file = folder / "video_preprocessor_config.json"
        values = read_json(file) if file.is_file() else {}
        return replace(self, **{f.name: values[f.name] for f in fields(self) if f.name in values})


class TakesVideos(ChatProcessor):
    """The part of a `MiniCPMVProcessor` that handles videos."""

    video_config: FrameConfig
    query_num: int

    video_options = ("fps", "max_frames")

    def frame_indices(self, total: int, source_fps: float, **options) -> Sequence[int]:
        """Return the indices of the frames to read: by the version's rule, or `num_frames` evenly."""
        if "num_frames" in options:
            return middle_indices(total, options["num_frames"])
        return self.sample(total, source_fps, replace(self.video_config, **options))

    @staticmethod
    def sample(total: int, source_fps: float, config: FrameConfig) -> list[int]:
        """Return the indices of frames 1 / fps seconds apart; if these are more than max_frames,
        return the midpoints of max_frames equal parts.
        """
        indices = list(range(0, total, max(1, round(source_fps / config.fps))))
        return [indices[i] for i in middle_indices(len(indices), config.max_frames)]

    def group(self, video: Video, tgt_size: tuple[int, int]) -> SliceLayout:
        """Return the layout of a video: one group per frame."""
        return (SliceGroup((tgt_size,)),) * len(video.frames)

    def layout_of(self, medium: Any) -> SliceLayout:
        """Return the groups of an image's slices, or of a video's frames."""
        plan = self.plan_of(medium)
        return self.group(medium, plan.tgt_sizes[0]) if isinstance(medium, Video) else plan.layout

    def plan_of(self, medium: Any) -> SlicePlan:
        """Return the plan for slicing an image, or each frame of a video."""
        if isinstance(medium, Video):
            _, height, width, _ = medium.frames.shape
            return plan_slices(width, height, self.frame_config)
        return plan_slices(medium.width, medium.height, self.image_config)

    def rows_of(self, medium: Any) -> Levels | Tensor:
        """Return the patch rows of the overview and slices of an image, or of every frame in order."""
        if isinstance(medium, Video):
            return levels_of_slices(map(Image.fromarray, medium.frames), self.frame_config)
        return levels_of_slices([medium], self.image_config)

    @property
    def frame_config(self) -> SliceConfig:
        """The rule for slicing a frame, with `max_slice_nums` from the video settings."""
        return replace(self.image_config, max_slice_nums=self.video_config.max_slice_nums)

    def video_pieces(self, video: Video, max_tokens: int) -> Iterator[tuple[SliceLayout, Levels | Tensor]]:
        """Yield (layout, patch rows) for consecutive parts of a video; see `ChatProcessor.pieces`."""
        layout, frames = self.layout_of(video), iter(video.frames)
        at_once = max(1, max_tokens // self.query_num)
        for start in range(0, len(layout), at_once):
            part = layout[start : start + at_once]
            taken = islice(frames, sum(len(group.slices) for group in part))
            yield part, levels_of_slices(map(Image.fromarray, taken), self.frame_config)


class PacksFrames(TakesVideos):
    """The video part of 4.5's processor: frames are packed, and each frame has a temporal id in tenths of a second."""

    @staticmethod
    def sample(total: int, source_fps: float, config: FrameConfig) -> list[int]:
        """Return the index of the middle frame of each of `fps` equal parts per second.

        The frames fill at most max_frames packs.
        """
        wanted = round(min(config.fps, round(source_fps)) * total / source_fps)
        return middle_indices(total, max(1, min(wanted, config.max_frames * (config.packing or config.max_packing))))

    def group(self, video: Video, tgt_size: tuple[int, int]) -> SliceLayout:
        """Return groups of frames that share a set; the last group may be smaller."""
        config, ids = self.video_config, temporal_ids(video)
        packing = config.packing or min(-(-len(ids) // config.max_frames), config.max_packing)
        packs = [ids[i : i + packing] for i in range(0, len(ids), packing)]
        return tuple(SliceGroup((tgt_size,) * len(pack), tuple(pack)) for pack in packs)


def temporal_ids(video: Video) -> list[int]:
    """Return the time of each frame in whole tenths of a second, but at most the last tenth before the video's end."""
    last = max(0, math.ceil(video.duration * TENTHS) - 1)
    return [min(round(second * TENTHS), last) for second in video.timestamps]


def middle_indices(total: int, wanted: int) -> list[int]:
    """Return all indices below `total` if `wanted` >= `total`, otherwise the middle indices of `wanted` equal parts.

    >>> middle_indices(10, 4)
    [1, 3, 6, 8]
    """
    if wanted >= total:
        return list(range(total))
    gap = total / wanted
    return [int(i * gap + gap / 2) for i in range(wanted)]


def patches_per_token(layout: SliceLayout, query_num: int) -> float:
    """Return the number of patches per token: 16 for a square slice, 96 for six square frames in one set.

    >>> patches_per_token((SliceGroup(((32, 32),) * 6, (0, 3, 6, 9, 12, 15)),), 64)
    96.0
    """
    patches = sum(h * w for group in layout for h, w in group.slices)
    return patches / (count_sets(layout) * query_num)
