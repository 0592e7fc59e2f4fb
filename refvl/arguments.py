"""Checks for arguments that callers write by hand: grids, sizes, ids, masks, times and names."""

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from refvl.checks import (
    MAX_PATCHES,
    Grid,
    check_integers,
    check_number,
    check_positive_int,
    check_shape,
    check_values,
    is_integer,
)

MAX_FRAMES = 2**24  # the maximum number of frames in a video: three days at 60 frames per second
MAX_SECONDS = 10**6  # the maximum time between two grid steps: more than eleven days
MAX_PLAN_BYTES = 2**30  # the maximum size of the vectors in one plan, one vector per patch


def as_grids(grid_thw, *, spatial_merge_size: int = 1, name: str = "grid_thw", size: int = 0) -> list[Grid]:
    """Normalise `grid_thw` to a list of (t, h, w) tuples of Python ints, in patches.

    Accepts a sequence of (t, h, w) or an integer tensor/array of shape (items, 3).
    Raises TypeError for a wrong type and ValueError for a wrong shape or value. Both h and w must be multiples of
    `spatial_merge_size`, because a merged token needs a whole merge block of patches.
    size: the number of bytes that a plan stores for each patch (see `check_room`).
    """
    m = check_positive_int(spatial_merge_size, "spatial_merge_size")
    grids = list[Grid]()
    for i, (t, h, w) in enumerate(as_integer_rows(grid_thw, "(t, h, w)", name)):
        if h % m or w % m:
            raise ValueError(f"{name}[{i}]: h and w must be multiples of spatial_merge_size={m}, got {(t, h, w)}")
        grids.append((t, h, w))
    check_room([sum(map(math.prod, grids))], size, name)
    return grids


def as_sizes(tgt_sizes, name: str = "tgt_sizes") -> list[tuple[int, int]]:
    """Normalise `tgt_sizes` to a list of (h, w) tuples of Python ints, in patches; errors as in `as_grids`."""
    return [(h, w) for h, w in as_integer_rows(tgt_sizes, "(h, w)", name, items="slices")]


def as_size(size, name: str) -> tuple[int, int]:
    """Return the `size` of a slice as (h, w): two Python ints, each at least 1."""
    h, w = as_integers(size, "(h, w)", name)
    return h, w


def as_integer_rows(values, row: str, name: str, *, items: str = "items", least: int = 1) -> list[tuple[int, ...]]:
    """Return `values`, a sequence of rows or an array (items, n), as tuples of Python ints (see `as_integers`).

    items: the word for the rows in error messages.
    """
    if isinstance(values, Tensor) or hasattr(values, "__array__"):
        values = check_values(check_integers(torch.as_tensor(values), name), name)
        if values.ndim != 2 or values.shape[1] != len(row.split()):
            raise ValueError(f"{name}: expected shape ({items}, {len(row.split())}), got {tuple(values.shape)}")
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name}: expected a sequence of {row}, got {type(values).__name__}")
    rows = [as_integers(value, row, f"{name}[{i}]", least) for i, value in enumerate(values)]
    if (patches := sum(map(math.prod, rows))) > MAX_PATCHES:
        raise ValueError(f"{name}: expected at most {MAX_PATCHES:,} patches in one plan, got {patches:,}")
    return rows


def check_room(extents: Sequence[int], size: int, name: str) -> Sequence[int]:
    """Return `extents` if vectors of `size` bytes, one per position, take less than `MAX_PLAN_BYTES` in total.

    Raises ValueError naming `name`.
    """
    if (needed := math.prod(extents) * size) >= MAX_PLAN_BYTES:
        vectors = f"expected less than {MAX_PLAN_BYTES / 2**30:.0f} GiB of vectors in one plan"
        raise ValueError(f"{name}: {vectors}, got {needed // 2**30:,} GiB for {math.prod(extents):,} patches")
    return extents


def check_plan(encoder: Any, layouts: list) -> list:
    """Return the layouts of a batch; raise ValueError if the batch has more patches than one plan may contain.

    An encoder whose `config` is None is part of a larger encoder, which has already checked the sizes.
    """
    if encoder.config is not None:
        patches = sum(encoder.item_size(layout)[0] for layout in layouts)
        if patches > MAX_PATCHES:
            raise ValueError(f"layouts: expected at most {MAX_PATCHES:,} patches in one plan, got {patches:,}")
        check_room([patches], encoder.config.hidden_size * encoder.dtype.itemsize, "layouts")
    return layouts


def as_integers(values, row: str, name: str, least: int = 1, most: int = MAX_PATCHES) -> tuple[int, ...]:
    """Return `values` as Python ints, one for each name in `row`, such as "(t, h, w)".
    Each must be at least `least`, and their product at most `most`."""
    values = as_list(values, name)
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(row.split()):
        raise ValueError(f"{name}: expected {row}, got {values!r}")
    if not all(map(is_integer, values)):
        raise TypeError(f"{name}: expected integers {row}, got {values!r}")
    integers = tuple(map(int, values))
    if min(integers) < least:
        raise ValueError(f"{name}: every extent must be at least {least}, got {integers}")
    if math.prod(integers) > most:
        raise ValueError(f"{name}: expected at most {most:,} patches in one plan, got {integers}")
    return integers


