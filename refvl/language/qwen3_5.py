"""Qwen3.5's text models are transformers'; here is what their linear-attention layers need for drafted tokens."""

import copy
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from refvl.language.model import CausalTextModel

READ_AGAIN = 32  # accepted tokens that a forward reads once more beside new drafts, before they get one of their own


class RewindingCache(DynamicCache):
    """A cache that can take drafted tokens back from linear-attention layers.

    Such a layer keeps one recurrent state for all tokens that it has read. transformers 5.17 to 5.23 crop keys, values
    and convolution states, but leave that state, rejected drafts included. Here every state is copied before each
    forward. `crop` returns to the last copy without a rejected token; the accepted tokens after it are read again.
    """

    copies: list[tuple[int, dict[int, Any]]] | None = None  # (tokens, linear layers) before each forward since `crop`
    behind: int = 0  # accepted tokens that have to be read again

    def activate_past_recording(self) -> None:
        """transformers calls this before it drafts tokens; without drafts nothing is copied."""
        self.copies = []

    def remember(self) -> None:
        """Copy the states of the linear layers, to which `crop` may return."""
        if self.copies is not None:
            layers = enumerate(self.layers)
            linear = {i: copy.deepcopy(x) for i, x in layers if isinstance(x, LinearAttentionCacheLayerMixin)}
            self.copies.append((self.get_seq_length(), linear))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back at least the last tokens; tokens_to_remove: minus their number, as transformers has it."""
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
    """Dense or with experts; the layer that predicts several tokens at once is skipped, as in transformers."""

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"^mtp\."]  # noqa: RUF012
    cache_class = RewindingCache

    def forward(self, *args, **kwargs):
        """As in `CausalTextModel`; accepted drafts that have to be read again, if many, get a forward of their own."""
        cache = kwargs.get("past_key_values")
        if isinstance(cache, RewindingCache):
            if (again := cache.behind) > READ_AGAIN:
                cache.behind = 0
                first = {name: kwargs[name][..., :again] for name in ("input_ids", "position_ids")}
                self(**first, past_key_values=cache)
                kwargs |= {name: kwargs[name][..., again:] for name in first}
            cache.remember()
        return super().forward(*args, **kwargs)

    def model_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """As in `CausalTextModel`. Raises ValueError for packed prompts (`refvl.positions.pack`)."""
        if position_ids is not None and len(position_ids) == 4:
            raise ValueError(
                "position_ids: Qwen3.5's linear-attention layers would mix packed prompts, give each alone"
            )
        return position_ids
