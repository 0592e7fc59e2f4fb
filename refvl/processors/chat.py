"""The base of all processors: the chat template, the tokenizer, and the limits from the checkpoint's folder.

    prompt, images, videos -> messages -> decoded media -> patch rows + layouts -> text -> ids with placeholders

Only the chat template writes special tokens. A caller's strings are text: `<|im_end|>` in a
question does not end a turn, and `<|image_pad|>` is not an image. `render` inserts a flag, a
character that occurs nowhere else, wherever a special token could begin in the caller's
strings. `encode` removes the flags, and tokenises every special token that begins at a flag as
plain text. If the caller's strings contain no special tokens, the prompt has no flags.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor
from transformers import PretrainedConfig

from refvl.checks import check_number
from refvl.merge import FramewiseMedia, MediaTokens
from refvl.pixels.media import LIMITS, PART, MediaLimits, Video, load_image, load_video
from refvl.pixels.patches import Levels, PatchConfig, Patches, fit, levels_of_frames, levels_of_image, plan_grid
from refvl.processors.messages import FITTED, as_messages, map_texts, media_of
from refvl.processors.tokenizers import load_tokenizer

PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))  # characters without an assigned meaning


class ChatProcessor:
    """The path from a prompt with media to the model's tensors.

    A subclass adds the family's rule for sampling videos, and the family's layout unless that
    is a grid of patches.
    """

    patch_config: ClassVar[type[PatchConfig]] = PatchConfig
    limits: MediaLimits = LIMITS  # limits on decoding; `processor.limits = MediaLimits(...)` changes them
    image_config: Any  # the settings for preparing an image
    video_config: Any  # the settings for preparing a video; None if the model accepts no video
    video_options: ClassVar[Collection[str]] = ()  # the sampling options of a message, in addition to num_frames
    sampler: ClassVar[Callable[..., Sequence[int]]]  # (total, source_fps, **options) -> the sampled frames' indices
    timestamps_of: Callable[[Video], tuple[float, ...]]  # a video -> the time that the prompt states for each frame
    no_video: ClassVar[str]  # the error for a video if the model accepts none
    # a description of the sampling rule; empty if `video_config` contains the whole rule
    clip_sampling: Any = ""
    tokens_at_once: int = 1  # every token count of the encoder is a multiple of this number
    # True if the pixel limits are the defaults of the class because no file sets them
    assumed: bool = False
    stop_token_ids: Sequence[int] = ()  # ids of tokens that end an answer, besides those in generation_config.json
    messages = staticmethod(as_messages)  # (prompt, images, videos) -> checked messages

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.image_config})"

    def __init__(self, config: PretrainedConfig, tokenizer=None, image_config=None, video_config=None):
        """Build a processor.

        If tokenizer is None, the processor can only plan: it counts tokens but builds no prompts.
        """
        self.config, self.tokenizer, self.assumed = config, tokenizer, image_config is None
        self.image_config = image_config or self.patch_config()
        self.video_config = video_config or self.patch_config.for_video()
        self.token_ids = {"image": config.image_token_id, "video": config.video_token_id}
        self.merge_size = config.vision_config.spatial_merge_size  # the side of a merge block, in patches
        sizes = {"image": self.image_config.merge_size, "video": self.video_config.merge_size}
        if set(sizes.values()) != {self.merge_size}:
            raise ValueError(f"merge_size: expected the tower's spatial_merge_size, {self.merge_size}, got {sizes}")

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "ChatProcessor":
        """Build a processor from a folder's tokenizer, chat template and preprocessing limits.

        Raises FileNotFoundError if no file contains limits, and ValueError if a file cannot be
        read.
        """
        configs = [cls.patch_config.from_folder(folder, kind) for kind in ("image", "video")]
        return cls(config, load_tokenizer(folder), *configs)

    @property
    def largest_picture(self) -> int:
        """The number of tokens of the largest image that the limits allow."""
        return self.image_config.max_image_tokens

    # --- media: pixels -> patch rows, their layout, and the extents that the language model sees

    def decode(self, messages: Sequence[dict]) -> list[Image.Image | Video]:
        """Decode the media of checked messages in order of appearance (videos are sampled while decoding)."""
        media = []
        for kind, source, options in media_of(messages):
            sizes = {name: options.pop(name) for name in FITTED if name in options}
            medium = load_image(source, limits=self.limits) if kind == "image" else self.load_video(source, options)
            media.append(fit(medium, self.image_config, sizes) if sizes else medium)
        return media

    def load_video(self, source, options: dict) -> Video:
        """Load a video: a file is sampled by `frame_indices`; frames in memory are treated as already sampled.

        options: the sampling options of a message, which override the checkpoint's settings.
        Raises ValueError for an option that the family does not support, and if the model
        accepts no videos.
        """
        if self.video_config is None:
            raise ValueError(self.no_video)
        if not isinstance(source, (str, os.PathLike)):
            return load_video(source, **options, limits=self.limits)
        part: dict[str, Any] = {name: check_number(options.pop(name), name) for name in PART if name in options}
        if not options.keys() <= set(self.video_options) and options.keys() != {"num_frames"}:
            allowed = f"{', '.join(self.video_options)}, or num_frames alone"
            raise ValueError(f"prompt: for a video, expected {allowed}, got {sorted(options)}")
        return load_video(source, sample=partial(self.frame_indices, **options), **part, limits=self.limits)

    def frame_indices(self, total: int, source_fps: float, **options) -> Sequence[int]:
        """Return the indices of the frames to read from a file of `total` frames, by the checkpoint's rate and limits.

        options: the sampling options of a message, which override the checkpoint's settings.
        """
        names = ("min_frames", "max_frames") if "num_frames" in options else self.video_options
        rule = {name: getattr(self.video_config, name) for name in names}
        return self.sampler(total, source_fps, **(rule | options))

    def patchify(self, media: Sequence[Image.Image | Video], *, pixels: bool = True) -> list[Patches]:
        """Resize each media item and cut it into patch rows; with pixels=False, only plan the
        layouts.

        Raises ValueError, naming the item that cannot be cut.
        """
        patches = []
        for number, medium in enumerate(media, 1):
            try:
                layout = self.layout_of(medium)
                rows: Any = self.rows_of(medium) if pixels else None
                patches.append(Patches(medium, rows, layout, self.extents_of(medium, layout)))
            except ValueError as error:
                source = medium.source if isinstance(medium, Video) else medium.info.get("source")
                raise ValueError(f"{source or f'item {number}'}: {error}") from error
        return patches

    def extents(self, media: Sequence[Image.Image | Video]) -> list[MediaTokens]:
        """Return the `media_tokens` that `patchify` would report for each item, without processing pixels."""
        return [patches.media_tokens for patches in self.patchify(media, pixels=False)]

    def layout_of(self, medium: Image.Image | Video) -> Any:
        """Return the layout of a decoded item: in this class, the grid (t, h, w) in patches."""
        if isinstance(medium, Video):
            _, height, width, _ = medium.frames.shape
            return plan_grid(height, width, self.video_config, len(self.frames_read(medium)))
        return plan_grid(medium.height, medium.width, self.image_config)

    def rows_of(self, medium: Image.Image | Video) -> Levels | Tensor:
        """Return the patch rows of a decoded item in the layout's order; here, unnormalised."""
        if isinstance(medium, Video):
            return levels_of_frames(medium.frames[self.frames_read(medium)], self.video_config)[0]
        return levels_of_image(medium, self.image_config)[0]

    def frames_read(self, video: Video) -> Any:
        """Return the indices of the sampled frames that become patch rows: in this class, of all frames."""
        return range(len(video.frames))

    def extents_of(self, medium: Image.Image | Video, layout: Any) -> MediaTokens:
        """Return the extents of a decoded item; those of a video contain the timestamp of each frame."""
        if not isinstance(medium, Video):
            return self.media_tokens("image", layout)
        return FramewiseMedia("video", self.media_tokens("video", layout).thw, timestamps=self.timestamps_of(medium))

    def media_tokens(self, kind: str, layout: Any, second_per_grid: float = 1.0) -> MediaTokens:
        """Return the extents that the language model sees for an item of this layout; text separates a video's frames.

        second_per_grid: the scale of a video's time axis, for families whose prompts do not
        contain timestamps.
        """
        t, h, w = layout
        thw = (t, h // self.merge_size, w // self.merge_size)
        return FramewiseMedia(kind, thw) if kind == "video" else MediaTokens(kind, thw)

    def pieces(self, medium: Image.Image | Video, max_tokens: int) -> Iterator[tuple[Any, Levels | Tensor]]:
        """Yield (layout, patch rows) for consecutive parts of an item; the encodings of all parts can be concatenated.

        A part of a video has at most max_tokens tokens, or consists of a single grid step. An
        image is one part.
        """
        if isinstance(medium, Video):
            return self.video_pieces(medium, max_tokens)
        return iter([(self.layout_of(medium), self.rows_of(medium))])

    def video_pieces(self, video: Video, max_tokens: int) -> Iterator[tuple[Any, Levels | Tensor]]:
        """Yield the `pieces` of a video."""
        frames, config = list(self.frames_read(video)), self.video_config
        _, h, w = self.media_tokens("video", self.layout_of(video)).thw
        at_once = config.temporal_patch_size * max(1, max_tokens // (h * w))
        for start in range(0, len(frames), at_once):
            part = video.frames[frames[start : start + at_once]]
            rows, grid = levels_of_frames(part, config, len(frames))
            yield grid, rows

    # --- text: messages -> ids, in which placeholders stand for the media

    def expand(self, token: int, medium: Any) -> list[int]:
        """Return the prompt's token ids for an item whose placeholder is `token`."""
        return [token] * medium.num_tokens

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Return (L,) ids in which the placeholders of each kind, and no other tokens, have the id of that kind."""
        return input_ids

    def tokenize(
        self, messages: Sequence[dict], media: Sequence[MediaTokens], *, allow_special_tokens: bool = False, **options
    ) -> list[int]:
        """Return the (L,) prompt ids of checked messages, with each placeholder repeated once per token of its item.

        allow_special_tokens: whether special tokens in the caller's strings, including
        placeholders, keep their meaning. options: variables of the chat template, such as
        `tools`. Raises ValueError if placeholders and media do not match, or if the chat
        template raises an error.
        """
        text, flag = self.render(messages, allow_special_tokens, **options)
        begun = bool(self.tokenizer.bos_token) and text.startswith(self.tokenizer.bos_token)  # the template wrote BOS
        ids = self.encode(text, flag, add_special_tokens=not begun)
        return expand_placeholders(ids, media, self.token_ids, self.expand)

    def render(self, messages: Sequence[dict], allow_special_tokens: bool = False, **options) -> tuple[str, str]:
        """Return the prompt as text, and its flag: the character before each position at which no special token may
        begin.

        The flag is empty if the caller's strings contain no special tokens, or if special
        tokens are allowed.
        """
        if self.tokenizer is None:
            raise ValueError("prompt: a model built from a config alone has no tokenizer; load a checkpoint folder")
        texts = list[str]()
        map_texts((messages, options), texts.append)
        written = "".join(texts)  # a token may begin in one part and end in the next
        if allow_special_tokens or not any(token in written for token in self.reserved_texts):
            return self.apply_template(messages, **options), ""
        flag = next(character for character in PRIVATE_USE if character not in written)
        firsts = {token[0] for token in self.reserved_texts}
        flagged = map_texts((messages, options), lambda text: "".join(flag * (c in firsts) + c for c in text))
        return self.apply_template(flagged[0], **flagged[1]), flag

    def encode(self, text: str, flag: str = "", *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text; a special token that begins at a flag is tokenised as plain text."""
        if not flag:
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        pieces = text.split(flag)
        flagged = set(accumulate(map(len, pieces[:-1])))  # offsets of the flags in the text without flags
        text = "".join(pieces)
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        ids: list[int] = []
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            is_text = token in self.reserved_ids and not flagged.isdisjoint(range(start, end))
            ids += self.spell(text[start:end]) if is_text else [token]
        return ids

    def spell(self, token: str) -> list[int]:
        """Return the ids of a special token's text, tokenised as if there were no special tokens.

        The setting `split_special_tokens=True` gives the same ids, but it changes the shared
        tokenizer, so it would affect other threads.
        """
        backend = self.tokenizer.backend_tokenizer
        words = backend.pre_tokenizer.pre_tokenize_str(token) if backend.pre_tokenizer else [(token, None)]
        return [piece.id for word, _ in words for piece in backend.model.tokenize(word)]

    @cached_property
    def reserved_ids(self) -> set[int]:
        """The ids that only the template and the processor may write: placeholders and all special tokens."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return special | {*self.tokenizer.all_special_ids, *self.token_ids.values()}

    @cached_property
    def reserved_texts(self) -> list[str]:
        """The texts of `reserved_ids`, which are plain text if a caller writes them."""
        added = self.tokenizer.added_tokens_decoder
        return [added[i].content for i in self.reserved_ids if i in added]

    def apply_template(self, messages: Sequence[dict], **options) -> str:
        """Return the text that the chat template produces for the messages.

        Raises ValueError, with the template's error, if the template rejects the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # templates may raise errors of any kind
            raise ValueError(f"prompt: the chat template of this checkpoint rejects the messages ({error})") from error

    def text(self, token_ids) -> str:
        """Decode token ids into text, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def expand_placeholders(
    input_ids: Sequence[int],
    media: Sequence[MediaTokens],
    token_ids: dict[str, int],
    expand: Callable[[int, MediaTokens], list[int]] = lambda token, medium: [token] * medium.num_tokens,
) -> list[int]:
    """Return prompt ids with each placeholder repeated once per token of its item.

    input_ids: a prompt with one placeholder per item. token_ids: {"image": id, "video": id}.
    expand: a function that returns an item's ids (default: the placeholder repeated). Raises
    ValueError if the placeholders do not match the media in number, kind and order.
    """
    kinds = {token: kind for kind, token in token_ids.items()}
    found = [kinds[token] for token in input_ids if token in kinds]
    if found != [item.kind for item in media]:
        raise ValueError(f"prompt: its placeholders are {found}, but the media given are {[m.kind for m in media]}")
    remaining, expanded = iter(media), []
    for token in input_ids:
        expanded += expand(token, next(remaining)) if token in kinds else [token]
    return expanded
