"""Qwen3-VL's prompts, and Qwen3.5's: a video is a row of frames, each behind the second it was taken at.

    <0.3 seconds><|vision_start|> tokens <|vision_end|><1.3 seconds><|vision_start|> tokens <|vision_end|>

A frame here is two sampled frames, one step of the grid, and its second the mean of theirs. To the positions each is a
medium of its own; EVS may drop its tokens, but never its second. These marks take the place of those that the chat
template writes around a video, as in transformers 4.57; from 5.10 on it keeps the outer ones as well, and so does vLLM
0.32 beside it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from refvl.checks import Grid, check_positive, check_positive_ints
from refvl.merge import FramewiseMedia, MediaTokens
from refvl.pixels.media import Video, load_video
from refvl.pixels.patch_configs import Qwen3VLPatchConfig
from refvl.processors.chat import ChatProcessor

RULE = ("fps", "min_frames", "max_frames")


class Qwen3VLProcessor(ChatProcessor):
    """Layouts are grids (t, h, w) in patches."""

    patch_config = Qwen3VLPatchConfig

    def load_video(self, source, options: dict) -> Video:
        """Files are sampled evenly by the checkpoint's rate and limits, unless the message says otherwise.

        options: fps, min_frames, max_frames, or num_frames alone. Frames in memory count as sampled already.
        """
        if not isinstance(source, (str, Path)):
            return load_video(source, **options, limits=self.limits)
        if "num_frames" in options and len(options) > 1:
            raise ValueError(f"prompt: a video is sampled by {', '.join(RULE)}, or num_frames alone, got {[*options]}")
        return load_video(source, sample=partial(self.frame_indices, **options), limits=self.limits)

    def frame_indices(self, total: int, source_fps: float, **options) -> Sequence[int]:
        """`even_indices`, by the checkpoint's rate and limits, unless `options` say otherwise."""
        rule = {name: getattr(self.video_config, name) for name in RULE} if "num_frames" not in options else {}
        return even_indices(total, source_fps, **(rule | options))

    def _video_extents(self, video: Video, layout: Grid) -> MediaTokens:
        seconds = tuple(seconds_of_steps(video.timestamps))
        thw = self.media_tokens("video", layout).thw
        return FramewiseMedia("video", thw, timestamps=seconds)

    def expand(self, token: int, medium: MediaTokens) -> list[int]:
        """Return the ids of a medium: an image's token repeated; a video's frames, each after its second."""
        if not isinstance(medium, FramewiseMedia):
            return [token] * medium.num_tokens
        _, h, w = medium.thw
        frame = [self.config.vision_start_token_id, *[token] * (h * w), self.config.vision_end_token_id]
        ids = list[int]()
        for second in medium.timestamps:
            ids += self.tokenizer.encode(f"<{second:.1f} seconds>", add_special_tokens=False) + frame
        return ids

    def apply_template(self, messages: Sequence[dict], **options) -> str:
        """Without the marks that the template writes around a video."""
        ids = self.config.vision_start_token_id, self.token_ids["video"], self.config.vision_end_token_id
        marks = self.tokenizer.convert_ids_to_tokens(list(ids))
        return super().apply_template(messages, **options).replace("".join(marks), marks[1])


def seconds_of_steps(timestamps: Sequence[float]) -> list[float]:
    """The mean of each two frames' seconds; the last frame of an odd number counts twice, as in the grid.

    >>> seconds_of_steps([0.0, 0.5, 1.0])
    [0.25, 1.0]
    """
    seconds = [*timestamps, *timestamps[-1:]]
    return [(a + b) / 2 for a, b in zip(seconds[::2], seconds[1::2], strict=False)]


def even_indices(
    total: int, source_fps: float, *, fps: float = 2.0, min_frames: int = 4, max_frames: int = 768,
    num_frames: int | None = None,
) -> list[int]:  # fmt: skip
    """`fps` frames per second within the limits, or `num_frames`, evenly from a clip's first frame to its last.

    Raises ValueError for more frames than there are. Upstream: `Qwen3VLVideoProcessor.sample_frames` (transformers).

    >>> even_indices(132, 25.0)
    [0, 15, 29, 44, 58, 73, 87, 102, 116, 131]
    """
    wanted = num_frames
    if wanted is None:
        check_positive_ints(min_frames=min_frames, max_frames=max_frames)
        wanted = min(max(int(total / source_fps * check_positive(fps, "fps")), min_frames), max_frames, total)
    elif check_positive_ints(num_frames=wanted)[0] > total:
        raise ValueError(f"num_frames: the clip has {total} frames, got {wanted}")
    return np.linspace(0, total - 1, wanted).round().astype(int).tolist()
