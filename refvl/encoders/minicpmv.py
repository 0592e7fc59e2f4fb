"""MiniCPM-V's encoders: each version consists of a tower and a resampler.

    patch rows (N, 3*P*P)      all slices of all items, concatenated
       | vpm                   one vector per patch
    (N, E)
       | resampler             query_num vectors per slice (in 4.5, per slice or group of frames)
    tokens (M, D)

    version    tower          input of the position table    resampler       frames
    2.0        SiglipViT      h x w, the table resized        Resampler2      -
    2.5        NaVitSiglip    one row of h * w patches        Resampler2_5    -
    2.6, 4.0   NaVitSiglip    h x w                           Resampler2_5    ordinary slices
    4.5        NaVitSiglip    h x w                           Resampler4_5    have times; groups share queries

An image consists of an overview and slices, and a video consists of frames; the encoder treats
all of them as slices of h x w patches. The layout of an item is a tuple of `SliceGroup`s in the
order of its rows. Each group contains one slice; in 4.5, frames that share a set of queries
form one group. Each version is a class in this file, never a branch in `forward`.

Graphs. Slices have many shapes. Upstream stores slices in buffers of one size, so it needs a
graph for each shape. This encoder concatenates the rows, so its only sizes are the numbers of
rows, slices and sets of queries. One graph per budget therefore serves every shape. Budgets
count tokens; for each token, a graph reserves `patches_per_slice / query_num` patch rows. Items
that need more rows use a larger budget, or run eagerly (see `plan_batches`).

Shape suffixes: N patches, M tokens, E the tower's width, D the language model's.
Upstream: `MiniCPMV2_0` ... `MiniCPMV4_5` (vLLM).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from refvl.encoders.navit_siglip import NaVitMetadata, NaVitSiglip, NaVitSiglipConfig
from refvl.encoders.resampler import Resampler, Resampler2_5, Resampler4_5, ResamplerMetadata
from refvl.encoders.resampler2 import FixedGridMetadata, Resampler2
from refvl.encoders.siglip_vit import SiglipViT
from refvl.encoders.slice_layouts import as_layouts
from refvl.encoders.tower import Tower
from refvl.encoders.weights import config_dict
from refvl.pixels.slices import NO_TIME, SliceLayout, count_sets

HEAD_DIM = 128  # the resampler's head dimension in every release
AUDIO_PARTS = r"(apm|tts|audio_\w+)\."  # omni checkpoints also contain weights for audio input and output


@dataclass(frozen=True, slots=True)
class MiniCPMVEncoderConfig:
    """The sizes of the tower and the resampler, read from the `config.json` of a whole model."""

    vision: Any  # NaVitSiglipConfig or SiglipViTConfig
    hidden_size: int  # D
    query_num: int = 64  # tokens per slice
    drop_vision_last_layer: bool = False
    scale_resolution: int = 448  # in pixels; the area of a slice is about that of a square with this side

    @classmethod
    def from_hf(cls, config, vision_config_class=NaVitSiglipConfig) -> "MiniCPMVEncoderConfig":
        """Read the dict in `config.json` or a transformers config; unknown keys are ignored.

        Raises ValueError if the tower's sizes are missing.
        """
        values = config_dict(config)
        if values.get("vision_config") is None and "vision_encoder" not in values:  # 2.0 names only its tower
            raise ValueError("vision_config: expected the sizes of the tower, got none")
        slices = values.get("slice_config") or {}
        wanted = ("hidden_size", "query_num", "drop_vision_last_layer")
        return cls(
            vision=vision_config_class.from_hf(values),
            scale_resolution=slices.get("scale_resolution", values.get("scale_resolution", 448)),
            **{name: values[name] for name in wanted if values.get(name) is not None},
        )

    @property
    def resampler_heads(self) -> int:
        """The number of heads of the resampler."""
        return max(1, self.hidden_size // HEAD_DIM)

    @property
    def num_heads(self) -> int:
        """The number of heads of the tower."""
        return self.vision.num_heads

    @property
    def depth(self) -> int:
        """The number of tower blocks that run."""
        return self.vision.depth - self.drop_vision_last_layer

    @property
    def head_dim(self) -> int:
        """The head dimension of the tower, in values."""
        return self.vision.head_dim

    @property
    def patch_values(self) -> int:
        """The number of values in one patch row: 3 * P * P."""
        return self.vision.patch_values


@dataclass(frozen=True, slots=True, eq=False)
class MiniCPMVMetadata:
    """The inputs of a forward pass other than the pixels: the plan of the tower and the plan of the resampler."""

    vision: NaVitMetadata
    resampler: ResamplerMetadata | FixedGridMetadata

    @property
    def summary(self) -> str:
        """Return a one-line description for tables."""
        slices, sets = len(self.vision.cu_seqlens) - 1, len(self.resampler.cu_seqlens_k) - 1
        return f"{slices} slices" if slices == sets else f"{slices} slices in {sets} groups"


class MiniCPMVEncoder(Tower):
    """The base class of all versions, which builds, plans and runs the tower and then the resampler."""

    vpm_class: ClassVar[type[NaVitSiglip]] = NaVitSiglip
    resampler_class: ClassVar[type[Resampler]] = Resampler2_5
    reads_times: ClassVar[bool] = False  # whether the encoder uses the times of frames
    skipped_parts: ClassVar[str] = AUDIO_PARTS  # a regular expression for checkpoint names to skip
    vpm: Any  # an instance of vpm_class
    resampler: Any  # an instance of resampler_class

    def __init__(self, config: MiniCPMVEncoderConfig, *, attention: str = "auto"):
        super().__init__(config)
        vision, sizes = config.vision, (config.hidden_size, config.resampler_heads, config.vision.hidden_size)
        self.vpm = self.vpm_class(vision, drop_last_layer=config.drop_vision_last_layer, attention=attention)
        self.resampler = self.resampler_class(self.resampler_queries(config), *sizes, attention=attention)

    @classmethod
    def from_config(cls, config, *, attention: str = "auto") -> "MiniCPMVEncoder":  # type: ignore[override]  # no extra
        """Build the encoder from a `MiniCPMVEncoderConfig`, a whole transformers config, or the dict in config.json."""
        if not isinstance(config, MiniCPMVEncoderConfig):
            config = MiniCPMVEncoderConfig.from_hf(config, cls.vpm_class.config_class)
        return cls(config, attention=attention)

    def resampler_queries(self, config: MiniCPMVEncoderConfig) -> int:
        """Return the number of queries that the resampler is built with."""
        return config.query_num

    def check_layouts(self, layouts, *, name: str = "layouts") -> list[SliceLayout]:
        """Return one tuple of `SliceGroup`s per item, normalised and hashable; forms and errors as in `as_layouts`."""
        return as_layouts(layouts, name, reads_times=self.reads_times)

    def item_size(self, layout: SliceLayout) -> tuple[int, int, int]:
        """Return an item's numbers of (patch rows, output tokens, frames).

        "frames" counts only the frames that share another frame's queries; the number of tokens
        already limits all other frames.
        """
        sizes = [size for group in layout for size in group.slices]
        sets = count_sets(layout)
        return sum(h * w for h, w in sizes), sets * self.config.query_num, len(sizes) - sets

    def plan_checked(self, layouts: Sequence[SliceLayout]) -> MiniCPMVMetadata:
        """Compute the plan on the CPU, and move it to the encoder's device."""
        sizes = [size for layout in layouts for group in layout for size in group.slices]
        return MiniCPMVMetadata(self.vpm.plan_checked(sizes), self.resampler.plan_checked(sizes))

    def forward(self, pixel_values: Tensor, layouts=None, *, metadata=None, attention: str | None = None) -> Tensor:
        """Encode (N, 3*P*P) patch rows of all items as (M, D) tokens, with items, groups and slices in order.

        Pass `layouts`, which this call plans, or the `MiniCPMVMetadata` that an earlier `plan` returned.
        `attention` overrides the backend; a graph capture requests static shapes. Raises
        ValueError if the rows do not match the plan, and TypeError if they are not floats.
        """
        if (metadata is None) == (layouts is None):
            raise ValueError("forward: pass exactly one of layouts and metadata")
        metadata = self.plan(layouts) if metadata is None else metadata
        x_NE = self.vpm.encode(pixel_values, metadata.vision, attention)
        return self.resampler.resample(x_NE, metadata.resampler, attention)

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The blocks of the tower."""
        return self.vpm.blocks

    def block_rows(self, metadata: MiniCPMVMetadata) -> list[Tensor]:
        """Return the index of the patch row at each input position of the tower, (N,), as in `Tower.block_rows`."""
        return self.vpm.block_rows(metadata.vision)

    @property
    def graph_attention(self) -> str:
        """The attention backend for graph capture; its tensor shapes do not depend on slice and set lengths."""
        return min(self.vpm.graph_attention, self.resampler.graph_attention)  # "masked" if either part needs it

    @property
    def patches_per_slice(self) -> int:
        """The number of patch rows that a graph reserves for each set of queries.

        A slice has the area of S x S patches, with S = scale_resolution / P, but its sides are
        rounded to whole patches. Sides a x b with ab = S * S become at most (a + 1/2)(b + 1/2),
        so 2 S additional rows are enough for ratios up to 12:1.
        """
        side = self.config.scale_resolution // self.config.vision.patch_size
        return side**2 + 2 * side

    def max_rows(self, max_tokens: int) -> int:
        """Return the number of patch rows in the graph for a budget of `max_tokens`, rounded down."""
        return max(1, max_tokens * self.patches_per_slice // self.config.query_num)

    def plan_capacity(self, max_tokens: int, max_frames: int) -> MiniCPMVMetadata:
        """Return a plan large enough for any batch of `max_tokens` output tokens and `max_frames` frames.

        Tokens come in sets of query_num, so there are at most max_tokens // query_num sets. There
        are at most as many slices as sets, plus the frames that share another frame's queries.
        """
        max_rows = self.max_rows(max_tokens)
        max_sets = max(1, max_tokens // self.config.query_num)
        vision = self.vpm.plan_capacity(max_rows, max_sets + max_frames)
        return MiniCPMVMetadata(vision, self.resampler.plan_capacity(max_rows, max_sets))

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """Return zeros of shape (patch rows, 3*P*P) for `max_tokens` output tokens."""
        return self.resampler.query.new_zeros(self.max_rows(max_tokens), self.config.patch_values)

    def rename(self, name: str) -> str:
        """Rename the tower's weights under `vpm.` as the tower does, but keep the resampler's names."""
        return f"vpm.{self.vpm.rename(name)}" if name.startswith("vpm.") else name

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint shapes of the tower's convolution kernels."""
        return {f"vpm.{name}": shape for name, shape in self.vpm.kernels.items()}

    @property
    def unused(self) -> str:
        """A pattern for the names of pooling heads, a dropped last layer, and the audio parts of omni checkpoints."""
        return rf"(?=vpm\.){self.vpm.unused}|{self.skipped_parts}"