def check_token_ids(input_ids, name: str = "input_ids") -> Tensor:
    """Return `input_ids` if it is a dense tensor (B, L) of int32 or int64; raise TypeError or ValueError naming it."""
    check_integers(check_shape(input_ids, ("B", "L"), name), name)
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got dtype {input_ids.dtype}")
    return check_values(input_ids, name)


def check_prompts(input_ids, attention_mask, vocab_size: int) -> Tensor:
    """Return the (B, L) bool mask of a batch of prompts, on the CPU: True for tokens, False for padding on the left.

    attention_mask: a (B, L) tensor of zeros and ones, or None if there is no padding. Raises a TypeError or ValueError
    that names the argument and the prompt. The causes are empty prompts, mask values other than 0 and 1, padding that
    is not on the left, and ids outside the vocabulary.
    """
    ids = check_token_ids(input_ids).cpu()
    if not ids.numel():
        raise ValueError(f"input_ids: expected prompts of at least one token, got shape {tuple(ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(ids)
    mask = check_values(check_shape(attention_mask, tuple(ids.shape), "attention_mask"), "attention_mask").cpu()
    for i, (row, keep) in enumerate(zip(ids, mask, strict=True)):
        if (wrong := keep[(keep != 0) & (keep != 1)]).numel():
            raise ValueError(f"attention_mask[{i}]: expected 0 (padding) or 1, got {wrong[0].item()}")
        kept = keep.bool()
        if not kept[-1] or (kept[:-1] & ~kept[1:]).any():
            raise ValueError(f"attention_mask[{i}]: expected padding only on the left, got padding elsewhere")
        if len(outside := row[kept & ((row < 0) | (row >= vocab_size))]):
            raise ValueError(f"input_ids[{i}]: expected token ids from 0 to {vocab_size - 1}, got {outside[0]}")
    return mask.bool()


def as_list(values, name: str):
    """Return a tensor or array as nested lists, and any other value unchanged.

    Raise TypeError as `check_values` does.
    """
    values = check_values(values, name) if isinstance(values, Tensor) else values
    return values.tolist() if hasattr(values, "tolist") else values


def as_sequence(values, name: str) -> Sequence:
    """Return `values` (see `as_list`) if it is a sequence but not a string; raise TypeError naming `name`."""
    values = as_list(values, name)
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"{name}: expected a sequence, got {type(values).__name__}")
    return values


def check_count(value, name: str, most: int = MAX_PATCHES) -> int:
    """Return `value` if it is a count from 1 to `most`; raise TypeError or ValueError naming `name`."""
    if (count := check_positive_int(value, name)) > most:
        raise ValueError(f"{name}: must be at most {most:,}, got {count:,}")
    return count


def check_mask(keep_L, positions_3L) -> None:
    """Raise TypeError or ValueError unless `keep_L` is a bool tensor (L,) and `positions_3L` a tensor (3, L)."""
    length = check_shape(positions_3L, (3, "L"), "positions_3L").shape[1]
    if check_shape(keep_L, (length,), "keep_L").dtype != torch.bool:
        raise TypeError(f"keep_L: expected bool, got dtype {keep_L.dtype}")


def as_seconds(values, count: int, name: str) -> list[float]:
    """Return one positive float for each of `count` videos. values: a sequence, or a tensor (videos,)."""
    values = as_sequence(values, name)
    if len(values) != count:
        raise ValueError(f"{name}: expected one number for each of {count} videos, got {len(values)}")
    values = [value.item() if isinstance(value, Tensor) else value for value in values]
    for i, value in enumerate(values):
        if not 0 < check_number(value, f"{name}[{i}]") <= MAX_SECONDS:  # this also rejects nan
            raise ValueError(f"{name}[{i}]: expected more than 0 and at most {MAX_SECONDS:,} seconds, got {value}")
    return [float(value) for value in values]


def is_grid(layout: object) -> bool:
    """Return whether a layout is (t, h, w), the form that Qwen and GLM use."""
    return isinstance(layout, (list, tuple)) and len(layout) == 3 and all(type(x) is int and x > 0 for x in layout)


def check_names(given: Iterable[str], allowed: Sequence[str], what: str, error: type[Exception] = TypeError) -> None:
    """Raise `error` for the first name that is not allowed, and suggest the most similar allowed name."""
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            short = f"; allowed: {', '.join(allowed)}" if len(allowed) < 12 else ""
            hint = f"; did you mean {near[0]!r}?" if near else short
            raise error(f"{name}: {what} accepts no such argument{hint}")
