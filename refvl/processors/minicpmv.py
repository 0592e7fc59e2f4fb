"""MiniCPM-V's prompts: a set of query tokens for the overview, for each slice, and for each frame or pack of frames.

    picture, 2.6 to 4.5   <image_id>0</image_id><image>...</image><slice>...</slice><slice>...</slice>
                          <slice>...</slice><slice>...</slice>                  one line per row of slices
    picture, 2.0, 2.5     <image>...</image><slice><image>...</image><image>...</image>
                          <image>...</image><image>...</image></slice>
    frame, 2.6 to 4.5     <image>...</image>                                    one line per frame, without a number

Each ... is `query_num` times the unknown token, whose places the embeddings take. A frame is an overview without
slices. Version 4.5 packs frames: up to `max_packing` of them share one set, and temporal ids, tenths of a second, tell
the resampler when each was taken.

Parts of a message stand on lines of their own, as the checkpoints' own `chat` writes them; vLLM writes the frames of a
clip without line breaks. Chat templates are the tokenizer's; version 2.0 has none and says <用户> and <AI>.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, dropwhile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from refvl.checks import check_positive_int
from refvl.encoders.minicpmv import SliceGroup
from refvl.language.minicpmv import MiniCPMVConfig
from refvl.merge import MergedMedia
from refvl.pixels.media import Video, load_video
from refvl.pixels.patches import read_json
from refvl.pixels.slices import SliceConfig, patchify_slices, plan_slices
from refvl.processors.chat import ChatProcessor, Patches, read_chat_template

PLACEHOLDERS = {"image": "(<image>./</image>)", "video": "(<video>./</video>)"}  # in the text before it is written out
MARKS = {
    "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>",
    "im_id_start": "<image_id>", "im_id_end": "</image_id>", "unk": "<unk>",
}  # fmt: skip
TEMPLATE_2_0 = (
    "{% for message in messages %}"
    "{{ {'user': '<用户>', 'assistant': '<AI>'}.get(message.role, '') + message.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<AI>' }}{% endif %}"
)
NO_VIDEO_ID = -1  # pictures and frames are filled with one token: the video's id is nobody's, see `placeholders`
TENTHS = 10  # temporal ids per second


@dataclass(frozen=True, slots=True)
class FrameConfig:
    """How a clip is sampled. Limits as in the examples of the checkpoints' cards."""

    fps: float = 1.0
    max_frames: int = 64  # sets of query tokens: packed frames count as one
    max_packing: int = 1  # frames that may share a set
    packing: int | None = None  # frames in a set; None: as few as keep the clip within max_frames sets

    def changed_by(self, folder: Path) -> "FrameConfig":
        """With what video_preprocessor_config.json says; released folders have none, and their cards say the limits."""
        file = folder / "video_preprocessor_config.json"
        values = read_json(file) if file.is_file() else {}
        return replace(self, **{f.name: values[f.name] for f in fields(self) if f.name in values})


@dataclass(frozen=True, slots=True)
class SlicedMedia(MergedMedia):
    """One medium in sets of query tokens, each a run of its own: thw is (sets, 1, query_num)."""

    grid: tuple[int, int] | None = None  # (columns, rows) of a picture's slices

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        sets, _, query_num = self.thw
        return [(1, 1, query_num)] * sets

    def check_pruning(self, q: float) -> None:
        """Raise ValueError where a video should be pruned."""
        if self.kind == "video" and q > 0:
            raise ValueError(
                f"pruning_rate: must be 0 for MiniCPM-V's clips, got {q}: EVS compares the same place in two frames, "
                f"and query tokens have no places"
            )

    def keep_mask(self, embeds_MD: Tensor, q: float) -> Tensor | None:
        """None: nothing is pruned."""
        return None


