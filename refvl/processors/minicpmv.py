"""MiniCPM-V's prompts: a set of query tokens for the overview, for each slice, and for each frame or pack of frames.

    image, 2.6 to 4.5   <image_id>0</image_id><image>...</image><slice>...</slice><slice>...</slice>
                        <slice>...</slice><slice>...</slice>                  one line per row of slices
    image, 2.0, 2.5     <image>...</image><slice><image>...</image><image>...</image>
                        <image>...</image><image>...</image></slice>
    frame, 2.6 to 4.5   <image>...</image>                                    one line per frame, without a number

Each ... is `query_num` times the unknown token; embeddings replace it. A frame is an overview without slices. Version
4.5 packs frames: up to `max_packing` of them share one set, and temporal ids, tenths of a second, tell the resampler
when each was taken.

Parts of a message stand on lines of their own, as the checkpoints' own `chat` writes them; vLLM writes the frames of a
video without line breaks. Chat templates are the tokenizer's; version 2.0 has none and says <用户> and <AI>.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import count, dropwhile, islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from refvl.checks import check_positive_int, read_json
from refvl.merge import MergedMedia
from refvl.pixels.media import Video, load_video
from refvl.pixels.patches import Levels
from refvl.pixels.slices import (
    SliceConfig,
    SliceGroup,
    SliceLayout,
    SlicePlan,
    count_sets,
    levels_of_slices,
    plan_slices,
)
from refvl.processors.chat import ChatProcessor, Patches
from refvl.processors.tokenizers import load_tokenizer

PLACEHOLDERS = {"image": "(<image>./</image>)", "video": "(<video>./</video>)"}  # in the text before it is written out
MARKS = {
    "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>",
    "im_id_start": "<image_id>", "im_id_end": "</image_id>", "unk": "<unk>",
}  # fmt: skip
NO_VIDEO_ID = -1  # images and frames are filled with one token: no token has the video's id, see `placeholders`
TEXT_ID = -2  # of unknown tokens that stand for nothing
TENTHS = 10  # temporal ids per second


@dataclass(frozen=True, slots=True)
class FrameConfig:
    """How a video is sampled. Limits as in the examples of the checkpoints' cards."""

    fps: float = 1.0
    max_frames: int = 64  # sets of query tokens: packed frames count as one
    max_packing: int = 1  # frames that may share a set
    packing: int | None = None  # frames in a set; None: as few as keep the video within max_frames sets

    def changed_by(self, folder: Path) -> "FrameConfig":
        """With what video_preprocessor_config.json says; released folders have none, and their cards say the limits."""
        file = folder / "video_preprocessor_config.json"
        values = read_json(file) if file.is_file() else {}
        return replace(self, **{f.name: values[f.name] for f in fields(self) if f.name in values})


@dataclass(frozen=True, slots=True)
class SlicedMedia(MergedMedia):
    """One medium in sets of query tokens, each a run of its own: thw is (sets, 1, query_num)."""

    grid: tuple[int, int] | None = None  # (columns, rows) of an image's slices

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        sets, _, query_num = self.thw
        return [(1, 1, query_num)] * sets

    def check_pruning(self, q: float) -> None:
        """Raise ValueError where a video should be pruned."""
        if self.kind == "video" and q > 0:
            reason = "pruning drops places of a frame, and query tokens have none"
            raise ValueError(f"pruning_rate: must be 0 for MiniCPM-V's videos, got {q}: {reason}")


