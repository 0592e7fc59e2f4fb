"""Qwen2.5-VL's prompts: an image or a video is one run of identical tokens between two special tokens.

The prompt contains no timestamps; the seconds between frames scale the time axis of a video's
positions instead.
"""

import os
from typing import Any

from refvl.checks import Grid
from refvl.merge import MediaTokens
from refvl.pixels.media import Video, sample_frame_indices
from refvl.processors.chat import ChatProcessor


class Qwen2_5_VLProcessor(ChatProcessor):
    """Qwen2.5-VL's processor. Layouts are grids (t, h, w) in patches."""

    sampler = staticmethod(sample_frame_indices)
    video_options = ("fps", "min_frames", "max_frames")

    def load_video(self, source, options: dict) -> Video:
        """Load a video; frames in memory count as sampled at the checkpoint's rate, unless the
        message sets a rate.
        """
        if not isinstance(source, (str, os.PathLike)) and "num_frames" not in options:
            options = {"fps": self.video_config.fps} | options
        return super().load_video(source, options)

    def extents_of(self, medium: Any, layout: Grid) -> MediaTokens:
        """Return the extents of an item; the seconds between grid steps scale the time axis of a video."""
        if not isinstance(medium, Video):
            return self.media_tokens("image", layout)
        return self.media_tokens("video", layout, self.video_config.temporal_patch_size / medium.fps)

    def media_tokens(self, kind: str, layout: Grid, second_per_grid: float = 1.0) -> MediaTokens:
        """Return an item's extents; only the time axis of a video is scaled."""
        t, h, w = layout
        t_factor = 1.0
        if kind == "video":
            t_factor = float(second_per_grid) * self.config.vision_config.tokens_per_second
        return MediaTokens(kind, (t, h // self.merge_size, w // self.merge_size), t_factor)
