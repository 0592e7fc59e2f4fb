"""Clear errors at the public border: name the argument, what came, what is allowed."""

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor

Grid = tuple[int, int, int]
MAX_SECONDS = 10**6  # eleven days between two grid steps
MAX_PATCHES = 2**26  # of one medium, and tokens of one prompt: far more than any model takes, and no memory bomb
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # float8 means nothing without its scale


class CheckedGrids(list[Grid]):
    """What `as_grids` returns. An encoder's plan hands it on, and nothing on the way checks the same grids again."""

    spatial_merge_size: int  # that h and w are multiples of


def as_grids(grid_thw, *, spatial_merge_size: int = 1, name: str = "grid_thw") -> list[Grid]:
    """Normalise `grid_thw` to a list of (t, h, w) tuples of Python ints, in patches.

    Accepts a sequence of (t, h, w) or an integer tensor/array of shape (items, 3).
    Raises TypeError for a wrong kind and ValueError for a wrong shape or value; h and w must be
    multiples of `spatial_merge_size`, because a merged token needs its whole block of patches.
    """
    check_positive_int(spatial_merge_size, "spatial_merge_size")
    if isinstance(grid_thw, CheckedGrids) and grid_thw.spatial_merge_size % spatial_merge_size == 0:
        return grid_thw
    rows = _integer_rows(grid_thw, ("items", 3), "(t, h, w)", name)
    grids = CheckedGrids(_as_grid(item, i, spatial_merge_size, name) for i, item in enumerate(rows))
    grids.spatial_merge_size = int(spatial_merge_size)
    return grids


def _integer_rows(values, shape: tuple[str, int], row: str, name: str) -> Sequence:
    """`values` if it is a sequence, the rows of an integer tensor or array of `shape`; rows are not checked here."""
    if isinstance(values, Tensor) or hasattr(values, "__array__"):
        values = torch.as_tensor(values)
        check_integers(values, name)
        if values.ndim != 2 or values.shape[1] != shape[1]:
            raise ValueError(f"{name}: expected shape ({shape[0]}, {shape[1]}), got {tuple(values.shape)}")
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name}: expected a sequence of {row}, got {type(values).__name__}")
    return values


def _as_grid(item, i: int, spatial_merge_size: int, name: str) -> Grid:
    item = item.tolist() if hasattr(item, "tolist") else item
    if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 3:
        raise ValueError(f"{name}[{i}]: expected (t, h, w), got {item!r}")
    if not all(map(is_integer, item)):
        raise TypeError(f"{name}[{i}]: expected three integers, got {item!r}")
    t, h, w = (int(n) for n in item)
    _check_extents((t, h, w), f"{name}[{i}]")
    if h % spatial_merge_size or w % spatial_merge_size:
        raise ValueError(
            f"{name}[{i}]: h and w must be multiples of spatial_merge_size={spatial_merge_size}, got {(t, h, w)}"
        )
    return t, h, w


def as_sizes(tgt_sizes, name: str = "tgt_sizes") -> list[tuple[int, int]]:
    """Normalise `tgt_sizes` to a list of (h, w) tuples of Python ints, in patches; errors as in `as_grids`."""
    rows = _integer_rows(tgt_sizes, ("slices", 2), "(h, w)", name)
    return [as_size(size, f"{name}[{i}]") for i, size in enumerate(rows)]


def as_size(size, name: str) -> tuple[int, int]:
    """(h, w) as Python ints, both at least 1: a slice has patches."""
    size = size.tolist() if hasattr(size, "tolist") else size
    if not isinstance(size, Sequence) or isinstance(size, str) or len(size) != 2:
        raise ValueError(f"{name}: expected (h, w), got {size!r}")
    if not all(map(is_integer, size)):
        raise TypeError(f"{name}: expected two integers, got {size!r}")
    h, w = (int(n) for n in size)
    _check_extents((h, w), name)
    return h, w


def _check_extents(extents: tuple[int, ...], name: str) -> None:
    if min(extents) < 1:
        raise ValueError(f"{name}: every extent must be at least 1, got {extents}")
    if math.prod(extents) > MAX_PATCHES:
        raise ValueError(f"{name}: at most {MAX_PATCHES:,} patches are planned at once, got {extents}")


def is_integer(value) -> bool:
    """Whether `value` is a whole number by its type: an int, or a scalar of a NumPy or torch integer dtype; no bool.

    Every tensor has `__index__`, whatever its dtype, and a float's cuts the fraction off.
    """
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.ndim or not _holds_integers(value))):
        return False
    try:
        operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a meta tensor
        return False
    return True


def check_int(value, name: str, least: int) -> int:
    """Return `value` if it is an integer of at least `least`; raise TypeError or ValueError naming `name`."""
    if not is_integer(value):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name}: must be at least {least}, got {value}")
    return int(value)


def check_positive_int(value, name: str) -> int:
    """Return `value` if it is an integer of at least 1; raise TypeError or ValueError naming `name`."""
    return check_int(value, name, 1)


def check_number(value, name: str) -> float:
    """Return `value` if it is a real number, of Python's or NumPy's; raise TypeError naming `name`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {value!r}")
    return float(value)


def check_positive(value, name: str) -> float:
    """Return `value` if it is a finite number above 0; raise TypeError or ValueError naming `name`."""
    number = check_number(value, name)
    if not 0 < number < math.inf:  # also refuses nan
        raise ValueError(f"{name}: must be a finite number above 0, got {value}")
    return number


def check_flag(value, name: str) -> bool:
    """Return `value` if it is True or False; raise TypeError naming `name`."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")
    return value


