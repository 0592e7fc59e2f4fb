"""The SigLIP tower for slices of any shape (NaViT), from top to bottom: used by MiniCPM-V 2.5, 2.6, 4.0 and 4.5.

    patch rows (N, 3*P*P)                         one row per patch, slice after slice, row by row inside a slice
       | embeddings       one matmul (a convolution with stride = kernel size)
       |                  + one learned position per patch: the entry at its relative location in a square table
    (N, E)
       | layers x         x + self_attn(layer_norm1(x)); x + mlp(layer_norm2(x)); attention inside slices
       | post_layernorm   LayerNorm
    (N, E)

Upstream pads all slices of a batch to the longest one and masks the padding. Here slices are
concatenated, and `cu_seqlens` contains the start of each slice. `encode` accepts concatenated
slices; `forward` accepts and returns the padded form (see `refvl.encoders.slice_layouts`). A
patch's index in the table depends only on sizes, so the plan contains it; `encode` neither
reads values back nor branches on tensors.

Shape suffixes: N patches of all slices, E tower width, H heads, K head dimension.
Upstream: `Idefics2VisionTransformer` (vLLM, transformers).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments, plan_segments, segment_capacity
from refvl.checks import as_sizes
from refvl.encoders.config import TowerConfig
from refvl.encoders.slice_layouts import encode_strips
from refvl.encoders.tower import Tower, to_device


@dataclass(frozen=True, slots=True)
class NaVitSiglipConfig(TowerConfig):
    """The sizes of the tower.

    The names are those of the checkpoint's `vision_config`, and the defaults are SigLIP-so400m's.
    """

    activation: ClassVar[str | None] = "gelu_pytorch_tanh"
    gelu: ClassVar[str] = "tanh"
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 980  # the side in pixels of the image that the position table covers
    patch_size: int = 14
    layer_norm_eps: float = 1e-6

    @classmethod
    def tiny(cls) -> "NaVitSiglipConfig":
        """Return sizes for tests: two layers and a table of 7 x 7 positions."""
        return cls(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=98)

    @property
    def num_patches_per_side(self) -> int:
        """The number of entries along each side of the position table."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, slots=True, eq=False)
class NaVitMetadata(Segments):
    """The inputs of `encode` other than the pixels; each segment is a slice."""

    positions: Tensor = field(metadata={"pad": "zero"})  # (N,) int64, indices into the position table


