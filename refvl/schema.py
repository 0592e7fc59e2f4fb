"""Clear errors at the public border: name the argument, what came, what is allowed."""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

Grid = tuple[int, int, int]


def as_grids(grid_thw, *, spatial_merge_size: int = 1, name: str = "grid_thw") -> list[Grid]:
    """Normalise `grid_thw` to a list of (t, h, w) tuples of Python ints, in patches.

    Accepts a sequence of (t, h, w) or an integer tensor/array of shape (items, 3).
    Raises TypeError for a wrong kind and ValueError for a wrong shape or value; h and w must be
    multiples of `spatial_merge_size`, because a merged token needs its whole block of patches.
    """
    rows = _integer_rows(grid_thw, ("items", 3), "(t, h, w)", name)
    return [_as_grid(item, i, spatial_merge_size, name) for i, item in enumerate(rows)]


def _integer_rows(values, shape: tuple[str, int], row: str, name: str) -> Sequence:
    """`values` if it is a sequence, the rows of an integer tensor or array of `shape`; rows are not checked here."""
    if isinstance(values, Tensor) or hasattr(values, "__array__"):
        values = torch.as_tensor(values)
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name}: expected integers, got dtype {values.dtype}")
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
    if any(isinstance(n, bool) or not hasattr(n, "__index__") for n in item):
        raise TypeError(f"{name}[{i}]: expected three integers, got {item!r}")
    t, h, w = (int(n) for n in item)
    if min(t, h, w) < 1:
        raise ValueError(f"{name}[{i}]: every extent must be at least 1, got {(t, h, w)}")
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
    if any(isinstance(n, bool) or not hasattr(n, "__index__") for n in size):
        raise TypeError(f"{name}: expected two integers, got {size!r}")
    h, w = (int(n) for n in size)
    if min(h, w) < 1:
        raise ValueError(f"{name}: every extent must be at least 1, got {(h, w)}")
    return h, w


def check_positive_int(value, name: str) -> int:
    """Return `value` if it is an integer of at least 1; raise TypeError or ValueError naming `name`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__} {value!r}")
    if value < 1:
        raise ValueError(f"{name}: must be at least 1, got {value}")
    return int(value)


def check_pruning_rate(q, name: str = "q") -> float:
    """Return `q` as a float if 0 <= q < 1; raise TypeError or ValueError naming `name`."""
    if isinstance(q, bool) or not isinstance(q, Real):
        raise TypeError(f"{name}: expected a number, got {type(q).__name__}")
    if not 0 <= q < 1:
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
    """Return `tensor` if it holds floating-point numbers; raise TypeError naming `name` and the dtype."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected floating-point numbers, got dtype {tensor.dtype}")
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


def check_token_ids(input_ids, name: str = "input_ids") -> Tensor:
    """Return `input_ids` if it is an integer tensor (B, L); raise TypeError or ValueError naming `name`."""
    check_shape(input_ids, ("B", "L"), name)
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got dtype {input_ids.dtype}")
    return input_ids


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
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}[{i}]: expected a number, got {type(value).__name__}")
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}[{i}]: expected a positive number of seconds, got {value}")
    return [float(value) for value in values]
