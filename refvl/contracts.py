"""The parts of a family: an `Encoder` and a `Processor`.

No class inherits from these protocols; classes match them by structure.

A *layout* describes the arrangement of the patch rows of one item, and depends only on the item's size. It is (t, h, w)
in patches for Qwen and GLM, a tuple of `SliceGroup`s for MiniCPM-V, and a `CropLayout` for Step3-VL. Layouts are
hashable. The processor makes the layout and the encoder plans it. Both count the same tokens: `media_tokens(kind,
layout).num_tokens == item_size(layout)[1]`.

Shape suffixes: N patch rows, C values per row, M output tokens, D the language model's width, L prompt tokens.
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
    """The interface of every encoder, and of every path of an encoder.

    `plan` runs on the CPU and computes everything that depends on sizes. `__call__` copies no value back to the host,
    so a graph can capture it.
    """

    @property
    def device(self) -> torch.device:
        """The device of the weights; patch rows and plans must be on it, too."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the embeddings."""

    def check_layouts(self, layouts: Any, *, name: str = "layouts") -> Sequence[Any]:
        """Return the layouts of a batch, normalised; raise ValueError or TypeError for an invalid layout."""

    def item_size(self, layout: Any) -> tuple[int, int, int]:
        """Return (patch rows, output tokens, frames) of one media item."""

    def plan(self, layouts: Any) -> Any:
        """Plan a batch: return a frozen dataclass of tensors and integers, with a padding rule for each tensor."""

    def __call__(self, pixel_values: Tensor, *, metadata: Any, attention: str | None = None) -> Tensor:
        """Encode (N, C) patch rows as (M, D), or as (M, D * (1 + k)) if k DeepStack features follow each embedding."""


class GraphEncoder(PlansAndEncodes, Protocol):
    """The methods that graphs need from an encoder, or from each of its paths.

    An encoder with several paths has a dict `paths` of `GraphEncoder`s by name, in the order of an item's rows. Its
    `path_layouts(layout)` maps each name to the part of an item that the path encodes, or to None if there is no such
    part. The items of a path consist of equal units, and `tokens` is the number of output tokens per unit.
    """

    @property
    def graph_attention(self) -> str:
        """The backend to capture: "varlen", "masked", or "sdpa" if all segments have the same length.

        Encoders without a graph path raise ValueError.
        """

    def plan_capacity(self, max_tokens: int, max_frames: int) -> Any:
        """Return a plan whose tensors and integers are large enough for any batch within the limits."""

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """Return zeros of shape (patch rows, C) for `max_tokens` output tokens.

        Items with more rows per token need a larger budget.
        """


class Encoder(PlansAndEncodes, Protocol):
    """A module that turns the patch rows of media into embeddings of the language model's width.

    An encoder is an `nn.Module`; each architecture has its own class.

    An encoder is also a `GraphEncoder`, or has several `paths` that are `GraphEncoder`s. Only MiniCPM-V 2.0's encoder
    has no graph path.
    """

    config: Any  # contains the tower's depth, num_heads and head_dim, and patch_values, the values per patch row
    is_compiled: bool  # whether `compile_blocks` was called

    def compile_blocks(self) -> None:
        """Make torch compile each block of the tower as a whole, for all sizes, when the block first runs."""

    def backend(self, attention: str | None, device: torch.device) -> str:
        """Return the backend of `refvl.attention` for inputs on `device`.

        attention: the backend requested for this call.
        """

    @classmethod
    def from_config(cls, config, *, attention: str = "auto") -> Any:
        """Build an encoder without weights from its own config, a transformers config, or the dict in config.json."""

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The blocks of the tower; each is called with (N, E) and the inputs of its attention, such as `Segments`."""

    def block_rows(self, metadata: Any) -> list[Tensor]:
        """Return, for each pass through the blocks, the patch row at each input position in the pass; -1 means none."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; return the names of the parameters that received a value."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) pairs, as in `nn.Module`."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer) pairs, as in `nn.Module`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters, as in `nn.Module`."""


class Processor(Protocol):
    """The path from a question and media to token ids and patch rows, configured by a checkpoint folder's files."""

    token_ids: dict[str, int]  # the placeholders: {"image": id, "video": id}
    image_config: Any  # the settings for preparing an image
    video_config: Any  # the settings for preparing a video; None if the model accepts no video
    limits: MediaLimits  # limits on decoding, which a caller may replace
    assumed: bool  # whether the pixel limits are the class's defaults because no file sets them
    tokenizer: Any  # None: the processor plans and counts tokens, but builds no prompt

    def __init__(self, config: Any) -> None:
        """Build a processor from a config alone, for planning."""

    @classmethod
    def from_folder(cls, folder: Path, config: Any) -> "Processor":
        """Build a processor with the tokenizer, chat template and preprocessing limits of a checkpoint folder."""

    @property
    def tokens_at_once(self) -> int:
        """A number that divides every token count of the encoder."""

    @property
    def clip_sampling(self) -> str:
        """A description of the video sampling if `video_config` does not contain all of it; otherwise empty."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer, in addition to those of generation_config.json."""

    @property
    def largest_picture(self) -> int:
        """The number of tokens in the largest image that the limits allow."""

    def messages(self, prompt: str | Sequence[dict], images: Iterable = (), videos: Iterable = ()) -> list[dict]:
        """Return checked chat messages."""

    def decode(self, messages: Sequence[dict]) -> list[Image.Image | Video]:
        """Decode the media items of the messages, in order of appearance."""

    def frame_indices(self, total: int, source_fps: float) -> Sequence[int]:
        """Return the indices of the frames that are read from a file of `total` frames.

        Raise ValueError if the model accepts no video.
        """

    def load_video(self, source: Any, options: dict) -> Video:
        """Load a video, sampled by a message's `options` or else by the checkpoint's rule.

        Raise ValueError if unsupported.
        """

    def patchify(self, media: Sequence[Image.Image | Video]) -> list:
        """Turn each media item into patch rows, with its layout and the extents that the language model sees."""

    def extents(self, media: Sequence[Image.Image | Video]) -> list[MediaTokens]:
        """Return the `media_tokens` that `patchify` would report, without processing pixels."""

    def pieces(self, medium: Image.Image | Video, max_tokens: int) -> Iterator[tuple[Any, Levels | Tensor]]:
        """Yield (layout, patch rows) for consecutive parts of an item, at most max_tokens tokens each if possible."""

    def layout_of(self, medium: Image.Image | Video) -> Any:
        """Return the layout that `patchify` gives a decoded item, computed from the item's size alone."""

    def media_tokens(self, kind: str, layout: Any, second_per_grid: float = 1.0) -> MediaTokens:
        """Return the extents that the language model sees for an item of this layout."""

    def tokenize(
        self, messages: Sequence[dict], media: Sequence[MediaTokens], *, allow_special_tokens: bool = False
    ) -> list[int]:
        """Return the prompt's ids, (L,), with every placeholder repeated.

        Special tokens in the caller's strings are treated as text unless `allow_special_tokens` is set.
        """

    def placeholders(self, input_ids: Tensor) -> Tensor:
        """Return (L,) ids in which the placeholders of each kind, and no other tokens, have the id of that kind."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode token ids into text."""
