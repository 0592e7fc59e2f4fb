"""Support for direct calls to MiniCPM-V's parts: layout checks, and slices in a padded batch.

Layouts are normalised and made hashable, or an error describes the problem. A processor's layouts are valid, so `chat`
skips these checks.

Encoders never pad: their slices are concatenated. `encode_strips` and `resample_slices` accept upstream's padded form,
in which each slice of a batch is padded to the length of the longest. The padding of a slice is never read, so its
values are arbitrary; the padding in results is zero.

Shape suffixes: B slices, L patches of the longest slice, N patches of all slices, C values of a patch, E the tower's
width, Q queries, D the language model's width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refvl.checks import as_size, as_sizes, check_integers, check_shape, is_integer
from refvl.pixels.slices import NO_TIME, SliceGroup, SliceLayout


def as_layouts(layouts, name: str, *, reads_times: bool) -> list[SliceLayout]:
    """Return one tuple of `SliceGroup`s per item; a bare (h, w) forms its own group.

    reads_times: whether the version uses the times of frames. Raises TypeError for values of the wrong type. Raises
    ValueError for an item or group without slices, for a slice without patches, and for temporal ids that do not cover
    every slice. Versions that do not use times raise ValueError if times are given.
    """
    if not isinstance(layouts, Sequence) or isinstance(layouts, str):
        raise TypeError(f"{name}: expected a sequence of layouts, got {type(layouts).__name__}")
    checked = []
    for i, layout in enumerate(layouts):
        if not isinstance(layout, Sequence) or isinstance(layout, str):
            raise TypeError(f"{name}[{i}]: expected a tuple of SliceGroups or (h, w), got {type(layout).__name__}")
        if not layout:
            raise ValueError(f"{name}[{i}]: expected at least one slice, got none")
        groups = [as_slice_group(group, f"{name}[{i}][{j}]", reads_times) for j, group in enumerate(layout)]
        checked.append(tuple(groups))
    return checked


def as_slice_group(group, name: str, reads_times: bool) -> SliceGroup:
    """Return a `SliceGroup` or (h, w) as a `SliceGroup`, with every value checked; ids that are all -1 become None."""
    if not isinstance(group, SliceGroup):
        return SliceGroup((as_size(group, name),))
    if not group.slices:
        raise ValueError(f"{name}: expected at least one slice, got none")
    slices = tuple(as_size(size, f"{name}.slices[{i}]") for i, size in enumerate(group.slices))
    if group.temporal_ids is None:
        return SliceGroup(slices)
    try:
        [ids] = as_temporal_groups([list(group.temporal_ids)], len(slices))
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None
    if set(ids) == {NO_TIME}:
        return SliceGroup(slices)
    if not reads_times:
        raise ValueError(f"{name}: expected no temporal ids, which only MiniCPM-V 4.5 supports, got {ids}")
    return SliceGroup(slices, tuple(map(int, ids)))


def as_temporal_groups(temporal_ids, num_slices: int) -> list[list[int]]:
    """Return one list of ids per group, with -1 for None.

    A flat tensor of ids, one per slice, forms no groups; None means separate slices without times. Raises TypeError for
    a different type, and ValueError for ids below -1, an empty group, or ids that do not cover every slice once.
    """
    if temporal_ids is None:
        return [[NO_TIME]] * num_slices
    if isinstance(temporal_ids, Tensor):
        check_integers(check_shape(temporal_ids, ("slices",), "temporal_ids"), "temporal_ids")
        temporal_ids = temporal_ids[:, None].tolist()
    if not isinstance(temporal_ids, Sequence) or not all(isinstance(ids, Sequence) for ids in temporal_ids):
        raise TypeError(f"temporal_ids: expected one list of ids per group, or a flat tensor, got {temporal_ids!r}")
    groups = [[NO_TIME if id_ is None else id_ for id_ in ids] for ids in temporal_ids]
    for i, ids in enumerate(groups):
        if not all(map(is_integer, ids)):
            raise TypeError(f"temporal_ids[{i}]: expected integers, got {ids}")
        if not ids or min(ids) < NO_TIME:
            raise ValueError(f"temporal_ids[{i}]: expected at least one id, and none below -1 (no time), got {ids}")
    if sum(map(len, groups)) != num_slices:
        raise ValueError(
            f"temporal_ids: expected one id for each of {num_slices} slices, got {sum(map(len, groups))} in {groups}"
        )
    return groups


def encode_strips(tower: Any, pixel_values: Tensor, tgt_sizes, position_sizes=None) -> Tensor:
    """Encode (B, C, P, L * P) strips into (B, L, E); slice b is the first h * w patches of strip b.

    tower: a `NaVitSiglip`. tgt_sizes, position_sizes: (B, 2); see `NaVitSiglip.plan`. Raises ValueError if a strip is
    too short for its slice.
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

    tgt_sizes: (B, 2); slice b is the first h * w rows of x[b], and no other row is read. temporal_ids: see
    `Resampler4_5.plan`.
    """
    sizes = as_sizes(tgt_sizes)
    check_shape(x, (len(sizes), "L", "kv_dim"), "x")
    rows_NC = unpad(x, [h * w for h, w in sizes], "x")
    metadata = resampler.plan(sizes, *temporal_ids)
    return resampler.resample(rows_NC, metadata).unflatten(0, (-1, resampler.num_queries))


def unpad(padded: Tensor, lengths: Sequence[int], name: str) -> Tensor:
    """Concatenate the first `lengths[b]` rows of each b of (B, L, ...); raise ValueError if there are fewer rows."""
    if any(length > padded.shape[1] for length in lengths):
        raise ValueError(f"tgt_sizes: expected at most {padded.shape[1]} patches per slice of {name}, got {[*lengths]}")
    return torch.cat([padded.flatten(0, 1)[:0], *(rows[:length] for rows, length in zip(padded, lengths, strict=True))])


def pad(rows: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
    """Invert `unpad`: return (B, longest, ...), with zeros after each slice."""
    padded = rows.new_zeros(len(lengths), longest, *rows.shape[1:])
    for b, piece in enumerate(rows.split(list(lengths))):
        padded[b, : len(piece)] = piece
    return padded
