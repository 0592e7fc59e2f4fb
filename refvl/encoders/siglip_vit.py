"""The SigLIP tower in timm's layout, from top to bottom: used by MiniCPM-V 2.0.

    pixels (B, 3, H, W)                           padded with zeros on the right and below, to whole patches
       | patchify         one row per patch, in row-major order
    patch rows (N, 3*P*P)
       | patch_embed      one matmul (a convolution with stride = kernel size)
       | + pos_embed      the learned table, resized bicubically with antialias to the image's grid
    (N, E)
       | blocks x         x + attn(norm1(x)); x + mlp(norm2(x)); attention inside images, exact GELU
       | norm             LayerNorm
    (N, E)

This tower is SigLIP without the class token or the attention pool. Apart from the exact
GELU, the layers are those of `NaVitSiglip`, and timm's weight names are mapped to the names in
that class. A plan contains the table resized to the grid, as in `refvl.encoders.glm4v`, so a
plan becomes stale when the table changes. `encode` accepts patch rows of images of different
sizes; `forward` accepts images of one size.

Shape suffixes: N patches of all images, E tower width, H heads, K head dimension.
Upstream: `VisionTransformer` (timm), `vit_so400m_patch14_siglip_384`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from refvl.attention import plan_segments
from refvl.checks import check_positive, check_shape
from refvl.encoders.navit_siglip import NaVitMetadata, NaVitSiglip, NaVitSiglipConfig
from refvl.encoders.tower import to_device
from refvl.encoders.weights import config_dict, config_values
from refvl.positions.tables import resize_position_table

KNOWN_ENCODER = "vit_so400m_patch14_siglip_384"
MLP_RATIO = 3.7362  # the ratio of the MLP's width to the tower's in KNOWN_ENCODER
TABLE = "embeddings.position_embedding.weight"
NAMES = {  # names of timm's parts -> names in `NaVitSiglip`
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "blocks.": "encoder.layers.",
    "norm.": "post_layernorm.",
    "pos_embed": TABLE,
}
NAMES_OF_A_LAYER = {".norm": ".layer_norm", ".attn.qkv.": ".self_attn.qkv.", ".attn.proj.": ".self_attn.out_proj."}


@dataclass(frozen=True, slots=True)
class SiglipViTConfig(NaVitSiglipConfig):
    """`NaVitSiglipConfig` with timm's names; the image size is that of `vit_so400m_patch14_siglip_384`."""

    activation = None
    gelu: ClassVar[str] = "none"  # the exact GELU
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({
        "img_size": "image_size", "in_chans": "num_channels", "embed_dim": "hidden_size", "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
    })  # fmt: skip
    image_size: int = 384  # the side in pixels of the images that the position table was learned on

    @classmethod
    def from_hf(cls, config) -> "SiglipViTConfig":
        """Build a config from a dict with timm's names, or from a whole model's `vision_config` or `vision_encoder`.

        Raises ValueError for an unsupported tower.
        """
        whole = config_dict(config)
        if "vision_encoder" in whole and not whole.get("vision_config"):
            if not str(whole["vision_encoder"]).startswith(KNOWN_ENCODER):
                raise ValueError(f"vision_encoder: must begin with {KNOWN_ENCODER!r}, got {whole['vision_encoder']!r}")
            return cls()  # in a whole model's config, these names refer to different sizes
        values = config_values(whole, cls, activation=None, aliases=cls.aliases)
        ratio = check_positive(whole.get("vision_config", whole).get("mlp_ratio", MLP_RATIO), "mlp_ratio")
        return cls(**(values | {"intermediate_size": int(values.get("hidden_size", 1152) * ratio)}))


class SiglipViT(NaVitSiglip):
    """The tower, which computes the same vector for each patch as timm's tower with the same weights."""

    config_class = SiglipViTConfig

    def plan_checked(self, layouts: Sequence[tuple[int, int]]) -> NaVitMetadata:
        """Plan images of (h, w) patches each; in this plan, `positions` contains (N, E) vectors."""
        table = self.get_parameter(TABLE)
        positions = [table[:0], *(resize_position_table(table, size, antialias=True) for size in layouts)]
        segments = plan_segments([h * w for h, w in layouts], with_groups=self.backend() == "sdpa")
        return to_device(NaVitMetadata(**segments, positions=torch.cat(positions)), self.device)

    def position_embeds(self, metadata: NaVitMetadata) -> Tensor:
        """Return the position vectors from the plan."""
        return metadata.positions

    def forward(self, pixel_values: Tensor) -> Tensor:  # type: ignore[override]  # takes no sizes
        """Encode (B, C, H, W) pixels into (B, ceil(H / P) * ceil(W / P), E)."""
        P = self.config.patch_size
        check_shape(pixel_values, ("B", self.config.num_channels, "H", "W"), "pixel_values")
        batch, _, height, width = pixel_values.shape
        padded = F.pad(pixel_values, (0, -width % P, 0, -height % P))
        grid = padded.unflatten(3, (-1, P)).unflatten(2, (-1, P))  # (B, C, h, P, w, P)
        patches_NC = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
        metadata = self.plan([(grid.shape[2], grid.shape[4])] * batch)
        return self.encode(patches_NC, metadata).unflatten(0, (batch, -1))

    def rename(self, name: str) -> str:
        """Turn `vpm.blocks.0.attn.qkv.weight`, or the bare name, into `encoder.layers.0.self_attn.qkv.weight`."""
        name = name.removeprefix("vpm.")
        for theirs, ours in NAMES.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        for theirs, ours in NAMES_OF_A_LAYER.items():
            name = name.replace(theirs, ours)
        return name

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the patch embedding and of the position table in checkpoints."""
        return super().kernels | {TABLE: (1, *self.get_parameter(TABLE).shape)}

    @property
    def unused(self) -> str:
        """A pattern for the names of SigLIP's attention pool and a dropped last block."""
        return r"(vpm\.)?(attn_pool\." + rf"|blocks\.{self.config.depth - 1}\." * self.drop_last_layer + ")"
