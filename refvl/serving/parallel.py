"""Data-parallel encoding over a torch.distributed group: each device encodes whole items, not a shard of every layer.

    sizes of all items -> get_load_balance_assignment: which rank encodes which item (the same result on every rank)
    own rows           -> the encoder, eager or with graphs
    own embeddings     -> padded to the length of the longest rank, all-gathered, cut, put in the caller's order

A vision tower is small and its items are independent, so every rank has the whole tower, and ranks
send only the results. This takes one all-gather; tensor parallelism would need two collectives per
layer. All ranks must get the same sizes. The process group uses gloo on CPUs and NCCL on GPUs.
`group=None` selects the default group. Without any group, the calling process encodes all items.

Shape suffixes: N patches, M output tokens, D hidden, B images. Upstream:
`run_dp_sharded_mrope_vision_model`, `run_dp_sharded_vision_model`, `get_load_balance_assignment`
(vLLM).
"""

import os
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from refvl.checks import check_pixel_rows, check_positive_int
from refvl.graphs.manager import EncoderGraphManager

Assignment = tuple[list[int], list[int], list[int]]


def get_load_balance_assignment(sizes: Sequence[int], num_gpus: int = 2) -> Assignment:
    """Assign items so that the total sizes of the ranks are similar: largest first, onto the least loaded rank.

    Items of equal size keep their order; among equally loaded ranks, the lowest gets the next item.
    Returns (shuffle_indices, sample_counts, grouped_sizes): the items rank by rank, the number of
    items per rank, and the total size per rank.

    Raises ValueError for num_gpus below 1, or for sizes that are not numbers of tokens.

    >>> get_load_balance_assignment([1000, 100, 200, 50], num_gpus=2)
    ([0, 2, 1, 3], [1, 3], [1000, 350])
    """
    _check_sizes(sizes)
    items: list[list[int]] = [[] for _ in range(check_positive_int(num_gpus, "num_gpus"))]
    loads = [0] * num_gpus
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        items[rank].append(i)
        loads[rank] += sizes[i]
    return [i for own in items for i in own], [len(own) for own in items], loads


