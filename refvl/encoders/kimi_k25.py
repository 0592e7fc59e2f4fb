"""The Kimi K2.5 vision tower (MoonViT-3D), from top to bottom: frames attend together, then their tokens are averaged.

    patch rows (N, C*P*P)                   one row per patch, frame after frame, merge-block order
       | patch_embed    one matmul
       |                + a learned table of rows and columns, sampled bicubically
       |                + sines and cosines of the frame's index in its chunk; zero for a chunk of one frame
    (N, E)
       | depth x block  x + attn(norm1(x)); x + mlp(norm2(x)); attention inside chunks, 2-D rotary
       | final_layernorm
    (N, E)
       | mean           over the frames of a chunk, patch by patch
       | projector      LayerNorm, fold each m x m block, Linear - GELU - Linear
    embeddings (M, D)

A chunk is `pos_emb_time` consecutive frames of a video, possibly fewer in the last chunk; an image is a chunk of one
frame. A chunk becomes as many tokens as an image of the same size. Other video towers encode each frame separately, or
put two frames into each patch row before the first layer.

Rotary pairs alternate: one pair rotates with the column, the next with the row. The released file pairs neighbouring
dimensions (0 and 1, 2 and 3, ...). Files written by transformers pair the two halves (0 and K/2, ...), and so does this
encoder. When the encoder loads a released file, it therefore reorders the rows of q and k.

Shape suffixes: N patches, B merge blocks of all frames, M tokens, E tower width, F = m * m * E, D language width, H
heads, K head dimension, T frames of the longest chunk.
Upstream: `Kimi_K25VisionModel`, `Kimi_K25MultimodalProjection` (transformers 5.23), `MoonViT3dPretrainedModel` (vLLM).
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments, plan_segments, segment_capacity
from refvl.checks import Grid
from refvl.encoders.config import TowerConfig
from refvl.encoders.grid import GridEncoder
from refvl.encoders.step_vl import pair_halves
from refvl.encoders.tower import Tower, to_device
from refvl.encoders.weights import config_dict
from refvl.positions.rotary import block_positions, rotary_factors, rotary_frequencies, rotate
from refvl.positions.tables import sample_position_table, sincos_1d

RENAMED = {  # a regular expression for a name in the released file or transformers' file -> the parameter's name
    r"^(model\.)?vision_tower\.": "",
    r"^(model\.)?mm_projector\.pre_norm": "projector.norm",
    r"^(model\.)?mm_projector\.(proj\.0|in_proj)": "projector.fc1",
    r"^(model\.)?mm_projector\.(proj\.2|out_proj)": "projector.fc2",
    r"^patch_embed\.pos_emb\.(weight|position_embeddings)": "pos_emb.weight",
    r"^(encoder\..*\.norm)1": r"\g<1>2",  # the released file counts norms and layers from 0
    r"^(encoder\..*\.norm)0": r"\g<1>1",
    r"^(encoder\..*\.mlp\.fc)1": r"\g<1>2",
    r"^(encoder\..*\.mlp\.fc)0": r"\g<1>1",
    r"\.wqkv\.": ".attn.qkv.",
    r"\.wo\.": ".attn.proj.",
    r"^encoder\.": "",
    r"^layers\.": "blocks.",
    r"\.([qkv])_proj\.": r".\1.",
}


@dataclass(frozen=True, slots=True)
class KimiK25VisionConfig(TowerConfig):
    """The sizes of the tower and the projector, under transformers' names.

    Released files use different names (see `aliases`).
    """

    activation = "gelu_pytorch_tanh"
    aliases = MappingProxyType(
        {f"vt_{size}": size for size in ("hidden_size", "intermediate_size")}
        | {f"vt_{count}": count for count in ("num_hidden_layers", "num_attention_heads")}
        | {f"init_pos_emb_{name}": f"pos_emb_{name}" for name in ("height", "width", "time")}
    )
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 14
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    pos_emb_time: int = 4  # T
    merge_kernel_size: tuple[int, int] = (2, 2)
    out_hidden_size: int = 7168  # D
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                "hidden_size: must be num_attention_heads times a head dimension that is a multiple of 4, "
                f"got {self.hidden_size} for {self.num_heads} heads"
            )
        for name, sides in (
            ("merge_kernel_size", self.merge_kernel_size),
            ("pos_emb_height", (self.pos_emb_height, self.pos_emb_width)),
        ):
            if sides[0] != sides[1]:
                raise ValueError(f"{name}: expected a square, got {' x '.join(map(str, sides))}")

    @classmethod
    def from_hf(cls, config) -> "KimiK25VisionConfig":
        """Build a config from a whole model's config (an object, or the dict in `config.json`) or a vision config."""
        whole = config_dict(config)
        width = (whole.get("text_config") or {}).get("hidden_size")
        given = {} if width is None else {"out_hidden_size": width}
        vision = config_dict(whole.get("vision_config", whole)) | given
        return super(KimiK25VisionConfig, cls).from_hf(vision)  # slots=True breaks super() without arguments

    @classmethod
    def tiny(cls) -> "KimiK25VisionConfig":
        """Return sizes for tests and figures: three blocks and a table of 6 x 6 positions."""
        return cls(
            hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4, pos_emb_height=6,
            pos_emb_width=6, out_hidden_size=96,
        )  # fmt: skip

    @property
    def spatial_merge_size(self) -> int:
        """m: the number of patches along a side of the square that becomes one token."""
        return self.merge_kernel_size[0]

    @property
    def block_size(self) -> int:
        """The number of patches of a frame that become one token: m * m."""
        return self.spatial_merge_size**2


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMetadata(Segments):
    """The inputs of one forward in addition to the pixels; segments are chunks.

    `pad`: the rule by which a graph fills the unused end of a buffer.

    For each token, `frames` and `shares` contain the merge blocks to average and their weights. A weight is 1 / t for
    each of the t frames of the token's chunk, and 0 for the remaining T - t frames.
    """

    positions: Tensor = field(metadata={"pad": "zero"})  # (N, 2) int32: the row and column of each patch
    frequencies: Tensor = field(metadata={"pad": "zero"})  # (K/4,) float32 (see `rotary_frequencies`)
    position_embeds: Tensor = field(metadata={"pad": "zero"})  # (N, E) in the tower's dtype: location plus time
    frames: Tensor = field(metadata={"pad": "zero"})  # (M, T) int64
    shares: Tensor = field(metadata={"pad": "zero"})  # (M, T) float32

    @property
    def summary(self) -> str:
        """Return a one-line description of the plan, for tables."""
        return f"{len(self.cu_seqlens) - 1} chunks of frames"


