"""Patch rows of GLM and Qwen3-VL, whose pixel budgets count the pixels of all frames."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from refvl.pixels.patches import PatchConfig, check_aspect_ratio


@dataclass(frozen=True, slots=True)
class Glm4vPatchConfig(PatchConfig):
    """GLM's rule: budgets limit the area of all frames together; an image counts as
    `temporal_patch_size` frames.
    """

    VIDEO_DEFAULTS: ClassVar[dict[str, Any]] = {"max_pixels": 28 * 28 * 2 * 30000}  # for all frames together

    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 15000
    max_frames: int = 640
    max_duration: float = 300.0  # in seconds; GLM-4.1V takes no more frames from a longer video

    @property
    def max_image_tokens(self) -> int:
        """The largest token count of an image, which counts as `temporal_patch_size` frames."""
        return self.max_pixels // (self.temporal_patch_size * (self.patch_size * self.merge_size) ** 2)

    def target_size(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """Return the size by `smart_resize_video` for the padded number of frames."""
        return smart_resize_video(
            self.padded(num_frames), height, width, temporal_factor=self.temporal_patch_size, factor=self.factor,
            min_pixels=self.min_pixels, max_pixels=self.max_pixels,
        )  # fmt: skip

    def frame_floor(self, num_frames: int) -> int:
        """Return the smallest allowed area of each frame, or of an image if num_frames is 1."""
        return math.ceil(self.min_pixels / self.padded(num_frames))

    def frame_budget(self, num_frames: int) -> int:
        """Return the largest allowed area of each frame, or of an image if num_frames is 1."""
        return self.max_pixels // self.padded(num_frames)

    def padded(self, num_frames: int) -> int:
        """Return the number of frames after padding to whole grid steps."""
        return math.ceil(num_frames / self.temporal_patch_size) * self.temporal_patch_size


@dataclass(frozen=True, slots=True)
class GlmgaPatchConfig(Glm4vPatchConfig):
    """GLM-GA's rule: the config can require sides to be multiples of several merged tokens."""

    VIDEO_DEFAULTS: ClassVar[dict[str, Any]] = {"max_pixels": 28 * 28 * 2 * 55790}  # almost twice other GLMs' budget

    patch_expand_factor: int = 1

    @property
    def factor(self) -> int:
        """The number of pixels that divides the resized sides."""
        return self.patch_size * self.merge_size * self.patch_expand_factor


@dataclass(frozen=True, slots=True)
class Qwen3VLPatchConfig(PatchConfig):
    """Qwen3-VL's rule for images.

    The default pixel budget is that of the released files, because transformers has none.
    """

    patch_size: int = 16
    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    max_video_tokens: int = 768

    @classmethod
    def for_video(cls, **changes) -> "Qwen3VLVideoPatchConfig":
        """Return the config for videos, whose sizes follow a different rule (see `Qwen3VLVideoPatchConfig`)."""
        return Qwen3VLVideoPatchConfig(**changes)


@dataclass(frozen=True, slots=True)
class Qwen3VLVideoPatchConfig(Qwen3VLPatchConfig):
    """Qwen3-VL's rule for videos: budgets limit the area of all frames together; the defaults
    are `Qwen3VLVideoProcessor`'s.

    If the file sets `cap_pixels_per_frame`, `max_video_tokens` limits the tokens of each frame.
    """

    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 768 * 32 * 32

    def target_size(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """Return the size by `smart_resize_video`; a single frame counts as a grid step, because it is padded."""
        frames = max(num_frames, self.temporal_patch_size)
        max_pixels = self.frame_budget(frames) * frames if self.cap_pixels_per_frame else self.max_pixels
        return smart_resize_video(
            frames, height, width, temporal_factor=self.temporal_patch_size, factor=self.factor,
            min_pixels=self.min_pixels, max_pixels=max_pixels,
        )  # fmt: skip

    def frame_floor(self, num_frames: int) -> int:
        """Return the smallest allowed area of each frame."""
        return math.ceil(self.min_pixels / num_frames)

    def frame_budget(self, num_frames: int) -> int:
        """Return the largest allowed area of each frame in a video of `num_frames` frames."""
        if not self.cap_pixels_per_frame:
            return self.max_pixels // num_frames
        share = min(self.max_video_tokens * self.factor**2, self.max_pixels // num_frames)
        return max(share, int(self.min_pixels * 1.05))


def smart_resize_video(
    num_frames: int,
    height: int,
    width: int,
    *,
    temporal_factor: int = 2,
    factor: int = 28,
    min_pixels: int = 112 * 112,
    max_pixels: int = 28 * 28 * 2 * 6144,
) -> tuple[int, int]:
    """Return the (height, width) by GLM's `smart_resize`: budgets count all frames; tiny images are enlarged first.

    num_frames: the number of frames in the video, at least temporal_factor; an image counts as temporal_factor frames.
    temporal_factor: the number of frames per grid step; the budgets count whole steps. Raises ValueError for an aspect
    ratio above 200. Upstream: `smart_resize` of GLM-4.1V (transformers).

    Unlike `fit_budget`, this function compares the budget with the area of all frames after
    rounding their number to whole grid steps, but computes the scale from the area of
    `num_frames` frames.

    >>> smart_resize_video(2, 480, 640), smart_resize_video(600, 480, 640)
    ((476, 644), (84, 140))
    """
    old_height, old_width = height, width
    if min(height, width) < factor:
        enlarge = max(factor / height, factor / width)
        old_height, old_width = int(height * enlarge), int(width * enlarge)
    check_aspect_ratio(old_height, old_width)
    frames = round(num_frames / temporal_factor) * temporal_factor
    new_height = round(old_height / factor) * factor
    new_width = round(old_width / factor) * factor
    if frames * new_height * new_width > max_pixels:
        shrink = math.sqrt((num_frames * old_height * old_width) / max_pixels)
        new_height = max(factor, math.floor(old_height / shrink / factor) * factor)
        new_width = max(factor, math.floor(old_width / shrink / factor) * factor)
    elif frames * new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * old_height * old_width))
        new_height = math.ceil(old_height * grow / factor) * factor
        new_width = math.ceil(old_width * grow / factor) * factor
    return new_height, new_width
