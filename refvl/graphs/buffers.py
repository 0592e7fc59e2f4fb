"""Static buffers: fixed addresses, changing contents.

A captured graph reads the same memory at every replay. Here that memory is the encoder's own metadata dataclass at full
capacity, plus the buffer of patch rows. Before a replay, each field is padded by the rule in its definition, so nothing
of the previous batch remains. A field without a rule raises TypeError, so it cannot cause stale data. Integers are
baked in at capture, so they are capacities that a batch must not exceed.

    rule          what follows the contents
    zero          0
    repeat_last   the last value: cumulative lengths continue with empty segments
    identity      the index itself: a permutation stays one
    empty         nothing; the field (a tuple) is not used inside a graph
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAD_RULES = ("zero", "repeat_last", "identity")


class Fill(NamedTuple):
    """The arguments of `fill_padded` for one buffer."""

    buffer: Tensor
    values: Any
    rule: str
    name: str

    @property
    def rest(self) -> Tensor:
        """The part of the buffer after the contents."""
        return self.buffer[len(self.values) :]


def fill_padded(buffer: Tensor, values: Tensor, rule: str, name: str) -> None:
    """Copy `values` (n, ...) to the front of `buffer` (capacity, ...) and pad the rest by `rule`, in place.

    Raises ValueError if the values do not fit, and TypeError for an unknown rule or an argument that is not a tensor.
    """
    if rule not in PAD_RULES:
        raise TypeError(f"{name}: expected a padding rule from {sorted(PAD_RULES)}, got {rule!r}")
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(values).__name__}")
    if len(values) > len(buffer) or values.shape[1:] != buffer.shape[1:]:
        shape, captured = tuple(values.shape), tuple(buffer.shape)
        raise ValueError(f"{name}: expected a shape that fits the captured {captured}, got {shape}")
    if rule == "repeat_last" and len(values) == 0 < len(buffer):
        raise ValueError(f"{name}: expected at least one value to repeat, got none")

    count = len(values)
    buffer[:count].copy_(values, non_blocking=True)
    rest = buffer[count:]
    if len(rest) == 0:
        return
    if rule == "zero":
        rest.zero_()
    elif rule == "repeat_last":
        rest.copy_(buffer[count - 1].expand_as(rest))
    else:
        torch.arange(count, len(buffer), out=rest)


def fill_metadata(buffers, metadata) -> None:
    """Fill a metadata dataclass at capacity (`buffers`) with the planned `metadata` of a batch, field by field.

    Tensors are copied and padded, integers are compared with their capacity, tuples are skipped, and dataclasses are
    filled in turn. On a GPU, one kernel copies the contents of all fields. Raises TypeError for a field of a different
    class or without a padding rule, and ValueError if a value exceeds the captured capacity.
    """
    together = []
    for fill in list(_fills(buffers, metadata)):  # a list, so an error is raised before any field is filled
        if _is_in_words(fill):
            together.append(fill)
        else:
            fill_padded(*fill)
    if together:
        _fill_together(together)


def _fills(buffers, metadata) -> Iterator[Fill]:
    if type(buffers) is not type(metadata):
        raise TypeError(f"metadata: expected {type(buffers).__name__}, got {type(metadata).__name__}")
    for field in fields(buffers):
        buffer, value = getattr(buffers, field.name), getattr(metadata, field.name)
        if isinstance(buffer, Tensor):
            yield Fill(buffer, value, field.metadata.get("pad", "none"), field.name)
        elif is_dataclass(buffer):
            yield from _fills(buffer, value)
        elif isinstance(buffer, int):
            if value > buffer:
                raise ValueError(f"{field.name}: {value} exceeds the captured capacity of {buffer}")
        elif field.metadata.get("pad") != "empty":
            raise TypeError(f"{field.name}: a {type(buffer).__name__} cannot be part of a graph")


def _is_in_words(fill: Fill) -> bool:
    """Return whether a fill is on a GPU, fits, and consists of whole 32-bit words."""
    buffer, values = fill.buffer, fill.values
    fits = isinstance(values, Tensor) and 0 < len(values) <= len(buffer) and values.shape[1:] == buffer.shape[1:]
    alike = fits and values.dtype == buffer.dtype and values.device == buffer.device and buffer.is_cuda
    return alike and fill.rule in PAD_RULES and values.is_contiguous() and values[0].nbytes % 4 == 0


def _fill_together(fills: list[Fill]) -> None:
    """Apply `fill_padded` to each fill. One kernel copies all contents and continues all permutations.

    A second kernel zeroes the unused ends of all buffers with the rule "zero". Each tensor of cumulative lengths needs
    a kernel of its own.
    """
    copies = [(fill.buffer[: len(fill.values)], fill.values) for fill in fills]
    padded = [fill for fill in fills if len(fill.rest)]
    if permutations := [fill for fill in padded if fill.rule == "identity"]:
        identity = torch.arange(max(len(fill.buffer) for fill in permutations), device=fills[0].buffer.device)
        copies += [(fill.rest, identity[len(fill.values) : len(fill.buffer)]) for fill in permutations]
    words = [(target.flatten().view(torch.int32), source.flatten().view(torch.int32)) for target, source in copies]
    torch._foreach_copy_([target for target, _ in words], [source for _, source in words])
    for fill in padded:
        if fill.rule == "repeat_last":
            fill.rest.copy_(fill.values[-1].expand_as(fill.rest))
    if zeros := [fill.rest for fill in padded if fill.rule == "zero"]:
        torch._foreach_zero_(zeros)


def metadata_tensors(metadata, prefix: str = "") -> dict[str, Tensor]:
    """Return all tensors of a metadata dataclass that a graph reads, by name.

    Nested tensors have names such as `vision.cos`.
    """
    tensors: dict[str, Tensor] = {}
    for field in fields(metadata):
        name, value = prefix + field.name, getattr(metadata, field.name)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif is_dataclass(value):
            tensors |= metadata_tensors(value, f"{name}.")
    return tensors
