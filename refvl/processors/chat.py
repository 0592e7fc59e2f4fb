"""From a question and media to token ids: the chat template, tokenizer and limits of the checkpoint's folder.

prompt, images, videos -> chat messages -> decoded media -> patch rows + grids -> text -> ids with placeholders
"""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from refvl.merge import MergedMedia, expand_placeholders
from refvl.pixels.media import LIMITS, Video, load_image
from refvl.pixels.patches import PatchConfig, patchify_image, plan_size


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """One medium, patchified: what the encoder eats, and where it came from."""

    source: Image.Image | Video
    pixel_values: Tensor  # (N, C*Tp*P*P) float32
    layout: Hashable  # how the rows lie, for the encoder's plan: (t, h, w) in patches for Qwen and GLM
    merged: MergedMedia


class ChatProcessor:
    """Everything between a user's words and the models' tensors; a family adds what its clips are."""

    patch_config = PatchConfig
    tokens_at_once = 1  # the encoder's tokens come in multiples of this
    limits = LIMITS  # of what is decoded: `processor.limits = MediaLimits(...)` changes them
    stop_token_ids = ()  # that end an answer, besides those of generation_config.json

    def __init__(self, config: PretrainedConfig, tokenizer=None, image_config=None, video_config=None):
        """tokenizer None: a processor for planning, which counts tokens but cannot make a prompt."""
        self.config, self.tokenizer = config, tokenizer
        self.image_config = image_config or self.patch_config()
        self.video_config = video_config or self.patch_config.for_video()
        self.token_ids = {"image": config.image_token_id, "video": config.video_token_id}

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "ChatProcessor":
        """Tokenizer, chat template and preprocessing limits from a checkpoint folder."""
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.chat_template = tokenizer.chat_template or read_chat_template(folder)
        image_config, video_config = (cls.patch_config.from_folder(folder, kind) for kind in ("image", "video"))
        return cls(config, tokenizer, image_config, video_config)

    def messages(self, prompt: str | Sequence[dict], images: Sequence = (), videos: Sequence = ()) -> list[dict]:
        """One user message with images, videos and the text, in that order; or a list of messages, checked."""
        if isinstance(prompt, str):
            media = [{"type": "image", "image": i} for i in _as_list(images, "images")]
            media += [{"type": "video", "video": v} for v in _as_list(videos, "videos")]
            return [{"role": "user", "content": [*media, {"type": "text", "text": prompt}]}]
        if len(images) or len(videos):
            raise ValueError("prompt: a list of messages carries its own media; give no images or videos beside it")
        return _check_messages(prompt)

    def decode(self, messages: list[dict]) -> list[Image.Image | Video]:
        """The media of the messages in order of appearance, decoded (videos are sampled while decoding)."""
        return [
            load_image(source, limits=self.limits) if kind == "image" else self.load_video(source, options)
            for kind, source, options in _media_of(messages)
        ]

    def load_video(self, source, options: dict) -> Video:
        """A clip, sampled by the checkpoint's rule; `options` of the message go first."""
        raise NotImplementedError

    def patchify(self, media: Sequence[Image.Image | Video]) -> list[Patches]:
        """Resize, normalise and cut each medium into patch rows. Raises ValueError that says which medium it was."""
        return [self._patchify(medium, number) for number, medium in enumerate(media, 1)]

    def _patchify(self, medium: Image.Image | Video, number: int) -> Patches:
        try:
            return self._patchify_video(medium) if isinstance(medium, Video) else self._patchify_image(medium)
        except ValueError as error:
            source = medium.source if isinstance(medium, Video) else medium.info.get("source")
            raise ValueError(f"{source or f'medium {number}'}: {error}") from error

    def _patchify_image(self, image: Image.Image) -> Patches:
        pixel_values, grid = patchify_image(image, self.image_config)
        return Patches(image, pixel_values, grid, self.merged("image", grid))

    def _patchify_video(self, video: Video) -> Patches:
        raise NotImplementedError

    @property
    def largest_picture(self) -> int:
        """Tokens of the largest picture that the limits allow."""
        return self.image_config.max_image_tokens

    def plan(self, medium: Image.Image | Video) -> tuple[str, Hashable]:
        """What becomes of a decoded medium, from its size alone: a line for tables, and its layout."""
        is_video = isinstance(medium, Video)
        config = self.video_config if is_video else self.image_config
        frames, height, width = medium.frames.shape[:3] if is_video else (1, medium.height, medium.width)
        height, width = plan_size(height, width, config, num_frames=frames)
        grid = (-(-frames // config.temporal_patch_size), height // config.patch_size, width // config.patch_size)
        return f"{width} x {height} px -> grid {grid}", grid

    def merged(self, kind: str, layout: Hashable, second_per_grid: float = 1.0) -> MergedMedia:
        """How the language model sees a medium of this layout; second_per_grid: of a video's time axis."""
        raise NotImplementedError

    def expand(self, token: int, medium: MergedMedia) -> list[int]:
        """What stands in the prompt for a medium whose placeholder is `token`."""
        return [token] * medium.num_tokens

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """(L,) ids in which each kind's placeholders have that kind's id, and nothing else has."""
        return input_ids

    def tokenize(self, messages: list[dict], media: Sequence[MergedMedia]) -> list[int]:
        """Prompt ids with every placeholder repeated; raises ValueError when placeholders and media do not match."""
        if self.tokenizer is None:
            raise ValueError("prompt: this model was built from a config alone; a tokenizer needs a checkpoint folder")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        begun = bool(self.tokenizer.bos_token) and text.startswith(self.tokenizer.bos_token)  # by the template itself
        ids = self.tokenizer(text, add_special_tokens=not begun)["input_ids"]
        return expand_placeholders(ids, media, self.token_ids, self.expand)

    def text(self, token_ids) -> str:
        """Token ids back to text, special tokens left out."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def read_chat_template(folder: Path) -> str | None:
    """Older checkpoints keep the template in chat_template.json."""
    file = folder / "chat_template.json"
    return json.loads(file.read_text())["chat_template"] if file.is_file() else None


def _as_list(media, name: str) -> list:
    """A single picture, path or clip array is a list of one."""
    if isinstance(media, (str, Path, Image.Image, Video)):
        return [media]
    if isinstance(media, np.ndarray):
        raise TypeError(f"{name}: expected a list of media, got one array; put it into a list")
    return list(media)


def _check_messages(messages: Sequence[dict]) -> list[dict]:
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"prompt: expected a string or a non-empty list of messages, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"prompt[{i}]: a message is a dict with 'role' and 'content', got {message!r}")
    return list(messages)


def _media_of(messages: list[dict]):
    """(kind, source, load options) of every medium in the messages, in order of appearance."""
    for i, message in enumerate(messages):
        if isinstance(message["content"], str):
            continue
        for part in message["content"]:
            kind = part.get("type")
            if kind not in ("text", "image", "video"):
                raise ValueError(f"prompt[{i}]: content type must be text, image or video, got {kind!r}")
            if kind != "text":
                keys = [key for key in (kind, "path", "url") if key in part]
                if not keys:
                    raise ValueError(f"prompt[{i}]: the {kind} has no source; give it under the key {kind!r}")
                options = {key: part[key] for key in ("fps", "num_frames", "min_frames", "max_frames") if key in part}
                yield kind, part[keys[0]], options