class MiniCPMV2_0Encoder(MiniCPMVEncoder):
    """The encoder of MiniCPM-V 2.0: timm's SigLIP, and queries in a fixed grid; a plan contains the resized table."""

    vpm_class = SiglipViT
    resampler_class = Resampler2
    skipped_parts = r"resampler\.pos_embed$"  # not loaded, because a formula computes the positions

    def resampler_queries(self, config: MiniCPMVEncoderConfig) -> int:
        """Return the side of the queries' grid; raise ValueError if the number of queries is not a square number."""
        side = int(config.query_num**0.5)
        if side**2 != config.query_num:
            raise ValueError(f"query_num: expected a square number for version 2.0, got {config.query_num}")
        return side

    @property
    def graph_attention(self) -> str:
        """Raises ValueError, because this version has no graph path."""
        raise ValueError("graphs: not supported by MiniCPM-V 2.0, whose encoder runs eagerly; load it with graphs=None")


class MiniCPMV2_5Encoder(MiniCPMVEncoder):
    """The encoder of MiniCPM-V 2.5: the position table treats every slice as one row of h * w patches."""

    skipped_parts = r"(?!)"  # nothing is skipped: 2.5 has no omni release

    def plan_checked(self, layouts: Sequence[SliceLayout]) -> MiniCPMVMetadata:
        """Plan as the other versions do, but with one row per slice for the position table."""
        sizes = [size for layout in layouts for group in layout for size in group.slices]
        in_one_row = [(1, h * w) for h, w in sizes]
        return MiniCPMVMetadata(self.vpm.plan_checked(in_one_row), self.resampler.plan_checked(sizes))


class MiniCPMV2_6Encoder(MiniCPMVEncoder):
    """The encoder of MiniCPM-V 2.6: the tower receives the shapes of slices; a video's frames are ordinary slices."""


class MiniCPMV4_0Encoder(MiniCPMVEncoder):
    """The encoder of MiniCPM-V 4.0, the same as in 2.6; only the text model differs."""


class MiniCPMV4_5Encoder(MiniCPMVEncoder):
    """The encoder of MiniCPM-V 4.5: frames have times, and all frames of a group share one set of queries."""

    resampler_class = Resampler4_5
    reads_times = True

    def plan_checked(self, layouts: Sequence[SliceLayout]) -> MiniCPMVMetadata:
        """Compute the plan, including times, on the CPU, and move it to the encoder's device."""
        groups = [group for layout in layouts for group in layout]
        sizes = [size for group in groups for size in group.slices]
        times = [group.temporal_ids or [NO_TIME] * len(group.slices) for group in groups]
        return MiniCPMVMetadata(self.vpm.plan_checked(sizes), self.resampler.plan_checked(sizes, times))
