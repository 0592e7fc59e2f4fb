"""Token counts of media from their sizes alone, and the encoding of a long video in parts.

A plain answer does not need this file; planning, cost estimates and long prompts do.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from refvl.merge import MediaTokens
from refvl.pixels.media import Video
from refvl.pixels.patches import Levels, levels_of_frames


class PlansMedia:
    """The planning part of a `ChatProcessor`."""

    @property
    def largest_picture(self: Any) -> int:
        """The number of tokens of the largest image that the limits allow."""
        return self.image_config.max_image_tokens

    @property
    def clip_sampling(self) -> str:
        """A description of the video sampling; empty if `video_config` contains all of it."""
        return ""

    def extents(self: Any, media: Sequence[Image.Image | Video]) -> list[MediaTokens]:
        """Return the `media_tokens` that `patchify` would report for each item, without processing pixels."""
        return self._each(
            media, self._image_extents, lambda video: self._video_extents(video, self._video_layout(video))
        )

    def layout_of(self: Any, medium: Image.Image | Video) -> Any:
        """Return the layout that `patchify` gives a decoded item, from its size.

        Raise ValueError for an unsupported video.
        """
        if not isinstance(medium, Video):
            return self._image_layout(medium)
        self._check_takes_videos()
        return self._video_layout(medium)

    def pieces(self: Any, medium: Image.Image | Video, max_tokens: int) -> Iterator[tuple[Any, Levels | Tensor]]:
        """Yield (layout, patch rows) for consecutive parts of an item, one by one; their encodings can be concatenated.

        A part of a video has at most max_tokens tokens, or consists of a single grid step. An image is one part.
        """
        if isinstance(medium, Video):
            yield from self._video_pieces(medium, max_tokens)
        else:
            patches = self._patchify_image(medium)
            yield patches.layout, patches.rows

    def _video_pieces(self: Any, video: Video, max_tokens: int) -> Iterator[tuple[Any, Levels]]:
        frames, config = list(self._frames_read(video)), self.video_config
        _, h, w = self.media_tokens("video", self._video_layout(video)).thw
        at_once = config.temporal_patch_size * max(1, max_tokens // (h * w))
        for start in range(0, len(frames), at_once):
            part = video.frames[frames[start : start + at_once]]
            rows, grid = levels_of_frames(part, config, len(frames))
            yield grid, rows

    def _image_extents(self: Any, image: Image.Image) -> MediaTokens:
        return self.media_tokens("image", self._image_layout(image))
