"""The GLM-4.1V vision tower, read downward; GLM-4.5V, GLM-4.6V and GLM-GA have the same one, GLM-OCR another.

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matrix product (a convolution whose stride is its kernel), RMSNorm
       | [position_embeds] + a learned table of positions, sampled bicubically at each patch's place
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x)); attention inside frames, 2-D rotary
       | post_layernorm   RMSNorm
    (N, E)
       | downsample       each m x m block of patches becomes one token (a convolution, as above)
       | merger           Linear - LayerNorm - GELU, then SwiGLU
    embeddings (M, D)                             M = N / m^2 tokens of the language model's width

Positions are told twice: the table says where in the picture a patch stands, whatever its size, the rotary angles how
many patches lie between two of them. Both depend on the grid (the first on the table as well), so both are planned:
`plan(grid_thw)` computes them into `VisionMetadata`, and `forward` reads no value back and branches on no tensor.

Shape suffixes: N patches, M merged tokens, E tower width, D language width, H heads, K head dimension.
Upstream: `Glm4vVisionTransformer` (vLLM), `Glm4vVisionModel` and `Glm4vMoeVisionModel` (transformers).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import available_backends, choose_backend, group_segments, varlen_attention
from refvl.checks import Grid, as_grids, check_shape
from refvl.encoders.weights import config_values, load_strict
from refvl.positions.rotary import apply_rotary, vision_rotary_cos_sin
from refvl.positions.tables import interpolate_position_table


@dataclass(frozen=True, slots=True)
class Glm4vVisionConfig:
    """Sizes of the tower; the names and defaults are those of the checkpoint's `vision_config` (GLM-4.1V-9B)."""

    depth: int = 24
    hidden_size: int = 1536
    intermediate_size: int = 13696  # of the merger; the blocks' MLPs are out_hidden_size wide
    num_heads: int = 12
    in_channels: int = 3
    image_size: int = 336  # the picture, in pixels, that the position table was learned on
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 4096
    attention_bias: bool = False
    rms_norm_eps: float = 1e-5

    def __post_init__(self):
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                "hidden_size: must be num_heads times a head dimension that is a multiple of 4, "
                f"got {self.hidden_size} for {self.num_heads} heads"
            )
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size: must be at least patch_size={self.patch_size}, got {self.image_size}")

    @classmethod
    def from_hf(cls, config) -> "Glm4vVisionConfig":
        """From a transformers vision config, the dict in `config.json`, or either of the whole model's.

        Unknown keys are ignored.
        """
        values = config_values(config, fields(cls), aliases={"in_chans": "in_channels"})
        if (activation := values.pop("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act: the tower is written for 'silu', got {activation!r}")
        return cls(**values)

    @classmethod
    def tiny(cls) -> "Glm4vVisionConfig":
        """Three blocks and a table of 6 x 6 places: for tests and pictures."""
        return cls(
            depth=3, hidden_size=64, intermediate_size=112, num_heads=4, image_size=84, out_hidden_size=96
        )  # fmt: skip

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values in one patch row: C * Tp * P * P."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def num_positions(self) -> int:
        """Places in the position table."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True, eq=False)
class VisionMetadata:
    """What one forward needs besides pixels. Fixed addresses, changing contents: the contract of a captured graph.

    The integer is baked in by a capture: there it is a capacity, and a replay must stay below it.
    """

    position_embeds: Tensor = field(metadata={"pad": "zero"})  # (N, E) in the tower's dtype
    cos: Tensor = field(metadata={"pad": "zero"})  # (N, K/2) float32
    sin: Tensor = field(metadata={"pad": "zero"})  # (N, K/2) float32
    cu_seqlens: Tensor = field(metadata={"pad": "repeat_last"})  # (frames + 1,) int32, patches
    frame_groups: tuple[Tensor, ...] = field(metadata={"pad": "empty"})  # equal-length frames, for the sdpa backend
    max_seqlen: int  # patches in the longest frame

    @property
    def summary(self) -> str:
        """One line for tables."""
        return f"{len(self.cu_seqlens) - 1} frames"


class Glm4vVisionTransformer(nn.Module):
    """Patch rows in, embeddings of the language model's width out; equal to transformers' tower on the same weights."""

    def __init__(self, config: Glm4vVisionConfig, *, attention: str = "auto"):
        super().__init__()
        self.config, self.attention = config, attention
        self.patch_embed = PatchEmbed(config)
        self.post_conv_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embeddings = PositionEmbeddings(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.post_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.downsample = nn.Linear(config.hidden_size * config.spatial_merge_size**2, config.out_hidden_size)
        self.merger = PatchMerger(config.out_hidden_size, config.intermediate_size)

    @classmethod
    def from_config(cls, config, *, attention: str = "auto") -> "Glm4vVisionTransformer":
        """Build from a `Glm4vVisionConfig`, a transformers vision config, or the dict in `config.json`.

        attention: a backend of `refvl.attention`, or "auto" for the best one on the device the pixels come from.
        """
        config = config if isinstance(config, Glm4vVisionConfig) else Glm4vVisionConfig.from_hf(config)
        return cls(config, attention=attention)

    @property
    def device(self) -> torch.device:
        return self.patch_embed.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed.proj.weight.dtype

    def check_layouts(self, grid_thw, *, name: str = "grid_thw") -> list[Grid]:
        """(t, h, w) per item, normalised; ValueError or TypeError for anything else and sides that do not merge."""
        return as_grids(grid_thw, spatial_merge_size=self.config.spatial_merge_size, name=name)

    def plan(self, grid_thw) -> VisionMetadata:
        """Everything that depends on sizes, computed on the CPU and moved to the tower's device.

        Only the table is sampled where it lies. The plan holds what the weights say now: plan again after loading.
        grid_thw: (t, h, w) per item, in patches; a list or an integer tensor (items, 3), images and videos mixed.
        """
        c = self.config
        grids = self.check_layouts(grid_thw)
        cos, sin = vision_rotary_cos_sin(grids, head_dim=c.head_dim, spatial_merge_size=c.spatial_merge_size)
        frames = torch.tensor([h * w for t, h, w in grids for _ in range(t)], dtype=torch.int32)
        cu_seqlens = F.pad(frames.cumsum(0, dtype=torch.int32), (1, 0))

        def to(x):
            return x.to(self.device, non_blocking=True)

        return VisionMetadata(
            position_embeds=self.embeddings(grids),
            cos=to(cos),
            sin=to(sin),
            cu_seqlens=to(cu_seqlens),
            frame_groups=tuple(map(to, group_segments(cu_seqlens))),
            max_seqlen=int(frames.max()) if grids else 0,
        )

    @property
    def graph_attention(self) -> str:
        """The backend for a capture: one whose shapes do not depend on the lengths of the segments."""
        available = available_backends(self.device, self.dtype, self.config.head_dim)
        return "varlen" if "varlen" in available else "masked"

    def item_size(self, grid: Grid) -> tuple[int, int, int]:
        """(patch rows, output tokens, frames) of one item of `grid` patches."""
        t, h, w = grid
        return t * h * w, t * h * w // self.config.spatial_merge_size**2, t

    def plan_capacity(self, max_tokens: int, max_frames: int) -> VisionMetadata:
        """Metadata as large as any batch of `max_tokens` output tokens and `max_frames` frames can need, for a capture.

        Cumulative lengths say "one frame that holds everything", so that a warm-up runs on legal values.
        """
        c = self.config
        patches, frames = max_tokens * c.spatial_merge_size**2, min(max_frames, max_tokens)
        cu_seqlens = torch.full((frames + 1,), patches, dtype=torch.int32, device=self.device)
        cu_seqlens[0] = 0
        angles = torch.zeros(patches, c.head_dim // 2, device=self.device)
        return VisionMetadata(
            position_embeds=torch.zeros(patches, c.hidden_size, dtype=self.dtype, device=self.device),
            cos=angles, sin=angles.clone(), cu_seqlens=cu_seqlens, frame_groups=(), max_seqlen=patches,
        )  # fmt: skip

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """(patch rows, C*Tp*P*P) zeros for `max_tokens` output tokens."""
        rows = max_tokens * self.config.spatial_merge_size**2
        return torch.zeros(rows, self.config.patch_values, dtype=self.dtype, device=self.device)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw=None,
        *,
        metadata: VisionMetadata | None = None,
        attention: str | None = None,
    ) -> Tensor:
        """(N, C*Tp*P*P) patch rows of all items -> (M, D) embeddings, items in order.

        Give `grid_thw` to plan here, or the `metadata` of an earlier `plan`; `attention` overrides the tower's backend
        (a capture asks for one with static shapes). Raises ValueError when the rows do not match.
        """
        if (metadata is None) == (grid_thw is None):
            raise ValueError("forward: give exactly one of grid_thw and metadata")
        metadata = self.plan(grid_thw) if metadata is None else metadata
        rows = (("patches", len(metadata.cos)), ("values (C*Tp*P*P)", self.config.patch_values))
        check_shape(pixel_values, rows, "pixel_values")
        backend = choose_backend(attention or self.attention, pixel_values.device, self.dtype, self.config.head_dim)

        x_NE = self.post_conv_layernorm(self.patch_embed(pixel_values.to(self.dtype)))
        x_NE = x_NE + metadata.position_embeds
        for block in self.blocks:
            x_NE = block(x_NE, metadata, backend)
        x_MD = self.downsample(fold_blocks(self.post_layernorm(x_NE), self.config.spatial_merge_size))
        return self.merger(x_MD)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; returns the names of the parameters that were filled.

        Reads names under `visual.`, `model.visual.` and bare ones; q, k, v fused or separate, and gate and up as well.
        Missing, unexpected and misshapen names are listed in one ValueError.
        """
        c = self.config
        kernels = {
            "patch_embed.proj.weight": (
                c.hidden_size, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size,
            ),
            "downsample.weight": (c.out_hidden_size, c.hidden_size, c.spatial_merge_size, c.spatial_merge_size),
        }  # fmt: skip
        return load_strict(
            self, split_gate_up(weights), rename=checkpoint_to_module_name, fuse=("q", "k", "v"), kernels=kernels
        )


class PatchEmbed(nn.Module):
    """Conv3d with kernel = stride = (Tp, P, P) over a patch row is one matrix product with the flattened kernel."""

    def __init__(self, config: Glm4vVisionConfig):
        super().__init__()
        self.proj = nn.Linear(config.patch_values, config.hidden_size)

    def forward(self, patches_NC: Tensor) -> Tensor:
        return self.proj(patches_NC)  # (N, E)


class PositionEmbeddings(nn.Module):
    """The table of positions, S x S places of the picture it was learned on; sampled for other sizes in `plan`."""

    def __init__(self, config: Glm4vVisionConfig):
        super().__init__()
        self.spatial_merge_size = config.spatial_merge_size
        self.position_embedding = nn.Embedding(config.num_positions, config.hidden_size)

    def forward(self, grids: list[Grid]) -> Tensor:
        table = self.position_embedding.weight
        return interpolate_position_table(table, grids, spatial_merge_size=self.spatial_merge_size)  # (N, E)


class VisionBlock(nn.Module):
    """Pre-norm: x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: Glm4vVisionConfig):
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm2 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config.hidden_size, config.out_hidden_size)

    def forward(self, x_NE: Tensor, metadata: VisionMetadata, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), metadata, backend)
        return x_NE + self.mlp(self.norm2(x_NE))


class VisionAttention(nn.Module):
    """Fused q, k, v; rotary on q and k; every patch attends within its own frame."""

    def __init__(self, config: Glm4vVisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_NE: Tensor, metadata: VisionMetadata, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_NHK, k_NHK = (apply_rotary(x, metadata.cos, metadata.sin) for x in (q_NHK, k_NHK))
        out_NHK = varlen_attention(
            q_NHK, k_NHK, v_NHK, metadata.cu_seqlens, metadata.max_seqlen,
            backend=backend, groups=metadata.frame_groups,
        )  # fmt: skip
        return self.proj(out_NHK.flatten(1))  # (N, E)


class VisionMLP(nn.Module):
    """SwiGLU; `intermediate_size` is the language model's width here, the config's own in GLM-OCR."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_NE)) * self.up_proj(x_NE))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        # float32 inside, cast back before the weight: as transformers does, so that half precision agrees too
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class PatchMerger(nn.Module):
    """Linear - LayerNorm - GELU, then SwiGLU, all at the language model's width."""

    def __init__(self, size: int, intermediate_size: int):
        super().__init__()
        self.proj = nn.Linear(size, size, bias=False)
        self.post_projection_norm = nn.LayerNorm(size)
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x_MD: Tensor) -> Tensor:
        x_MD = F.gelu(self.post_projection_norm(self.proj(x_MD)))
        return self.down_proj(F.silu(self.gate_proj(x_MD)) * self.up_proj(x_MD))


def fold_blocks(x_NE: Tensor, spatial_merge_size: int) -> Tensor:
    """(N, E) -> (M, E*m*m): one row per merge block, channel first, as the downsampling kernel is flattened."""
    return x_NE.unflatten(0, (-1, spatial_merge_size**2)).transpose(1, 2).flatten(1)


def checkpoint_to_module_name(name: str) -> str:
    """`visual.blocks.0.norm1.weight`, `model.visual.blocks...` and the bare name are the same parameter."""
    return re.sub(r"^(model\.)?visual\.", "", name)


def split_gate_up(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A fused `gate_up_proj` is gate's rows, then up's: passed on as two. Other names, `up_proj` among them, stay."""
    for name, tensor in weights:
        if ".gate_up_proj." not in name or not isinstance(tensor, Tensor) or not tensor.ndim:
            yield name, tensor
            continue
        half = len(tensor) // 2
        yield name.replace(".gate_up_proj.", ".gate_proj."), tensor[:half]
        yield name.replace(".gate_up_proj.", ".up_proj."), tensor[half:]
