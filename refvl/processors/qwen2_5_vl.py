"""Qwen2.5-VL's prompts: an image or a video is one run of equal tokens between two special tokens.

The prompt does not contain the times of a video; they scale the time axis of its positions.
"""

from collections.abc import Sequence

from refvl.checks import Grid
from refvl.merge import MediaTokens
from refvl.pixels.media import Video, load_video, sample_frame_indices
from refvl.processors.chat import ChatProcessor


class Qwen2_5_VLProcessor(ChatProcessor):
    """Qwen2.5-VL's processor. Layouts are grids (t, h, w) in patches."""

    def frame_indices(self, total: int, source_fps: float) -> Sequence[int]:
        """Return the indices of frames sampled at the checkpoint's rate and within its limits."""
        config = self.video_config
        return sample_frame_indices(
            total, source_fps, fps=config.fps, min_frames=config.min_frames, max_frames=config.max_frames
        )

    def load_video(self, source, options: dict) -> Video:
        """Load a video with the checkpoint's rate and limits, unless the message sets them."""
        config = self.video_config
        rate = {} if "num_frames" in options else {"fps": config.fps}
        limits = {"min_frames": config.min_frames, "max_frames": config.max_frames}
        return load_video(source, **(rate | limits | options), limits=self.limits)

    def _video_extents(self, video: Video, layout: Grid) -> MediaTokens:
        return self.media_tokens("video", layout, self.video_config.temporal_patch_size / video.fps)

    def media_tokens(self, kind: str, layout: Grid, second_per_grid: float = 1.0) -> MediaTokens:
        """Return an item's extents; only the time axis of a video is scaled."""
        t, h, w = layout
        t_factor = 1.0
        if kind == "video":
            t_factor = float(second_per_grid) * self.config.vision_config.tokens_per_second
        return MediaTokens(kind, (t, h // self.merge_size, w // self.merge_size), t_factor)