def check_pruning_rate(q, name: str = "q") -> float:
    """Return `q` as a float if 0 <= q < 1; raise TypeError or ValueError naming `name`."""
    if not 0 <= check_number(q, name) < 1:
        raise ValueError(f"{name}: a pruning rate lies in [0, 1), got {q}")
    return float(q)


def check_shape(tensor, shape: Sequence[int | str | tuple[str, int] | None], name: str) -> Tensor:
    """Raise unless `tensor` is a Tensor whose shape matches `shape`, e.g. `(("patches", 64), "values")`.

    An int must be equal, and so must that of a (name, int) pair, where the message says what is counted; a string or
    None stands for any size.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    dimensions = [size if isinstance(size, tuple) else ("", size) for size in shape]
    wanted = "(" + ", ".join(str(size) for _, size in dimensions) + ")"
    if tensor.ndim != len(shape):
        raise ValueError(f"{name}: expected {len(shape)} dimensions {wanted}, got shape {tuple(tensor.shape)}")
    for axis, (size, (counted, want)) in enumerate(zip(tensor.shape, dimensions, strict=True)):
        if isinstance(want, int) and size != want:
            got = f"{size} {counted}".strip()
            raise ValueError(
                f"{name}: dimension {axis} must be {want}, got {got} (shape {tuple(tensor.shape)}, wanted {wanted})"
            )
    return tensor


def check_floats(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if it is a dense tensor of floating-point numbers; raise TypeError naming `name`.

    Refused are integers (unnormalised pixels), booleans, complex numbers, float8 and quantised values, which mean
    nothing without their scale, and sparse tensors.
    """
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name}: expected floating-point numbers, got dtype {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    return tensor


def check_values(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if it is dense and has values; raise TypeError naming `name` (sparse, or on the meta device)."""
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "one on the meta device" if tensor.is_meta else f"layout {tensor.layout}"
        raise TypeError(f"{name}: expected a dense tensor with values, got {kind}")
    return tensor


def check_pixel_rows(pixel_values, shape: Sequence, device: torch.device, name: str = "pixel_values") -> Tensor:
    """Return `pixel_values` if it has `shape` (see `check_shape`) and holds numbers that an encoder can read.

    device: the encoder's; a tensor on the meta device has no values, and only an encoder there needs none. Raises
    TypeError or ValueError naming `name`.
    """
    check_floats(check_shape(pixel_values, shape, name), name)
    if pixel_values.is_meta and device.type != "meta":
        raise TypeError(f"{name}: expected values for an encoder on {device}, got a tensor on the meta device")
    return pixel_values


def check_integers(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if it holds integers; raise TypeError naming `name` and the dtype."""
    if not _holds_integers(tensor):
        raise TypeError(f"{name}: expected integers, got dtype {tensor.dtype}")
    return tensor


def _holds_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or tensor.dtype == torch.bool)


def check_token_ids(input_ids, name: str = "input_ids") -> Tensor:
    """Return `input_ids` if it is a dense tensor (B, L) of int32 or int64; raise TypeError or ValueError naming it."""
    check_integers(check_shape(input_ids, ("B", "L"), name), name)
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got dtype {input_ids.dtype}")
    return check_values(input_ids, name)


def check_prompts(input_ids, attention_mask, vocab_size: int) -> Tensor:
    """The (B, L) bool mask of a batch of prompts, on the CPU: True for tokens, False for padding on their left.

    attention_mask: (B, L) of 0 and 1, or None for no padding. Raises TypeError or ValueError, naming the argument and
    the prompt, for empty prompts, other values, padding elsewhere, and ids outside the vocabulary.
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
            raise ValueError(f"attention_mask[{i}]: padding must stand on the left, and leave the prompt in one piece")
        if len(outside := row[kept & ((row < 0) | (row >= vocab_size))]):
            raise ValueError(f"input_ids[{i}]: token {outside[0]} is not in the vocabulary, 0 to {vocab_size - 1}")
    return mask.bool()


def check_names(given: Iterable[str], allowed: Sequence[str], what: str, error: type[Exception] = TypeError) -> None:
    """Raise `error` for the first name that is not allowed, with the nearest one that is."""
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            short = f"; allowed: {', '.join(allowed)}" if len(allowed) < 12 else ""
            hint = f"; did you mean {near[0]!r}?" if near else short
            raise error(f"{name}: {what} takes no such argument{hint}")


def as_seconds(values, count: int, name: str) -> list[float]:
    """One positive number for each of `count` videos, as floats; a sequence or a tensor (videos,)."""
    if isinstance(values, Tensor) or hasattr(values, "__array__"):
        values = check_shape(torch.as_tensor(values), (("videos", count),), name).tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name}: expected a sequence of numbers, got {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"{name}: expected one number for each of {count} videos, got {len(values)}")
    values = [value.item() if isinstance(value, Tensor) else value for value in values]
    for i, value in enumerate(values):
        if not 0 < check_number(value, f"{name}[{i}]") <= MAX_SECONDS:  # also refuses nan
            raise ValueError(f"{name}[{i}]: expected a positive number of seconds, got {value} (at most {MAX_SECONDS})")
    return [float(value) for value in values]
