"""Checks of callers' arguments; the errors name the argument, its value and the allowed values."""

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
Grid = tuple[int, int, int]
# the limit per media item and per prompt; no model accepts as many patches, and plans stay below 2 GB
MAX_PATCHES = 2**22
WORDED = (ValueError, OSError, ImportError)  # errors whose messages need no context
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # without float8, whose values need a scale


def is_integer(value) -> bool:
    """Return whether `value` is an int, or a NumPy or torch scalar of an integer dtype, but not a bool."""
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(value, name: str, least: int) -> int:
    """Return `value` if it is an integer of at least `least`; raise TypeError or ValueError naming `name`."""
    if not is_integer(value):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name}: must be at least {least}, got {value}")
    return int(value)


def check_positive_int(value, name: str) -> int:
    """Return `value` if it is an integer of at least 1; raise TypeError or ValueError naming `name`."""
    return value if type(value) is int and value > 0 else check_int(value, name, 1)


def check_positive_ints(**values) -> list[int]:
    """Return the values as ints if all are positive integers; an error names the keyword argument."""
    return [check_positive_int(value, name) for name, value in values.items()]


def check_number(value, name: str) -> float:
    """Return `value` as a float if it is a Python or NumPy real number; raise TypeError naming `name`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {value!r}")
    return float(value)


def check_positive(value, name: str) -> float:
    """Return `value` if it is a finite number above 0; raise TypeError or ValueError naming `name`."""
    number = check_number(value, name)
    if not 0 < number < math.inf:  # this also rejects nan
        raise ValueError(f"{name}: must be a finite number above 0, got {value}")
    return number


def check_pruning_rate(q, name: str = "q") -> float:
    """Return `q` as a float if 0 <= q < 1; raise TypeError or ValueError naming `name`."""
    number = check_number(q, name)
    if not 0 <= number < 1:
        raise ValueError(f"{name}: expected a pruning rate in [0, 1), got {q}")
    return number


def check_shape(tensor, shape: Sequence[int | str | tuple[str, int] | None], name: str) -> Tensor:
    """Return `tensor` if it is a Tensor that matches `shape`, e.g. `(("patches", 64), "values")`; else raise an error.

    An int must match exactly. In a (string, int) pair, the int must match, and the string names
    the unit in the message. A string or None matches any size.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    dimensions = [size if isinstance(size, tuple) else ("", size) for size in shape]
    wanted = "(" + ", ".join(str(size) for _, size in dimensions) + ")"
    if tensor.ndim != len(shape):
        raise ValueError(f"{name}: expected {len(shape)} dimensions {wanted}, got shape {tuple(tensor.shape)}")
    for axis, (size, (counted, want)) in enumerate(zip(tensor.shape, dimensions, strict=True)):
        if isinstance(want, int) and size != want:
            got = f"{f'{size} {counted}'.strip()} (shape {tuple(tensor.shape)}, wanted {wanted})"
            raise ValueError(f"{name}: dimension {axis} must be {want}, got {got}")
    return tensor


