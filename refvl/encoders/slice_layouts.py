"""Support for direct calls to MiniCPM-V's parts: layout checks, and slices in a padded batch.

The checks return normalised, hashable layouts, or raise an error. A processor's layouts are
valid, so `chat` skips these checks.

Encoders never pad, because they concatenate slices. `encode_strips` and `resample_slices` accept
upstream's padded form, in which each slice of a batch is padded to the length of the longest slice.
The padding of inputs is never read, so it may have any values; the padding of results is zero.

Shape suffixes: B slices, L patches of the longest slice, N patches of all slices, C values of a
patch, E the tower's width, Q queries, D the language model's width.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from refvl.checks import as_integers, as_sequence, as_sizes, check_integers, check_shape, is_integer
from refvl.pixels.slices import NO_TIME, SliceGroup, SliceLayout


def as_layouts(layouts, name: str, *, reads_times: bool) -> list[SliceLayout]:
    """Return one tuple of `SliceGroup`s per item; a bare (h, w) becomes a group of one slice.

    reads_times: whether the version uses the times of frames. Raises TypeError for values of
    the wrong type. Raises ValueError for an item or group without slices, for a slice without
    patches, and for temporal ids that do not cover every slice. If reads_times is False, times
    also raise ValueError.
    """
    checked = []
    for i, layout in enumerate(as_sequence(layouts, name)):
        groups = enumerate(as_sequence(layout, f"{name}[{i}]"))
        checked.append(tuple(as_slice_group(group, f"{name}[{i}][{j}]", reads_times) for j, group in groups))
        if not checked[-1]:
            raise ValueError(f"{name}[{i}]: expected at least one slice, got none")
    return checked


def as_slice_group(group, name: str, reads_times: bool) -> SliceGroup:
    """Return a `SliceGroup` or (h, w) as a `SliceGroup`, with every value checked; ids that are all -1 become None."""
    if not isinstance(group, SliceGroup):
        h, w = as_integers(group, "(h, w)", name)
        return SliceGroup(((h, w),))
    slices = tuple(as_sizes(group.slices, f"{name}.slices"))
    if not slices:
        raise ValueError(f"{name}: expected at least one slice, got none")
    if group.temporal_ids is None:
        return SliceGroup(slices)
    [ids] = as_temporal_groups([group.temporal_ids], len(slices), f"{name}: temporal_ids")
    if set(ids) == {NO_TIME}:
        return SliceGroup(slices)
    if not reads_times:
        raise ValueError(f"{name}: expected no temporal ids, which only MiniCPM-V 4.5 supports, got {ids}")
    return SliceGroup(slices, tuple(map(int, ids)))


def as_temporal_groups(temporal_ids, num_slices: int, name: str = "temporal_ids") -> list[list[int]]:
    """Return one list of ids per group, with -1 in place of None.

    In a flat tensor, each id is a separate group; None means separate slices without times.
    Raises ValueError for ids that are not integers of at least -1, for an empty group, or for
    ids that do not cover every slice once.
    """
    if temporal_ids is None:
        return [[NO_TIME]] * num_slices
    if isinstance(temporal_ids, Tensor):
        temporal_ids = check_integers(check_shape(temporal_ids, ("slices",), name), name)[:, None].tolist()
    groups = [[NO_TIME if id_ is None else id_ for id_ in as_sequence(ids, name)] for ids in temporal_ids]
    if not all(groups) or not all(is_integer(id_) and id_ >= NO_TIME for id_ in chain(*groups)):
        raise ValueError(f"{name}: expected groups of integers of at least -1 (-1: no time), got {groups}")
    if (count := sum(map(len, groups))) != num_slices:
        raise ValueError(f"{name}: expected one id for each of {num_slices} slices, got {count} in {groups}")
    return groups


def encode_strips(tower: Any, pixel_values: Tensor, tgt_sizes, position_sizes=None) -> Tensor:
    """Encode (B, C, P, L * P) strips into (B, L, E); slice b is the first h * w patches of strip b.

    tower: a `NaVitSiglip`. tgt_sizes, position_sizes: (B, 2); see `NaVitSiglip.plan`. Raises
    ValueError if a strip is too short for its slice.
    """
    P, sizes = tower.config.patch_size, as_sizes(tgt_sizes)
    check_shape(pixel_values, (len(sizes), tower.config.num_channels, P, "L"), "pixel_values")
    if pixel_values.shape[-1] % P:
        raise ValueError(f"pixel_values: expected a width of whole patches of {P} px, got {pixel_values.shape[-1]} px")
    rows_BLC = pixel_values.unflatten(-1, (-1, P)).permute(0, 3, 1, 2, 4).flatten(2)
    lengths = [h * w for h, w in sizes]
    rows_NE = tower.encode(unpad(rows_BLC, lengths, "pixel_values"), tower.plan(sizes, position_sizes))
    return pad(rows_NE, lengths, rows_BLC.shape[1])


def resample_slices(resampler: Any, x: Tensor, tgt_sizes, *temporal_ids) -> Tensor:
    """Resample (B, L, kv_dim) to (sets, Q, D). resampler: a `Resampler2_5` or a `Resampler4_5`.

    tgt_sizes: (B, 2); slice b is the first h * w rows of x[b], and no other row is read.
    temporal_ids: see `Resampler4_5.plan`.
    """
    sizes = as_sizes(tgt_sizes)
    check_shape(x, (len(sizes), "L", "kv_dim"), "x")
    rows_NC = unpad(x, [h * w for h, w in sizes], "x")
    metadata = resampler.plan(sizes, *temporal_ids)
    return resampler.resample(rows_NC, metadata).unflatten(0, (-1, resampler.num_queries))


def unpad(padded: Tensor, lengths: Sequence[int], name: str) -> Tensor:
    """Concatenate the first `lengths[b]` rows of each padded[b], (L, ...); raise ValueError if L is smaller."""
    if any(length > padded.shape[1] for length in lengths):
        raise ValueError(f"tgt_sizes: expected at most {padded.shape[1]} patches per slice of {name}, got {[*lengths]}")
    return torch.cat([padded.flatten(0, 1)[:0], *(rows[:length] for rows, length in zip(padded, lengths, strict=True))])


def pad(rows: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
    """Invert `unpad`: return (B, longest, ...), with zeros after each slice."""
    padded = rows.new_zeros(len(lengths), longest, *rows.shape[1:])
    for b, piece in enumerate(rows.split(list(lengths))):
        padded[b, : len(piece)] = piece
    return padded
