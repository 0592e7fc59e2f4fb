"""Kimi K2.5's prompts: a video is a sequence of chunks of four frames, each preceded by the time of its first frame.

    image   <|media_begin|>image<|media_content|> tokens <|media_end|>
    video   00:00:00.000<|media_begin|>video<|media_content|> tokens <|media_end|>00:00:02.000<|media_begin|>video ...

The chat template writes everything for an image except its tokens, but only a placeholder for a video. A chunk has as
many tokens as one frame has merge blocks.

Upstream: `Kimi_K25Processor` (transformers 5.23). The released code fills chunks with the image's token; embeddings
replace it, so the model sees no difference.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image
from transformers import PretrainedConfig

from refvl.checks import Grid, check_positive, check_positive_int
from refvl.merge import FramewiseMedia, MediaTokens
from refvl.pixels.media import Video, load_video
from refvl.pixels.padded import PaddedPatchConfig, padded_levels
from refvl.pixels.patches import Levels, Patches
from refvl.processors.chat import ChatProcessor

CHUNK = "<|media_begin|>video<|media_content|>", "<|media_end|>"  # the text around the tokens of a chunk


class KimiK25Processor(ChatProcessor):
    """Kimi's processor. Layouts are grids (t, h, w) in patches; t counts the frames of a whole video."""

    patch_config: ClassVar[type[PaddedPatchConfig]] = PaddedPatchConfig
    video_config: PaddedPatchConfig

    def __init__(self, config: PretrainedConfig, tokenizer=None, image_config=None, video_config=None):
        """Build a processor; without a tokenizer, it can plan and count tokens, but not build a prompt."""
        self.config, self.tokenizer, self.assumed = config, tokenizer, image_config is None
        self.image_config = image_config or self.patch_config()
        self.video_config = video_config or self.patch_config.for_video()
        self.token_ids = {"image": config.image_token_id, "video": config.video_token_id}
        self.merge_size = config.vision_config.merge_kernel_size[0]
        tower = (self.merge_size, self.merge_size, config.vision_config.pos_emb_time)
        given = (self.image_config.merge_size, self.video_config.merge_size, self.video_config.chunk_frames)
        if given != tower:
            names = "merge_size of images, merge_size of videos, temporal_patch_size"
            raise ValueError(f"{names}: expected {tower} as in config.json, got {given} from the preprocessor config")

    def load_video(self, source, options: dict) -> Video:
        """Sample a file evenly at the checkpoint's rate; frames in memory are treated as already sampled.

        options: fps or num_frames. Raises ValueError for any other option.
        """
        if options.keys() - {"fps", "num_frames"} or len(options) > 1:
            raise ValueError(f"prompt: expected either fps or num_frames for a video, got {sorted(options)}")
        if not isinstance(source, (str, Path)):
            return load_video(source, **options, limits=self.limits)
        return load_video(source, sample=partial(self.frame_indices, **options), limits=self.limits)

    def frame_indices(
        self, total: int, source_fps: float, *, fps: float | None = None, num_frames: int | None = None
    ) -> Sequence[int]:
        """Return the indices of `fps` frames per second, or num_frames, evenly spaced from the first; at most `total`.

        Raises ValueError if num_frames exceeds `total`. Upstream: `default_sample_indices_fn` (transformers).
        """
        if num_frames is None:
            rate = self.video_config.fps if fps is None else check_positive(fps, "fps")
            num_frames = min(max(1, int(total / source_fps * rate)), total)
        elif check_positive_int(num_frames, "num_frames") > total:
            raise ValueError(f"num_frames: expected at most {total}, the number of frames available, got {num_frames}")
        return [i * total // num_frames for i in range(num_frames)]

    def media_tokens(self, kind: str, layout: Grid, second_per_grid: float = 1.0) -> MediaTokens:
        """Return (chunks, h, w) tokens; text separates a video's chunks, and second_per_grid is not used."""
        t, h, w = layout
        thw = (-(-t // self.video_config.chunk_frames), h // self.merge_size, w // self.merge_size)
        return FramewiseMedia(kind, thw) if kind == "video" else MediaTokens(kind, thw)

    def _patchify_image(self, image: Image.Image) -> Patches:
        rows, grid = padded_levels(np.asarray(image)[None], self.image_config)
        return Patches(image, rows, grid, self.media_tokens("image", grid))

    def _patchify_video(self, video: Video) -> Patches:
        rows, grid = padded_levels(video.frames, self.video_config)
        return Patches(video, rows, grid, self._video_extents(video, grid))

    def _video_extents(self, video: Video, layout: Grid) -> MediaTokens:
        seconds = tuple(video.timestamps[:: self.video_config.chunk_frames])
        return FramewiseMedia("video", self.media_tokens("video", layout).thw, timestamps=seconds)

    def _video_pieces(self, video: Video, max_tokens: int) -> Iterator[tuple[Grid, Levels]]:
        _, h, w = self.media_tokens("video", self._video_layout(video)).thw
        at_once = self.video_config.chunk_frames * max(1, max_tokens // (h * w))
        for start in range(0, len(video.frames), at_once):
            rows, grid = padded_levels(video.frames[start : start + at_once], self.video_config)
            yield grid, rows

    def expand(self, token: int, medium: MediaTokens) -> list[int]:
        """Return an item's ids: an image's token repeated, or a video's chunks, each preceded by its time."""
        if not isinstance(medium, FramewiseMedia):
            return [token] * medium.num_tokens
        _, h, w = medium.thw
        before, after = CHUNK
        ids = list[int]()
        for second in medium.timestamps:
            ids += self.tokenizer.encode(clock(second) + before, add_special_tokens=False)
            ids += [token] * (h * w) + self.tokenizer.encode(after, add_special_tokens=False)
        return ids


def clock(second: float) -> str:
    """Format a time in a video as it appears in the prompt, rounded down to milliseconds.

    >>> clock(62.5)
    '00:01:02.500'
    """
    return time.strftime("%H:%M:%S", time.gmtime(second)) + f".{int(second % 1 * 1000):03d}"
