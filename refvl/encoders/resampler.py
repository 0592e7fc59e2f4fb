"""MiniCPM-V's resamplers: learned queries read the patches of a slice, which turns 1,000 patches into 64 tokens.

    rows of the tower (N, C)                      slice after slice
       | kv_proj, ln_kv   to the language model's width
    keys = rows + positions, values = rows (N, D)
       | attn             `query`, through ln_q, over the keys of each slice: Q tokens per slice
       | ln_post, proj    LayerNorm, one matrix product
    tokens (slices * Q, D)

    Resampler2     queries and keys carry positions: the queries' fixed grid, resized to the slice's      (2.0)
    Resampler2_5   only keys do: sines and cosines of row and column                                 (2.5, 2.6, 4.0)
    Resampler4_5   and of time; frames of one group share a set of queries                                (4.5)

Upstream keeps tables of sines and cosines and lets them grow; a formula has no size, so a grid of 4 x 227 or a frame
two hours into a video needs nothing special. There are no padded keys here: slices lie end to end. `resample` works on
those; `forward` takes the padded form.

Shape suffixes: N patches of all slices, D the language model's width, Q queries, H heads, K head dimension;
B slices, L patches of the longest.
Upstream: `Resampler2`, `Resampler2_5`, `Resampler4_5` (vLLM).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.arguments import as_size, as_sizes
from refvl.attention import cumulative_lengths, group_segment_pairs, varlen_cross_attention
from refvl.checks import check_floats, check_integers, check_positive_int, check_shape, is_integer
from refvl.encoders.navit_siglip import unpad
from refvl.encoders.tower import Tower
from refvl.positions.tables import resize_position_table, sincos, sincos_2d, sincos_frequencies

NO_TIME = -1  # the temporal id of an image


@dataclass(frozen=True, slots=True, eq=False)
class SetMetadata:
    """Which patches each set of queries reads. Integers are baked in by a capture: there they are capacities."""

    positions: Tensor = field(metadata={"pad": "zero"})  # one row per patch
    cu_seqlens_q: Tensor = field(metadata={"pad": "repeat_last"})  # (sets + 1,) int32, tokens
    cu_seqlens_k: Tensor = field(metadata={"pad": "repeat_last"})  # (sets + 1,) int32, patches
    set_groups: tuple | None = field(metadata={"pad": "empty"})  # sets of equal lengths; planned for sdpa alone
    max_seqlen_q: int  # Q
    max_seqlen_k: int  # patches that the fullest set of queries reads


@dataclass(frozen=True, slots=True, eq=False)
class FixedGridMetadata(SetMetadata):
    """Positions are (N, D) in the module's dtype, and queries have them, too."""

    query_positions: Tensor  # (Q, D) in the module's dtype


@dataclass(frozen=True, slots=True, eq=False)
class ResamplerMetadata(SetMetadata):
    """Positions are (N, 2) int32: row and column of each patch in its slice.

    The frequencies depend on the width alone. They are planned because a buffer of the module would be rounded by
    `.to(torch.bfloat16)` and lost by `to_empty`.
    """

    frequencies: Tensor = field(metadata={"pad": "zero"})  # (D / 4,) float32


@dataclass(frozen=True, slots=True, eq=False)
class TemporalResamplerMetadata(ResamplerMetadata):
    """And the time of each patch."""

    times: Tensor = field(metadata={"pad": "zero"})  # (N,) int32: temporal id of the patch's frame, -1 for none
    time_frequencies: Tensor = field(metadata={"pad": "zero"})  # (D / 2,) float32


