"""The SigLIP tower in timm's layout, read downward: MiniCPM-V 2.0 has it.

    pixels (B, 3, H, W)                           padded with zeros on the right and below, to whole patches
       | patchify         one row per patch, row by row
    patch rows (N, 3*P*P)
       | patch_embed      one matrix product (a convolution whose stride is its kernel)
       | + pos_embed      the learned table, resized bicubically with antialias to the image's grid
    (N, E)
       | blocks x         x + attn(norm1(x)); x + mlp(norm2(x)); attention inside images, exact GELU
       | norm             LayerNorm
    (N, E)

There is no class token, and SigLIP's attention pool is not part of it. Resized positions depend on the grid and the
table: they are planned, as in `refvl.encoders.glm4v`, and a plan holds what the weights are now.

Shape suffixes: N patches of all images, E tower width, H heads, K head dimension.
Upstream: `VisionTransformer` (timm), `vit_so400m_patch14_siglip_384`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import choose_backend, group_segments, varlen_attention
from refvl.checks import as_sizes, check_pixel_rows, check_shape
from refvl.encoders.navit_siglip import cumulative_lengths
from refvl.encoders.weights import config_dict, config_values, load_strict
from refvl.positions.tables import resize_position_table

LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SiglipViTConfig:
    """Sizes of the tower; the names are timm's, the defaults those of `vit_so400m_patch14_siglip_384`."""

    img_size: int = 384  # pixels along a side of the images that the position table was learned on
    patch_size: int = 14
    in_chans: int = 3
    embed_dim: int = 1152
    depth: int = 27
    num_heads: int = 16
    mlp_ratio: float = 3.7362

    def __post_init__(self):
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim: must be a multiple of num_heads={self.num_heads}, got {self.embed_dim}")
        if self.img_size < self.patch_size:
            raise ValueError(f"img_size: must be at least patch_size={self.patch_size}, got {self.img_size}")

    @classmethod
    def from_hf(cls, config) -> "SiglipViTConfig":
        """From a dict of timm's names, or the whole model's config: its `vision_config`, or its `vision_encoder`."""
        whole = config_dict(config)
        if "vision_encoder" in whole and not whole.get("vision_config"):
            if not str(whole["vision_encoder"]).startswith(KNOWN_ENCODER):
                raise ValueError(f"vision_encoder: expected {KNOWN_ENCODER!r}, got {whole['vision_encoder']!r}")
            return cls()  # a whole config uses these names for other sizes
        return cls(**config_values(whole, cls, activation=None))

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def hidden_size(self) -> int:
        """The width, under the name that other towers use."""
        return self.embed_dim

    @property
    def patch_values(self) -> int:
        """Values in one patch row: C * P * P."""
        return self.in_chans * self.patch_size**2


KNOWN_ENCODER = "vit_so400m_patch14_siglip_384"


@dataclass(frozen=True, slots=True, eq=False)
class SiglipViTMetadata:
    """What one `encode` needs besides pixels."""

    position_embeds: Tensor = field(metadata={"pad": "zero"})  # (N, E) in the tower's dtype
    cu_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (images + 1,) int32, patches
    image_groups: tuple[Tensor, ...] = field(metadata={"pad": "empty"})  # equal sizes, for the sdpa backend
    max_seqlen: int  # patches in the largest image