class MiniCPMVProcessor(ChatProcessor):
    """Versions 2.0 and 2.5: pictures only."""

    frames = None  # FrameConfig of versions that see clips
    # ends of an answer; which of them there are, the vocabulary says
    terminators = ("</s>", "<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")

    def __init__(self, config: MiniCPMVConfig, tokenizer=None, image_config=None, marks=None):
        """tokenizer None: a processor for planning, which counts tokens but cannot make a prompt."""
        self.config, self.tokenizer = config, tokenizer
        self.image_config = image_config or SliceConfig.from_dict(_slice_defaults(config))
        self.video_config = self.frames
        self.query_num = self.tokens_at_once = config.query_num
        self.marks = MARKS | (marks or {})
        self.mark_ids = {} if tokenizer is None else {name: self._id(name) for name in MARKS}
        self.token_ids = {"image": self.mark_ids.get("unk"), "video": NO_VIDEO_ID}

    @classmethod
    def from_folder(cls, folder: Path, config: MiniCPMVConfig) -> "MiniCPMVProcessor":
        """tokenizer.json, template and limits from a checkpoint folder; the tokenizer class it names is not run."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer.chat_template = tokenizer.chat_template or read_chat_template(folder) or TEMPLATE_2_0
        file = folder / "preprocessor_config.json"
        values = read_json(file) if file.is_file() else {}
        marks = {name: values[name] for name in MARKS if name in values}
        processor = cls(config, tokenizer, SliceConfig.from_folder(folder, _slice_defaults(config)), marks)
        processor.video_config = cls.frames and cls.frames.changed_by(folder)
        return processor

    def _id(self, name: str) -> int | None:
        """The id of a mark; None for a number's marks where the vocabulary has none, as before version 2.6."""
        token = self.tokenizer.get_vocab().get(self.marks[name])
        if token is None and not (name.startswith("im_id") and not self.image_config.use_image_id):
            raise ValueError(f"tokenizer: has no token {self.marks[name]!r}, which MiniCPM-V's prompts need")
        return token

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an answer, besides those of generation_config.json."""
        vocabulary = {} if self.tokenizer is None else self.tokenizer.get_vocab()
        return [vocabulary[token] for token in self.terminators if token in vocabulary]

    @property
    def largest_picture(self) -> int:
        """Tokens of the largest picture: the overview and all slices."""
        return (self.image_config.max_slice_nums + 1) * self.query_num

    def load_video(self, source, options: dict) -> Video:
        """Raises ValueError: this version has not seen clips."""
        raise ValueError(f"videos: MiniCPM-V {self.config.minicpmv_version} sees pictures only, 2.6 and later clips")

    def _patchify_image(self, image: Image.Image) -> Patches:
        pixel_values, _ = patchify_slices(image, self.image_config)
        plan = plan_slices(*image.size, self.image_config)
        layout = tuple(SliceGroup((size,)) for size in plan.tgt_sizes)
        return Patches(image, pixel_values, layout, replace(self.merged("image", layout), grid=plan.grid))

    def plan(self, medium: Image.Image | Video) -> tuple[str, tuple[SliceGroup, ...]]:
        """What becomes of a decoded medium, from its size alone: a line for tables, and its layout."""
        plan = plan_slices(*medium.size, self.image_config)
        line = "overview {} x {} px".format(*plan.overview)
        if plan.grid:
            line += " and {} x {} slices".format(*plan.grid) + " of {} x {} px".format(*plan.cell)
        return line, tuple(SliceGroup((size,)) for size in plan.tgt_sizes)

    def merged(self, kind: str, layout: Sequence[SliceGroup], second_per_grid: float = 1.0) -> SlicedMedia:
        """query_num tokens per set; second_per_grid is not read."""
        return SlicedMedia(kind, (count_sets(layout), 1, self.query_num))

    def tokenize(self, messages: list[dict], media: Sequence[SlicedMedia]) -> list[int]:
        """Prompt ids, placeholders written out; raises ValueError when placeholders and media do not match."""
        if self.tokenizer is None:
            raise ValueError("prompt: this model was built from a config alone; a tokenizer needs a checkpoint folder")
        messages = [message | {"content": _as_text(message["content"])} for message in messages]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return self._with_one_bos(self.tokenizer(self._write_media(text, media))["input_ids"])

    def _write_media(self, text: str, media: Sequence[SlicedMedia]) -> str:
        """The text with every medium's placeholder replaced; pictures are numbered as they come."""
        pieces = re.split(f"({'|'.join(map(re.escape, PLACEHOLDERS.values()))})", text)
        kinds = [kind for piece in pieces for kind, placeholder in PLACEHOLDERS.items() if piece == placeholder]
        if kinds != [medium.kind for medium in media]:
            raise ValueError(f"prompt: its placeholders are {kinds}, but the media given are {[m.kind for m in media]}")
        numbers = count()
        written = [self.write_image(m, next(numbers)) if m.kind == "image" else self.write_video(m) for m in media]
        pieces[1::2] = written
        return "".join(pieces)

    def write_image(self, medium: SlicedMedia, number: int) -> str:
        """Overview and slices of a picture as text."""
        m, picture = self.marks, self._query_tokens("im")
        if medium.grid is None:
            return picture
        columns, rows = medium.grid
        return picture + m["slice_start"] + "\n".join([picture * columns] * rows) + m["slice_end"]

    def write_video(self, medium: SlicedMedia) -> str:
        """Never reached: `load_video` refuses clips."""
        raise NotImplementedError

    def _query_tokens(self, mark: str) -> str:
        return self.marks[f"{mark}_start"] + self.marks["unk"] * self.query_num + self.marks[f"{mark}_end"]

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Template and tokenizer both may write the first token, or neither: Llama 3's both do. Qwen's have none."""
        bos = self.tokenizer.bos_token_id
        if bos is None or self.config.minicpmv_version in ("2.6", "4.5"):
            return ids
        return [bos, *dropwhile(lambda token: token == bos, ids)]

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Unknown tokens between the marks of a picture, slice or frame are placeholders, elsewhere they are text."""
        opened = sum((input_ids == self.mark_ids[f"{mark}_start"]).cumsum(0) for mark in ("im", "slice"))
        closed = sum((input_ids == self.mark_ids[f"{mark}_end"]).cumsum(0) for mark in ("im", "slice"))
        inside = (opened > closed) & (input_ids == self.mark_ids["unk"])
        as_text = torch.where(input_ids == self.mark_ids["unk"], -2, input_ids)
        return torch.where(inside, self._kind_ids(input_ids), as_text)

    def _kind_ids(self, input_ids: Tensor) -> Tensor:
        """(L,) the id of the kind that a placeholder at each place would be of."""
        return torch.full_like(input_ids, self.token_ids["image"])


