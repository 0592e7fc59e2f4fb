"""Layouts of MiniCPM-V that a caller writes by hand, normalised and hashable, or a clear error.

A processor's layouts are known to be good, so `chat` does without these checks.
"""

from collections.abc import Sequence

from torch import Tensor

from refvl.arguments import as_size
from refvl.checks import check_integers, check_shape, is_integer
from refvl.pixels.slices import NO_TIME, SliceGroup, SliceLayout


def as_layouts(layouts, name: str, *, reads_times: bool) -> list[SliceLayout]:
    """Return one tuple of `SliceGroup`s per item; a bare (h, w) is a slice by itself.

    reads_times: whether the version reads the times of frames. Raises TypeError for another kind. Raises ValueError for
    an item or group without slices, a slice without patches, temporal ids that do not cover every slice, and times
    given to a version that does not read them.
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
        raise ValueError(f"{name}: temporal ids are read by MiniCPM-V 4.5 alone, got {group.temporal_ids}")
    return SliceGroup(slices, tuple(map(int, ids)))


def as_temporal_groups(temporal_ids, num_slices: int) -> list[list[int]]:
    """Return one list of ids per group, with -1 for None.

    A flat tensor of ids, one per slice, groups nothing; None means slices by themselves, without a time. Raises
    TypeError for another kind, and ValueError for ids below -1, an empty group, or ids that do not cover every slice
    once.
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
            raise ValueError(f"temporal_ids[{i}]: expected at least one id, each -1 (no time) or more, got {ids}")
    if sum(map(len, groups)) != num_slices:
        raise ValueError(
            f"temporal_ids: expected one id per slice, {num_slices}, got {sum(map(len, groups))} in {groups}"
        )
    return groups
