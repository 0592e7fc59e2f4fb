"""The padded forms of MiniCPM-V's parts: slices in a batch, each filled up to the longest, as upstream passes them.

Encoders never pad: their slices are stored end to end. A `NaVitSiglip` or a resampler that is called by hand runs one
of these functions. The padding of a slice is never read, so it may hold anything; in results it is zero.

Shape suffixes: B slices, L patches of the longest, N patches of all slices, C values of a patch, E the tower's width,
Q queries, D the language model's width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refvl.arguments import as_sizes
from refvl.checks import check_shape


def encode_strips(tower: Any, pixel_values: Tensor, tgt_sizes, position_sizes=None) -> Tensor:
    """(B, C, P, L * P) strips -> (B, L, E). tower: a `NaVitSiglip`; slice b is the first h * w patches of strip b.

    tgt_sizes, position_sizes: (B, 2), see `NaVitSiglip.plan`. Raises ValueError if a strip is too short for its slice.
    """
    P, sizes = tower.config.patch_size, as_sizes(tgt_sizes)
    check_shape(pixel_values, (len(sizes), tower.config.num_channels, P, "L"), "pixel_values")
    if pixel_values.shape[-1] % P:
        raise ValueError(f"pixel_values: strips must be whole patches of {P} px, got {pixel_values.shape[-1]}")
    rows_BLC = pixel_values.unflatten(-1, (-1, P)).permute(0, 3, 1, 2, 4).flatten(2)
    lengths = [h * w for h, w in sizes]
    rows_NE = tower.encode(unpad(rows_BLC, lengths, "pixel_values"), tower.plan(sizes, position_sizes))
    return pad(rows_NE, lengths, rows_BLC.shape[1])


def resample_slices(resampler: Any, x: Tensor, tgt_sizes, *temporal_ids) -> Tensor:
    """(B, L, kv_dim) -> (sets, Q, D). resampler: a `Resampler2_5` or a `Resampler4_5`.

    tgt_sizes: (B, 2); slice b is the first h * w rows of x[b], and no other row is read. temporal_ids: see
    `Resampler4_5.plan`.
    """
    sizes = as_sizes(tgt_sizes)
    check_shape(x, (len(sizes), "L", "kv_dim"), "x")
    rows_NC = unpad(x, [h * w for h, w in sizes], "x")
    metadata = resampler.plan(sizes, *temporal_ids)
    return resampler.resample(rows_NC, metadata).unflatten(0, (-1, resampler.num_queries))


def unpad(padded: Tensor, lengths: Sequence[int], name: str) -> Tensor:
    """(B, L, ...) -> the first `lengths[b]` rows of each b, end to end; ValueError if there are fewer."""
    if any(length > padded.shape[1] for length in lengths):
        raise ValueError(f"tgt_sizes: slices of {list(lengths)} patches do not fit the {padded.shape[1]} of {name}")
    return torch.cat([padded.flatten(0, 1)[:0], *(rows[:length] for rows, length in zip(padded, lengths, strict=True))])


def pad(rows: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
    """The inverse of `unpad`: (B, longest, ...), zero after each slice."""
    padded = rows.new_zeros(len(lengths), longest, *rows.shape[1:])
    for b, piece in enumerate(rows.split(list(lengths))):
        padded[b, : len(piece)] = piece
    return padded
