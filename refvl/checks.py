"""Argument checks for the public API; their errors name the argument, the value passed and the allowed values."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path

import torch
from torch import Tensor

from refvl.printing import printable

Grid = tuple[int, int, int]
MAX_PATCHES = 2**22  # the limit per media item and per prompt: above what any model accepts, and plans stay below 2 GB
WORDED = (ValueError, OSError, ImportError)  # these error messages need no context
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # float8 would need its scale


def is_integer(value) -> bool:
    """Return whether `value` is an int, or a scalar of an integer dtype of NumPy or torch, but not a bool."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and _holds_integers(value) and not value.is_meta and value.layout == torch.strided
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
    """Return several values as positive ints; an error names the keyword argument."""
    return [check_positive_int(value, name) for name, value in values.items()]


def check_number(value, name: str) -> float:
    """Return `value` as a float if it is a real number in Python or NumPy; raise TypeError naming `name`.

    An integer above the largest float becomes infinity.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {value!r}")
    return math.inf * (value > 0 or -1) if isinstance(value, int) and abs(value) >> 1023 else float(value)


def check_positive(value, name: str) -> float:
    """Return `value` if it is a finite number above 0; raise TypeError or ValueError naming `name`."""
    number = check_number(value, name)
    if not 0 < number < math.inf:  # this also rejects nan
        raise ValueError(f"{name}: must be a finite number above 0, got {value}")
    return number


def check_flag(value, name: str) -> bool:
    """Return `value` if it is True or False; raise TypeError naming `name`."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")
    return value


def check_pruning_rate(q, name: str = "q") -> float:
    """Return `q` as a float if 0 <= q < 1; raise TypeError or ValueError naming `name`."""
    number = check_number(q, name)
    if not 0 <= number < 1:
        raise ValueError(f"{name}: expected a pruning rate in [0, 1), got {q}")
    return number


def check_shape(tensor, shape: Sequence[int | str | tuple[str, int] | None], name: str) -> Tensor:
    """Raise an error unless `tensor` is a Tensor whose shape matches `shape`, e.g. `(("patches", 64), "values")`.

    An int must match exactly. In a (counted, int) pair, the int must match, and the string names the unit in the
    message. A string or None matches any size.
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

    Integers (unnormalised pixels), booleans, complex numbers and sparse tensors raise TypeError. So do float8 and
    quantised values, which have no meaning without their scale.
    """
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name}: expected floating-point numbers, got dtype {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    return tensor


def check_values(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if it is dense and has values; raise TypeError naming `name` if it is sparse or on "meta"."""
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "a tensor on the meta device" if tensor.is_meta else f"layout {tensor.layout}"
        raise TypeError(f"{name}: expected a dense tensor with values, got {kind}")
    return tensor


def check_pixel_rows(pixel_values, shape: Sequence, device: torch.device, name: str = "pixel_values") -> Tensor:
    """Return `pixel_values` if it has `shape` (see `check_shape`) and a floating-point dtype (see `check_floats`).

    device: the encoder's device. A tensor on the meta device has no values, so only an encoder on "meta" accepts it.
    Raises TypeError or ValueError naming `name`.
    """
    check_floats(check_shape(pixel_values, shape, name), name)
    if pixel_values.is_meta and device.type != "meta":
        raise TypeError(f"{name}: expected values for an encoder on {device}, got a tensor on the meta device")
    return pixel_values


def check_integers(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if its dtype is an integer type; raise TypeError naming `name` and the dtype."""
    if not _holds_integers(tensor):
        raise TypeError(f"{name}: expected integers, got dtype {tensor.dtype}")
    return tensor


def _holds_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or tensor.dtype == torch.bool)


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
    """Turn errors in the `with` block into ValueErrors that begin with `what`, such as a file; let `passed` through."""
    try:
        yield
    except passed:
        raise
    except Exception as error:  # values of a wrong type or size can cause any kind of error
        raise ValueError(f"{what}: {printable(error) or type(error).__name__}") from error
