"""The encoder of MiniCPM-V 4.6 and 4.7, from top to bottom: SigLIP on slices of any shape, with two merges of 2 x 2.

    patch rows (N, 3*P*P)      one row per patch, slice after slice, row by row inside a slice
       | order                 4 x 4 blocks are contiguous, and in each of them four windows of 2 x 2
       | embeddings            as in `refvl.encoders.navit_siglip`
    (N, E)
       | layers 0 ... 6        attention inside slices
       | vit_merger            attention inside windows; then the four rows of a window become one
    (N / 4, E)
       | layers 7 ...          attention inside slices, between windows
       | post_layernorm
       | merger                four concatenated rows -> one
    tokens (N / 16, D)

The flow above shows the mode "16x". The mode "4x" has no vit_merger, so a slice becomes four
times as many tokens, and its sides are multiples of 2 patches instead of 4. Layouts are
MiniCPM-V's: a tuple of `SliceGroup`s, one per slice.

Shape suffixes: N patches of all slices, W windows, M tokens, E tower width, D language width.
Upstream: `MiniCPMV4_6VisionModel` and `MiniCPMV4_6Merger` (transformers 5.23).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments, equal_segments, group_segments, plan_segments, segment_capacity
from refvl.encoders.navit_siglip import NaVitMetadata, NaVitSiglip, NaVitSiglipConfig, SelfAttention
from refvl.encoders.slice_layouts import as_layouts
from refvl.encoders.tower import Tower, to_device
from refvl.encoders.weights import config_dict
from refvl.pixels.slices import SliceLayout


@dataclass(frozen=True, slots=True)
class MiniCPMV4_6VisionConfig(NaVitSiglipConfig):
    """The sizes of the tower and the merger, under transformers' names and with its defaults."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    image_size: int = 224
    patch_size: int = 16
    insert_layer_id: int = 6  # windows are folded after this layer
    downsample_mode: str = "16x"  # or "4x"
    out_hidden_size: int = 1024  # D

    def __post_init__(self):
        NaVitSiglipConfig.__post_init__(self)
        if self.downsample_mode not in ("16x", "4x"):
            raise ValueError(f"downsample_mode: expected '16x' or '4x', got {self.downsample_mode!r}")

    @classmethod
    def from_hf(cls, config) -> "MiniCPMV4_6VisionConfig":
        """Build a config from a whole model's config (an object, or the dict in `config.json`) or a vision config."""
        whole = config_dict(config)
        given = {name: whole[name] for name in ("insert_layer_id", "downsample_mode") if name in whole}
        if (width := (whole.get("text_config") or {}).get("hidden_size")) is not None:
            given["out_hidden_size"] = width
        vision = config_dict(whole.get("vision_config", whole)) | given
        return super(MiniCPMV4_6VisionConfig, cls).from_hf(vision)  # slots=True breaks super() without arguments

    @classmethod
    def tiny(cls, **changes) -> "MiniCPMV4_6VisionConfig":
        """Return sizes for tests: three layers, a fold after the second, and a table of 7 x 7 positions."""
        sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
        sizes |= {"image_size": 98, "patch_size": 14, "insert_layer_id": 1, "out_hidden_size": 56}
        return cls(**sizes | changes)

    @property
    def folds(self) -> bool:
        """Whether windows are folded inside the tower, as in the mode "16x"."""
        return self.downsample_mode == "16x"

    @property
    def merge_size(self) -> int:
        """The number of patches along a side of the square that becomes one token."""
        return 4 if self.folds else 2


@dataclass(frozen=True, slots=True, eq=False)
class FoldMetadata(NaVitMetadata):
    """The plan of the earlier versions' tower plus the patch order; after the fold, segments are a quarter as long."""

    order: Tensor = field(metadata={"pad": "identity"})  # (N,) int64: the index of the patch row at each position
    folded_groups: tuple[Tensor, ...] | None = field(metadata={"pad": "empty"})  # `groups` after the fold, for sdpa

    @property
    def summary(self) -> str:
        """Return a one-line description for tables."""
        return f"{len(self.cu_seqlens) - 1} slices"


