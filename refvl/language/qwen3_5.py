"""Qwen3.5's text models are those of transformers; this file lets linear-attention layers undo drafted tokens."""

import copy
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from refvl.language.model import CausalTextModel

READ_AGAIN = 32  # at most this many accepted tokens are re-read with new drafts; more get their own forward


class RewindingCache(DynamicCache):
    """A cache that can remove drafted tokens from linear-attention layers.

    Such a layer has one recurrent state for all tokens that it has read. transformers 5.17 to 5.23 crop keys, values
    and convolution states, but not the recurrent state, which then includes rejected drafts. This cache copies every
    state before each forward. `crop` returns to the last copy that contains no rejected token, and the accepted tokens
    after that copy are re-read.
    """

    copies: list[tuple[int, dict[int, Any]]] | None = None  # (tokens, linear layers' states) before each forward
    behind: int = 0  # the number of accepted tokens that have to be re-read

    def activate_past_recording(self) -> None:
        """Start copying: transformers calls this before it drafts tokens; without drafts nothing is copied."""
        self.copies = []

    def remember(self) -> None:
        """Copy the states of the linear layers, so `crop` can return to them."""
        if self.copies is not None:
            layers = enumerate(self.layers)
            linear = {i: copy.deepcopy(x) for i, x in layers if isinstance(x, LinearAttentionCacheLayerMixin)}
            self.copies.append((self.get_seq_length(), linear))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, possibly more. tokens_to_remove: minus their number, as in transformers."""
        total, self.behind = self.get_seq_length(), 0
        if tokens_to_remove:
            wanted = total - abs(tokens_to_remove)
            length, linear = next(kept for kept in reversed(self.copies or []) if kept[0] <= wanted)
            self.behind = wanted - length
            layers: list[Any] = self.layers
            for i, layer in enumerate(layers):
                if i in linear:
                    layers[i] = linear[i]
                else:
                    layer.crop(length - total)
        self.copies = []


class Qwen3_5TextModel(CausalTextModel):
    """A dense or MoE model; the multi-token-prediction layer is skipped, as in transformers."""

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"^mtp\."]  # noqa: RUF012
    cache_class = RewindingCache

    def forward(self, *args, attention_mask=None, **kwargs):
        """Run as in `CausalTextModel`; if many accepted drafts have to be re-read, they get a separate forward."""
        cache = kwargs.get("past_key_values")
        if isinstance(cache, RewindingCache):
            if (again := cache.behind) > READ_AGAIN:
                cache.behind = 0
                first = {name: kwargs[name][..., :again] for name in ("input_ids", "position_ids")}
                self(**first, past_key_values=cache)
                kwargs |= {name: kwargs[name][..., again:] for name in first}
            cache.remember()
        return super().forward(*args, **kwargs | {"attention_mask": attention_mask})

    def model_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """Return positions as in `CausalTextModel`; raise ValueError for packed prompts (`refvl.positions.pack`)."""
        if position_ids is not None and len(position_ids) == 4:
            raise ValueError(
                "position_ids: expected one prompt, because Qwen3.5's linear-attention layers would mix packed prompts"
            )
        return position_ids