class Resampler(Tower):
    """What all versions share: every set of queries reads its patches. Not used by itself."""

    ln_post: Any  # None, as `proj`, where the resampler ends at the attention
    proj: Any

    def __init__(self, num_queries: int, embed_dim: int, num_heads: int, kv_dim: int | None, attention: str):
        super().__init__(None, attention=attention)
        self.num_queries = check_positive_int(num_queries, "num_queries")
        self.query = nn.Parameter(torch.empty(num_queries, embed_dim).normal_(std=0.02))
        if kv_dim is None or kv_dim == embed_dim:  # as wide as the language model already
            self.kv_proj: nn.Module = nn.Identity()
        else:
            self.kv_proj = nn.Linear(kv_dim, embed_dim, bias=False)
        self.attn = CrossAttention(embed_dim, num_heads)
        self.head_dim = self.attn.head_dim
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(embed_dim, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(embed_dim**-0.5 * torch.randn(embed_dim, embed_dim))

    @classmethod
    def from_config(cls, config: dict, **extra) -> Self:
        """Build from a dict of the constructor's arguments."""
        return cls(**config, **extra)

    @property
    def embed_dim(self) -> int:
        """D."""
        return self.query.shape[1]

    def resample(self, rows_NC: Tensor, metadata: Any, attention: str | None = None) -> Tensor:
        """(N, kv_dim) rows of all slices -> (sets * Q, D); `attention` overrides the module's backend."""
        backend = self.backend(attention, self.device)
        tokens_MD = self.attn(*self.attention_inputs(rows_NC, metadata), metadata, backend)
        return tokens_MD if self.proj is None else self.ln_post(tokens_MD) @ self.proj

    def attention_inputs(self, rows_NC: Tensor, metadata: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (Q, D), keys (N, D), values (N, D) before they are projected."""
        check_floats(check_shape(rows_NC, (len(metadata.positions), "kv_dim"), "x"), "x")
        values_ND = self.ln_kv(self.kv_proj(rows_NC.to(self.dtype)))
        return self.ln_q(self.query), self.add_positions(values_ND, metadata), values_ND

    def add_positions(self, x_ND: Tensor, metadata: Any) -> Tensor:
        """Keys from values."""
        raise NotImplementedError

    def rename(self, name: str) -> str:
        """Names under `resampler.` or bare ones."""
        return name.removeprefix("resampler.")


class Resampler2(Resampler):
    """A fixed grid of queries; queries and keys carry positions in it: MiniCPM-V 2.0."""

    unused = r"(resampler\.)?pos_embed$"  # a formula

    def __init__(
        self,
        grid_size: int,
        embed_dim: int,
        num_heads: int,
        kv_dim: int | None = None,
        *,
        adaptive: bool = False,
        do_post_projection: bool = True,
        attention: str = "auto",
    ):
        """grid_size: G, for Q = G * G queries. kv_dim: width of the rows (default: embed_dim, no projection).

        adaptive: keys get the sines and cosines of their own grid instead of the queries' resized ones.
        do_post_projection: False ends at the attention (Qwen-VL's form).
        """
        super().__init__(check_positive_int(grid_size, "grid_size") ** 2, embed_dim, num_heads, kv_dim, attention)
        self.grid_size, self.adaptive = grid_size, adaptive
        if not do_post_projection:
            self.ln_post = self.proj = None

    def plan(self, tgt_sizes) -> FixedGridMetadata:
        """tgt_sizes: (h, w) per slice in patches."""
        sizes = as_sizes(tgt_sizes)
        queries_QD = sincos_2d(self.embed_dim, (self.grid_size, self.grid_size)).flatten(0, 1)
        keys_ND = torch.cat([queries_QD[:0], *(self._key_positions(queries_QD, size) for size in sizes)])
        sets = plan_sets(self.num_queries, [h * w for h, w in sizes], with_groups=self.reads_groups)
        keys_ND, queries_QD = keys_ND.to(self.dtype), queries_QD.to(self.dtype)
        return self.move(FixedGridMetadata(positions=keys_ND, query_positions=queries_QD, **sets))

    def _key_positions(self, query_positions_QD: Tensor, size: tuple[int, int]) -> Tensor:
        if self.adaptive:
            return sincos_2d(self.embed_dim, size).flatten(0, 1)
        return resize_position_table(query_positions_QD, size, antialias=False)

    def attention_inputs(self, rows_NC: Tensor, metadata: FixedGridMetadata) -> tuple[Tensor, Tensor, Tensor]:
        """As in `Resampler`; queries have positions as well."""
        query_QD, keys_ND, values_ND = super().attention_inputs(rows_NC, metadata)
        return query_QD + metadata.query_positions, keys_ND, values_ND

    def add_positions(self, x_ND: Tensor, metadata: FixedGridMetadata) -> Tensor:
        """As planned."""
        return x_ND + metadata.positions

    def forward(self, x: Tensor, tgt_size: tuple[int, int] | None = None) -> Tensor:
        """(B, L, kv_dim) -> (B, Q, D). tgt_size: (h, w) of every slice, h * w = L; None: a square."""
        check_shape(x, ("B", "L", "kv_dim"), "x")
        side = int(x.shape[1] ** 0.5)
        h, w = (side, side) if tgt_size is None else as_size(tgt_size, "tgt_size")
        if h * w != x.shape[1]:
            raise ValueError(f"tgt_size: {(h, w)} does not hold the {x.shape[1]} patches of x")
        return self.resample(x.flatten(0, 1), self.plan([(h, w)] * len(x))).unflatten(0, (len(x), self.num_queries))


class Resampler2_5(Resampler):
    """Keys carry the sines and cosines of their row and column: MiniCPM-V 2.5, 2.6 and 4.0."""

    def __init__(
        self,
        num_queries: int,
        embed_dim: int,
        num_heads: int,
        kv_dim: int | None = None,
        max_size: tuple[int, int] = (70, 70),
        *,
        attention: str = "auto",
    ):
        """kv_dim: width of the rows (default: embed_dim, no projection). max_size: the size of upstream's first table,
        and no limit.
        """
        super().__init__(num_queries, embed_dim, num_heads, kv_dim, attention)
        self.max_size = as_size(max_size, "max_size")

    def plan(self, tgt_sizes) -> ResamplerMetadata:
        """Everything that depends on sizes, computed on the CPU. tgt_sizes: (h, w) per slice in patches."""
        sizes = as_sizes(tgt_sizes)
        return self.move(ResamplerMetadata(**self._plan(sizes, [h * w for h, w in sizes])))

    def _plan(self, sizes: Sequence[tuple[int, int]], patches_per_set: Sequence[int]) -> dict[str, Any]:
        places = [torch.zeros(0, 2, dtype=torch.int32), *(grid_places(h, w) for h, w in sizes)]
        frequencies = sincos_frequencies(self.embed_dim // 2)
        return plan_sets(self.num_queries, patches_per_set, with_groups=self.reads_groups) | {
            "positions": torch.cat(places),
            "frequencies": frequencies,
        }

    def plan_capacity(self, max_patches: int, max_sets: int) -> ResamplerMetadata:
        """Metadata as large as any batch of so many patches and sets of queries; legal values: one set reads all."""
        return self.move(ResamplerMetadata(**self._capacity(max_patches, max_sets)))

    def _capacity(self, max_patches: int, max_sets: int) -> dict[str, Any]:
        capacity = self._plan([(1, max_patches)], [max_patches])
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            capacity[name] = torch.cat([capacity[name], capacity[name][-1:].expand(max_sets - 1)])
        return capacity | {"set_groups": None}

    def add_positions(self, x_ND: Tensor, metadata: Any) -> Tensor:
        """The first half of the channels encodes the column, the second the row, as in `sincos_2d`."""
        column_row = sincos(metadata.positions.flip(-1), metadata.frequencies)  # (N, 2, D / 2)
        return x_ND + column_row.flatten(1).to(x_ND.dtype)

    def forward(self, x: Tensor, tgt_sizes) -> Tensor:
        """(B, L, kv_dim) -> (B, Q, D). tgt_sizes: (B, 2); slice b is the first h * w rows of x[b], no other is read."""
        return self._resample_padded(x, as_sizes(tgt_sizes))

    def _resample_padded(self, x: Tensor, sizes: list[tuple[int, int]], *times) -> Tensor:
        check_shape(x, (len(sizes), "L", "kv_dim"), "x")
        rows = unpad(x, [h * w for h, w in sizes], "x")
        return self.resample(rows, self.plan(sizes, *times)).unflatten(0, (-1, self.num_queries))


class Resampler4_5(Resampler2_5):
    """Keys carry time as well, and frames of one group share a set of queries: MiniCPM-V 4.5."""

    def __init__(self, *args, max_temporal_size: int = 36000, **kwargs):
        """As `Resampler2_5`. max_temporal_size: the size of upstream's first table (an hour in tenths of a second),
        and no limit.
        """
        super().__init__(*args, **kwargs)
        self.max_temporal_size = check_positive_int(max_temporal_size, "max_temporal_size")

    def plan(self, tgt_sizes, temporal_ids: Sequence[Sequence[int]] | None = None) -> TemporalResamplerMetadata:
        """tgt_sizes: (h, w) per slice. temporal_ids: one list per group, one id per slice, -1 or None for none.

        A group shares one set of queries, unless all of its ids are -1: then each slice has its own.
        """
        sizes = as_sizes(tgt_sizes)
        groups, patches = as_temporal_groups(temporal_ids, len(sizes)), [h * w for h, w in sizes]
        rest = iter(patches)
        patches_per_set = [n for ids in groups for n in count_per_set(ids, [next(rest) for _ in ids])]
        ids = torch.tensor([id_ for group in groups for id_ in group], dtype=torch.int32)
        times = ids.repeat_interleave(torch.tensor(patches, dtype=torch.long))
        return self.move(TemporalResamplerMetadata(**self._plan(sizes, patches_per_set), **self._times(times)))

    def plan_capacity(self, max_patches: int, max_sets: int) -> TemporalResamplerMetadata:
        """As in `Resampler2_5`."""
        times = self._times(torch.zeros(max_patches, dtype=torch.int32))
        return self.move(TemporalResamplerMetadata(**self._capacity(max_patches, max_sets), **times))

    def _times(self, times: Tensor) -> dict[str, Any]:
        return {"times": times, "time_frequencies": sincos_frequencies(self.embed_dim)}

    def add_positions(self, x_ND: Tensor, metadata: Any) -> Tensor:
        """Row, column, and time where there is one."""
        x_ND = super().add_positions(x_ND, metadata)
        time_ND = sincos(metadata.times, metadata.time_frequencies).to(x_ND.dtype)
        return x_ND + time_ND.masked_fill((metadata.times == NO_TIME)[:, None], 0)

    def forward(self, x: Tensor, tgt_sizes, temporal_ids=None) -> Tensor:
        """(B, L, kv_dim) -> (sets, Q, D).

        temporal_ids: one list per group, see `plan`; a (B,) tensor of ids groups nothing; None: no times.
        """
        if isinstance(temporal_ids, Tensor):
            check_integers(check_shape(temporal_ids, ("slices",), "temporal_ids"), "temporal_ids")
            temporal_ids = temporal_ids[:, None].tolist()
        return self._resample_padded(x, as_sizes(tgt_sizes), temporal_ids)


class CrossAttention(nn.Module):
    """Multi-head attention of Q queries over the keys of each set; parameters as in `nn.MultiheadAttention`."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        if check_positive_int(embed_dim, "embed_dim") % check_positive_int(num_heads, "num_heads"):
            raise ValueError(f"embed_dim: must be a multiple of num_heads={num_heads}, got {embed_dim}")
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim).normal_(std=0.02))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query_QD: Tensor, keys_ND: Tensor, values_ND: Tensor, metadata, backend: str) -> Tensor:
        """(Q, D) queries, the same for every set -> (sets * Q, D)."""
        q_QHK, k_NHK, v_NHK = self.project(query_QD, keys_ND, values_ND)
        out_MHK = varlen_cross_attention(
            q_QHK.repeat(len(metadata.cu_seqlens_q) - 1, 1, 1), k_NHK, v_NHK,
            metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.max_seqlen_q, metadata.max_seqlen_k,
            backend=backend, groups=metadata.set_groups,
        )  # fmt: skip
        return self.out_proj(out_MHK.flatten(1))

    def project(self, *query_keys_values: Tensor) -> tuple[Tensor, ...]:
        """Queries (Q, D), keys (N, D) and values (N, D) -> (Q, H, K), (N, H, K), (N, H, K)."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        return tuple(
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1))
            for x, weight, bias in zip(query_keys_values, weights, biases, strict=True)
        )


def attention_weights(resampler: Resampler, rows_NC: Tensor, metadata: SetMetadata) -> list[Tensor]:
    """How much each query takes from each patch: (H, Q, L) per set of L patches; rows sum to 1.

    For inspection: `resample` never holds them. Arguments as there.
    """
    q_QHK, k_NHK, _ = resampler.attn.project(*resampler.attention_inputs(rows_NC, metadata))
    scores_HQN = torch.einsum("qhk,nhk->hqn", q_QHK, k_NHK) / resampler.attn.head_dim**0.5
    patches_per_set = metadata.cu_seqlens_k.diff().tolist()
    return [scores_HQL.softmax(-1) for scores_HQL in scores_HQN.split(patches_per_set, dim=-1)]


def grid_places(h: int, w: int) -> Tensor:
    """(h * w, 2) int32: row and column of each patch, row by row."""
    return torch.cartesian_prod(torch.arange(h, dtype=torch.int32), torch.arange(w, dtype=torch.int32)).view(-1, 2)


def plan_sets(num_queries: int, patches_per_set: Sequence[int], *, with_groups: bool) -> dict[str, Any]:
    """The fields of `SetMetadata`, but for the positions."""
    cu_seqlens_q = cumulative_lengths([num_queries] * len(patches_per_set))
    cu_seqlens_k = cumulative_lengths(patches_per_set)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "set_groups": group_segment_pairs(cu_seqlens_q, cu_seqlens_k) if with_groups else None,
        "max_seqlen_q": num_queries,
        "max_seqlen_k": max(patches_per_set, default=0),
    }


def as_temporal_groups(temporal_ids, num_slices: int) -> list[list[int]]:
    """One list of ids per group, -1 for None; None: every slice by itself, without a time.

    Raises TypeError for another kind and ValueError for ids below -1, an empty group, or ids that do not cover every
    slice once.
    """
    if temporal_ids is None:
        return [[NO_TIME]] * num_slices
    if not isinstance(temporal_ids, Sequence) or not all(isinstance(ids, Sequence) for ids in temporal_ids):
        raise TypeError(f"temporal_ids: expected one list of ids per group, or a flat tensor, got {temporal_ids!r}")
    groups = [[NO_TIME if id_ is None else id_ for id_ in ids] for ids in temporal_ids]
    for i, ids in enumerate(groups):
        if not all(map(is_integer, ids)):
            raise TypeError(f"temporal_ids[{i}]: expected integers, got {ids}")
        if not ids or min(ids) < NO_TIME:
            raise ValueError(f"temporal_ids[{i}]: expected at least one id, each -1 (no time) or more, got {ids}")
    if sum(map(len, groups)) != num_slices:
        raise ValueError(
            f"temporal_ids: expected one id per slice, {num_slices}, got {sum(map(len, groups))} in {groups}"
        )
    return groups


def count_per_set(ids: Sequence[int], patches: Sequence[int]) -> list[int]:
    """Patches that each set of queries reads: all of the group's, or those of one slice where there is no time.

    >>> count_per_set([2, 6], [24, 24]), count_per_set([-1, -1], [24, 24])
    ([48], [24, 24])
    """
    return [sum(patches)] if any(id_ != NO_TIME for id_ in ids) else list(patches)
