"""MiniCPM-V's encoders: a tower and a resampler per version, joined.

    patch rows (N, 3*P*P)      all slices of all items, end to end
       | vpm                   2.0: `SiglipViT`; later: `NaVitSiglip`
    (N, E)
       | resampler             2.0: `Resampler2`; 2.5, 2.6, 4.0: `Resampler2_5`; 4.5: `Resampler4_5`
    tokens (M, D)              query_num per slice (4.5: per slice, or per group of frames)

An image is an overview and slices, a video is frames; to the encoder both are slices of h x w patches. The layout of an
item is a tuple of `SliceGroup`s in the order of its rows: one slice each, except for the frames that share a set of
queries in 4.5. What differs between the versions is a class below, never a branch in a forward.

2.5 was trained without telling its tower the shape of a slice: the position table sees one row of h * w patches.

Graphs. Slices have many shapes, and upstream, which keeps slices in buffers of one size, needs a graph for each. Flat
rows do not: the only sizes here are `N` and the numbers of slices and sets, so one graph per budget serves every shape.
Budgets count tokens; a token pays for `patches_per_slice / query_num` patch rows. Items that need more rows take a
larger budget, or run eagerly (see `plan_batches`).

Shape suffixes: N patches, M tokens, E the tower's width, D the language model's.
Upstream: `MiniCPMV2_0` ... `MiniCPMV4_5` (vLLM).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from refvl.arguments import as_size
from refvl.checks import check_positive_int
from refvl.encoders.navit_siglip import NaVitMetadata, NaVitSiglip, NaVitSiglipConfig
from refvl.encoders.resampler import (
    NO_TIME,
    FixedGridMetadata,
    Resampler2,
    Resampler2_5,
    Resampler4_5,
    ResamplerMetadata,
    as_temporal_groups,
)
from refvl.encoders.siglip_vit import SiglipViT, SiglipViTConfig, SiglipViTMetadata
from refvl.encoders.tower import Tower
from refvl.encoders.weights import config_dict
from refvl.pixels.slices import SliceGroup, count_sets

HEAD_DIM = 128  # of the resampler, in every release
AUDIO_PARTS = r"(apm|tts|audio_\w+)\."  # omni checkpoints also hold audio input and output


Layout = tuple[SliceGroup, ...]


@dataclass(frozen=True, slots=True)
class MiniCPMVEncoderConfig:
    """What the `config.json` of a whole model says about the encoder."""

    vision: Any  # NaVitSiglipConfig or SiglipViTConfig
    hidden_size: int  # D
    query_num: int = 64  # tokens per slice
    drop_vision_last_layer: bool = False
    scale_resolution: int = 448  # pixels: a slice has about the area of a square with this side

    def __post_init__(self):
        check_positive_int(self.query_num, "query_num")
        if self.resampler_heads * self.resampler_head_dim != self.hidden_size:
            raise ValueError(
                f"hidden_size: must be a multiple of its {self.resampler_heads} heads, got {self.hidden_size}"
            )

    @classmethod
    def from_hf(cls, config, vision_config_class=NaVitSiglipConfig) -> "MiniCPMVEncoderConfig":
        """From the dict in `config.json` or a transformers config; unknown keys are ignored."""
        values = config_dict(config)
        if values.get("vision_config") is None and "vision_encoder" not in values:  # 2.0 gives a name only
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
        return max(1, self.hidden_size // HEAD_DIM)

    @property
    def resampler_head_dim(self) -> int:
        return self.hidden_size // self.resampler_heads

    @property
    def num_heads(self) -> int:
        """Of the tower."""
        return self.vision.num_heads

    @property
    def depth(self) -> int:
        """Blocks of the tower that are run."""
        return self.vision.depth - self.drop_vision_last_layer

    @property
    def head_dim(self) -> int:
        """Of the tower."""
        return self.vision.head_dim

    @property
    def patch_size(self) -> int:
        return self.vision.patch_size

    @property
    def patch_values(self) -> int:
        """Values in one patch row: 3 * P * P."""
        return self.vision.patch_values


@dataclass(frozen=True, slots=True, eq=False)
class MiniCPMVMetadata:
    """What one forward needs besides pixels: the plan of the tower and that of the resampler."""

    vision: NaVitMetadata | SiglipViTMetadata
    resampler: ResamplerMetadata | FixedGridMetadata

    @property
    def summary(self) -> str:
        """One line for tables."""
        slices, sets = len(self.vision.cu_seqlens) - 1, len(self.resampler.cu_seqlens_k) - 1
        return f"{slices} slices" if slices == sets else f"{slices} slices in {sets} groups"


class SliceEncoder(Tower):
    """What the five versions share: layouts, sizes, the two steps of a forward, and loading. Not used by itself."""

    skipped_parts = r"(?!)"  # regular expression: checkpoint names of neither tower nor resampler, to be left out
    vpm: Any  # SiglipViT or NaVitSiglip, each with metadata of its own
    resampler: Any  # Resampler2, Resampler2_5 or Resampler4_5, as well

    def __init__(self, config: MiniCPMVEncoderConfig, vpm: nn.Module, resampler: nn.Module):
        super().__init__(config)
        self.vpm, self.resampler = vpm, resampler

    def check_layouts(self, layouts, *, name: str = "layouts") -> list[Layout]:
        """One tuple of `SliceGroup`s per item, normalised and hashable; a bare (h, w) is a slice by itself.

        Raises TypeError for another kind, and ValueError for an item or group without slices, a slice without
        patches, temporal ids that do not cover every slice, and times given to a version that does not read them.
        """
        if not isinstance(layouts, Sequence) or isinstance(layouts, str):
            raise TypeError(f"{name}: expected a sequence of layouts, got {type(layouts).__name__}")
        return [self._check_layout(layout, f"{name}[{i}]") for i, layout in enumerate(layouts)]

    def _check_layout(self, layout, name: str) -> Layout:
        if not isinstance(layout, Sequence) or isinstance(layout, str):
            raise TypeError(f"{name}: expected a tuple of SliceGroups or (h, w), got {type(layout).__name__}")
        if not layout:
            raise ValueError(f"{name}: expected at least one slice, got none")
        return tuple(self.check_group(group, f"{name}[{i}]") for i, group in enumerate(layout))

    def check_group(self, group, name: str) -> SliceGroup:
        """One group, normalised; without times."""
        group = as_slice_group(group, name)
        if group.temporal_ids is not None:
            raise ValueError(f"{name}: temporal ids are read by MiniCPM-V 4.5 alone, got {group.temporal_ids}")
        return group

    def item_size(self, layout: Layout) -> tuple[int, int, int]:
        """(patch rows, output tokens, frames) of one item; frames are those that share the queries of another frame.

        The others need no limit of their own: tokens bound them.
        """
        slices, sets = sum(len(group.slices) for group in layout), count_sets(layout)
        return sum(h * w for group in layout for h, w in group.slices), sets * self.config.query_num, slices - sets

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The tower's."""
        return self.vpm.encoder["layers"].children()

    def block_rows(self, metadata: MiniCPMVMetadata) -> list[Tensor]:
        """The tower's."""
        return self.vpm.block_rows(metadata.vision)

    def plan(self, layouts) -> MiniCPMVMetadata:
        """Everything that depends on the layouts: the metadata of the tower and of the resampler."""
        raise NotImplementedError

    def forward(
        self,
        pixel_values: Tensor,
        layouts=None,
        *,
        metadata: MiniCPMVMetadata | None = None,
        attention: str | None = None,
    ) -> Tensor:
        """(N, 3*P*P) patch rows of all items -> (M, D) tokens; items, groups and slices in order.

        Give `layouts` to plan here, or the `metadata` of an earlier `plan`; `attention` overrides the backend (a
        capture asks for one with static shapes). Raises ValueError when the rows do not match, TypeError when they hold
        no floating-point numbers.
        """
        if (metadata is None) == (layouts is None):
            raise ValueError("forward: give exactly one of layouts and metadata")
        metadata = self.plan(layouts) if metadata is None else metadata
        x_NE = self.vpm.encode(pixel_values, metadata.vision, attention)
        return self.resampler.resample(x_NE, metadata.resampler, attention)

    def rename(self, name: str) -> str:
        """The tower's names under `vpm.`, as the tower reads them; the resampler's stay."""
        return f"vpm.{self.vpm.rename(name)}" if name.startswith("vpm.") else name

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """The tower's."""
        return {f"vpm.{name}": shape for name, shape in self.vpm.kernels.items()}

    @property
    def unused(self) -> str:
        """Pooling heads, a dropped last layer, the audio parts of omni checkpoints."""
        return rf"(?=vpm\.){self.vpm.unused}|{self.skipped_parts}"


