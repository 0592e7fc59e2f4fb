"""MiniCPM-V's resamplers: learned queries attend to the patches of a slice, so 1,000 patches become 64 tokens.

    rows of the tower (N, C)                      slice after slice
       | kv_proj, ln_kv   to the language model's width
    keys = rows + positions, values = rows (N, D)
       | attn             `query`, through ln_q, over the keys of each slice: Q tokens per slice
       | ln_post, proj    LayerNorm, one matmul
    tokens (slices * Q, D)

    Resampler2     queries and keys have positions: the queries' fixed grid, resized for the keys         (2.0)
    Resampler2_5   only keys have positions: sines and cosines of row and column                        (2.5, 2.6, 4.0)
    Resampler4_5   the same plus time; the frames of a group share a set of queries                      (4.5)

Upstream stores tables of sines and cosines and enlarges them on demand. This file uses a
formula without a size limit, so a grid of 4 x 227, or a frame two hours into a video, needs no
special case. `resample` works on concatenated slices, without padded keys; `forward` accepts
the padded form of `refvl.encoders.slice_layouts`. `Resampler2` is in a separate file.

Shape suffixes: N patches of all slices, D the language model's width, Q queries, H heads, K
head dimension. Upstream: `Resampler2`, `Resampler2_5`, `Resampler4_5` (vLLM).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import attend, cumulative_lengths, zero_padding
from refvl.checks import as_sizes, check_positive_int
from refvl.encoders.slice_layouts import as_temporal_groups, resample_slices
from refvl.encoders.tower import Tower, to_device
from refvl.pixels.slices import NO_TIME
from refvl.positions.rotary import block_positions
from refvl.positions.tables import sincos, sincos_frequencies


@dataclass(frozen=True, slots=True, eq=False)
class SetMetadata:
    """The patches of each set of queries; in a captured graph, the integers are constants and serve as capacities."""

    positions: Tensor = field(metadata={"pad": "zero"})  # one row per patch
    cu_seqlens_q: Tensor = field(metadata={"pad": "repeat_last"})  # (sets + 1,) int32, in tokens
    cu_seqlens_k: Tensor = field(metadata={"pad": "repeat_last"})  # (sets + 1,) int32, in patches
    set_groups: tuple | None = field(metadata={"pad": "empty"})  # groups of sets of equal lengths; only for sdpa
    max_seqlen_q: int  # Q
    max_seqlen_k: int  # the largest number of patches of any set of queries


@dataclass(frozen=True, slots=True, eq=False)
class ResamplerMetadata(SetMetadata):
    """The metadata of `Resampler2_5`: positions are (N, 2) int32, the row and column of each patch in its slice.

    The frequencies depend only on the width. They are part of the plan, because
    `.to(torch.bfloat16)` would round a buffer of the module, and `to_empty` would lose it.
    """

    frequencies: Tensor = field(metadata={"pad": "zero"})  # (D / 4,) float32


@dataclass(frozen=True, slots=True, eq=False)
class TemporalResamplerMetadata(ResamplerMetadata):
    """The metadata of `Resampler2_5` plus the time of each patch."""

    times: Tensor = field(metadata={"pad": "zero"})  # (N,) int32: the temporal id of the patch's frame, or -1 for none
    time_frequencies: Tensor = field(metadata={"pad": "zero"})  # (D / 2,) float32


class Resampler(Tower):
    """The base class of all versions: every set of queries attends to its own patches."""

    def __init__(
        self, num_queries: int, embed_dim: int, num_heads: int, kv_dim: int | None = None, max_size=None, *,
        attention: str = "auto",
    ):  # fmt: skip
        """Build the modules.

        kv_dim: the width of the rows (default: embed_dim, without a projection). max_size:
        upstream's initial table size; unused, because positions are computed for any size.
        """
        super().__init__(None, attention=attention)
        self.num_queries = check_positive_int(num_queries, "num_queries")
        self.embed_dim = embed_dim  # D
        self.query = nn.Parameter(torch.empty(num_queries, embed_dim).normal_(std=0.02))
        if kv_dim is None or kv_dim == embed_dim:  # rows already have the language model's width
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

    def check_layouts(self, layouts, *, name: str = "tgt_sizes") -> list[tuple[int, int]]:
        """Return the (h, w) of each slice in patches; errors as in `as_sizes`."""
        return as_sizes(layouts, name)

    def plan_sets(self, patches_per_set: Sequence[int]) -> dict[str, Any]:
        """Return all fields of `SetMetadata` except the positions, from the number of patches of each set."""
        cu_seqlens_q = cumulative_lengths([self.num_queries] * len(patches_per_set))
        cu_seqlens_k = cumulative_lengths(patches_per_set)
        needs_groups = self.backend() == "sdpa"
        return {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "set_groups": group_segment_pairs(cu_seqlens_q, cu_seqlens_k) if needs_groups else None,
            "max_seqlen_q": self.num_queries,
            "max_seqlen_k": max(patches_per_set, default=0),
        }

    def resample(self, rows_NC: Tensor, metadata: Any, attention: str | None = None) -> Tensor:
        """Resample (N, kv_dim) rows of all slices to (sets * Q, D); `attention` overrides the module's backend."""
        backend = self.backend(attention)
        query_QD, keys_ND, values_ND = self.attention_inputs(rows_NC, metadata)
        return self.ln_post(self.attn(query_QD, keys_ND, values_ND, metadata, backend)) @ self.proj

    def attention_inputs(self, rows_NC: Tensor, metadata: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (Q, D), keys (N, D) and values (N, D) before they are projected."""
        values_ND = self.ln_kv(self.kv_proj(rows_NC.to(self.query.dtype)))
        return self.ln_q(self.query), self.add_positions(values_ND, metadata), values_ND

    def add_positions(self, x_ND: Tensor, metadata: Any) -> Tensor:
        """Return the keys (N, D) for the values x_ND."""
        raise NotImplementedError

    def rename(self, name: str) -> str:
        """Drop `resampler.` from a weight's name."""
        return name.removeprefix("resampler.")


class Resampler2_5(Resampler):
    """The resampler of MiniCPM-V 2.5, 2.6 and 4.0: keys contain the sines and cosines of their row and column."""

    def plan_checked(self, layouts: Sequence[tuple[int, int]]) -> ResamplerMetadata:
        """Compute the plan on the CPU, and move it to the resampler's device.

        layouts: the (h, w) of each slice.
        """
        sets = self.plan_sets([h * w for h, w in layouts])
        frequencies = sincos_frequencies(self.embed_dim // 2)
        metadata = ResamplerMetadata(positions=rows_columns(layouts), frequencies=frequencies, **sets)
        return to_device(metadata, self.device)

    def plan_capacity(self, max_patches: int, max_sets: int) -> ResamplerMetadata:
        """Return a plan in which one set attends to all patches, large enough for any batch within these limits."""
        plan, unused = self.plan([(1, max_patches)]), max_sets - 1
        return replace(
            plan,
            cu_seqlens_q=torch.cat([plan.cu_seqlens_q, plan.cu_seqlens_q[-1:].expand(unused)]),
            cu_seqlens_k=torch.cat([plan.cu_seqlens_k, plan.cu_seqlens_k[-1:].expand(unused)]),
            set_groups=None,
        )

    def add_positions(self, x_ND: Tensor, metadata: Any) -> Tensor:
        """Return x_ND plus sines and cosines of the column (first half of the channels) and row, as in `sincos_2d`."""
        column_row = sincos(metadata.positions.flip(-1), metadata.frequencies)  # (N, 2, D / 2)
        return x_ND + column_row.flatten(1).to(x_ND.dtype)

    def forward(self, x: Tensor, tgt_sizes) -> Tensor:
        """Resample (B, L, kv_dim) to (B, Q, D). tgt_sizes: (B, 2); slice b is the first h * w rows of x[b]."""
        return resample_slices(self, x, tgt_sizes)


class Resampler4_5(Resampler2_5):
    """The resampler of MiniCPM-V 4.5: keys also encode time, and the frames of a group share a set of queries."""

    def __init__(self, *args, max_temporal_size: int = 36000, **kwargs):
        """Build the modules of `Resampler2_5`; max_temporal_size, upstream's initial table size, is unused."""
        super().__init__(*args, **kwargs)

    def plan(self, tgt_sizes, temporal_ids=None) -> TemporalResamplerMetadata:
        """Plan slices of (h, w) patches each, in groups.

        temporal_ids: one list per group, with one id per slice; -1 or None means no time. A
        group shares one set of queries; if all of its ids are -1, each slice has its own set. A
        flat tensor contains one group per id; None means that no slice has a time.
        """
        sizes = as_sizes(tgt_sizes)
        return self.plan_checked(sizes, as_temporal_groups(temporal_ids, len(sizes)))

    def plan_checked(  # type: ignore[override]  # here, slices also have times
        self, layouts: Sequence[tuple[int, int]], temporal_ids: Sequence[Sequence[int]]
    ) -> TemporalResamplerMetadata:
        """Plan slices whose sizes and times are already checked.

        layouts: the (h, w) of each slice in patches. temporal_ids: one list per group, one id
        per slice, -1 for none.
        """
        patches = [h * w for h, w in layouts]
        patches_per_set = list[int]()
        start = 0
        for ids in temporal_ids:
            of_group = patches[start : start + len(ids)]
            patches_per_set += of_group if max(ids) == NO_TIME else [sum(of_group)]
            start += len(ids)
        time_of_slice = torch.tensor([id_ for ids in temporal_ids for id_ in ids], dtype=torch.int32)
        metadata = TemporalResamplerMetadata(
            positions=rows_columns(layouts),
            frequencies=sincos_frequencies(self.embed_dim // 2),
            times=time_of_slice.repeat_interleave(torch.tensor(patches, dtype=torch.long)),
            time_frequencies=sincos_frequencies(self.embed_dim),
            **self.plan_sets(patches_per_set),
        )
        return to_device(metadata, self.device)

    def add_positions(self, x_ND: Tensor, metadata: Any) -> Tensor:
        """Return x_ND plus the encodings of row, column and, if a patch has one, time."""
        x_ND = super().add_positions(x_ND, metadata)
        time_ND = sincos(metadata.times, metadata.time_frequencies).to(x_ND.dtype)
        return x_ND + time_ND.masked_fill((metadata.times == NO_TIME)[:, None], 0)

    def forward(self, x: Tensor, tgt_sizes, temporal_ids=None) -> Tensor:
        """Resample (B, L, kv_dim) to (sets, Q, D).

        tgt_sizes: (B, 2), as in `Resampler2_5`; temporal_ids: as in `plan`.
        """
        return resample_slices(self, x, tgt_sizes, temporal_ids)


class CrossAttention(nn.Module):
    """Multi-head attention of Q queries over the keys of each set; parameters as in `nn.MultiheadAttention`."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim: must be a multiple of num_heads={num_heads}, got {embed_dim}")
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim).normal_(std=0.02))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query_QD: Tensor, keys_ND: Tensor, values_ND: Tensor, metadata, backend: str) -> Tensor:
        """Attend with (Q, D) queries, the same for every set; return (sets * Q, D)."""
        q_QHK, k_NHK, v_NHK = self.project(query_QD, keys_ND, values_ND)
        cu_seqlens_q, cu_seqlens_k, groups = metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.set_groups
        if groups is None and backend == "sdpa":
            groups = group_segment_pairs(cu_seqlens_q, cu_seqlens_k)
        q_MHK = q_QHK.repeat(len(cu_seqlens_q) - 1, 1, 1)
        longest = metadata.max_seqlen_q, metadata.max_seqlen_k
        out_MHK = attend(q_MHK, k_NHK, v_NHK, cu_seqlens_q, cu_seqlens_k, *longest, backend, groups)
        return self.out_proj(zero_padding(out_MHK, cu_seqlens_q, backend).flatten(1))

    def project(self, *query_keys_values: Tensor) -> tuple[Tensor, ...]:
        """Project queries (Q, D), keys (N, D) and values (N, D) to (Q, H, K), (N, H, K), (N, H, K)."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        return tuple(
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1))
            for x, weight, bias in zip(query_keys_values, weights, biases, strict=True)
        )