class MiniCPMV4_6Encoder(NaVitSiglip):
    """The encoder, which turns the patch rows of slices into embeddings."""

    config_class = MiniCPMV4_6VisionConfig
    config: MiniCPMV4_6VisionConfig

    def __init__(self, config: MiniCPMV4_6VisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        if config.folds:
            self.vit_merger = WindowMerger(config)
        self.merger = Merger(config)
        self.block_size = config.merge_size**2  # the number of patches that become one token

    def check_layouts(self, layouts, *, name: str = "layouts") -> list[SliceLayout]:
        """Return one tuple of `SliceGroup`s per item, normalised and hashable; forms and errors as in `as_layouts`."""
        checked, m = as_layouts(layouts, name, reads_times=False), self.config.merge_size
        for i, size in ((i, size) for i, layout in enumerate(checked) for group in layout for size in group.slices):
            if size[0] % m or size[1] % m:
                raise ValueError(f"{name}[{i}]: sides of slices must be multiples of {m} patches, got {size}")
        return checked

    def item_size(self, layout: SliceLayout) -> tuple[int, int, int]:
        """Return an item's numbers of (patch rows, output tokens, slices)."""
        sizes = [size for group in layout for size in group.slices]
        patches = sum(h * w for h, w in sizes)
        return patches, patches // self.block_size, len(sizes)

    plan = Tower.plan  # type: ignore[assignment]  # takes layouts of items, not sizes of slices

    def plan_checked(self, layouts: Sequence[SliceLayout]) -> FoldMetadata:  # type: ignore[override]
        """Plan layouts that are already checked."""
        sizes = [size for layout in layouts for group in layout for size in group.slices]
        orders, places, start = [torch.arange(0)], [torch.arange(0)], 0
        for h, w in sizes:
            order = fold_order(h, w, folds=self.config.folds)
            orders.append(order + start)
            row, column = (torch.arange(n) * self.table_side // n for n in (h, w))  # rounded down, as in transformers
            places.append((row[:, None] * self.table_side + column).flatten()[order])
            start += h * w
        segments = plan_segments([h * w for h, w in sizes], with_groups=self.backend() == "sdpa")
        folded = group_segments(segments["cu_seqlens"] // 4) if segments["groups"] is not None else None
        at, order = torch.cat(places), torch.cat(orders)
        return to_device(FoldMetadata(**segments, positions=at, order=order, folded_groups=folded), self.device)

    def forward(self, pixel_values: Tensor, layouts=None, *, metadata=None, attention: str | None = None) -> Tensor:  # type: ignore[override]
        """Encode (N, 3*P*P) patch rows of all items as (M, D) tokens, with items, slices and rows in order.

        Pass `layouts`, which this call plans, or the `metadata` of an earlier `plan`. `attention`
        overrides the backend. Raises ValueError if the rows do not match the plan, and
        TypeError if they are not floats.
        """
        rows_NC, metadata, backend = self.inputs(pixel_values, layouts, metadata, attention)
        segments: Segments = metadata
        x_NE = self.embeddings["patch_embedding"](rows_NC[metadata.order]) + self.position_embeds(metadata)
        for i, layer in enumerate(self.blocks):
            x_NE = layer(x_NE, segments, backend)
            if self.config.folds and i == self.config.insert_layer_id:
                x_NE = self.vit_merger(x_NE, backend)
                segments = Segments(metadata.cu_seqlens // 4, metadata.folded_groups, metadata.max_seqlen // 4)
        return self.merger(self.post_layernorm(x_NE))

    def block_rows(self, metadata: FoldMetadata) -> list[Tensor]:
        """Return the indices (N,) of the patch rows before the fold, which turns every four of these rows into one."""
        return [metadata.order]

    def plan_capacity(self, max_tokens: int, max_frames: int) -> FoldMetadata:
        """Return a plan with all patches in one slice, large enough for any batch within these limits."""
        patches = max_tokens * self.block_size
        metadata = FoldMetadata(
            **segment_capacity(patches, min(max_frames, max_tokens)),
            positions=torch.zeros(patches, dtype=torch.long),
            order=torch.arange(patches),
            folded_groups=None,
        )
        return to_device(metadata, self.device)

    def rename(self, name: str) -> str:
        """Drop `model.vision_tower.` and the index of the only merger; q, k and v fill `qkv`."""
        name = re.sub(r"^(model\.)?(vision_tower\.)?", "", name)
        return super().rename(re.sub(r"^merger\.mlp\.0\.", "merger.", name))

    @property
    def unused(self) -> str:
        """A pattern for the weights to skip: those of vit_merger if the mode is "4x", otherwise none."""
        return r"(?!)" if self.config.folds else r"(model\.)?(vision_tower\.)?vit_merger\."


class MiniCPMV4_7Encoder(MiniCPMV4_6Encoder):
    """The same encoder as in 4.6; only the positions in the language model differ (`refvl.positions.canvas`)."""


class WindowMerger(nn.Module):
    """Attention in windows of four rows, then an MLP on the four concatenated rows, plus the mean of the four rows."""

    def __init__(self, config: MiniCPMV4_6VisionConfig):
        super().__init__()
        E, hidden = config.hidden_size, config.intermediate_size
        self.layer_norm1 = nn.LayerNorm(E, eps=config.layer_norm_eps)
        self.self_attn = SelfAttention(config)
        self.pre_norm = nn.LayerNorm(4 * E, eps=config.layer_norm_eps)
        self.linear_1 = nn.Linear(4 * E, 4 * hidden)
        self.linear_2 = nn.Linear(4 * hidden, E)

    def forward(self, x_NE: Tensor, backend: str) -> Tensor:
        """Merge (N, E) rows in window order into (W, E)."""
        windows = equal_segments(len(x_NE) // 4, 4, x_NE.device)
        backend = "sdpa" if backend == "masked" else backend  # windows have equal lengths, so no mask is needed
        x_NE = x_NE + self.self_attn(self.layer_norm1(x_NE), windows, backend)
        x_W4E = x_NE.unflatten(0, (-1, 4))
        hidden = F.gelu(self.linear_1(self.pre_norm(x_W4E.flatten(1))), approximate="tanh")
        return self.linear_2(hidden) + x_W4E.mean(1)


class Merger(nn.Module):
    """A layer that turns four concatenated rows into one row of the language model's width."""

    def __init__(self, config: MiniCPMV4_6VisionConfig):
        super().__init__()
        E = config.hidden_size
        self.pre_norm = nn.LayerNorm(4 * E, eps=1e-6)
        self.linear_1 = nn.Linear(4 * E, 4 * E)
        self.linear_2 = nn.Linear(4 * E, config.out_hidden_size)

    def forward(self, x_WE: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(self.pre_norm(x_WE.unflatten(0, (-1, 4)).flatten(1)))))


def fold_order(h: int, w: int, *, folds: bool) -> Tensor:
    """Return an order of patches, (h * w,) int64, in which each token's patches are contiguous, window by window.

    >>> fold_order(2, 4, folds=False).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    place = torch.arange(h * w)
    if not folds:
        return place.view(h // 2, 2, w // 2, 2).transpose(1, 2).flatten()
    # (block, window, patch) downward, then across
    return place.view(h // 4, 2, 2, w // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).flatten()
