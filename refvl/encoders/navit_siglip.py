"""The SigLIP tower for slices of any shape (NaViT), read downward: MiniCPM-V 2.5, 2.6, 4.0 and 4.5 have it.

    patch rows (N, 3*P*P)                         one row per patch, slice after slice, row by row inside a slice
       | embeddings       one matrix product (a convolution whose stride is its kernel)
       |                  + one learned position per patch: the entry of a square table that lies under it
    (N, E)
       | layers x         x + self_attn(layer_norm1(x)); x + mlp(layer_norm2(x)); attention inside slices
       | post_layernorm   LayerNorm
    (N, E)

Upstream pads all slices of a batch to the longest and masks; here they lie end to end, and `cu_seqlens` says where
each begins. `encode` is that tower; `forward` takes and returns the padded form. Which entry a patch reads depends on
sizes alone, so it is planned: `encode` reads no value back and branches on no tensor.

Shape suffixes: N patches of all slices, E tower width, H heads, K head dimension; B slices, L pixels along a strip.
Upstream: `Idefics2VisionTransformer` (vLLM, transformers).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import available_backends, choose_backend, group_segments, varlen_attention
from refvl.checks import as_sizes, check_pixel_rows, check_shape
from refvl.encoders.weights import config_values, load_strict

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class NaVitSiglipConfig:
    """Sizes of the tower; the names are those of the checkpoint's `vision_config`, the defaults SigLIP-so400m's."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 980  # pixels along a side of the image that the position table covers
    patch_size: int = 14
    layer_norm_eps: float = 1e-6

    def __post_init__(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: must be a multiple of num_attention_heads={self.num_attention_heads}, "
                f"got {self.hidden_size}"
            )
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size: must be at least patch_size={self.patch_size}, got {self.image_size}")

    @classmethod
    def from_hf(cls, config) -> "NaVitSiglipConfig":
        """From a transformers vision config, the dict in `config.json`, or either of the whole model's.

        Unknown keys are ignored.
        """
        return cls(**config_values(config, cls, activation="gelu_pytorch_tanh"))

    @classmethod
    def tiny(cls) -> "NaVitSiglipConfig":
        """Two layers and a table of 7 x 7 positions: for tests."""
        return cls(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=98)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def depth(self) -> int:
        """`num_hidden_layers`, under the name that other towers use."""
        return self.num_hidden_layers

    @property
    def num_heads(self) -> int:
        """`num_attention_heads`, likewise."""
        return self.num_attention_heads

    @property
    def patch_values(self) -> int:
        """Values in one patch row: C * P * P."""
        return self.num_channels * self.patch_size**2

    @property
    def num_patches_per_side(self) -> int:
        """Entries along each side of the position table."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, slots=True, eq=False)
class NaVitMetadata:
    """What one `encode` needs besides pixels. The integer is baked in by a capture: there it is a capacity."""

    position_ids: Tensor = field(metadata={"pad": "zero"})  # (N,) int64, rows of the position table
    cu_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (slices + 1,) int32, patches
    slice_groups: tuple[Tensor, ...] = field(metadata={"pad": "empty"})  # equal-length slices, for the sdpa backend
    max_seqlen: int  # patches in the largest slice


class NaVitSiglip(nn.Module):
    """Strips of patches in, one vector per patch out; equal to transformers' tower on the same weights."""

    def __init__(self, config: NaVitSiglipConfig, *, drop_last_layer: bool = False, attention: str = "auto"):
        super().__init__()
        self.config, self.drop_last_layer, self.attention = config, drop_last_layer, attention
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config, config.num_hidden_layers - drop_last_layer)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @classmethod
    def from_config(cls, config, *, drop_last_layer: bool = False, attention: str = "auto") -> "NaVitSiglip":
        """Build from a `NaVitSiglipConfig`, a transformers vision config, or the dict in `config.json`.

        drop_last_layer: leave the last layer out (`drop_vision_last_layer` of the checkpoint). attention: a backend of
        `refvl.attention`, or "auto" for the best one on the device the pixels come from.
        """
        config = config if isinstance(config, NaVitSiglipConfig) else NaVitSiglipConfig.from_hf(config)
        return cls(config, drop_last_layer=drop_last_layer, attention=attention)

    @property
    def device(self) -> torch.device:
        return self.post_layernorm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.post_layernorm.weight.dtype

    @property
    def graph_attention(self) -> str:
        """The backend for a capture: one whose shapes do not depend on the lengths of the slices."""
        return "varlen" if "varlen" in available_backends(self.device, self.dtype, self.config.head_dim) else "masked"

    def plan(self, tgt_sizes, position_sizes=None) -> NaVitMetadata:
        """Everything that depends on sizes, computed on the CPU and moved to the tower's device.

        tgt_sizes: (h, w) per slice in patches, a list or an integer tensor (slices, 2). position_sizes: what the
        position table is given instead, with as many patches (default: tgt_sizes).
        """
        sizes = as_sizes(tgt_sizes)
        position_sizes = sizes if position_sizes is None else as_sizes(position_sizes, "position_sizes")
        if [h * w for h, w in position_sizes] != [h * w for h, w in sizes]:
            raise ValueError(
                f"position_sizes: must hold as many patches per slice as tgt_sizes, got {position_sizes} for {sizes}"
            )
        side = self.config.num_patches_per_side
        position_ids = [torch.zeros(0, dtype=torch.long), *(place_in_table(h, w, side) for h, w in position_sizes)]
        cu_seqlens = cumulative_lengths([h * w for h, w in sizes])
        return NaVitMetadata(
            position_ids=torch.cat(position_ids).to(self.device, non_blocking=True),
            cu_seqlens=cu_seqlens.to(self.device, non_blocking=True),
            slice_groups=tuple(group.to(self.device, non_blocking=True) for group in group_segments(cu_seqlens)),
            max_seqlen=max((h * w for h, w in sizes), default=0),
        )

    def plan_capacity(self, max_patches: int, max_slices: int) -> NaVitMetadata:
        """Metadata as large as any batch within these limits can need; its values are legal: one slice holds all."""
        cu_seqlens = torch.full((max_slices + 1,), max_patches, dtype=torch.int32, device=self.device)
        cu_seqlens[0] = 0
        position_ids = torch.zeros(max_patches, dtype=torch.long, device=self.device)
        return NaVitMetadata(position_ids, cu_seqlens, slice_groups=(), max_seqlen=max_patches)

    def encode(self, patches_NC: Tensor, metadata: NaVitMetadata, attention: str | None = None) -> Tensor:
        """(N, C*P*P) patch rows of all slices -> (N, E); `attention` overrides the tower's backend."""
        check_pixel_rows(patches_NC, (len(metadata.position_ids), self.config.patch_values), self.device)
        backend = choose_backend(attention or self.attention, patches_NC.device, self.dtype, self.config.head_dim)
        x_NE = self.embeddings(patches_NC.to(self.dtype), metadata.position_ids)
        return self.post_layernorm(self.encoder(x_NE, metadata, backend))

    def forward(self, pixel_values: Tensor, tgt_sizes, position_sizes=None) -> Tensor:
        """(B, C, P, L) strips -> (B, L / P, E): slice b is the first h * w patches of strip b; the other rows are zero.

        tgt_sizes, position_sizes: (B, 2), see `plan`. Raises ValueError when a strip is too short for its slice.
        """
        c, sizes = self.config, as_sizes(tgt_sizes)
        check_shape(pixel_values, (len(sizes), c.num_channels, c.patch_size, "L"), "pixel_values")
        if pixel_values.shape[-1] % c.patch_size:
            raise ValueError(
                f"pixel_values: strips must be whole patches of {c.patch_size} px, got {pixel_values.shape[-1]}"
            )
        rows_BNC = pixel_values.unflatten(-1, (-1, c.patch_size)).permute(0, 3, 1, 2, 4).flatten(2)
        lengths = [h * w for h, w in sizes]
        rows_NE = self.encode(unpad(rows_BNC, lengths, "pixel_values"), self.plan(sizes, position_sizes))
        return pad(rows_NE, lengths, rows_BNC.shape[1])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; returns the names of the parameters that were filled.

        Reads names under `vpm.`, `vision_model.` and bare ones; q, k, v fused or separate. The dropped last layer and
        SigLIP's pooling head are left out. All else that does not fit is listed in one ValueError, see `load_strict`.
        """
        return load_strict(
            self, weights, rename=checkpoint_to_module_name, fuse=("q", "k", "v"), kernels=self.kernels,
            skip=rf"{VISION_PREFIX}({self.unused_names})",
        )  # fmt: skip

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """The shape of the patch embedding in checkpoints, where it is a convolution."""
        c = self.config
        return {"embeddings.patch_embedding.weight": (c.hidden_size, c.num_channels, c.patch_size, c.patch_size)}

    @property
    def unused_names(self) -> str:
        """A regular expression for the checkpoint names, without prefix, of parts that this tower does not have."""
        last = rf"|encoder\.layers\.{self.config.num_hidden_layers - 1}\." if self.drop_last_layer else ""
        return rf"head\.{last}"


class Embeddings(nn.Module):
    """Conv2d with kernel = stride = P over a patch row is one matrix product with the flattened kernel."""

    def __init__(self, config: NaVitSiglipConfig):
        super().__init__()
        self.patch_embedding = nn.Linear(config.patch_values, config.hidden_size)
        self.position_embedding = nn.Embedding(config.num_patches_per_side**2, config.hidden_size)

    def forward(self, patches_NC: Tensor, position_ids: Tensor) -> Tensor:
        return self.patch_embedding(patches_NC) + self.position_embedding(position_ids)  # (N, E)


class Encoder(nn.Module):
    """The layers, one after the other."""

    def __init__(self, config: NaVitSiglipConfig, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(depth))

    def forward(self, x_NE: Tensor, metadata: NaVitMetadata, backend: str) -> Tensor:
        for layer in self.layers:
            x_NE = layer(x_NE, metadata, backend)
        return x_NE


class EncoderLayer(nn.Module):
    """Pre-norm: x + self_attn(layer_norm1(x)), then x + mlp(layer_norm2(x))."""

    def __init__(self, config: NaVitSiglipConfig):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = SelfAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_NE: Tensor, metadata: NaVitMetadata, backend: str) -> Tensor:
        x_NE = x_NE + self.self_attn(self.layer_norm1(x_NE), metadata, backend)
        return x_NE + self.mlp(self.layer_norm2(x_NE))


class SelfAttention(nn.Module):
    """Fused q, k, v; every patch attends within its own slice."""

    def __init__(self, config: NaVitSiglipConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_NE: Tensor, metadata: NaVitMetadata, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        out_NHK = varlen_attention(
            q_NHK, k_NHK, v_NHK, metadata.cu_seqlens, metadata.max_seqlen,
            backend=backend, groups=metadata.slice_groups,
        )  # fmt: skip
        return self.out_proj(out_NHK.flatten(1))  # (N, E)


class MLP(nn.Module):
    """Linear - GELU (its tanh form) - Linear."""

    def __init__(self, config: NaVitSiglipConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_NE), approximate="tanh"))


def place_in_table(h: int, w: int, side: int) -> Tensor:
    """(h * w,) int64: for each patch of an h x w slice, row by row, the entry it falls on in a side x side table.

    Row r of the slice falls on row floor(r / h * side). Computed in integers: upstream sorts the fraction r / h into
    buckets with bounds 1 / side, 2 / side, ..., and a fraction on a bound would depend on rounding.
    """
    row, column = torch.arange(h) * side // h, torch.arange(w) * side // w
    return (row[:, None] * side + column).flatten()


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """(len + 1,) int32, leading 0."""
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


def unpad(padded: Tensor, lengths: Sequence[int], name: str) -> Tensor:
    """(B, N, ...) -> the first `lengths[b]` rows of each b, end to end; ValueError when there are fewer."""
    if any(length > padded.shape[1] for length in lengths):
        raise ValueError(f"tgt_sizes: slices of {list(lengths)} patches do not fit the {padded.shape[1]} of {name}")
    return torch.cat([padded.flatten(0, 1)[:0], *(rows[:length] for rows, length in zip(padded, lengths, strict=True))])


def pad(rows: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
    """The inverse of `unpad`: (B, longest, ...), zero after each slice."""
    padded = rows.new_zeros(len(lengths), longest, *rows.shape[1:])
    for b, piece in enumerate(rows.split(list(lengths))):
        padded[b, : len(piece)] = piece
    return padded


VISION_PREFIX = r"(?:(?:vpm|vision_model)\.)?"


def checkpoint_to_module_name(name: str) -> str:
    """`vpm.encoder.layers.0.self_attn.q_proj.weight` -> `encoder.layers.0.self_attn.q.weight`, which fills `qkv`."""
    return rename_projections(re.sub(rf"^{VISION_PREFIX}", "", name))


def rename_projections(name: str) -> str:
    """`self_attn.q_proj` -> `self_attn.q`, and so for k, v and a fused `qkv_proj`."""
    return re.sub(r"\.self_attn\.(q|k|v|qkv)_proj\.", r".self_attn.\1.", name)
