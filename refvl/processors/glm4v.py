"""GLM's prompts: a video is a sequence of images, each followed by its timestamp.

    <|begin_of_video|>
        <|begin_of_image|> tokens <|end_of_image|> 0
        <|begin_of_image|> tokens <|end_of_image|> 1
        ...
    <|end_of_video|>

A "frame" here is a grid step, which contains two sampled frames. For positions, each frame counts
as a separate item. EVS may drop a frame's tokens, but never its timestamp. The sampling of frames
and the format of timestamps depend on the processor class in the checkpoint's files
(`refvl.families.load_processor`), not on `model_type`, which is the same for GLM-4.5V and GLM-4.6V.

    class               releases                              sampler    timestamp
    Glm4vProcessor      GLM-4.1V, GLM-4.5V                    glm4v      3
    Glm46VProcessor     GLM-4.6V, GLM-4.6V-Flash, GLM-OCR     glm46v     3.3 seconds
    GlmgaProcessor      GLM-GA                                glmga      3.3 seconds

GLM-GA's files also name Glm46VProcessor, but different image and video processors. Both
timestamp formats are those of the releases' processors (transformers). vLLM 0.33 truncates all
timestamps, so GLM-4.6V reads "3.0 seconds" up to six times. Frames are filled with image
tokens; `placeholders` also accepts video tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import read_json
from refvl.merge import FramewiseMedia, MediaTokens
from refvl.pixels.media import Video, sample_frame_indices
from refvl.pixels.patch_configs import Glm4vPatchConfig, GlmgaPatchConfig
from refvl.positions.timestamps import distinct_and_even, sample_video_frames, written_seconds
from refvl.processors.chat import ChatProcessor


class Glm4vProcessor(ChatProcessor):
    """The processor of GLM-4.1V and GLM-4.5V; layouts are grids (t, h, w) in patches."""

    patch_config = Glm4vPatchConfig
    variant = "glm4v"  # the rule's name in `sample_video_frames`
    rule = "{0.fps:g} frames per second up to {0.max_duration:g} s, spread evenly beyond"  # see `clip_sampling`
    timestamp_format = "{}"
    video_options: ClassVar[dict[str, str]] = {"fps": "target_fps"}  # a message's option -> its name in the sampler

    @property
    def clip_sampling(self) -> str:
        """A description of the sampling rule.

        Only a folder's files, not `model_type`, distinguish GLM-4.6V from GLM-4.5V.
        """
        assumed = type(self) is Glm4vProcessor and self.assumed
        note = " (assumed: without processor files GLM-4.6V looks like GLM-4.5V)" if assumed else ""
        return f"{self.variant}: {self.rule.format(self.video_config)}{note}"

    def frame_indices(self, total: int, source_fps: float, **options) -> Sequence[int]:
        """Return increasing indices, each once: by the variant's rule, or `num_frames` evenly spaced ones."""
        if "num_frames" in options:
            return sample_frame_indices(total, **options)
        config = self.video_config
        settings = {"target_fps": config.fps, "max_duration": config.max_duration, "max_frames": config.max_frames}
        settings |= {self.video_options[name]: value for name, value in options.items()}
        chosen = sample_video_frames(
            self.variant, fps=source_fps, total_num_frames=total, duration=total / source_fps,
            temporal_patch_size=config.temporal_patch_size, **settings,
        )  # fmt: skip
        return list(dict.fromkeys(chosen.indices))

    def frames_read(self, video: Video) -> list[int]:
        """Return the indices of the frames that become patch rows: each frame once, but the last
        frame twice if the number is odd.

        The timestamps of the prompt come from the same indices, so there is one timestamp for
        every two frames.
        """
        places = {index: place for place, index in enumerate(video.indices)}
        return [places[index] for index in distinct_and_even(video.indices)]

    def timestamps_of(self, video: Video) -> tuple[float, ...]:
        """Return the time of each grid step's first frame, as the prompt states it."""
        timestamps = video.timestamps  # these times are exact even if the rate varies
        return tuple(written_seconds(self.variant, timestamps[place]) for place in self.frames_read(video)[::2])

    def expand(self, token: int, medium: MediaTokens) -> list[int]:
        """Return an item's ids: the image token, repeated, or all ids between a video's begin and end tokens."""
        if not isinstance(medium, FramewiseMedia):
            return [token] * medium.num_tokens
        _, h, w = medium.thw
        frame = [self.token_ids["image"]] * (h * w)
        ids = list[int]()
        for second in medium.timestamps:
            ids += [self.config.image_start_token_id, *frame, self.config.image_end_token_id]
            ids += self.tokenizer.encode(self.timestamp_format.format(second), add_special_tokens=False)
        return ids

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Return (L,) ids in which image tokens between a video's begin and end tokens have the video's id.

        The token that begins a video counts only if a frame begins directly after it, which
        never happens in plain text.
        """
        config, places = self.config, torch.arange(len(input_ids))
        opens = (input_ids[:-1] == config.video_start_token_id) & (input_ids[1:] == config.image_start_token_id)
        opened = torch.where(F.pad(opens, (0, 1)), places, -1).cummax(0).values
        closed = torch.where(input_ids == config.video_end_token_id, places, -1).cummax(0).values
        in_video = (opened > closed) & (input_ids == self.token_ids["image"])
        return torch.where(in_video, self.token_ids["video"], input_ids)


class Glm46VProcessor(Glm4vProcessor):
    """The processor of GLM-4.6V, GLM-4.6V-Flash and GLM-OCR."""

    variant = "glm46v"
    rule = "6, 2 or 1 frames per second, fewer for longer videos, {0.max_frames} at most"
    timestamp_format = "{:.1f} seconds"
    video_options: ClassVar[dict[str, str]] = {"max_frames": "max_frames"}


class GlmgaProcessor(Glm46VProcessor):
    """The processor of GLM-GA: the prompts of GLM-4.6V, with a different sampler and different image sizes."""

    patch_config = GlmgaPatchConfig
    variant = "glmga"
    rule = "{0.fps:g} frames per second, {0.max_frames} at most"
    video_options: ClassVar[dict[str, str]] = {"fps": "target_fps", "max_frames": "max_frames"}


def class_named_in(folder: Path) -> type[Glm4vProcessor] | None:
    """Return the GLM class that the first file with `processor_class` names, or None if it names another class."""
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        if (file := folder / name).is_file() and "processor_class" in (values := read_json(file)):
            return {"Glm4vProcessor": Glm4vProcessor, "Glm46VProcessor": Glm46VProcessor}.get(values["processor_class"])
    return None