class SiglipViT(nn.Module):
    """Pixels in, one vector per patch out; equal to timm's tower on the same weights."""

    def __init__(self, config: SiglipViTConfig, *, drop_last_layer: bool = False, attention: str = "auto"):
        super().__init__()
        self.config, self.drop_last_layer, self.attention = config, drop_last_layer, attention
        side = config.img_size // config.patch_size
        self.pos_embed = nn.Parameter(torch.empty(1, side**2, config.embed_dim).normal_(std=0.02))
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth - drop_last_layer))
        self.norm = nn.LayerNorm(config.embed_dim, eps=LAYER_NORM_EPS)

    @classmethod
    def from_config(cls, config, *, drop_last_layer: bool = False, attention: str = "auto") -> "SiglipViT":
        """Build from a `SiglipViTConfig`, a dict of timm's names, or a whole config of MiniCPM-V 2.0.

        drop_last_layer: leave the last block out, keep the norm after it (`drop_vision_last_layer`). attention: a
        backend of `refvl.attention`, or "auto" for the best one on the device the pixels come from.
        """
        config = config if isinstance(config, SiglipViTConfig) else SiglipViTConfig.from_hf(config)
        return cls(config, drop_last_layer=drop_last_layer, attention=attention)

    @property
    def device(self) -> torch.device:
        return self.pos_embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.pos_embed.dtype

    def plan(self, tgt_sizes) -> SiglipViTMetadata:
        """Everything that depends on sizes, and the resized table. tgt_sizes: (h, w) per image in patches."""
        sizes = as_sizes(tgt_sizes)
        table = self.pos_embed[0]
        positions = [table[:0], *(resize_position_table(table, size, antialias=True) for size in sizes)]
        cu_seqlens = cumulative_lengths([h * w for h, w in sizes])
        return SiglipViTMetadata(
            position_embeds=torch.cat(positions),
            cu_seqlens=cu_seqlens.to(self.device, non_blocking=True),
            image_groups=tuple(group.to(self.device, non_blocking=True) for group in group_segments(cu_seqlens)),
            max_seqlen=max((h * w for h, w in sizes), default=0),
        )

    def encode(self, patches_NC: Tensor, metadata: SiglipViTMetadata, attention: str | None = None) -> Tensor:
        """(N, C*P*P) patch rows of all images -> (N, E); `attention` overrides the tower's backend."""
        check_pixel_rows(patches_NC, (len(metadata.position_embeds), self.config.patch_values), self.device)
        backend = choose_backend(attention or self.attention, patches_NC.device, self.dtype, self.config.head_dim)
        x_NE = self.patch_embed(patches_NC.to(self.dtype)) + metadata.position_embeds
        for block in self.blocks:
            x_NE = block(x_NE, metadata, backend)
        return self.norm(x_NE)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, ceil(H / P) * ceil(W / P), E)."""
        c = self.config
        check_shape(pixel_values, ("B", c.in_chans, "H", "W"), "pixel_values")
        batch, _, height, width = pixel_values.shape
        padded = F.pad(pixel_values, (0, -width % c.patch_size, 0, -height % c.patch_size))
        grid = padded.unflatten(3, (-1, c.patch_size)).unflatten(2, (-1, c.patch_size))  # (B, C, h, P, w, P)
        patches_NC = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
        metadata = self.plan([(grid.shape[2], grid.shape[4])] * batch)
        return self.encode(patches_NC, metadata).unflatten(0, (batch, -1))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; returns the names of the parameters that were filled.

        Reads names under `vpm.` and bare ones. The attention pool and the dropped last block are left out. All else
        that does not fit is listed in one ValueError, see `load_strict`.
        """
        return load_strict(
            self, weights, rename=lambda name: name.removeprefix("vpm."), kernels=self.kernels,
            skip=rf"(vpm\.)?({self.unused_names})",
        )  # fmt: skip

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """The shape of the patch embedding in checkpoints, where it is a convolution."""
        c = self.config
        return {"patch_embed.proj.weight": (c.embed_dim, c.in_chans, c.patch_size, c.patch_size)}

    @property
    def unused_names(self) -> str:
        """A regular expression for the checkpoint names, without prefix, of parts that this tower does not have."""
        return r"attn_pool\." + rf"|blocks\.{self.config.depth - 1}\." * self.drop_last_layer


class PatchEmbed(nn.Module):
    """Conv2d with kernel = stride = P over a patch row is one matrix product with the flattened kernel."""

    def __init__(self, config: SiglipViTConfig):
        super().__init__()
        self.proj = nn.Linear(config.patch_values, config.embed_dim)

    def forward(self, patches_NC: Tensor) -> Tensor:
        return self.proj(patches_NC)  # (N, E)


class Block(nn.Module):
    """Pre-norm: x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: SiglipViTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=LAYER_NORM_EPS)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(config)

    def forward(self, x_NE: Tensor, metadata: SiglipViTMetadata, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), metadata, backend)
        return x_NE + self.mlp(self.norm2(x_NE))


class Attention(nn.Module):
    """Fused q, k, v; every patch attends within its own image."""

    def __init__(self, config: SiglipViTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x_NE: Tensor, metadata: SiglipViTMetadata, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        out_NHK = varlen_attention(
            q_NHK, k_NHK, v_NHK, metadata.cu_seqlens, metadata.max_seqlen,
            backend=backend, groups=metadata.image_groups,
        )  # fmt: skip
        return self.proj(out_NHK.flatten(1))  # (N, E)


class Mlp(nn.Module):
    """Linear - GELU (exact, unlike the tanh form of the later towers) - Linear."""

    def __init__(self, config: SiglipViTConfig):
        super().__init__()
        hidden = int(config.embed_dim * config.mlp_ratio)
        self.fc1 = nn.Linear(config.embed_dim, hidden)
        self.fc2 = nn.Linear(hidden, config.embed_dim)

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_NE)))