def check_floats(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if it contains floating-point numbers; raise TypeError naming `name`.

    Integers (such as unnormalised pixels), booleans and complex numbers raise TypeError, as do
    float8 and quantised values, which mean nothing without their scale.
    """
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name}: expected floating-point numbers, got dtype {tensor.dtype}")
    return tensor


def check_pixel_rows(pixel_values, shape: Sequence, name: str = "pixel_values") -> Tensor:
    """Return `pixel_values` if it has `shape` (see `check_shape`) and a floating-point dtype (see `check_floats`).

    Raises TypeError or ValueError naming `name`.
    """
    return check_floats(check_shape(pixel_values, shape, name), name)


def check_integers(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if its dtype is an integer type; raise TypeError naming `name` and the dtype."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got dtype {tensor.dtype}")
    return tensor


def as_grids(grid_thw, *, spatial_merge_size: int = 1, name: str = "grid_thw") -> list[Grid]:
    """Normalise `grid_thw` to a list of (t, h, w) tuples of Python ints, in patches.

    Accepts a sequence of (t, h, w) or an integer tensor/array of shape (items, 3). Raises TypeError
    for a wrong type and ValueError for a wrong shape or value. Both h and w must be multiples of
    `spatial_merge_size`, because a merged token needs a whole merge block of patches.
    """
    m = check_positive_int(spatial_merge_size, "spatial_merge_size")
    grids = list[Grid]()
    for i, (t, h, w) in enumerate(as_integer_rows(grid_thw, "(t, h, w)", name)):
        if h % m or w % m:
            raise ValueError(f"{name}[{i}]: h and w must be multiples of spatial_merge_size={m}, got {(t, h, w)}")
        grids.append((t, h, w))
    return grids


def as_sizes(tgt_sizes, name: str = "tgt_sizes") -> list[tuple[int, int]]:
    """Normalise `tgt_sizes` to a list of (h, w) tuples of Python ints, in patches; errors as in `as_grids`."""
    return [(h, w) for h, w in as_integer_rows(tgt_sizes, "(h, w)", name, items="slices")]


def as_integer_rows(values, row: str, name: str, *, items: str = "items", least: int = 1) -> list[tuple[int, ...]]:
    """Return `values`, a sequence of rows or an array (items, n), as tuples of Python ints (see `as_integers`).

    items: the word for the rows in error messages.
    """
    if hasattr(values, "tolist") and (len(values.shape) != 2 or values.shape[1] != len(row.split())):
        raise ValueError(f"{name}: expected shape ({items}, {len(row.split())}), got {tuple(values.shape)}")
    rows = as_sequence(values, name, f" of {row}")
    return [as_integers(value, row, f"{name}[{i}]", least) for i, value in enumerate(rows)]


def check_plan(encoder: Any, layouts: list) -> list:
    """Return the layouts of a batch; raise ValueError if the batch has more patches than one plan may contain.

    An encoder whose `config` is None is part of a larger encoder, which has already checked the
    sizes.
    """
    if encoder.config is not None:
        patches = sum(encoder.item_size(layout)[0] for layout in layouts)
        if patches > MAX_PATCHES:
            raise ValueError(f"layouts: expected at most {MAX_PATCHES:,} patches in one plan, got {patches:,}")
    return layouts


def as_integers(values, row: str, name: str, least: int = 1, most: int = MAX_PATCHES) -> tuple[int, ...]:
    """Return `values` as Python ints, one for each name in `row`, such as "(t, h, w)".
    Each int must be at least `least`, and the product of all at most `most`."""
    values = values.tolist() if hasattr(values, "tolist") else values
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


def check_prompts(input_ids, attention_mask, vocab_size: int) -> Tensor:
    """Return the attention mask of the prompts, (B, L) bool: True for tokens, False for padding.

    attention_mask: a (B, L) tensor of zeros and ones, or None if there is no padding. Raises
    TypeError or ValueError, naming the argument, for empty prompts, for padding that is not on
    the left, and for ids outside the vocabulary.
    """
    ids = check_integers(check_shape(input_ids, ("B", "L"), "input_ids"), "input_ids").cpu()
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    mask = check_shape(mask, tuple(ids.shape), "attention_mask").cpu().bool()
    if not ids.numel():
        raise ValueError(f"input_ids: expected prompts of at least one token, got shape {tuple(ids.shape)}")
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("attention_mask: expected padding only on the left, got padding elsewhere")
    if len(outside := ids[mask & ((ids < 0) | (ids >= vocab_size))]):
        raise ValueError(f"input_ids: expected token ids from 0 to {vocab_size - 1}, got {outside[0]}")
    return mask


def as_sequence(values, name: str, of: str = "") -> Sequence:
    """Return `values` as a sequence, with tensors converted to lists; strings do not count as sequences.

    Raises TypeError, naming `name`, for other values. of: the items in the message, such as "
    of (t, h, w)".
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"{name}: expected a sequence{of}, got {type(values).__name__}")
    return values


def as_seconds(values, count: int, name: str) -> list[float]:
    """Return `values` as one positive float for each of `count` videos. values: a sequence, or a tensor (videos,)."""
    values = as_sequence(values, name)
    if len(values) != count:
        raise ValueError(f"{name}: expected one number for each of {count} videos, got {len(values)}")
    return [check_positive(value, f"{name}[{i}]") for i, value in enumerate(values)]


def is_grid(layout: object) -> bool:
    """Return whether a layout is a grid (t, h, w), as in Qwen and GLM."""
    return isinstance(layout, (list, tuple)) and len(layout) == 3 and all(type(x) is int and x > 0 for x in layout)


INSTEAD = {  # the name of an argument or key in other software -> the name in refvl
    "system": "a message with role 'system'", "stop": "stop_strings", "max_tokens": "max_new_tokens",
    **dict.fromkeys(("tools", "enable_thinking", "chat_template_kwargs"), "template_kwargs={...}"),
    "total_pixels": "max_pixels, the area of a frame", "raw_fps": "video_metadata, and pass the frames",
}  # fmt: skip


def check_names(given: Iterable[str], allowed: Sequence[str], what: str, error: type[Exception] = TypeError) -> None:
    """Raise `error` for the first name that is not allowed, and suggest the most similar allowed name."""
    for name in given:
        if name not in allowed:
            short = f"; allowed: {', '.join(allowed)}" if len(allowed) < 12 else ""
            hint = f"; write {INSTEAD[name]}" if name in INSTEAD else nearest(name, allowed) or short
            raise error(f"{name}: {what} accepts no such argument{hint}")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message, which suggests the most similar allowed name.

    The result is empty if no name is similar.
    """
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def printable(text: object) -> str:
    """Return a path or message as one short line, escaped as in `plain`."""
    text = plain(str(text).replace("\n", " "))
    return text if len(text) <= 240 else f"{text[:120]}...{text[-100:]}"


def plain(text: str) -> str:
    """Escape the characters that control a terminal (such as ESC and bidi overrides), and lone surrogates.

    >>> plain("a\\x1b[2J") == "a" + chr(92) + "x1b[2J"
    True
    """
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def read_json(path: Path) -> dict:
    """Return the object in a JSON file. Raises ValueError, naming the file, if the file does not contain an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8 also raise ValueError
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {json.dumps(values)[:40]}")
    return values


@contextmanager
def blame(what: object, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn errors in the `with` block, except those of the types in `passed`, into ValueErrors
    that begin with `what`, such as a file.
    """
    try:
        yield
    except passed:
        raise
    except Exception as error:  # values of a wrong type or size can cause any kind of error
        raise ValueError(f"{what}: {printable(error) or type(error).__name__}") from error