class NaVitSiglip(Tower):
    """The tower, which returns one vector per patch, as the released code does (`docs/differences.md`)."""

    config_class = NaVitSiglipConfig

    def __init__(self, config: NaVitSiglipConfig, *, drop_last_layer: bool = False, attention: str = "auto"):
        """Build the tower. drop_last_layer: whether to omit the last layer (`drop_vision_last_layer` in configs)."""
        super().__init__(config, attention=attention)
        self.drop_last_layer = drop_last_layer
        self.patch_values = config.patch_values
        self.table_side = config.num_patches_per_side
        layers = [EncoderLayer(config) for _ in range(config.num_hidden_layers - drop_last_layer)]
        self.embeddings = nn.ModuleDict()
        self.embeddings["patch_embedding"] = nn.Linear(config.patch_values, config.hidden_size)
        self.embeddings["position_embedding"] = nn.Embedding(self.table_side**2, config.hidden_size)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The blocks of the tower."""
        return self.encoder["layers"].children()

    def plan(self, tgt_sizes, position_sizes=None) -> NaVitMetadata:
        """Compute the plan on the CPU, and move it to the tower's device.

        tgt_sizes: the (h, w) of each slice in patches, a list or an integer tensor (slices, 2).
        position_sizes: the (h, w) that the position table uses for each slice (default: tgt_sizes).
        Raises ValueError if tgt_sizes and position_sizes differ in patches per slice.
        """
        sizes = as_sizes(tgt_sizes)
        position_sizes = sizes if position_sizes is None else as_sizes(position_sizes, "position_sizes")
        if [h * w for h, w in position_sizes] != [h * w for h, w in sizes]:
            raise ValueError(f"position_sizes: expected as many patches per slice as in {sizes}, got {position_sizes}")
        return self.plan_checked(position_sizes)

    def plan_checked(self, layouts: Sequence[tuple[int, int]]) -> NaVitMetadata:
        """Plan slices whose sizes are already checked. layouts: the (h, w) of each slice for the position table."""
        segments = plan_segments([h * w for h, w in layouts], with_groups=self.backend() == "sdpa")
        places = [place_in_table(h, w, self.table_side) for h, w in layouts]
        positions = torch.cat([torch.zeros(0, dtype=torch.long), *places])
        return to_device(NaVitMetadata(**segments, positions=positions), self.device)

    def plan_capacity(self, max_patches: int, max_slices: int) -> NaVitMetadata:
        """Return a plan with all patches in one slice, large enough for any batch within these limits."""
        positions = torch.zeros(max_patches, dtype=torch.long)
        return to_device(NaVitMetadata(**segment_capacity(max_patches, max_slices), positions=positions), self.device)

    def encode(self, patches_NC: Tensor, metadata: NaVitMetadata, attention: str | None = None) -> Tensor:
        """Encode (N, C*P*P) patch rows of all slices into (N, E); `attention` overrides the tower's backend."""
        patches_NC, _, backend = self.inputs(patches_NC, None, metadata, attention)
        x_NE = self.embeddings["patch_embedding"](patches_NC) + self.position_embeds(metadata)
        for layer in self.blocks:
            x_NE = layer(x_NE, metadata, backend)
        return self.post_layernorm(x_NE)

    def position_embeds(self, metadata: NaVitMetadata) -> Tensor:
        """Return the position vector of each patch, (N, E)."""
        return self.embeddings["position_embedding"](metadata.positions)

    def forward(self, pixel_values: Tensor, tgt_sizes, position_sizes=None) -> Tensor:
        """Encode (B, C, P, L * P) strips into (B, L, E), as in `encode_strips`."""
        return encode_strips(self, pixel_values, tgt_sizes, position_sizes)

    def rename(self, name: str) -> str:
        """Turn `vpm.encoder.layers.0.self_attn.q_proj.weight` into
        `encoder.layers.0.self_attn.q.weight`, a part of `qkv`.

        Also drop the prefix `vision_model.`.
        """
        name = re.sub(r"^(vpm|vision_model)\.", "", name)
        return re.sub(r"\.self_attn\.(q|k|v|qkv)_proj\.", r".self_attn.\1.", name)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint shape of the patch embedding's kernel."""
        return {"embeddings.patch_embedding.weight": self.config.patch_kernel}

    @property
    def unused(self) -> str:
        """A pattern for the names of SigLIP's pooling head and a dropped last layer."""
        last = rf"|encoder\.layers\.{self.config.num_hidden_layers - 1}\." if self.drop_last_layer else ""
        return rf"((vpm|vision_model)\.)?(head\.{last})"


class EncoderLayer(nn.Module):
    """A pre-norm layer: x + self_attn(layer_norm1(x)), then x + mlp(layer_norm2(x))."""

    def __init__(self, config: NaVitSiglipConfig):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = SelfAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_NE: Tensor, metadata: Segments, backend: str) -> Tensor:
        x_NE = x_NE + self.self_attn(self.layer_norm1(x_NE), metadata, backend)
        return x_NE + self.mlp(self.layer_norm2(x_NE))


class SelfAttention(nn.Module):
    """Attention with a fused QKV projection; each patch attends only within its own slice."""

    def __init__(self, config: NaVitSiglipConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_NE: Tensor, metadata: Segments, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        return self.out_proj(metadata.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)


class MLP(nn.Module):
    """Linear - GELU - Linear."""

    def __init__(self, config: NaVitSiglipConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.gelu = config.gelu

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_NE), approximate=self.gelu))


def place_in_table(h: int, w: int, side: int) -> Tensor:
    """Return (h * w,) int64: for each patch of an h x w slice, in row-major order, its index in a side x side table.

    Row r of the slice uses the row of the table in which the fraction r / h lies. As in the
    released code, 1 / h is rounded to float32, so a fraction on a bound may fall below the
    bound. For example, row 5 of 25 uses table row 13 of 70, not 14.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    fractions = (torch.arange(0, 1 - 1e-6, float(1 / torch.tensor(n))) for n in (h, w))
    row, column = (torch.bucketize(x, bounds, right=True) for x in fractions)
    return (row[:, None] * side + column).flatten()
