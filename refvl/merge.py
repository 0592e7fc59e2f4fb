"""Merge embeddings into the prompt: find the tokens that each media item fills, and replace them with its embeddings.

Placeholder tokens mark the locations of media. If a prompt's placeholders do not match the
layouts exactly, an error is raised, so no image is ever shifted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refvl.checks import check_shape
from refvl.positions import MediaSpan, find_pruner


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The tokens of one media item as the language model sees them: their grid, and the scale of the time axis."""

    kind: str  # "image" or "video"
    thw: tuple[int, int, int]  # in merged tokens
    t_factor: float = 1.0

    @property
    def num_tokens(self) -> int:
        t, h, w = self.thw
        return t * h * w

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """The extents (t, h, w) of each run of consecutive placeholders.

        By default, a single run contains all tokens.
        """
        return [self.thw]

    def keep_mask(self, embeds_MD: Tensor, q: float, pruning: str = "evs") -> Tensor | None:
        """Return the mask of embeddings that a pruner in `PRUNERS` keeps at rate q, (M,) bool, or None if all are kept.

        All tokens of an image are kept.
        """
        return find_pruner(pruning).mask(embeds_MD, self.thw, 1, q) if self.kind == "video" and q > 0 else None


@dataclass(frozen=True, slots=True)
class FramewiseMedia(MediaTokens):
    """A video of GLM or Qwen3-VL: each frame is a separate run, with text between the frames."""

    timestamps: tuple[float, ...] = ()  # in seconds, one per frame; empty if refvl did not build the prompt

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        t, h, w = self.thw
        return [(1, h, w)] * t


def find_media_spans(input_ids: Tensor, media: Sequence[MediaTokens], token_ids: dict[str, int]) -> list[MediaSpan]:
    """Find each media item in an expanded prompt (L,), in the order of `media`; return one span per run.

    Media of one kind fill the placeholders of that kind in order; kinds may alternate in the
    prompt. Raises ValueError if a run of placeholders is shorter than its item, if placeholders
    or media are left over, or if the prompt does not end in text. The error is also raised if
    two runs of one item are adjacent: because text always separates frames and crops, the
    lengths or the order of such a prompt do not match the media.
    """
    spans: dict[int, list[MediaSpan]] = {i: [] for i in range(len(media))}
    for kind, token in token_ids.items():
        places = (input_ids == token).nonzero().flatten().tolist()
        items = [(i, item) for i, item in enumerate(media) if item.kind == kind]
        expected = sum(item.num_tokens for _, item in items)
        if len(places) != expected:
            wanted = f"{expected} {kind} placeholders for {len(items)} {kind}(s)"
            raise ValueError(f"input_ids: expected {wanted}, got {len(places)}")
        used, runs = 0, [(i, item, thw) for i, item in items for thw in item.runs]
        for i, item, thw in runs:
            span = MediaSpan(places[used], *thw, item.t_factor)
            length = span.num_tokens
            if places[used + length - 1] - span.offset + 1 != length:
                raise ValueError(f"input_ids: expected {length} consecutive placeholders of {kind} {i}, got a gap")
            if spans[i] and places[used - 1] + 1 == span.offset:
                parts = f"separate runs of {[t * h * w for t, h, w in item.runs]} placeholders for {kind} {i}"
                raise ValueError(f"input_ids: expected {parts}, got two runs without a gap between them")
            spans[i].append(span)
            used += length
    if int(input_ids[-1]) in token_ids.values():
        raise ValueError("prompt: must end in text, because later positions continue from its last token")
    return [span for of_medium in spans.values() for span in of_medium]


def media_places(spans: Sequence[MediaSpan]) -> Tensor:
    """Return the prompt indices of all media tokens, (M,) int64, in the order of their embeddings."""
    places = [torch.arange(span.offset, span.offset + span.num_tokens) for span in spans]
    return torch.cat(places) if places else torch.empty(0, dtype=torch.int64)


def merge_embeddings(text_embeds_LD: Tensor, spans: Sequence[MediaSpan], media_embeds: Sequence[Tensor]) -> Tensor:
    """Return the text embeddings, (L, D), with the rows of all spans replaced by the media's rows, (M, D)."""
    merged_LD = text_embeds_LD.clone()
    if media_embeds:
        places_M = media_places(spans)
        embeds_MD = torch.cat(list(media_embeds))
        if embeds_MD.shape != (len(places_M), text_embeds_LD.shape[1]):
            check_shape(embeds_MD, (("tokens of spans", len(places_M)), text_embeds_LD.shape[1]), "media_embeds")
        merged_LD[places_M.to(merged_LD.device)] = embeds_MD.to(merged_LD)
    return merged_LD


def keep_in_prompt(
    num_tokens: int, spans: Sequence[MediaSpan], keep_masks: Sequence[Tensor | None], counts: Sequence[int]
) -> Tensor:
    """Return a (L,) bool mask of all text tokens and of the tokens that each item's (M,) mask keeps (None: all).

    counts: the number of tokens of each item; an item may fill several spans.
    """
    keep_L = torch.ones(num_tokens, dtype=torch.bool)
    for places_M, mask_M in zip(media_places(spans).split(list(counts)), keep_masks, strict=True):
        if mask_M is not None:
            keep_L[places_M] = mask_M.cpu()
    return keep_L


def left_pad(rows: Sequence[Tensor], value=0) -> tuple[Tensor, Tensor]:
    """Stack sequences (L_i, ...) into (B, L, ...), padded on the left; return the stack and its (B, L) int64 mask."""
    length = max(len(row) for row in rows)
    batch = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), value)
    mask = torch.zeros(len(rows), length, dtype=torch.int64, device=rows[0].device)
    for i, row in enumerate(rows):
        batch[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
    return batch, mask
