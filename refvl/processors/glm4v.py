"""GLM's prompts: a video is a row of images, each followed by the second it was taken at.

    <|begin_of_video|>
        <|begin_of_image|> tokens <|end_of_image|> 0
        <|begin_of_image|> tokens <|end_of_image|> 1
        ...
    <|end_of_video|>

A frame here is two sampled frames, one step of the grid. To the positions each is a medium of its own, and EVS may drop
its tokens, but never its second. Which frames are sampled, how a second is written and which token fills a frame
depends on the processor class that the checkpoint's files name (`refvl.families.load_processor`), not on `model_type`:
GLM-4.5V and GLM-4.6V share theirs.

    class               releases                              sampler    a second    token of a frame
    Glm4vProcessor      GLM-4.1V, GLM-4.5V                    glm4v      3           the video's
    Glm46VProcessor     GLM-4.6V, GLM-4.6V-Flash, GLM-OCR     glm46v     3.0 seconds the image's
    GlmgaProcessor      GLM-GA                                glmga      3.0 seconds the image's

GLM-GA's files name Glm46VProcessor too; only the image and video processors inside are its own.
Seconds are whole, as in vLLM; transformers writes 3.3 seconds where the frame was taken then.

transformers (5.17 to 5.23) and vLLM 0.33 fill frames with the image's token for all of them. Embeddings replace it, so
the model sees no difference, and prompts made there are read as well (`placeholders`).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import Grid, read_json
from refvl.merge import FramewiseMedia, MediaTokens
from refvl.pixels.media import Video, load_video
from refvl.pixels.patch_configs import Glm4vPatchConfig, GlmgaPatchConfig
from refvl.positions.timestamps import distinct_and_even, sample_video_frames
from refvl.processors.chat import ChatProcessor


class Glm4vProcessor(ChatProcessor):
    """GLM-4.1V and GLM-4.5V. Layouts are grids (t, h, w) in patches."""

    patch_config = Glm4vPatchConfig
    variant = "glm4v"  # of `sample_video_frames`
    rule = "{0.fps:g} frames a second up to {0.max_duration:g} s, longer clips are spread"  # with `video_config`
    timestamp_format = "{}"
    frame_kind = "video"  # whose token fills a frame
    options: ClassVar[dict[str, str]] = {"fps": "target_fps"}  # what a message may say: its name in the sampler

    @property
    def clip_sampling(self) -> str:
        """The rule in words; `model_type` does not tell GLM-4.6V from GLM-4.5V, only a folder's files do."""
        assumed = type(self) is Glm4vProcessor and self.assumed
        note = " (assumed: without processor files GLM-4.6V looks like GLM-4.5V)" if assumed else ""
        return f"{self.variant}: {self.rule.format(self.video_config)}{note}"

    def load_video(self, source, options: dict) -> Video:
        """Files are sampled by the variant's rule, `num_frames` evenly; frames in memory count as sampled already.

        Raises ValueError for options that the variant's rule does not read.
        """
        if not isinstance(source, (str, Path)) or "num_frames" in options:
            return load_video(source, **options, limits=self.limits)
        if unknown := sorted(options.keys() - self.options.keys()):
            raise ValueError(f"prompt: {type(self).__name__} samples a video by {sorted(self.options)}, got {unknown}")
        settings = {self.options[name]: value for name, value in options.items()}
        return load_video(source, sample=partial(self.frame_indices, **settings), limits=self.limits)

    def frame_indices(self, total: int, source_fps: float, **settings) -> Sequence[int]:
        """Increasing, by the variant's rule; settings: of its sampler. A repeated last frame is read once."""
        config = self.video_config
        own = {"target_fps": config.fps, "max_duration": config.max_duration, "max_frames": config.max_frames}
        chosen = sample_video_frames(
            self.variant, fps=source_fps, total_num_frames=total, duration=total / source_fps,
            temporal_patch_size=config.temporal_patch_size, **(own | settings),
        )  # fmt: skip
        return list(dict.fromkeys(chosen.indices))

    def _frames_read(self, video: Video) -> list[int]:
        """Return the places of the frames that become patch rows: each frame once, the last twice in an odd number.

        The seconds of the prompt are read from the same places, so that there is one for every two frames.
        """
        places = {index: place for place, index in enumerate(video.indices)}
        return [places[index] for index in distinct_and_even(video.indices)]

    def _video_extents(self, video: Video, layout: Grid) -> MediaTokens:
        timestamps = video.timestamps  # true ones, also where the rate varies
        seconds = tuple(int(timestamps[place]) for place in self._frames_read(video)[::2])
        thw = self.media_tokens("video", layout).thw
        return FramewiseMedia("video", thw, timestamps=seconds)

    def expand(self, token: int, medium: MediaTokens) -> list[int]:
        """Return the ids of a medium: an image's token repeated; all that lies between begin and end of a video."""
        if not isinstance(medium, FramewiseMedia):
            return [token] * medium.num_tokens
        _, h, w = medium.thw
        frame = [self.token_ids[self.frame_kind]] * (h * w)
        ids = list[int]()
        for second in medium.timestamps:
            ids += [self.config.image_start_token_id, *frame, self.config.image_end_token_id]
            ids += self.tokenizer.encode(self.timestamp_format.format(second), add_special_tokens=False)
        return ids

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Image tokens between begin and end of video are frames of the video.

        A begin of video counts where a frame begins right behind it: in text, which may hold the token, none does.
        """
        config, places = self.config, torch.arange(len(input_ids))
        opens = (input_ids[:-1] == config.video_start_token_id) & (input_ids[1:] == config.image_start_token_id)
        opened = torch.where(F.pad(opens, (0, 1)), places, -1).cummax(0).values
        closed = torch.where(input_ids == config.video_end_token_id, places, -1).cummax(0).values
        in_video = (opened > closed) & (input_ids == self.token_ids["image"])
        return torch.where(in_video, self.token_ids["video"], input_ids)


class Glm46VProcessor(Glm4vProcessor):
    """GLM-4.6V, GLM-4.6V-Flash and GLM-OCR."""

    variant = "glm46v"
    rule = "6, 2 or 1 frames a second, fewer the longer the clip, {0.max_frames} at most"
    timestamp_format = "{:.1f} seconds"
    frame_kind = "image"
    options: ClassVar[dict[str, str]] = {"max_frames": "max_frames"}


class GlmgaProcessor(Glm46VProcessor):
    """GLM-GA: GLM-4.6V's prompts, with its own sampler and image sizes."""

    patch_config = GlmgaPatchConfig
    variant = "glmga"
    rule = "{0.fps:g} frames a second, {0.max_frames} at most"
    options: ClassVar[dict[str, str]] = {"fps": "target_fps", "max_frames": "max_frames"}


def named_processor(folder: Path) -> str | None:
    """`processor_class`, from the first of the folder's files that has it."""
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        if (file := folder / name).is_file() and "processor_class" in (values := read_json(file)):
            return values["processor_class"]
    return None