def get_count_assignment(sizes: Sequence[int], num_gpus: int = 2) -> Assignment:
    """Assign the same number of consecutive items to every rank, regardless of size: the baseline for balancing.

    Raises ValueError for num_gpus below 1, or for sizes that are not numbers of tokens.
    """
    _check_sizes(sizes)
    share = -(-len(sizes) // check_positive_int(num_gpus, "num_gpus"))
    items = [range(len(sizes))[rank * share : (rank + 1) * share] for rank in range(num_gpus)]
    return list(range(len(sizes))), [len(own) for own in items], [sum(sizes[i] for i in own) for own in items]


def get_speed_up(grouped_sizes: Sequence[int]) -> float:
    """Return the speed-up over one rank alone, limited by the slowest rank, if time is proportional to size.

    The speed-up is at most the number of ranks. The share of an all-gather that is padding is 1 -
    speed-up / ranks.
    """
    return sum(grouped_sizes) / max(grouped_sizes) if max(grouped_sizes, default=0) else 1.0


def _check_sizes(sizes: Sequence[int]) -> None:
    for i, size in enumerate(sizes):
        if isinstance(size, bool) or not isinstance(size, Real) or not size >= 0:
            raise ValueError(f"sizes[{i}]: expected a non-negative number, got {size!r}")


@torch.no_grad()
def run_dp_sharded_mrope_vision_model(
    vision_model, pixel_values: Tensor, grid_thw_list: Sequence,
    *, rope_type: str = "rope_3d", group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Encode items of any size, each on one rank; every rank gets all embeddings, in the caller's order.

    vision_model: a refvl encoder, or an `EncoderGraphManager`; each rank then replays its own
    graphs. pixel_values: (N, values) patch rows of all items in order, equal on every rank. Each
    rank copies only its own rows to its encoder's device. grid_thw_list: (t, h, w) per item in
    patches, or the layouts that the encoder plans. rope_type: "rope_3d", as in vLLM; no encoder of
    this library needs vLLM's other value, "rope_2d".

    Returns one tensor per item. Raises ValueError on all ranks, before anything is sent, if rows
    and grids do not match. If one rank fails later, the others wait until the group's timeout, or
    until `torchrun` ends them.
    """
    if rope_type != "rope_3d":
        raise ValueError(f"rope_type: expected 'rope_3d', got {rope_type!r}")
    is_graphs = isinstance(vision_model, EncoderGraphManager)
    encoder = vision_model.encoder if is_graphs else vision_model
    layouts = encoder.check_layouts(grid_thw_list, name="grid_thw_list")
    rows = [encoder.item_size(layout)[0] for layout in layouts]
    tokens = [encoder.item_size(layout)[1] for layout in layouts]
    check_pixel_rows(pixel_values, (("patches of grid_thw_list", sum(rows)), "values"))
    if not layouts:
        return ()
    rank, world_size = rank_and_world_size(group)
    order, counts, _ = get_load_balance_assignment(rows, world_size)
    items = [own.tolist() for own in torch.tensor(order).split(counts)]
    lengths = [sum(tokens[i] for i in own) for own in items]

    split_rows, local = pixel_values.split(rows), None
    if items[rank]:
        local_rows = torch.cat([split_rows[i] for i in items[rank]]).to(encoder.device)
        own = [layouts[i] for i in items[rank]]
        local = torch.cat(vision_model.execute(local_rows, own)) if is_graphs else vision_model(local_rows, own)
    gathered = _gather_padded(local, lengths, encoder.device, group)
    return tuple(restore_order(gathered, tokens, order, counts))


def restore_order(gathered: Tensor, tokens: Sequence[int], order: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    """Split the result of an all-gather into one tensor per item, in the caller's order and without padding.

    gathered: (ranks * longest, ...), the rows of all ranks, with each rank's rows padded to the
    longest. tokens: output tokens of each item. order, counts: the assignment. Returns a list of
    (tokens, D) tensors.
    """
    embeds: dict[int, Tensor] = {}
    items = iter(order)
    for rank, count in enumerate(counts):
        start = rank * (len(gathered) // len(counts))
        for i in islice(items, count):
            embeds[i] = gathered[start : start + tokens[i]]
            start += tokens[i]
    return [embeds[i] for i in range(len(tokens))]


def _gather_padded(local: Tensor | None, lengths: list[int], device: torch.device, group) -> Tensor:
    """Gather the rows of all ranks, (ranks * longest, ...).

    local: the rows of this rank, (lengths[rank], ...), or None if it has none. An all-gather needs
    equal shapes, so each rank sends as many rows as the rank with the most rows. A rank without
    items does not know the width of its padding, so rank 0, which always has the largest item,
    sends the width.
    """
    if 0 in lengths:
        told: list[Any] = [None if local is None else (local.shape[1:], local.dtype)]
        nccl = dist.get_backend(group) == "nccl"  # NCCL sends only CUDA tensors, by default from GPU 0 on every rank
        dist.broadcast_object_list(told, group=group, group_src=0, device=device if nccl else None)
        shape, dtype = told[0]
        local = torch.empty(0, *shape, dtype=dtype, device=device) if local is None else local
    assert local is not None  # an empty tensor replaced None above
    if len(lengths) == 1:
        return local
    padded = F.pad(local, (0, 0) * (local.ndim - 1) + (0, max(lengths) - len(local))).contiguous()
    gathered = padded.new_empty(len(lengths) * len(padded), *padded.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return gathered


@torch.no_grad()
def run_dp_sharded_vision_model(image_input: Tensor, vision_model, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Encode B images of one size, with the same number on every rank; every rank gets all embeddings, in order.

    image_input: (B, ...), equal on every rank. vision_model: (b, ...) -> (b, ...) on the device of
    the images. If B is not a multiple of the number of ranks, the last ranks encode zeros, whose
    results are dropped.
    """
    rank, world_size = rank_and_world_size(group)
    if not len(image_input):
        return vision_model(image_input)
    share = -(-len(image_input) // world_size)
    padding = (0, 0) * (image_input.ndim - 1) + (0, share * world_size - len(image_input))
    embeds = vision_model(F.pad(image_input, padding)[rank * share : (rank + 1) * share])
    return _gather_padded(embeds, [share] * world_size, embeds.device, group)[: len(image_input)]


def rank_and_world_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return (rank, ranks) in the group, or (0, 1) if torch.distributed is not initialised."""
    is_group = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(group), dist.get_world_size(group)) if is_group else (0, 1)


@contextmanager
def torchrun_ranks():
    """Use gloo to join the ranks that `torchrun` started: yield (rank, ranks), or (0, 1) if it started none.

    gloo is also used on GPUs, because only names and counts are exchanged here.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        yield rank_and_world_size()
        return
    dist.init_process_group("gloo", timeout=timedelta(days=7))  # timeout: the time that a rank waits for the others
    try:
        yield rank_and_world_size()
    finally:
        dist.destroy_process_group()
