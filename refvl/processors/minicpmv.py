"""MiniCPM-V's prompts: a set of query tokens for the overview, for each slice, and for each frame or pack of frames.

    image, 2.6 to 4.5   <image_id>0</image_id><image>...</image><slice>...</slice><slice>...</slice>
                        <slice>...</slice><slice>...</slice>                  one line per row of slices
    image, 2.0, 2.5     <image>...</image><slice><image>...</image><image>...</image>
                        <image>...</image><image>...</image></slice>
    frame, 2.6 to 4.5   <image>...</image>                                    one line per frame, without a number

Each ... stands for `query_num` unknown tokens, which embeddings replace. Each part of a message
is on a separate line, as in the checkpoints' own `chat`; vLLM writes the frames of a video
without line breaks. The chat templates come from the tokenizer; version 2.0 has no template, so
this file defines one with <用户> and <AI>.

The special tokens have fixed texts unless preprocessor_config.json sets different ones; the
tokenizer determines their ids. `refvl.processors.minicpmv_video` samples and packs videos, from
version 2.6 on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, dropwhile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from refvl.checks import read_json
from refvl.merge import MediaTokens
from refvl.pixels.media import Video
from refvl.pixels.patches import Levels
from refvl.pixels.slices import SliceConfig, SliceLayout, count_sets, levels_of_slices, plan_slices
from refvl.processors.chat import ChatProcessor
from refvl.processors.minicpmv_video import FrameConfig, PacksFrames, TakesVideos
from refvl.processors.tokenizers import load_tokenizer

MARKS = {
    "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>",
    "im_id_start": "<image_id>", "im_id_end": "</image_id>", "unk": "<unk>",
}  # fmt: skip
TEXT_ID = -2  # the id of unknown tokens that are text, not placeholders
# tokens that end an answer; the vocabulary determines which of them exist
TERMINATORS = ("</s>", "<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")
SLICING = ("max_slice_nums", "scale_resolution", "patch_size", "use_image_id", "slice_mode")
PLACEHOLDERS = {"image": "(<image>./</image>)", "video": "(<video>./</video>)"}  # replaced by `write_media`
PLACEHOLDER = re.compile(r"\(<(image|video)>\./</\1>\)")
NO_VIDEO_ID = -1  # images and frames share one token, so no token has the video's id (see `placeholders`)


@dataclass(frozen=True, slots=True)
class SlicedMedia(MediaTokens):
    """One media item as sets of query tokens, each in a separate run of tokens: thw is (sets, 1, query_num)."""

    grid: tuple[int, int] | None = None  # (columns, rows) of the slices of an image

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        sets, _, query_num = self.thw
        return [(1, 1, query_num)] * sets


class MiniCPMVProcessor(ChatProcessor):
    """The base class of all versions, for sliced images.

    Layouts are tuples of `SliceGroup`s. Each version is a subclass below.
    """

    no_video = "videos: MiniCPM-V 2.0 and 2.5 accept images only; later versions accept videos too"
    template: ClassVar[str | None] = None  # used if a folder has no chat template
    numbers_images: ClassVar[bool] = False  # the default if the folder does not set use_image_id
    writes_bos: ClassVar[bool] = True
    frames: ClassVar[FrameConfig | None] = None  # None if this version accepts no video

    def __init__(self, config: PretrainedConfig, tokenizer=None, image_config=None, video_config=None, marks=None):
        """Build a processor.

        If tokenizer is None, the processor can only plan: it counts tokens but builds no prompts.
        """
        self.config, self.tokenizer, self.query_num = config, tokenizer, config.query_num
        self.tokens_at_once = self.query_num  # the number of tokens of a set
        self.image_config = image_config or SliceConfig.from_dict(slicing_of(config, self.numbers_images))
        self.video_config = video_config or self.frames
        self.marks = m = MARKS | (marks or {})
        unknown = m["unk"] * self.query_num
        self.overview_text = m["im_start"] + unknown + m["im_end"]
        self.slice_text = m["slice_start"] + unknown + m["slice_end"]
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        self.stop_token_ids = [vocabulary[token] for token in TERMINATORS if token in vocabulary]
        needed = [mark for name, mark in m.items() if self.image_config.use_image_id or not name.startswith("im_id")]
        if vocabulary and (missing := [mark for mark in needed if mark not in vocabulary]):
            raise ValueError(f"tokenizer: has no special tokens {missing}, which MiniCPM-V's prompts need")
        self.mark_ids = {name: vocabulary.get(mark, TEXT_ID) for name, mark in m.items()} if vocabulary else {}
        self.token_ids = {"image": self.mark_ids.get("unk", NO_VIDEO_ID), "video": NO_VIDEO_ID}

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "MiniCPMVProcessor":
        """Build a processor from a folder's tokenizer.json, template and limits.

        Code in the folder is never run.
        """
        tokenizer = load_tokenizer(folder, PreTrainedTokenizerFast.from_pretrained, cls.template)
        image_config = SliceConfig.from_folder(folder, slicing_of(config, cls.numbers_images))
        video_config = cls.frames and cls.frames.changed_by(folder)
        file = folder / "preprocessor_config.json"  # version 2.0 has no such file
        values = read_json(file) if file.is_file() else {}
        marks = {name: values[name] for name in MARKS if name in values}
        return cls(config, tokenizer, image_config, video_config, marks)

    @property
    def largest_picture(self) -> int:
        """The number of tokens of the largest image, including its overview and all slices."""
        return (self.image_config.max_slice_nums + 1) * self.query_num

    def layout_of(self, medium: Any) -> SliceLayout:
        """Return an image's layout: one group for the overview, and one for each slice."""
        return plan_slices(medium.width, medium.height, self.image_config).layout

    def rows_of(self, medium: Any) -> Levels | Tensor:
        """Return the patch rows of the overview and the slices of an image."""
        return levels_of_slices([medium], self.image_config)

    def extents_of(self, medium: Any, layout: SliceLayout) -> SlicedMedia:
        """Return the extents of an item; those of an image contain the grid of its slices."""
        if isinstance(medium, Video):
            return self.media_tokens("video", layout)
        plan = plan_slices(medium.width, medium.height, self.image_config)
        return replace(self.media_tokens("image", layout), grid=plan.grid)

    def media_tokens(self, kind: str, layout: SliceLayout, second_per_grid: float = 1.0) -> SlicedMedia:
        """Return an item's extents: sets of query_num tokens; second_per_grid is not used."""
        return SlicedMedia(kind, (count_sets(layout), 1, self.query_num))

    def tokenize(
        self, messages: Sequence[dict], media: Sequence[Any], *, allow_special_tokens: bool = False, **options
    ) -> list[int]:
        """Return (L,) prompt ids of checked messages, with the tokens of all media; see `ChatProcessor.tokenize`."""
        text, flag = self.render(messages, allow_special_tokens, **options)
        ids = self.encode(self.write_media(text, media), flag, add_special_tokens=True)
        bos = self.tokenizer.bos_token_id
        if bos is None or not self.writes_bos:
            return ids
        return [bos, *dropwhile(lambda token: token == bos, ids)]  # Llama 3's template and tokenizer both write BOS

    def apply_template(self, messages: Sequence[dict], **options) -> str:
        """Return the template's text; line breaks join the parts of a message.

        These templates accept only strings.
        """
        joined = []
        for message in messages:
            content = message.get("content", "")
            if not isinstance(content, str):
                lines = [part["text"] if part["type"] == "text" else PLACEHOLDERS[part["type"]] for part in content]
                content = "\n".join(lines)
            joined.append(message | {"content": content})
        return super().apply_template(joined, **{"enable_thinking": False} | options)

    def write_media(self, text: str, media: Sequence[SlicedMedia]) -> str:
        """Replace every item's placeholder in a text; images are numbered in order."""
        pieces = PLACEHOLDER.split(text)  # alternating: text, kind, text, kind, ..., text
        kinds = [medium.kind for medium in media]
        if pieces[1::2] != kinds:
            raise ValueError(f"prompt: its placeholders are {pieces[1::2]}, but the media given are {kinds}")
        numbers = count()
        pieces[1::2] = [
            self.write_image(medium, next(numbers)) if medium.kind == "image" else self.write_video(medium)
            for medium in media
        ]
        return "".join(pieces)

    def write_image(self, medium: SlicedMedia, number: int) -> str:
        """Return the text for the overview and the slices of an image."""
        if medium.grid is None:
            return self.overview_text
        columns, rows = medium.grid
        slices = "\n".join([self.overview_text * columns] * rows)
        return self.overview_text + self.marks["slice_start"] + slices + self.marks["slice_end"]

    def write_video(self, medium: SlicedMedia) -> str:
        """Return the text for frames, or packs of frames, one per line."""
        return "\n".join([self.overview_text] * medium.thw[0])

    @cached_property
    def reserved_texts(self) -> list[str]:
        """The texts of special tokens, and the placeholders that `write_media` replaces."""
        return [*super().reserved_texts, *PLACEHOLDERS.values()]

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Return (L,) ids in which placeholders have the id of their kind, and all other unknown tokens have TEXT_ID.

        A placeholder is one of the unknown tokens directly after the start of an image, slice
        or frame; text may also contain unknown tokens. A frame is an overview without a number.
        If images are not numbered either, every overview counts as an image.
        """
        ids = self.mark_ids
        is_unknown = input_ids == ids["unk"]
        before = torch.where(is_unknown, -1, torch.arange(len(input_ids))).cummax(0).values  # last known token's index
        starts_image = input_ids == ids["im_start"]
        starts_any = starts_image | (input_ids == ids["slice_start"])
        kind_L = torch.where(starts_any, self.token_ids["image"], TEXT_ID)
        if self.video_config is not None and self.image_config.use_image_id:
            numbered = input_ids.roll(1) == ids["im_id_end"]
            kind_L = torch.where(starts_image & ~numbered, self.token_ids["video"], kind_L)
        return torch.where(is_unknown, kind_L[before.clamp(min=0)], input_ids)


class MiniCPMV2_0Processor(MiniCPMVProcessor):
    """The processor of MiniCPM-V 2.0: images only, without a chat template."""

    template = (
        "{% for message in messages %}"
        "{{ {'user': '<用户>', 'assistant': '<AI>'}.get(message.role, '') + message.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<AI>' }}{% endif %}"
    )


class MiniCPMV2_5Processor(MiniCPMVProcessor):
    """The processor of MiniCPM-V 2.5: images only, with Llama 3's template."""