class MiniCPMVProcessor(ChatProcessor):
    """What all versions share: sliced images. Layouts are tuples of `SliceGroup`s. A version is a class below."""

    no_video = "videos: MiniCPM-V 2.0 and 2.5 read images only, later versions videos too"
    template: ClassVar[str | None] = None  # where the folder has no chat template
    numbers_images: ClassVar[bool] = False  # unless the folder says otherwise (use_image_id)
    writes_bos: ClassVar[bool] = True
    frames: ClassVar[FrameConfig | None] = None  # of versions that take videos
    # ends of an answer; which of them there are depends on the vocabulary
    terminators: ClassVar[tuple[str, ...]] = ("</s>", "<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")

    def __init__(self, config: PretrainedConfig, tokenizer=None, image_config=None, video_config=None, marks=None):
        """tokenizer None: a processor for planning, which counts tokens but cannot make a prompt."""
        self.config, self.tokenizer, self.query_num = config, tokenizer, config.query_num
        self.tokens_at_once = self.query_num  # a set
        self.image_config: SliceConfig = image_config or SliceConfig.from_dict(self._slice_defaults(config))
        self.video_config: FrameConfig | None = video_config or self.frames
        self.marks = MARKS | (marks or {})
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        self.stop_token_ids = [vocabulary[token] for token in self.terminators if token in vocabulary]
        self.mark_ids = {name: self._id(name, vocabulary) for name in MARKS} if vocabulary else {}
        self.token_ids = {"image": self.mark_ids.get("unk", NO_VIDEO_ID), "video": NO_VIDEO_ID}

    @classmethod
    def from_folder(cls, folder: Path, config: PretrainedConfig) -> "MiniCPMVProcessor":
        """tokenizer.json, template and limits from a checkpoint folder; the tokenizer class it names is not run."""
        tokenizer = load_tokenizer(folder, PreTrainedTokenizerFast.from_pretrained, cls.template)
        file = folder / "preprocessor_config.json"
        values = read_json(file) if file.is_file() else {}
        marks = {name: values[name] for name in MARKS if name in values}
        image_config = SliceConfig.from_folder(folder, cls._slice_defaults(config))
        return cls(config, tokenizer, image_config, cls.frames and cls.frames.changed_by(folder), marks)

    @classmethod
    def _slice_defaults(cls, config: PretrainedConfig) -> dict:
        """What config.json says of slicing: at the top, or in `slice_config`."""
        names = ("max_slice_nums", "scale_resolution", "patch_size", "use_image_id", "slice_mode")
        top = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
        nested = getattr(config, "slice_config", None) or {}
        return {"use_image_id": cls.numbers_images} | top | {name: nested[name] for name in names if name in nested}

    def _id(self, name: str, vocabulary: dict[str, int]) -> int:
        """The id of a mark; TEXT_ID for a number's marks where the vocabulary has none, as before version 2.6."""
        token = vocabulary.get(self.marks[name])
        if token is None and not (name.startswith("im_id") and not self.image_config.use_image_id):
            raise ValueError(f"tokenizer: has no token {self.marks[name]!r}, which MiniCPM-V's prompts need")
        return TEXT_ID if token is None else token

    @cached_property
    def reserved_texts(self) -> list[str]:
        """Besides the tokens, what stands for a medium until it is written out."""
        return [*super().reserved_texts, *PLACEHOLDERS.values()]

    @property
    def largest_picture(self) -> int:
        """Tokens of the largest image: the overview and all slices."""
        return (self.image_config.max_slice_nums + 1) * self.query_num

    def _patchify_image(self, image: Image.Image) -> Patches:
        plan = plan_slices(*image.size, self.image_config)
        rows = levels_of_slices([image], plan, self.image_config)
        return Patches(image, rows, plan.layout, self._image_extents(image))

    def _image_extents(self, image: Image.Image) -> SlicedMedia:
        plan = plan_slices(*image.size, self.image_config)
        return replace(self.merged("image", plan.layout), grid=plan.grid)

    def _image_layout(self, image: Image.Image) -> SliceLayout:
        return plan_slices(*image.size, self.image_config).layout

    def merged(self, kind: str, layout: SliceLayout, second_per_grid: float = 1.0) -> SlicedMedia:
        """query_num tokens per set; second_per_grid is not read."""
        return SlicedMedia(kind, (count_sets(layout), 1, self.query_num))

    def tokenize(
        self, messages: Sequence[dict], media: Sequence[Any], *, allow_special_tokens: bool = False
    ) -> list[int]:
        """(L,) prompt ids of checked messages, every medium written out; see `ChatProcessor.tokenize`."""
        text, flag = self.render(messages, allow_special_tokens)
        return self._with_one_bos(self.encode(self._write_media(text, media), flag, add_special_tokens=True))

    def apply_template(self, messages: Sequence[dict], **options) -> str:
        """The template's text for messages whose parts are joined: these templates know strings only."""
        joined = [message | {"content": _as_text(message["content"])} for message in messages]
        return super().apply_template(joined, enable_thinking=False, **options)

    def _write_media(self, text: str, media: Sequence[SlicedMedia]) -> str:
        """The text with every medium's placeholder replaced; images are numbered as they come."""
        pieces = re.split(f"({'|'.join(map(re.escape, PLACEHOLDERS.values()))})", text)
        kinds = [kind for piece in pieces for kind, placeholder in PLACEHOLDERS.items() if piece == placeholder]
        if kinds != [medium.kind for medium in media]:
            raise ValueError(f"prompt: its placeholders are {kinds}, but the media given are {[m.kind for m in media]}")
        numbers = count()
        pieces[1::2] = [self.write_image(m, next(numbers)) if m.kind == "image" else self.write_video(m) for m in media]
        return "".join(pieces)

    def write_image(self, medium: SlicedMedia, number: int) -> str:
        """Overview and slices of an image as text."""
        m, slice_ = self.marks, self._query_tokens("im")
        if medium.grid is None:
            return slice_
        columns, rows = medium.grid
        return slice_ + m["slice_start"] + "\n".join([slice_ * columns] * rows) + m["slice_end"]

    def write_video(self, medium: SlicedMedia) -> str:
        """Frames, or packs of them, in lines."""
        sets, _, _ = medium.thw
        return "\n".join([self._query_tokens("im")] * sets)

    def _query_tokens(self, mark: str) -> str:
        return self.marks[f"{mark}_start"] + self.marks["unk"] * self.query_num + self.marks[f"{mark}_end"]

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Template and tokenizer both may write the first token, or neither: Llama 3's both do. Qwen's have none."""
        bos = self.tokenizer.bos_token_id
        return ids if bos is None or not self.writes_bos else [bos, *dropwhile(lambda token: token == bos, ids)]

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Unknown tokens right behind the start of an image, slice or frame are placeholders, elsewhere they are text.

        What else the text says does not matter: it may hold marks of its own.
        """
        is_unknown = input_ids == self.mark_ids["unk"]
        before = torch.where(is_unknown, -1, torch.arange(len(input_ids))).cummax(0).values  # the last other token
        before = before.clamp(min=0)
        starts = torch.tensor([self.mark_ids["im_start"], self.mark_ids["slice_start"]])
        of_kind = torch.where(torch.isin(input_ids[before], starts), self._kind_ids(input_ids)[before], TEXT_ID)
        return torch.where(is_unknown, of_kind, input_ids)

    def _kind_ids(self, input_ids: Tensor) -> Tensor:
        """(L,) the id of the kind that would begin at each place."""
        return torch.full_like(input_ids, self.token_ids["image"])


