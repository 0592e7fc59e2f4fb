"""The GLM-4.1V vision tower, from top to bottom; GLM-4.5V, 4.6V and GLM-GA use the same tower, GLM-OCR a different one.

    patch rows (N, C*Tp*P*P)                      one row per patch, merge-block order
       | patch_embed      one matmul (a convolution with stride = kernel size), RMSNorm
       | [position_embeds] + a learned table of positions, sampled bicubically at each patch's centre
    (N, E)
       | depth x block    x + attn(norm1(x)); x + mlp(norm2(x)); attention inside frames, 2-D rotary
       | post_layernorm   RMSNorm
    (N, E)
       | downsample       each m x m block of patches becomes one token (a convolution, as above)
       | merger           Linear - LayerNorm - GELU, then SwiGLU
    embeddings (M, D)                             M = N / m^2 tokens of the language model's width

Positions enter the tower twice. The table encodes the location of a patch relative to the
image's size; the rotary angles encode the distance between two patches, in patches. Samples and
angles depend on the grid; the samples also depend on the table's weights.

The CPU plans and the device executes: `plan(grid_thw)` computes everything that depends on
sizes into `TableMetadata`. `forward` neither reads values back nor branches on tensors.
`GridEncoder` and `Tower` define the input checks, device, backends and weight names.

Shape suffixes: N patches, M merged tokens of B = m * m patches, E tower width, D language
width, H heads, K head dimension. Upstream: `Glm4vVisionTransformer` (vLLM), `Glm4vVisionModel`
and `Glm4vMoeVisionModel` (transformers).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments
from refvl.checks import Grid
from refvl.encoders.grid import GridEncoder, GridVisionConfig, TableMetadata
from refvl.encoders.tower import to_device
from refvl.positions.rotary import rotary_cos_sin, rotary_factors, rotate
from refvl.positions.tables import sample_position_table


@dataclass(frozen=True, slots=True)
class Glm4vVisionConfig(GridVisionConfig):
    """The sizes of the tower; the names and defaults are those of the checkpoint's `vision_config` (GLM-4.1V-9B)."""

    depth: int = 24
    hidden_size: int = 1536
    intermediate_size: int = 13696  # the width of the merger's MLP; the blocks' MLPs have the width out_hidden_size
    num_heads: int = 12
    in_channels: int = 3
    image_size: int = 336  # the side in pixels of the images that the position table was learned on
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 4096
    attention_bias: bool = False
    rms_norm_eps: float = 1e-5

    @classmethod
    def tiny(cls) -> "Glm4vVisionConfig":
        """Return sizes for tests and figures: three blocks and a table of 6 x 6 positions."""
        return cls(depth=3, hidden_size=64, intermediate_size=112, num_heads=4, image_size=84, out_hidden_size=96)


class Glm4vVisionTransformer(GridEncoder):
    """The tower, which turns patch rows into embeddings of the language model's width.

    With the same weights, it returns the values of transformers' tower.
    """

    config_class = Glm4vVisionConfig
    config: Glm4vVisionConfig

    def __init__(self, config: Glm4vVisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        convolution = nn.Linear(self.patch_values, config.hidden_size)  # stride = kernel size
        self.patch_embed = nn.Sequential(OrderedDict(proj=convolution))
        self.post_conv_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        entries = (config.image_size // config.patch_size) ** 2
        self.embeddings = nn.ModuleDict({"position_embedding": nn.Embedding(entries, config.hidden_size)})
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.post_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.downsample = nn.Linear(config.hidden_size * config.block_size, config.out_hidden_size)
        self.merger = PatchMerger(config.out_hidden_size, config.intermediate_size)

    def plan_checked(self, grids: Sequence[Grid]) -> TableMetadata:
        """Compute the plan on the CPU, and move it to the tower's device.

        grids: the (t, h, w) of each item, in patches; images and videos may be mixed. `plan`
        also accepts tensors, and checks the grids. Only the position table is sampled on the
        tower's device.
        """
        table, m = self.get_parameter("embeddings.position_embedding.weight"), self.config.spatial_merge_size
        sampled = sample_position_table(table, grids, m, mode="bicubic", align_corners=False)
        metadata = TableMetadata(**self.plan_frames(grids), position_embeds=sampled)
        return to_device(metadata, self.device)

    def forward(self, pixel_values: Tensor, grid_thw=None, *, metadata=None, attention: str | None = None) -> Tensor:
        """Encode (N, C*Tp*P*P) patch rows of all items as (M, D) embeddings, with items in order.

        Pass `grid_thw`, which this call plans, or the `metadata` of an earlier `plan`. `attention`
        overrides the tower's backend; a graph capture requests static shapes. Raises ValueError if
        the rows do not match the plan, and TypeError if they are not floats.
        """
        patches_NC, metadata, backend = self.inputs(pixel_values, grid_thw, metadata, attention)
        rotary = rotary_factors(*rotary_cos_sin(metadata.positions, metadata.frequencies))  # shared by all blocks
        x_NE = self.post_conv_layernorm(self.patch_embed(patches_NC)) + metadata.position_embeds
        for block in self.blocks:
            x_NE = block(x_NE, rotary, metadata, backend)
        x_MBE = self.post_layernorm(x_NE).unflatten(0, (-1, self.block_size))
        return self.merger(self.downsample(x_MBE.transpose(1, 2).flatten(1)))  # channel first, as in the kernel

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the kernel shapes of the patch embedding and of the downsampling."""
        config, m = self.config, self.config.spatial_merge_size
        return super().kernels | {"downsample.weight": (config.out_hidden_size, config.hidden_size, m, m)}


class VisionBlock(nn.Module):
    """A pre-norm block: x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: Glm4vVisionConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = VisionAttention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.out_hidden_size, bias=False)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], frames: Segments, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), rotary, frames, backend)
        return x_NE + self.mlp(self.norm2(x_NE))


class VisionAttention(nn.Module):
    """Attention with a fused QKV projection and rotary q and k; each patch attends only within its own frame."""

    def __init__(self, config: Glm4vVisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor], frames: Segments, backend: str) -> Tensor:
        qkv_NHK = self.qkv(x_NE).unflatten(-1, (3 * self.num_heads, -1))
        qk_NHK, v_NHK = qkv_NHK.tensor_split([2 * self.num_heads], dim=1)
        q_NHK, k_NHK = rotate(qk_NHK, *rotary).chunk(2, dim=1)  # rotating q and k together halves the number of kernels
        return self.proj(frames.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)


class SwiGLU(nn.Module):
    """A gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PatchMerger(SwiGLU):
    """Linear - LayerNorm - GELU, then SwiGLU; inputs and outputs have the language model's width."""

    def __init__(self, size: int, intermediate_size: int):
        super().__init__(size, intermediate_size, bias=False)
        self.proj = nn.Linear(size, size, bias=False)
        self.post_projection_norm = nn.LayerNorm(size)

    def forward(self, x_MD: Tensor) -> Tensor:
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x_MD))))