class MiniCPMV2_6Processor(TakesVideos, MiniCPMVProcessor):
    """The processor of MiniCPM-V 2.6: images are numbered, and videos are sequences of frames."""

    numbers_images = True
    writes_bos = False
    frames = FrameConfig()

    def write_image(self, medium: SlicedMedia, number: int) -> str:
        """Return the text for an image's number, its overview, and its slices row by row."""
        m, text = self.marks, self.overview_text
        if self.image_config.use_image_id:
            text = f"{m['im_id_start']}{number}{m['im_id_end']}{text}"
        columns, rows = medium.grid or (0, 0)
        return text + "\n".join([self.slice_text * columns] * rows)


class MiniCPMV4_0Processor(MiniCPMV2_6Processor):
    """The processor of MiniCPM-V 4.0: the prompts of 2.6 with a BOS token."""

    writes_bos = True


class MiniCPMV4_5Processor(PacksFrames, MiniCPMV2_6Processor):
    """The processor of MiniCPM-V 4.5: frames are packed, and each frame has a time in tenths of a second."""

    frames = FrameConfig(fps=3.0, max_frames=180, max_packing=3)


def slicing_of(config: PretrainedConfig, numbers_images: bool) -> dict[str, Any]:
    """Return the slicing settings in config.json, at the top level or in `slice_config`.

    numbers_images: the default of `use_image_id`, which numbers images.
    """
    top = {name: getattr(config, name) for name in SLICING if getattr(config, name, None) is not None}
    nested = getattr(config, "slice_config", None) or {}
    return {"use_image_id": numbers_images} | top | {name: nested[name] for name in SLICING if name in nested}