class MiniCPMV2_0Encoder(SliceEncoder):
    """timm's SigLIP, and queries with positions in a fixed grid."""

    skipped_parts = r"resampler\.pos_embed$"  # a formula
    plan_reads_weights = True  # the tower's position table
    vpm: SiglipViT
    resampler: Resampler2

    @classmethod
    def from_config(cls, config, *, attention: str = "auto") -> "MiniCPMV2_0Encoder":  # type: ignore[override]  # no extra
        """Build from a `MiniCPMVEncoderConfig`, a whole transformers config, or the dict in `config.json`."""
        c = as_encoder_config(config, SiglipViTConfig)
        grid_size = int(c.query_num**0.5)
        if grid_size**2 != c.query_num:
            raise ValueError(f"query_num: the queries of 2.0 form a square, got {c.query_num}")
        vpm = SiglipViT(c.vision, drop_last_layer=c.drop_vision_last_layer, attention=attention)
        return cls(
            c, vpm, Resampler2(grid_size, c.hidden_size, c.resampler_heads, c.vision.hidden_size, attention=attention)
        )

    def plan(self, layouts) -> MiniCPMVMetadata:
        """Everything that depends on sizes, and the tower's position table, resized: plan again after loading."""
        sizes = [size for layout in self.check_layouts(layouts) for group in layout for size in group.slices]
        return MiniCPMVMetadata(self.vpm.plan(sizes), self.resampler.plan(sizes))

    @property
    def graph_attention(self) -> str:
        raise ValueError("graphs: MiniCPM-V 2.0 has no graph path; its encoder runs eagerly (load with graphs=None)")