class MiniCPMVVideoProcessor(MiniCPMVProcessor):
    """Versions 2.6 and 4.0: pictures are numbered, clips are rows of frames."""

    frames = FrameConfig()

    def load_video(self, source, options: dict) -> Video:
        """Files: a frame each second, at most max_frames, evenly; frames in memory count as sampled already.

        options: fps, max_frames or num_frames, in place of the processor's own.
        """
        if options.keys() - {"fps", "max_frames"} and options.keys() != {"num_frames"}:
            raise ValueError(
                f"prompt: MiniCPM-V samples a clip by fps, max_frames, or num_frames alone, got {sorted(options)}"
            )
        if not isinstance(source, (str, Path)):
            return load_video(source, **options, limits=self.limits)
        if "num_frames" in options:
            wanted = check_positive_int(options["num_frames"], "num_frames")
            return load_video(source, sample=lambda total, _: middle_indices(total, wanted), limits=self.limits)
        config = replace(self.video_config, **options)
        return load_video(
            source, sample=lambda total, source_fps: self.sample(total, source_fps, config), limits=self.limits
        )

    @staticmethod
    def sample(total: int, source_fps: float, config: FrameConfig) -> list[int]:
        """A frame every 1 / fps seconds; where these are too many, max_frames from the middle of equal parts."""
        indices = list(range(0, total, max(1, round(source_fps / config.fps))))
        return [indices[i] for i in middle_indices(len(indices), config.max_frames)]

    def _patchify_video(self, video: Video) -> Patches:
        config = replace(self.image_config, max_slice_nums=1)
        rows = [patchify_slices(Image.fromarray(frame), config)[0] for frame in video.frames]
        _, layout = self.plan(video)
        return Patches(video, torch.cat(rows), layout, self.merged("video", layout))

    def plan(self, medium: Image.Image | Video) -> tuple[str, tuple[SliceGroup, ...]]:
        """What becomes of a decoded medium; for a clip, how many patches share a token is said as well."""
        if not isinstance(medium, Video):
            return super().plan(medium)
        _, height, width = medium.frames.shape[:3]
        frame = plan_slices(width, height, replace(self.image_config, max_slice_nums=1))
        layout = self.group(medium, frame.tgt_sizes[0])
        line = "{} x {} px".format(*frame.overview) + f" in {count_sets(layout)} sets of frames, "
        return line + f"{patches_per_token(layout, self.query_num):.3g} patches a token", layout

    def group(self, video: Video, tgt_size: tuple[int, int]) -> tuple[SliceGroup, ...]:
        """A set of query tokens for each frame."""
        return (SliceGroup((tgt_size,)),) * len(video.frames)

    def write_image(self, medium: SlicedMedia, number: int) -> str:
        """The picture's number, overview, slices in lines."""
        m, text = self.marks, self._query_tokens("im")
        if self.image_config.use_image_id:
            text = f"{m['im_id_start']}{number}{m['im_id_end']}{text}"
        columns, rows = medium.grid or (0, 0)
        return text + "\n".join([self._query_tokens("slice") * columns] * rows)

    def write_video(self, medium: SlicedMedia) -> str:
        """Frames, or packs of them, in lines."""
        sets, _, _ = medium.thw
        return "\n".join([self._query_tokens("im")] * sets)

    def _kind_ids(self, input_ids: Tensor) -> Tensor:
        """Slices are a picture's, and so are overviews behind a number; the others are frames.

        Where the folder wants no numbers, everything is a picture.
        """
        ids = self.mark_ids
        if not self.image_config.use_image_id:
            return super()._kind_ids(input_ids)
        slices, overviews = input_ids == ids["slice_start"], input_ids == ids["im_start"]
        is_picture = slices | (overviews & (input_ids.roll(1) == ids["im_id_end"]))
        last_start = torch.where(slices | overviews, torch.arange(len(input_ids)), 0).cummax(0).values
        return torch.where(is_picture[last_start], self.token_ids["image"], self.token_ids["video"])


