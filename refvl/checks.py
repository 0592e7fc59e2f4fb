"""Clear errors at the public border: name the argument, what came, what is allowed."""

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path

import torch
from torch import Tensor

Grid = tuple[int, int, int]
MAX_SECONDS = 10**6  # eleven days between two grid steps
MAX_PATCHES = 2**26  # of one medium, and tokens of one prompt: far more than any model takes, and no memory bomb
WORDED = (ValueError, OSError, ImportError)  # errors whose messages stand for themselves
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
    m = check_positive_int(spatial_merge_size, "spatial_merge_size")
    if isinstance(grid_thw, CheckedGrids) and grid_thw.spatial_merge_size % m == 0:
        return grid_thw
    grids = CheckedGrids()
    for i, (t, h, w) in enumerate(as_integer_rows(grid_thw, "(t, h, w)", name)):
        if h % m or w % m:
            raise ValueError(f"{name}[{i}]: h and w must be multiples of spatial_merge_size={m}, got {(t, h, w)}")
        grids.append((t, h, w))
    grids.spatial_merge_size = m
    return grids


def as_sizes(tgt_sizes, name: str = "tgt_sizes") -> list[tuple[int, int]]:
    """Normalise `tgt_sizes` to a list of (h, w) tuples of Python ints, in patches; errors as in `as_grids`."""
    return [(h, w) for h, w in as_integer_rows(tgt_sizes, "(h, w)", name, items="slices")]


def as_size(size, name: str) -> tuple[int, int]:
    """(h, w) as Python ints, both at least 1: a slice has patches."""
    h, w = as_integers(size, "(h, w)", name)
    return h, w


def as_integer_rows(values, row: str, name: str, *, items: str = "items", least: int = 1) -> list[tuple[int, ...]]:
    """`values` as rows of Python ints, see `as_integers`: a sequence of rows, or an integer tensor or array (items, n).

    items: what a message calls them.
    """
    if isinstance(values, Tensor) or hasattr(values, "__array__"):
        values = check_values(check_integers(torch.as_tensor(values), name), name)
        if values.ndim != 2 or values.shape[1] != len(row.split()):
            raise ValueError(f"{name}: expected shape ({items}, {len(row.split())}), got {tuple(values.shape)}")
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name}: expected a sequence of {row}, got {type(values).__name__}")
    return [as_integers(value, row, f"{name}[{i}]", least) for i, value in enumerate(values)]


def as_integers(values, row: str, name: str, least: int = 1) -> tuple[int, ...]:
    """`values` as Python ints of at least `least`, as many as `row` names, for example "(t, h, w)"."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(row.split()):
        raise ValueError(f"{name}: expected {row}, got {values!r}")
    if not all(map(is_integer, values)):
        raise TypeError(f"{name}: expected integers {row}, got {values!r}")
    integers = tuple(map(int, values))
    if min(integers) < least:
        raise ValueError(f"{name}: every extent must be at least {least}, got {integers}")
    if math.prod(integers) > MAX_PATCHES:
        raise ValueError(f"{name}: at most {MAX_PATCHES:,} patches are planned at once, got {integers}")
    return integers


def is_integer(value) -> bool:
    """Whether `value` is a whole number by its type: an int, or a scalar of a NumPy or torch integer dtype; no bool."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and _holds_integers(value) and not value.is_meta
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
    return check_int(value, name, 1)


def check_positive_ints(**values) -> list[int]:
    """Several of these by their names."""
    return [check_positive_int(value, name) for name, value in values.items()]


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
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name}: expected a sequence of numbers, got {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"{name}: expected one number for each of {count} videos, got {len(values)}")
    values = [value.item() if isinstance(value, Tensor) else value for value in values]
    for i, value in enumerate(values):
        if not 0 < check_number(value, f"{name}[{i}]") <= MAX_SECONDS:  # also refuses nan
            raise ValueError(f"{name}[{i}]: expected a positive number of seconds, got {value} (at most {MAX_SECONDS})")
    return [float(value) for value in values]


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError, naming the file, for anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {json.dumps(values)[:40]}")
    return values


@contextmanager
def blame(what: object, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Whatever goes wrong inside, but for `passed`, becomes a ValueError that begins with `what`, such as a file."""
    try:
        yield
    except passed:
        raise
    except Exception as error:  # values of a wrong type or size run into all kinds of errors
        raise ValueError(f"{what}: {printable(error) or type(error).__name__}") from error


def printable(text: object) -> str:
    """A path or message in a line: shortened, and without what a terminal cannot show, such as lone surrogates."""
    text = str(text).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0").replace("\n", " ")
    return text if len(text) <= 240 else f"{text[:120]}...{text[-100:]}"
