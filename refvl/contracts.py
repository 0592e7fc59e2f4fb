"""What a family offers to the rest: an `Encoder` and a `Processor`. No class inherits from these; they agree by shape.

A *layout* says how the rows of one medium lie, from its size alone: (t, h, w) in patches for Qwen and GLM, a tuple of
`SliceGroup`s for MiniCPM-V, a `CropLayout` for Step3-VL. It is hashable. The processor makes it, the encoder plans it,
and both give it the same number of tokens: `media_tokens(kind, layout).num_tokens == item_size(layout)[1]`.

Shape suffixes: N patch rows, C values of a row, M output tokens, D the language model's width, L prompt tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from refvl.merge import MediaTokens
from refvl.pixels.media import MediaLimits, Video
from refvl.pixels.patches import Levels


class PlansAndEncodes(Protocol):
    """What every encoder, and every path of one, offers.

    `plan` runs on the CPU and computes everything that depends on sizes; `__call__` reads no value back, which is what
    makes an encoder capturable.
    """

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where rows and plans have to be."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the embeddings."""

    def check_layouts(self, layouts: Any, *, name: str = "layouts") -> Sequence[Any]:
        """The layouts of a batch, normalised, or a ValueError or TypeError that says what is wrong."""

    def item_size(self, layout: Any) -> tuple[int, int, int]:
        """(patch rows, output tokens, frames) of one medium."""

    def plan(self, layouts: Any) -> Any:
        """Metadata of a batch: a frozen dataclass of tensors and integers, with a padding rule on each tensor."""

    def __call__(self, pixel_values: Tensor, *, metadata: Any, attention: str | None = None) -> Tensor:
        """(N, C) patch rows -> (M, D), or (M, D * (1 + k)) where k deeper features travel beside the embeddings."""


class GraphEncoder(PlansAndEncodes, Protocol):
    """What graphs ask of an encoder, or of each of its paths.

    An encoder of several paths offers them as `paths`, a mapping from name to `GraphEncoder` in the order in which an
    item's rows lie. Its `path_layouts(layout)` maps each name to what that path is given of an item; None: nothing. The
    items of a path consist of equal units, and `tokens` says how many output tokens a unit has.
    """

    @property
    def graph_attention(self) -> str:
        """The backend to capture: "varlen", "masked", or "sdpa" where all segments are equally long.

        Encoders without a graph path raise ValueError.
        """

    def plan_capacity(self, max_tokens: int, max_frames: int) -> Any:
        """What `plan` gives, with every tensor as long, and every integer as large, as any batch within the limits."""

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """(patch rows, C) zeros for `max_tokens` output tokens; items with more rows take a larger budget."""


class Encoder(PlansAndEncodes, Protocol):
    """Patch rows of media -> rows of the language model's width. An `nn.Module`, one class per architecture.

    It is a `GraphEncoder` as well, or has several `paths` that are, but for MiniCPM-V 2.0's, which has no graph path.
    """

    config: Any  # depth, num_heads and head_dim of the tower, patch_values of a row
    is_compiled: bool  # whether `compile_blocks` was called

    def compile_blocks(self) -> None:
        """Let torch compile each block of the tower as a whole, for all sizes, when it first runs."""

    def backend(self, attention: str | None, device: torch.device) -> str:
        """The backend of `refvl.attention` for inputs on `device`; attention: what a call asks for, if anything."""

    @classmethod
    def from_config(cls, config, *, attention: str = "auto") -> Any:
        """Built from its own config, a transformers config, or the dict in config.json; without weights."""

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The tower's, each called with (N, E) and what its attention needs, a `Segments` among it."""

    def block_rows(self, metadata: Any) -> list[Tensor]:
        """For each time that a forward runs the blocks, the patch row at each place of their input; -1: none."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; the names of the parameters that were filled."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of every `nn.Module`."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """As of every `nn.Module`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As of every `nn.Module`."""


class Processor(Protocol):
    """From a question and media to token ids and patch rows, by the files of a checkpoint folder."""

    token_ids: dict[str, int]  # the placeholders: {"image": id, "video": id}
    image_config: Any  # how an image is prepared
    video_config: Any  # how a video is; None where the model takes none
    limits: MediaLimits  # of what is decoded; may be replaced
    assumed: bool  # the limits on pixels are the class's defaults, because no file says them
    tokenizer: Any  # None: plans and counts, but makes no prompt

    def __init__(self, config: Any) -> None:
        """From a config alone: for planning."""

    @classmethod
    def from_folder(cls, folder: Path, config: Any) -> "Processor":
        """With the tokenizer, chat template and preprocessing limits of a checkpoint folder."""

    @property
    def tokens_at_once(self) -> int:
        """The encoder's tokens come in multiples of this."""

    @property
    def clip_sampling(self) -> str:
        """How a video file is sampled, in words, where `video_config` does not say it all; else empty."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer, besides those of generation_config.json."""

    @property
    def largest_picture(self) -> int:
        """Tokens of the largest image that the limits allow."""

    def messages(self, prompt: str | Sequence[dict], images: Iterable = (), videos: Iterable = ()) -> list[dict]:
        """Chat messages, checked."""

    def decode(self, messages: Sequence[dict]) -> list[Image.Image | Video]:
        """The media of the messages, in order of appearance."""

    def frame_indices(self, total: int, source_fps: float) -> Sequence[int]:
        """Which of a file's `total` frames are read; ValueError where no videos are taken."""

    def load_video(self, source: Any, options: dict) -> Video:
        """A video, sampled by the checkpoint's rule, `options` of a message first; ValueError where none is taken."""

    def patchify(self, media: Sequence[Image.Image | Video]) -> list:
        """Each medium as patch rows, with its layout and the extents that the language model sees."""

    def extents(self, media: Sequence[Image.Image | Video]) -> list[MediaTokens]:
        """How the language model sees each medium: what `patchify` says of it, without touching a pixel."""

    def pieces(self, medium: Image.Image | Video, max_tokens: int) -> Iterator[tuple[Any, Levels | Tensor]]:
        """(layout, patch rows) of a medium's consecutive parts, of at most max_tokens tokens where it can be cut."""

    def layout_of(self, medium: Image.Image | Video) -> Any:
        """The layout that `patchify` gives a decoded medium, from its size alone."""

    def media_tokens(self, kind: str, layout: Any, second_per_grid: float = 1.0) -> MediaTokens:
        """How the language model sees a medium of this layout."""

    def tokenize(
        self, messages: Sequence[dict], media: Sequence[MediaTokens], *, allow_special_tokens: bool = False
    ) -> list[int]:
        """(L,) prompt ids with every placeholder repeated; special tokens in the caller's strings are text unless
        `allow_special_tokens`."""

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """(L,) ids in which each kind's placeholders have that kind's id, and nothing else has."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Token ids back to text."""