class NaVitEncoder(SliceEncoder):
    """What 2.5 and all later versions share: NaViT's SigLIP, sines and cosines, graphs. Not used by itself."""

    resampler_class: ClassVar[type[Resampler2_5]] = Resampler2_5
    vpm: NaVitSiglip
    resampler: Resampler2_5

    @classmethod
    def from_config(cls, config, *, attention: str = "auto") -> "NaVitEncoder":  # type: ignore[override]  # no extra
        """Build from a `MiniCPMVEncoderConfig`, a whole transformers config, or the dict in `config.json`."""
        c = as_encoder_config(config, NaVitSiglipConfig)
        vpm = NaVitSiglip(c.vision, drop_last_layer=c.drop_vision_last_layer, attention=attention)
        resampler = cls.resampler_class(
            c.query_num, c.hidden_size, c.resampler_heads, c.vision.hidden_size, attention=attention
        )
        return cls(c, vpm, resampler)

    def plan(self, layouts) -> MiniCPMVMetadata:
        """Everything that depends on sizes and times, computed on the CPU and moved to the encoder's device."""
        groups = [group for layout in self.check_layouts(layouts) for group in layout]
        sizes = [size for group in groups for size in group.slices]
        return MiniCPMVMetadata(
            vision=self.vpm.plan(sizes, self.position_sizes(sizes)), resampler=self.plan_resampler(sizes, groups)
        )

    def position_sizes(self, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The shapes by which the tower reads its position table: those of the slices."""
        return sizes

    def plan_resampler(self, sizes: list[tuple[int, int]], groups: list[SliceGroup]) -> ResamplerMetadata:
        """Every slice has its own set of queries."""
        return self.resampler.plan(sizes)

    @property
    def graph_attention(self) -> str:
        """The backend for a capture: one whose shapes do not depend on the lengths of slices and sets."""
        return min(self.vpm.graph_attention, self.resampler.graph_attention)  # "masked" where one needs it

    @property
    def patches_per_slice(self) -> int:
        """Patch rows that a set of queries pays for in a graph.

        A slice has the area of S x S patches, S = scale_resolution / P, but its sides are rounded to whole patches:
        a x b with ab = S * S becomes at most (a + 1/2)(b + 1/2), so 2 S more suffice for shapes up to 12 to 1.
        """
        side = self.config.scale_resolution // self.config.patch_size
        return side**2 + 2 * side

    def max_rows(self, max_tokens: int) -> int:
        """Patch rows in the graph of a budget: what its tokens pay for, rounded down."""
        return max(1, max_tokens * self.patches_per_slice // self.config.query_num)

    def plan_capacity(self, max_tokens: int, max_frames: int) -> MiniCPMVMetadata:
        """Metadata as large as any batch of `max_tokens` output tokens, their rows, and `max_frames` frames can need.

        Tokens come in sets of query_num, so there are at most max_tokens // query_num sets, and at most as many slices
        plus the frames that share the queries of another frame.
        """
        max_sets, max_rows = max(1, max_tokens // self.config.query_num), self.max_rows(max_tokens)
        return MiniCPMVMetadata(
            vision=self.vpm.plan_capacity(max_rows, max_sets + max_frames),
            resampler=self.resampler.plan_capacity(max_rows, max_sets),
        )

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """(patch rows, 3*P*P) zeros for `max_tokens` output tokens."""
        values = self.config.vision.patch_values
        return torch.zeros(self.max_rows(max_tokens), values, dtype=self.dtype, device=self.device)


class MiniCPMV2_5Encoder(NaVitEncoder):
    """The tower is given one row of patches, whatever the slice's shape."""

    def position_sizes(self, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """(1, h * w) for each slice."""
        return [(1, h * w) for h, w in sizes]


class MiniCPMV2_6Encoder(NaVitEncoder):
    """The tower is given the shapes; frames of a video are slices like any other."""

    skipped_parts = AUDIO_PARTS


class MiniCPMV4_0Encoder(NaVitEncoder):
    """As 2.6; only the text model differs."""

    skipped_parts = AUDIO_PARTS


class MiniCPMV4_5Encoder(NaVitEncoder):
    """Frames have times, and those of a group share one set of queries."""

    skipped_parts = AUDIO_PARTS
    resampler_class = Resampler4_5
    resampler: Resampler4_5

    def check_group(self, group, name: str) -> SliceGroup:
        """One group, normalised: images, or frames with one id each."""
        return as_slice_group(group, name)

    def plan_resampler(self, sizes: list[tuple[int, int]], groups: list[SliceGroup]) -> ResamplerMetadata:
        """Groups with times share a set of queries."""
        return self.resampler.plan(sizes, [group.temporal_ids or [NO_TIME] * len(group.slices) for group in groups])


def as_encoder_config(config, vision_config_class: type) -> MiniCPMVEncoderConfig:
    """A `MiniCPMVEncoderConfig` as it is; anything else is read, with the tower's part as `vision_config_class`."""
    if isinstance(config, MiniCPMVEncoderConfig):
        return config
    return MiniCPMVEncoderConfig.from_hf(config, vision_config_class)


def as_slice_group(group, name: str) -> SliceGroup:
    """A `SliceGroup` or (h, w) with every value checked; ids that are all -1 become None."""
    if not isinstance(group, SliceGroup):
        return SliceGroup((as_size(group, name),))
    if not group.slices:
        raise ValueError(f"{name}: expected at least one slice, got none")
    slices = tuple(as_size(size, f"{name}.slices[{i}]") for i, size in enumerate(group.slices))
    if group.temporal_ids is None:
        return SliceGroup(slices)
    try:
        [ids] = as_temporal_groups([list(group.temporal_ids)], len(slices))
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None
    return SliceGroup(slices, tuple(map(int, ids)) if set(ids) != {NO_TIME} else None)