class KimiK25Encoder(GridEncoder):
    """Patch rows in, embeddings of the language model's width out."""

    config_class = KimiK25VisionConfig
    config: KimiK25VisionConfig

    def __init__(self, config: KimiK25VisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        convolution = nn.Linear(self.patch_values, config.hidden_size)  # stride = kernel size
        self.patch_embed = nn.Sequential(OrderedDict(proj=convolution))
        self.pos_emb = nn.Embedding(config.pos_emb_height * config.pos_emb_width, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.projector = Projector(config)

    def chunks_of(self, grids: Sequence[Grid]) -> list[Grid]:
        """Return (t, h, w) of every chunk: t is T, possibly less in the last chunk of a video."""
        T = self.config.pos_emb_time
        return [(min(T, t - first), h, w) for t, h, w in grids for first in range(0, t, T)]

    def plan_checked(self, grids: Sequence[Grid]) -> ChunkMetadata:
        """Compute on the CPU everything that depends on sizes, and move it to the tower's device.

        grids: (t, h, w) per item, in patches; t counts the frames of a whole video. The position table, in contrast, is
        sampled on its own device.
        """
        m, chunks = self.config.spatial_merge_size, self.chunks_of(grids)
        table = self.pos_emb.weight
        of_place = sample_position_table(table, chunks, m, mode="bicubic", align_corners=False)
        frames, shares = frames_of_tokens(chunks, self.block_size, self.config.pos_emb_time)
        metadata = ChunkMetadata(
            **plan_segments([t * h * w for t, h, w in chunks], with_groups=self.backend() == "sdpa"),
            positions=block_positions(chunks, m).int(),
            frequencies=rotary_frequencies(self.head_dim),
            position_embeds=of_place + self._of_time(chunks).to(of_place),
            frames=frames,
            shares=shares,
        )
        return to_device(metadata, self.device)

    def _of_time(self, chunks: Sequence[Grid]) -> Tensor:
        """Return (N, E) float32 encodings of each patch's frame index in its chunk.

        The encodings are 0 for a chunk of one frame.
        """
        E = self.config.hidden_size
        table_TE = sincos_1d(E, self.config.pos_emb_time)
        rows = [table_TE[:t].repeat_interleave(h * w, 0) * (t > 1) for t, h, w in chunks]
        return torch.cat([torch.empty(0, E), *rows])

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw=None,
        *,
        metadata: ChunkMetadata | None = None,
        attention: str | None = None,
    ) -> Tensor:
        """Encode (N, C*P*P) patch rows of all items as (M, D) embeddings, with items and chunks in order.

        Pass `grid_thw` to plan in this call, or the `metadata` of an earlier `plan`. `attention` overrides the tower's
        backend; a capture requests a backend with static shapes. Raises ValueError if the rows do not match the plan,
        and TypeError if their dtype is not floating point.
        """
        patches_NC, metadata, backend = self.inputs(pixel_values, grid_thw, metadata, attention)
        rotary = alternating_factors(metadata.positions, metadata.frequencies)  # shared by all blocks
        x_NE = self.patch_embed(patches_NC) + metadata.position_embeds
        for block in self.blocks:
            x_NE = block(x_NE, rotary, metadata, backend)
        x_BF = self.final_layernorm(x_NE).view(-1, self.block_size * x_NE.shape[1])
        shares = metadata.shares[..., None].unbind(1)  # one step per frame, so only M rows are copied at a time
        mean_MF = sum(x_BF[frame] * share for frame, share in zip(metadata.frames.unbind(1), shares, strict=True))
        return self.projector(mean_MF.to(x_NE))

    def item_size(self, grid: Grid) -> tuple[int, int, int]:
        """Return (patch rows, output tokens, chunks) of one item of `grid` patches."""
        t, h, w = grid
        chunks = len(self.chunks_of([grid]))
        return t * h * w, chunks * h * w // self.block_size, chunks

    def plan_capacity(self, max_tokens: int, max_frames: int) -> ChunkMetadata:
        """Return metadata large enough for any batch of `max_tokens` output tokens and `max_frames` chunks.

        The buffers have room for one frame's patch rows per token, which is enough for images; chunks of T frames need
        a budget T times as large.
        """
        patches = max_tokens * self.block_size
        metadata = ChunkMetadata(
            **segment_capacity(patches, min(max_frames, max_tokens)),
            positions=torch.zeros(patches, 2, dtype=torch.int32),
            frequencies=rotary_frequencies(self.head_dim),
            position_embeds=torch.zeros(patches, self.config.hidden_size, dtype=self.dtype),
            frames=torch.zeros(max_tokens, self.config.pos_emb_time, dtype=torch.int64),
            shares=torch.zeros(max_tokens, self.config.pos_emb_time),
        )
        return to_device(metadata, self.device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly, under the released names or transformers' names.

        Tensors have the shapes of the checkpoint. Raises one ValueError that lists all mismatches (see `load_strict`).
        """
        halves = pair_halves(weights, self.config.num_heads, self.config.head_dim, fused=".wqkv.")
        return Tower.load_weights(self, halves)

    def rename(self, name: str) -> str:
        """Return the name of the parameter that a checkpoint's tensor of this name fills."""
        for old, new in RENAMED.items():
            name = re.sub(old, new, name)
        return name

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of parameters in checkpoints, where rows and columns of the table are two dimensions."""
        c = self.config
        table = (c.pos_emb_height, c.pos_emb_width, c.hidden_size)
        return {"patch_embed.proj.weight": c.patch_kernel, "pos_emb.weight": table}


class VisionBlock(nn.Module):
    """A pre-norm block: x + attn(norm1(x)), then x + mlp(norm2(x)), with the tanh approximation of GELU."""

    def __init__(self, config: KimiK25VisionConfig):
        super().__init__()
        E, hidden = config.hidden_size, config.intermediate_size
        self.norm1 = nn.LayerNorm(E, config.norm_eps)
        self.attn = VisionAttention(config)
        self.norm2 = nn.LayerNorm(E, config.norm_eps)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(E, hidden), act=nn.GELU(approximate="tanh"), fc2=nn.Linear(hidden, E))
        )

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor | None], chunks: Segments, backend: str) -> Tensor:
        x_NE = x_NE + self.attn(self.norm1(x_NE), rotary, chunks, backend)
        return x_NE + self.mlp(self.norm2(x_NE))


class VisionAttention(nn.Module):
    """Attention with a fused, biased QKV projection and rotary q and k; a patch attends to all frames of its chunk."""

    def __init__(self, config: KimiK25VisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_NE: Tensor, rotary: tuple[Tensor, Tensor | None], chunks: Segments, backend: str) -> Tensor:
        qkv_NHK = self.qkv(x_NE).unflatten(-1, (3 * self.num_heads, -1))
        qk_NHK, v_NHK = qkv_NHK.tensor_split([2 * self.num_heads], dim=1)
        q_NHK, k_NHK = rotate(qk_NHK, *rotary).chunk(2, dim=1)  # rotating q and k together halves the number of kernels
        return self.proj(chunks.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)


class Projector(nn.Module):
    """A module that normalises each patch, then turns the m x m patches of each block into one token."""

    def __init__(self, config: KimiK25VisionConfig):
        super().__init__()
        self.width = config.hidden_size
        folded = config.hidden_size * config.block_size
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.fc1 = nn.Linear(folded, folded)
        self.fc2 = nn.Linear(folded, config.out_hidden_size)

    def forward(self, x_MF: Tensor) -> Tensor:
        normed_MF = self.norm(x_MF.unflatten(1, (-1, self.width))).flatten(1)
        return self.fc2(F.gelu(self.fc1(normed_MF)))  # (M, D)


def alternating_factors(positions_N2: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor | None]:
    """Turn (N, 2) rows and columns and (K/4,) frequencies into the factors of `rotate`, column and row alternating."""
    angles_NK = (positions_N2.flip(1)[:, None] * frequencies[:, None]).flatten(1)  # (N, K/4, 2) -> (N, K/2)
    return rotary_factors(angles_NK.cos(), angles_NK.sin())


def frames_of_tokens(chunks: Sequence[Grid], block_size: int, T: int) -> tuple[Tensor, Tensor]:
    """Return the merge blocks of each token, one per frame, (M, T) int64, and their weights, (M, T) float32.

    >>> frames_of_tokens([(2, 2, 4)], 4, 3)[0].tolist()  # two frames of two blocks; the third frame has weight 0
    [[0, 2, 0], [1, 3, 1]]
    """
    frames, shares, start = [torch.empty(0, T, dtype=torch.int64)], [torch.empty(0, T)], 0
    frame_T = torch.arange(T)
    for t, h, w in chunks:
        of_frame = h * w // block_size
        there_T = frame_T < t
        frames.append(start + torch.arange(of_frame)[:, None] + of_frame * frame_T * there_T)
        shares.append((there_T / t).expand(of_frame, T))
        start += t * of_frame
    return torch.cat(frames), torch.cat(shares)
