"""The prompts of Qwen3-VL and Qwen3.5: a video is a sequence of frames, each preceded by its timestamp.

    <0.3 seconds><|vision_start|> tokens <|vision_end|><1.3 seconds><|vision_start|> tokens <|vision_end|>

A "frame" here is a grid step, which contains two sampled frames; its timestamp is the mean of
their times. For positions, each frame counts as a separate item. EVS may drop a frame's tokens,
but never its timestamp. As in transformers 4.57, the authors' version, these special tokens
replace those that the chat template writes around a video. transformers 5.10 and later, and
vLLM 0.32, also keep the template's tokens, as `processor.outer_tokens = True` does here.
"""

from collections.abc import Sequence

import numpy as np

from refvl.checks import check_positive, check_positive_ints
from refvl.merge import FramewiseMedia, MediaTokens
from refvl.pixels.media import Video
from refvl.pixels.patch_configs import Qwen3VLPatchConfig
from refvl.processors.chat import ChatProcessor


def even_indices(
    total: int, source_fps: float, *, fps: float = 2.0, min_frames: int = 4, max_frames: int = 768,
    num_frames: int | None = None,
) -> list[int]:  # fmt: skip
    """Return evenly spaced indices from the first to the last frame: `fps` per second within limits, or `num_frames`.

    Raises ValueError if num_frames exceeds `total`. Upstream:
    `Qwen3VLVideoProcessor.sample_frames` (transformers).

    >>> even_indices(132, 25.0)
    [0, 15, 29, 44, 58, 73, 87, 102, 116, 131]
    """
    wanted = num_frames
    if wanted is None:
        min_frames, max_frames = check_positive_ints(min_frames=min_frames, max_frames=max_frames)
        wanted = int(min(max(total / source_fps * check_positive(fps, "fps"), min_frames), max_frames, total))
    elif (wanted := check_positive_ints(num_frames=wanted)[0]) > total:
        raise ValueError(f"num_frames: expected at most {total}, the number of frames available, got {wanted}")
    return np.linspace(0, total - 1, wanted).round().astype(int).tolist()


class Qwen3VLProcessor(ChatProcessor):
    """Qwen3-VL's processor. Layouts are grids (t, h, w) in patches."""

    patch_config = Qwen3VLPatchConfig
    sampler = staticmethod(even_indices)
    # whether a video keeps the special tokens that the chat template writes around it
    outer_tokens: bool = False
    video_options = ("fps", "min_frames", "max_frames")

    def timestamps_of(self, video: Video) -> tuple[float, ...]:
        """Return the mean time of the two frames of each grid step."""
        return tuple(seconds_of_steps(video.timestamps))

    def expand(self, token: int, medium: MediaTokens) -> list[int]:
        """Return an item's ids: an image's token repeated, or a video's frames, each preceded by its timestamp."""
        if not isinstance(medium, FramewiseMedia):
            return [token] * medium.num_tokens
        _, h, w = medium.thw
        frame = [self.config.vision_start_token_id, *[token] * (h * w), self.config.vision_end_token_id]
        ids = list[int]()
        for second in medium.timestamps:
            ids += self.tokenizer.encode(f"<{second:.1f} seconds>", add_special_tokens=False) + frame
        return ids

    def apply_template(self, messages: Sequence[dict], **options) -> str:
        """Return the template's text; unless `outer_tokens` is set, drop the special tokens written around videos."""
        text = super().apply_template(messages, **options)
        ids = self.config.vision_start_token_id, self.token_ids["video"], self.config.vision_end_token_id
        marks = self.tokenizer.convert_ids_to_tokens(list(ids))
        return text if self.outer_tokens else text.replace("".join(marks), marks[1])


def seconds_of_steps(timestamps: Sequence[float]) -> list[float]:
    """Return the mean time of each pair of frames; if the last frame has no partner, it counts twice.

    >>> seconds_of_steps([0.0, 0.5, 1.0])
    [0.25, 1.0]
    """
    seconds = [*timestamps, *timestamps[-1:]]
    return [(a + b) / 2 for a, b in zip(seconds[::2], seconds[1::2], strict=False)]
