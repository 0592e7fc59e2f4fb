"""Several prompts as one sequence, for training without padding; each prompt attends only to
itself, at its own positions.

    prompt A  input_ids (5,)   positions (3, 5)
    prompt B  input_ids (3,)   positions (3, 3)

    pack      input_ids     A A A A A B B B
              position_ids  0 1 2 3 4 0 1 2    index in the prompt: a restart at 0 begins the next prompt
                            t, h, w of A, then t, h, w of B
              cu_seqlens    0 5 8

transformers builds the mask from the first row of `position_ids` if there is neither an
`attention_mask` nor a cache. If transformers gets only the three rows of M-RoPE, it treats all
prompts as one, so the prompts attend to each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refvl.checks import check_positive_int, check_shape

IGNORED = -100  # the label of a token that has no loss
# features with an entry per token -> the value for prompts without the feature; None: all prompts need it
FILLERS = {
    "labels": IGNORED, "deepstack_embeds": 0, "attention_mask": 1, "inputs_embeds": None, "mm_token_type_ids": None,
}  # fmt: skip


def pack(prompts: Sequence, *, pad_to: int | None = None) -> dict[str, Tensor]:
    """Concatenate prompts into one sequence.

    prompts: traces from `VLM.trace`, or mappings with `input_ids` (L,) and `positions` (3, L).
    pad_to: the length of the result; the remainder becomes one extra sequence of token 0, to
    which no prompt attends.

    Returns `input_ids` (1, L), `position_ids` (4, 1, L: index, t, h, w) and `cu_seqlens`
    (sequences + 1,) int32, the start of each sequence. Raises ValueError if there is no prompt,
    if shapes do not match, or if `pad_to` is too short.
    """
    if not len(prompts):
        raise ValueError("prompts: expected at least one prompt, got none")
    pairs = [_ids_and_positions(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
    ids, positions = map(list, zip(*pairs, strict=True))
    if (room := _room(sum(map(len, ids)), pad_to)) > 0:
        ids.append(ids[0].new_zeros(room))
        positions.append(torch.arange(room).expand(3, -1))
    lengths = torch.tensor([len(ids_L) for ids_L in ids])
    indexes_L = torch.cat([torch.arange(n) for n in lengths.tolist()])
    positions_3L = torch.cat([p.to(indexes_L) for p in positions], dim=1)
    return {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat([indexes_L[None], positions_3L])[:, None],
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
    }


def truncate(trace: Any, max_tokens: int) -> dict[str, Any]:
    """Cut a prompt after at most `max_tokens` tokens, but never inside an image or a video.

    trace: the result of `VLM.trace`; its prompt may be pruned. Returns a mapping that `pack`
    accepts, with `input_ids` (L,), `positions` (3, L), and `media`, the indices of the
    remaining items. Raises ValueError if the prompt begins with an item that does not fit.
    """
    length = min(check_positive_int(max_tokens, "max_tokens"), len(trace.input_ids))
    extents = media_extents(trace)
    for first, last in sorted(extents, reverse=True):
        if first < length <= last:
            length = first
    if length == 0:
        raise ValueError(f"max_tokens: must be at least {last + 1}, so that the first item fits, got {max_tokens}")
    return {
        "input_ids": trace.input_ids[:length],
        "positions": trace.positions[:, :length],
        "media": [i for i, (_, last) in enumerate(extents) if last < length],
    }


def media_extents(trace: Any) -> list[tuple[int, int]]:
    """Return the indices of the (first, last) kept token of each item in a prompt; text may
    separate the tokens of one item.
    """
    spans, kept, extents = iter(trace.spans), trace.keep.long().cumsum(0), []
    for embeds_MW in trace.embeds:
        runs, tokens = [], 0
        while tokens < len(embeds_MW):
            runs.append(next(spans))
            tokens += runs[-1].num_tokens
        end = runs[-1].offset + runs[-1].num_tokens
        first = int(kept[runs[0].offset] - trace.keep[runs[0].offset].long())
        extents.append((first, int(kept[end - 1]) - 1))
    return extents


@dataclass
class PackingCollator:
    """A `data_collator` for transformers' Trainer and for TRL, which packs the features of a step into one sequence.

    A feature is a mapping with `input_ids` (L,) and `positions` (3, L); `labels` and
    `mm_token_type_ids` (L,), `inputs_embeds` (L, D) and `deepstack_embeds` are packed as well.
    All other tensors, such as `pixel_values` and `image_grid_thw`, are concatenated. A value of
    None counts as absent. Prompts without labels have no loss, and prompts without DeepStack
    features get zeros. The first label of each prompt is ignored, because the token before it
    belongs to a different prompt. The batch sets `use_cache=False`, because with a cache
    transformers treats all prompts as one. An `attention_mask` has the same effect, so a mask
    of ones is dropped.

    Raises ValueError if the length of a feature is not the prompt's, if only some prompts have
    `inputs_embeds` or `mm_token_type_ids`, and for a mask with zeros.
    """

    pad_to: int | None = None

    def __call__(self, features: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        batch: dict[str, Any] = {"use_cache": False, **pack(features, pad_to=self.pad_to)}
        starts = batch.pop("cu_seqlens").long()
        names = {name for feature in features for name in feature if feature[name] is not None}
        for name in names - {"input_ids", "positions"}:
            if name in FILLERS:
                batch[name] = _per_token(name, features, starts.diff().tolist())
            else:
                batch[name] = torch.cat([torch.as_tensor(f[name]) for f in features if f.get(name) is not None])
        if not batch.pop("attention_mask", torch.ones(1)).all():
            raise ValueError("attention_mask: expected ones, got zeros; remove the padding of each prompt first")
        if "labels" in batch:
            batch["labels"][0, starts[:-1]] = IGNORED
        return batch


def _per_token(name: str, features: Sequence[Mapping[str, Tensor]], lengths: list[int]) -> Tensor:
    """Join a feature with one entry per token, (1, L, ...); fill it for prompts that lack it, and for padding."""
    given = [None if feature.get(name) is None else torch.as_tensor(feature[name]) for feature in features]
    like = next(x for x in given if x is not None)
    lacking = [i for i, x in enumerate(given) if x is None]
    if lacking and FILLERS[name] is None:
        raise ValueError(f"features[{lacking[0]}]: expected {name}, because other prompts have it, got none")
    pieces = [like.new_full((length, *like.shape[1:]), FILLERS[name] or 0) for length in lengths]
    for i, x in enumerate(given):
        if x is not None:
            pieces[i] = check_shape(x, tuple(pieces[i].shape), f"features[{i}]: {name}")
    return torch.cat(pieces)[None]


def _ids_and_positions(prompt: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the ids and positions of a trace or a mapping, after checking that they match."""
    get = prompt.__getitem__ if isinstance(prompt, Mapping) else lambda field: getattr(prompt, field)
    ids, positions = torch.as_tensor(get("input_ids")).cpu(), torch.as_tensor(get("positions")).cpu()
    check_shape(ids, (None,), f"{name}: input_ids")
    check_shape(positions, (3, len(ids)), f"{name}: positions")
    return ids, positions


def _room(tokens: int, pad_to: int | None) -> int:
    if pad_to is None:
        return 0
    if check_positive_int(pad_to, "pad_to") < tokens:
        raise ValueError(f"pad_to: must be at least {tokens}, got {pad_to}; truncate the prompts or raise pad_to")
    return pad_to - tokens
