"""Static buffers: fixed addresses, changing contents.

A captured graph reads the same memory at every replay: the buffer of patch rows, and the encoder's
own metadata dataclass at full capacity. Before a replay, each field is padded by the rule in its
definition, so nothing of the previous batch remains. A field without a rule raises TypeError, so
no field can keep stale data. Integers are baked into the graph at capture, so they are capacities
that a batch must not exceed.

    rule          what follows the contents
    zero          0
    repeat_last   the last value: cumulative lengths continue with empty segments
    identity      the index itself: a permutation stays a permutation
    empty         nothing; the field (a tuple) is not used inside a graph
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

PAD_RULES = ("zero", "repeat_last", "identity")
Fill = tuple[Tensor, Tensor, str, str]  # the arguments of `fill_padded`


def fill_padded(buffer: Tensor, values: Tensor, rule: str, name: str) -> None:
    """Copy `values` (n, ...) to the front of `buffer` (capacity, ...) and pad the rest by `rule`, in place.

    Raises ValueError if the values do not fit, and TypeError for an unknown rule.
    """
    fill_together([(buffer, values, rule, name)])


def fill_metadata(buffers, metadata) -> None:
    """Fill a metadata dataclass at capacity (`buffers`) with the planned `metadata` of a batch, field by field.

    Tensors are copied and padded, integers are compared with their capacity, tuples are
    skipped, and nested dataclasses are filled recursively. Raises TypeError for metadata of a
    different class or a field without a padding rule, and ValueError if a value exceeds the
    captured capacity.
    """
    fill_together(list(fields_to_fill(buffers, metadata)))


def fields_to_fill(buffers, metadata) -> Iterator[Fill]:
    """Yield the arguments of `fill_padded` for every tensor of a metadata dataclass; errors as in `fill_metadata`."""
    if type(buffers) is not type(metadata):
        raise TypeError(f"metadata: expected {type(buffers).__name__}, got {type(metadata).__name__}")
    for field in fields(buffers):
        buffer, value = getattr(buffers, field.name), getattr(metadata, field.name)
        rule = field.metadata.get("pad", "none")
        if isinstance(buffer, Tensor):
            yield buffer, value, rule, field.name
        elif is_dataclass(buffer):
            yield from fields_to_fill(buffer, value)
        elif isinstance(buffer, int):
            if value > buffer:
                raise ValueError(f"{field.name}: {value} exceeds the captured capacity of {buffer}")
        elif rule != "empty":
            raise TypeError(f"{field.name}: a {type(buffer).__name__} cannot be part of a graph")


def fill_together(fills: Sequence[Fill]) -> None:
    """Apply `fill_padded` to several buffers; all are checked before any is filled.

    On a GPU, one kernel copies all contents and another writes all zeros, because launches take
    longer than copies.
    """
    for buffer, values, rule, name in fills:
        if rule not in PAD_RULES:
            raise TypeError(f"{name}: expected a padding rule from {PAD_RULES}, got {rule!r}")
        if len(values) > len(buffer) or values.shape[1:] != buffer.shape[1:]:
            shape, captured = tuple(values.shape), tuple(buffer.shape)
            raise ValueError(f"{name}: expected a shape that fits the captured {captured}, got {shape}")

    copies, zeros = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for buffer, values, rule, _ in fills:
        rest = buffer[len(values) :]
        copies.append((buffer[: len(values)], values))
        if rule == "zero" and len(rest):
            zeros.append(rest)
        elif rule == "identity":
            copies.append((rest, torch.arange(len(values), len(buffer), dtype=buffer.dtype, device=buffer.device)))
        elif len(rest):
            rest.copy_(values[-1].expand_as(rest))
    # torch copies all tensors with one kernel only if their dtypes are equal, so view them as 32-bit words
    if all(to.dtype == x.dtype and to.nbytes % 4 == 0 and x.is_contiguous() for to, x in copies):
        copies = [(to.flatten().view(torch.int32), x.flatten().view(torch.int32)) for to, x in copies]
    if all((x.data_ptr() | x.nbytes) % 4 == 0 for x in zeros):
        zeros = [x.view(-1).view(torch.int32) for x in zeros]
    torch._foreach_copy_([to for to, _ in copies], [x for _, x in copies], non_blocking=True)
    if zeros:
        torch._foreach_zero_(zeros)


def metadata_tensors(metadata, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors that a graph reads from a metadata dataclass, by name.

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
