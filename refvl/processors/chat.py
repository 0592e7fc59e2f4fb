"""The base of all processors: the chat template, the tokenizer, and the limits from the checkpoint's folder.

    prompt, images, videos -> messages -> decoded media -> patch rows + layouts -> text -> ids with placeholders

Only the chat template writes special tokens. A caller's strings are text: if they contain special tokens,
`refvl.processors.special_tokens` tokenises them as plain text.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor
from transformers import PretrainedConfig

from refvl.merge import FramewiseMedia, MediaTokens
from refvl.pixels.media import LIMITS, MediaLimits, Video, load_image
from refvl.pixels.patches import PatchConfig, Patches, levels_of_frames, levels_of_image, plan_grid
from refvl.processors.messages import as_messages, media_of, texts_of
from refvl.processors.planning import PlansMedia
from refvl.processors.special_tokens import SpecialTokensAsText
from refvl.processors.tokenizers import load_tokenizer


class ChatProcessor(PlansMedia, SpecialTokensAsText):
    """The path from a user's words to the models' tensors.

    A subclass adds its family's rule for sampling videos, and its layout if that is not a grid of patches.
    """

    patch_config: ClassVar[type[PatchConfig]] = PatchConfig
    limits: MediaLimits = LIMITS  # limits on decoding; `processor.limits = MediaLimits(...)` changes them
    image_config: Any  # the settings for preparing an image
    video_config: Any  # the settings for preparing a video; None if the model accepts no video
    no_video: ClassVar[str]  # the error for a video if the model accepts none
    tokens_at_once: int = 1  # a number that divides every token count of the encoder
    assumed: bool = False  # True if the pixel limits are the defaults of the class because no file sets them
    stop_token_ids: Sequence[int] = ()  # tokens that end an answer, in addition to those of generation_config.json
    messages = staticmethod(as_messages)  # (prompt, images, videos) -> checked messages

    def __init__(self, config: PretrainedConfig, tokenizer=None, image_config=None, video_config=None):
        """Build a processor.

        If tokenizer is None, the processor is for planning only: it counts tokens but cannot build a prompt.
        """
        self.config, self.tokenizer, self.assumed = config, tokenizer, image_config is None
        self.image_config = image_config or self.patch_config()
        self.video_config = video_config or self.patch_config.for_video()
        self.token_ids = {"image": config.image_token_id, "video": config.video_token_id}
        self.merge_size = config.vision_config.spatial_merge_size  # the side in patches of a merge block
        sizes = {"image": self.image_config.merge_size, "video": self.video_config.merge_size}
        if set(sizes.values()) != {self.merge_size}:
            raise ValueError(f"merge_size: expected the tower's spatial_merge_size, {self.merge_size}, got {sizes}")

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "ChatProcessor":
        """Load tokenizer, chat template and preprocessing limits from a checkpoint folder.

        Raises ValueError, naming the file or folder, if one is missing or cannot be read.
        """
        configs = [cls.patch_config.from_folder(folder, kind) for kind in ("image", "video")]
        return cls(config, load_tokenizer(folder), *configs)

    def decode(self, messages: Sequence[dict]) -> list[Image.Image | Video]:
        """Decode the media of checked messages in order of appearance (videos are sampled while decoding)."""
        return [
            load_image(source, limits=self.limits) if kind == "image" else self.load_video(source, options)
            for kind, source, options in media_of(messages)
        ]

    def load_video(self, source, options: dict) -> Video:
        """Load a video, sampled by a message's `options` or else by the checkpoint's rule.

        Raise ValueError if unsupported.
        """
        raise ValueError(self.no_video)

    def frame_indices(self, total: int, source_fps: float) -> Sequence[int]:
        """Return the indices of the frames to read from a file of `total` frames; raise ValueError if unsupported."""
        raise ValueError(self.no_video)

    def patchify(self, media: Sequence[Image.Image | Video]) -> list[Patches]:
        """Resize each media item and cut it into patch rows. Raises ValueError naming the item."""
        return self._each(media, self._patchify_image, self._patchify_video)

    def _each(self, media: Sequence, of_image: Callable, of_video: Callable) -> list:
        """Return one result per media item; a ValueError begins with the item's file or number."""
        results = []
        for number, medium in enumerate(media, 1):
            try:
                if isinstance(medium, Video):
                    self._check_takes_videos()
                    results.append(of_video(medium))
                else:
                    results.append(of_image(medium))
            except ValueError as error:
                source = medium.source if isinstance(medium, Video) else medium.info.get("source")
                raise ValueError(f"{source or f'item {number}'}: {error}") from error
        return results

    def _check_takes_videos(self) -> None:
        if self.video_config is None:
            raise ValueError(self.no_video)

    def _patchify_image(self, image: Image.Image) -> Patches:
        rows, grid = levels_of_image(image, self.image_config)
        return Patches(image, rows, grid, self.media_tokens("image", grid))

    def _patchify_video(self, video: Video) -> Patches:
        rows, grid = levels_of_frames(video.frames[self._frames_read(video)], self.video_config)
        return Patches(video, rows, grid, self._video_extents(video, grid))

    def _frames_read(self, video: Video) -> Any:
        """Return the indices of a sampled video's frames that become patch rows: all of them."""
        return range(len(video.frames))

    def _video_extents(self, video: Video, layout: Any) -> MediaTokens:
        return self.media_tokens("video", layout)

    def _image_layout(self, image: Image.Image) -> Any:
        return plan_grid(image.height, image.width, self.image_config)

    def _video_layout(self, video: Video) -> Any:
        _, height, width, _ = video.frames.shape
        return plan_grid(height, width, self.video_config, len(self._frames_read(video)))

    def media_tokens(self, kind: str, layout: Any, second_per_grid: float = 1.0) -> MediaTokens:
        """Return the extents that the language model sees for an item of this layout; text separates a video's frames.

        second_per_grid: the scale of a video's time axis, for families whose prompts do not contain timestamps.
        """
        t, h, w = layout
        thw = (t, h // self.merge_size, w // self.merge_size)
        return FramewiseMedia(kind, thw) if kind == "video" else MediaTokens(kind, thw)

    def expand(self, token: int, medium: Any) -> list[int]:
        """Return the prompt's token ids for an item whose placeholder is `token`."""
        return [token] * medium.num_tokens

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Return (L,) ids in which the placeholders of each kind, and no other tokens, have the id of that kind."""
        return input_ids

    def tokenize(
        self, messages: Sequence[dict], media: Sequence[MediaTokens], *, allow_special_tokens: bool = False
    ) -> list[int]:
        """Return the (L,) prompt ids of checked messages, with every placeholder repeated.

        allow_special_tokens: whether special tokens in the caller's strings, including placeholders, keep their
        meaning. Raises ValueError if placeholders and media do not match, or if the chat template raises an error.
        """
        text, flag = self.render(messages, allow_special_tokens)
        begun = bool(self.tokenizer.bos_token) and text.startswith(self.tokenizer.bos_token)  # the template wrote BOS
        ids = self.encode(text, flag, add_special_tokens=not begun)
        return expand_placeholders(ids, media, self.token_ids, self.expand)

    def render(self, messages: Sequence[dict], allow_special_tokens: bool = False) -> tuple[str, str]:
        """Return the prompt as text, and its flag: the character before each position at which no special token may
        begin.

        The flag is empty if the caller's strings contain no special tokens, or if special tokens are allowed.
        """
        if self.tokenizer is None:
            raise ValueError("prompt: a model built from a config alone has no tokenizer; load a checkpoint folder")
        written = "".join(texts_of(messages))  # joined, because a token may begin in one part and end in the next
        if allow_special_tokens or not any(token in written for token in self.reserved_texts):
            return self.apply_template(messages), ""
        return self.render_flagged(messages, written)

    def encode(self, text: str, flag: str = "", *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text; a special token that begins at a flag is tokenised as plain text."""
        if flag:
            return self.encode_flagged(text, flag, add_special_tokens)
        return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def apply_template(self, messages: Sequence[dict], **options) -> str:
        """Return the text that the chat template produces for the messages.

        Raises ValueError with the template's reason if the template raises an error.
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
    """Repeat each single placeholder once per token of its item.

    input_ids: a prompt with one placeholder per item. token_ids: {"image": id, "video": id}. expand: a function that
    returns an item's ids, if they are more than its placeholder repeated. Raises ValueError if the placeholders do not
    match the media in number, kind and order.
    """
    kinds = {token: kind for kind, token in token_ids.items()}
    found = [kinds[token] for token in input_ids if token in kinds]
    if found != [item.kind for item in media]:
        raise ValueError(f"prompt: its placeholders are {found}, but the media given are {[m.kind for m in media]}")
    remaining, expanded = iter(media), []
    for token in input_ids:
        expanded += expand(token, next(remaining)) if token in kinds else [token]
    return expanded