def attention_weights(resampler: Resampler, rows_NC: Tensor, metadata: SetMetadata) -> list[Tensor]:
    """Return the queries' attention weights: (H, Q, L) per set of L patches; rows sum to 1.

    Use this for inspection; `resample` never stores the weights and has the same arguments.
    """
    q_QHK, k_NHK, _ = resampler.attn.project(*resampler.attention_inputs(rows_NC, metadata))
    scores_HQN = torch.einsum("qhk,nhk->hqn", q_QHK, k_NHK) / resampler.attn.head_dim**0.5
    patches_per_set = metadata.cu_seqlens_k.diff().tolist()
    return [scores_HQL.softmax(-1) for scores_HQL in scores_HQN.split(patches_per_set, dim=-1)]


def rows_columns(sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Return (N, 2) int32: the row and column of each patch in its slice, in row-major order."""
    return block_positions([(1, h, w) for h, w in sizes], 1).int()


def group_segment_pairs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the indices of (queries (G, S), keys (G, T)) for each distinct pair of segment lengths.

    Segments without queries or without keys are omitted.
    """
    ends_q, ends_k = cu_seqlens_q.cpu().numpy(), cu_seqlens_k.cpu().numpy()
    pairs = np.stack([np.diff(ends_q), np.diff(ends_k)])
    groups = []
    for q, k in sorted({(q, k) for q, k in pairs.T.tolist() if q and k}):
        chosen = np.flatnonzero((pairs[0] == q) & (pairs[1] == k))
        queries_GS, keys_GT = _spans(ends_q[chosen], q), _spans(ends_k[chosen], k)
        groups.append((queries_GS.to(cu_seqlens_q.device), keys_GT.to(cu_seqlens_k.device)))
    return tuple(groups)


def _spans(starts: np.ndarray, length: int) -> Tensor:
    """Return (G, length) int64: `length` consecutive indices from each start."""
    return torch.from_numpy(starts[:, None] + np.arange(length))