class MiniCPMV4_5Processor(MiniCPMVVideoProcessor):
    """Version 4.5: frames are packed, and each has its tenth of a second."""

    frames = FrameConfig(fps=3.0, max_frames=180, max_packing=3)

    @staticmethod
    def sample(total: int, source_fps: float, config: FrameConfig) -> list[int]:
        """`fps` frames a second from the middle of equal parts, as many as fit into max_frames full packs."""
        wanted = round(min(config.fps, round(source_fps)) * total / source_fps)
        return middle_indices(total, max(1, min(wanted, config.max_frames * (config.packing or config.max_packing))))

    def group(self, video: Video, tgt_size: tuple[int, int]) -> tuple[SliceGroup, ...]:
        """Consecutive frames share a set; the last one may hold fewer."""
        config, ids = self.video_config, temporal_ids(video)
        packing = config.packing or min(-(-len(ids) // config.max_frames), config.max_packing)
        packs = [ids[i : i + packing] for i in range(0, len(ids), packing)]
        return tuple(SliceGroup((tgt_size,) * len(pack), tuple(pack)) for pack in packs)


PROCESSORS = {
    "2.0": MiniCPMVProcessor,
    "2.5": MiniCPMVProcessor,
    "2.6": MiniCPMVVideoProcessor,
    "4.0": MiniCPMVVideoProcessor,
    "4.5": MiniCPMV4_5Processor,
}


def temporal_ids(video: Video) -> list[int]:
    """When each frame was taken, in whole tenths of a second; the last one is before the clip's end."""
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


def count_sets(layout: Sequence[SliceGroup]) -> int:
    """Sets of query tokens that a layout gives: a group without times is not merged."""
    return sum(1 if _is_packed(group) else len(group.slices) for group in layout)


def _is_packed(group: SliceGroup) -> bool:
    return group.temporal_ids is not None and max(group.temporal_ids) >= 0


def patches_per_token(layout: Sequence[SliceGroup], query_num: int) -> float:
    """How many patches become one token: 16 for a square slice, 96 for six square frames packed into one set.

    >>> patches_per_token((SliceGroup(((32, 32),) * 6, (0, 3, 6, 9, 12, 15)),), 64)
    96.0
    """
    return sum(h * w for group in layout for h, w in group.slices) / (count_sets(layout) * query_num)


def _slice_defaults(config: MiniCPMVConfig) -> dict:
    """What config.json says of slicing: at the top, or in `slice_config`."""
    nested = dict(getattr(config, "slice_config", None) or {})
    names = ("max_slice_nums", "scale_resolution", "patch_size", "use_image_id", "slice_mode")
    top = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    numbered = config.minicpmv_version not in ("2.0", "2.5")
    return {"use_image_id": numbered} | top | {name: nested[name] for name in names if name in nested}


def _as_text(content: str | Sequence[dict]) -> str:
    """The parts of a message in lines, a placeholder for each medium."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else PLACEHOLDERS[part["type"]] for part in content)
