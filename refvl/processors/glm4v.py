"""GLM's prompts: a clip is a row of pictures, each followed by the second it was taken at.

    <|begin_of_video|>
        <|begin_of_image|> tokens <|end_of_image|> 0
        <|begin_of_image|> tokens <|end_of_image|> 1
        ...
    <|end_of_video|>

A frame is two sampled frames, one step of the grid. To the positions each is a medium of its own, and EVS may drop its
tokens, but never its second. Which frames are looked at, how a second is written and which token fills a frame comes
from the processor class that the checkpoint's files name, not from `model_type`: GLM-4.5V and GLM-4.6V share theirs.

    class               releases                              sampler    a second    token of a frame
    Glm4vProcessor      GLM-4.1V, GLM-4.5V                    glm4v      3           the video's
    Glm46VProcessor     GLM-4.6V, GLM-4.6V-Flash, GLM-OCR     glm46v     3.0 seconds the picture's
    Glm46VProcessor     GLM-GA (GlmgaProcessor here)          glmga      3.0 seconds the picture's

GLM-GA's files name Glm46VProcessor too; what is its own are the picture and the video processor inside.
Seconds are whole, as in vLLM; transformers writes 3.3 seconds where the frame was taken then.

transformers (5.17 to 5.23) and vLLM 0.33 fill frames with the picture's token for both; its place is taken by
embeddings, so a model cannot tell. Prompts made there are understood as well (`placeholders`).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from refvl.checks import Grid
from refvl.merge import FramewiseMedia, MergedMedia
from refvl.pixels.media import Video, load_video
from refvl.pixels.patches import Glm4vPatchConfig, GlmgaPatchConfig, patchify_video, read_json
from refvl.positions.timestamps import sample_video_frames
from refvl.processors.chat import ChatProcessor, Patches


class Glm4vProcessor(ChatProcessor):
    """GLM-4.1V and GLM-4.5V."""

    patch_config = Glm4vPatchConfig
    variant = "glm4v"  # of `sample_video_frames`
    rule = "{fps:g} frames a second up to {max_duration:g} s, longer clips are spread"
    timestamp_format = "{}"
    frame_kind = "video"  # whose token fills a frame
    options = {"fps": "target_fps"}  # noqa: RUF012  what a message may say, under the sampler's name

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "Glm4vProcessor":
        """The class that the folder's files name, where they name one of these and this one is not of its kind."""
        known = {c.__name__: c for c in (Glm4vProcessor, Glm46VProcessor)}
        named = known.get(_processor_class(folder), cls)
        chosen = cls if issubclass(cls, named) and named is not Glm4vProcessor else named
        return super(Glm4vProcessor, chosen).from_folder(folder, config)

    @property
    def clip_sampling(self) -> str:
        """The rule in words; `model_type` does not tell GLM-4.6V from GLM-4.5V, only a folder's files do."""
        config = self.video_config
        limits = {"fps": config.fps, "max_duration": config.max_duration, "max_frames": config.max_frames}
        assumed = type(self) is Glm4vProcessor and self.tokenizer is None
        note = " (assumed: without processor files GLM-4.6V looks like GLM-4.5V)" if assumed else ""
        return f"{self.variant}: {self.rule.format(**limits)}{note}"

    def load_video(self, source, options: dict) -> Video:
        """Files are sampled by the variant's rule, `num_frames` evenly; frames in memory count as sampled already.

        Raises ValueError for options that the variant's rule does not read.
        """
        if isinstance(source, (str, Path)) and "num_frames" not in options:
            return load_video(source, sample=self._sampler(options), limits=self.limits)
        return load_video(source, **options, limits=self.limits)

    def _sampler(self, options: dict):
        """(total_num_frames, fps) -> indices, increasing: a repeated last frame is read once and repeated later."""
        if unknown := sorted(options.keys() - self.options.keys()):
            raise ValueError(f"prompt: {type(self).__name__} samples a clip by {sorted(self.options)}, got {unknown}")
        config = self.video_config
        settings = {"target_fps": config.fps, "max_duration": config.max_duration, "max_frames": config.max_frames}
        settings |= {self.options[name]: value for name, value in options.items()}

        def sample(total: int, fps: float) -> list[int]:
            chosen = sample_video_frames(
                self.variant, fps=fps, total_num_frames=total, duration=total / fps,
                temporal_patch_size=config.temporal_patch_size, **settings,
            )  # fmt: skip
            return list(dict.fromkeys(chosen.indices))

        return sample

    def _patchify_video(self, video: Video) -> Patches:
        """Pixels and seconds are those of the same frames, so that there are as many of both."""
        sample = sample_video_frames(
            self.variant, fps=video.source_fps, total_num_frames=video.total_num_frames, do_sample_frames=False,
            frames_indices=video.indices,
        )  # fmt: skip
        rows = np.array([video.indices.index(i) for i in sample.indices])
        pixel_values, grid = patchify_video(video.frames[rows], self.video_config)
        seconds = tuple(int(video.timestamps[row]) for row in rows[::2])  # true ones, also where the rate varies
        merged = replace(self.merged("video", grid), timestamps=seconds)
        return Patches(video, pixel_values, grid, merged)

    def merged(self, kind: str, layout: Grid, second_per_grid: float = 1.0) -> MergedMedia:
        """A clip is t pictures; second_per_grid is not read, because the prompt says the time."""
        m, (t, h, w) = self.config.vision_config.spatial_merge_size, layout
        return (FramewiseMedia if kind == "video" else MergedMedia)(kind, (t, h // m, w // m))

    def expand(self, token: int, medium: MergedMedia) -> list[int]:
        """A picture's token repeated; for a clip everything between begin and end of video."""
        if medium.kind == "image":
            return super().expand(token, medium)
        config, frame_token, ids = self.config, self.token_ids[self.frame_kind], []
        for (_, h, w), second in zip(medium.runs, medium.timestamps, strict=True):
            ids += [config.image_start_token_id, *[frame_token] * (h * w), config.image_end_token_id]
            ids += self.tokenizer.encode(self.timestamp_format.format(second), add_special_tokens=False)
        return ids

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Picture tokens between begin and end of video are frames of the video."""
        opened = (input_ids == self.config.video_start_token_id).cumsum(0)
        closed = (input_ids == self.config.video_end_token_id).cumsum(0)
        in_video = (opened > closed) & (input_ids == self.token_ids["image"])
        return torch.where(in_video, self.token_ids["video"], input_ids)


class Glm46VProcessor(Glm4vProcessor):
    """GLM-4.6V, GLM-4.6V-Flash and GLM-OCR."""

    variant = "glm46v"
    rule = "6, 2 or 1 frames a second, fewer the longer the clip, {max_frames} at most"
    timestamp_format = "{:.1f} seconds"
    frame_kind = "image"
    options = {"max_frames": "max_frames"}  # noqa: RUF012


class GlmgaProcessor(Glm46VProcessor):
    """GLM-GA: GLM-4.6V's prompts, its own sampler and picture sizes."""

    patch_config = GlmgaPatchConfig
    variant = "glmga"
    rule = "{fps:g} frames a second, {max_frames} at most"
    options = {"fps": "target_fps", "max_frames": "max_frames"}  # noqa: RUF012


def _processor_class(folder: Path) -> str | None:
    """`processor_class`, from the first of the folder's files that has it."""
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        if (file := folder / name).is_file() and "processor_class" in (values := read_json(file)):
            return values["processor_class"]
    return None