class MiniCPMV2_0Processor(MiniCPMVProcessor):
    """Images only; no chat template."""

    template = (
        "{% for message in messages %}"
        "{{ {'user': '<用户>', 'assistant': '<AI>'}.get(message.role, '') + message.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<AI>' }}{% endif %}"
    )


class MiniCPMV2_5Processor(MiniCPMVProcessor):
    """Images only, with Llama 3's template."""


class MiniCPMV2_6Processor(MiniCPMVProcessor):
    """Images are numbered, videos are rows of frames."""

    numbers_images = True
    writes_bos = False
    frames = FrameConfig()
    video_config: FrameConfig

    def load_video(self, source, options: dict) -> Video:
        """Files: a frame each second, at most max_frames, evenly; frames in memory count as sampled already.

        options: fps, max_frames or num_frames, in place of the processor's own.
        """
        if options.keys() - {"fps", "max_frames"} and options.keys() != {"num_frames"}:
            raise ValueError(
                f"prompt: MiniCPM-V samples a video by fps, max_frames, or num_frames alone, got {sorted(options)}"
            )
        if not isinstance(source, (str, Path)):
            return load_video(source, **options, limits=self.limits)
        if "num_frames" in options:
            wanted = check_positive_int(options["num_frames"], "num_frames")
            return load_video(source, sample=lambda total, _: middle_indices(total, wanted), limits=self.limits)
        sample = partial(self.sample, config=replace(self.video_config, **options))
        return load_video(source, sample=sample, limits=self.limits)

    def frame_indices(self, total: int, source_fps: float) -> Sequence[int]:
        """By the version's rule, with the processor's own limits."""
        return self.sample(total, source_fps, self.video_config)

    @staticmethod
    def sample(total: int, source_fps: float, config: FrameConfig) -> list[int]:
        """A frame every 1 / fps seconds; where these are too many, max_frames from the middle of equal parts."""
        indices = list(range(0, total, max(1, round(source_fps / config.fps))))
        return [indices[i] for i in middle_indices(len(indices), config.max_frames)]

    def _patchify_video(self, video: Video) -> Patches:
        rows = levels_of_slices(map(Image.fromarray, video.frames), self._plan_frame(video), self.image_config)
        return Patches(video, rows, self._video_layout(video), self._video_extents(video))

    def _video_pieces(self, video: Video, max_tokens: int) -> Iterator[tuple[SliceLayout, Levels]]:
        plan, layout = self._plan_frame(video), self._video_layout(video)
        frames, at_once = iter(video.frames), max(1, max_tokens // self.query_num)
        for start in range(0, len(layout), at_once):
            part = layout[start : start + at_once]
            taken = islice(frames, sum(len(group.slices) for group in part))
            yield part, levels_of_slices(map(Image.fromarray, taken), plan, self.image_config)

    def _video_layout(self, video: Video) -> SliceLayout:
        return self.group(video, self._plan_frame(video).tgt_sizes[0])

    def _plan_frame(self, video: Video) -> SlicePlan:
        _, height, width, _ = video.frames.shape
        return plan_slices(width, height, replace(self.image_config, max_slice_nums=1))

    def group(self, video: Video, tgt_size: tuple[int, int]) -> SliceLayout:
        """A set of query tokens for each frame."""
        return (SliceGroup((tgt_size,)),) * len(video.frames)

    def write_image(self, medium: SlicedMedia, number: int) -> str:
        """The image's number, overview, slices in lines."""
        m, text = self.marks, self._query_tokens("im")
        if self.image_config.use_image_id:
            text = f"{m['im_id_start']}{number}{m['im_id_end']}{text}"
        columns, rows = medium.grid or (0, 0)
        return text + "\n".join([self._query_tokens("slice") * columns] * rows)

    def _kind_ids(self, input_ids: Tensor) -> Tensor:
        """Slices are an image's, and so are overviews behind a number; the others are frames.

        Where the folder wants no numbers, everything is an image.
        """
        if not self.image_config.use_image_id:
            return super()._kind_ids(input_ids)
        numbered = input_ids.roll(1) == self.mark_ids["im_id_end"]
        is_image = numbered | (input_ids == self.mark_ids["slice_start"])
        return torch.where(is_image, self.token_ids["image"], self.token_ids["video"])


class MiniCPMV4_0Processor(MiniCPMV2_6Processor):
    """As 2.6, with a first token."""

    writes_bos = True


class MiniCPMV4_5Processor(MiniCPMV2_6Processor):
    """Frames are packed, and each has its tenth of a second."""

    frames = FrameConfig(fps=3.0, max_frames=180, max_packing=3)

    @staticmethod
    def sample(total: int, source_fps: float, config: FrameConfig) -> list[int]:
        """`fps` frames a second from the middle of equal parts, as many as fit into max_frames full packs."""
        wanted = round(min(config.fps, round(source_fps)) * total / source_fps)
        return middle_indices(total, max(1, min(wanted, config.max_frames * (config.packing or config.max_packing))))

    def group(self, video: Video, tgt_size: tuple[int, int]) -> SliceLayout:
        """Consecutive frames share a set; the last one may hold fewer."""
        config, ids = self.video_config, temporal_ids(video)
        packing = config.packing or min(-(-len(ids) // config.max_frames), config.max_packing)
        packs = [ids[i : i + packing] for i in range(0, len(ids), packing)]
        return tuple(SliceGroup((tgt_size,) * len(pack), tuple(pack)) for pack in packs)


def temporal_ids(video: Video) -> list[int]:
    """When each frame was taken, in whole tenths of a second; the last one is before the video's end."""
    last = max(0, math.ceil(video.duration * TENTHS) - 1)
    return [min(round(second * TENTHS), last) for second in video.timestamps]


def middle_indices(total: int, wanted: int) -> list[int]:
    """All of 0 .. total - 1 where that is not more than wanted, else those in the middle of `wanted` equal parts.

    >>> middle_indices(10, 4)
    [1, 3, 6, 8]
    """
    if wanted >= total:
        return list(range(total))
    gap = total / wanted
    return [int(i * gap + gap / 2) for i in range(wanted)]


def patches_per_token(layout: SliceLayout, query_num: int) -> float:
    """How many patches become one token: 16 for a square slice, 96 for six square frames packed into one set.

    >>> patches_per_token((SliceGroup(((32, 32),) * 6, (0, 3, 6, 9, 12, 15)),), 64)
    96.0
    """
    patches = sum(h * w for group in layout for h, w in group.slices)
    return patches / (count_sets(layout) * query_num)


def _as_text(content: str | Sequence[dict]) -> str:
    """The parts of a message in lines, a placeholder for each medium."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else PLACEHOLDERS[part["type"]] for part in content)
