"""Data recorded during an answer: the last prompt token's states, the first logits,
and the margins of new tokens.

    Readout         hooks on a text model, refvl's or transformers', while it answers one prompt
    margins         the best logit minus the second best, for each new token
    last_states     the states of the last prompt token, recomputed from the inputs of a run

Shape suffixes: L tokens of the prompt, D text model width, V vocabulary.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from refvl.serving.features import share_weights


def margins(logits: Tensor) -> Tensor:
    """Return the difference between the best two logits of (..., V), (...) float32; 0 is a tie."""
    best, second = logits.float().topk(2).values.unbind(-1)
    return best - second


class Readout(ExitStack):
    """Hooks on a text model while it answers one prompt; `close`, or the end of a `with` block,
    removes the hooks.

    Row numbers count the tokens that the model has read, so they do not depend on chunks.
    The last prompt token is row L - 1, and new token k is chosen after row L - 1 + k. Only
    forwards of the creating thread are recorded.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], length: int):
        """Register the hooks. model: a model whose output has `logits`, (B, rows, V).

        layers: the model's layers. length: L, the number of prompt tokens.
        """
        super().__init__()
        self.length, self.start, self.stop, self.thread = length, 0, 0, threading.get_ident()
        self.states, self.first, self.by_row = list[Tensor](), list[Tensor](), dict[int, Tensor]()
        self.enter_context(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self.enter_context(model.register_forward_hook(self._end))
        self.enter_context(layers[0].register_forward_pre_hook(self._enter, with_kwargs=True))
        for layer in layers:
            self.enter_context(layer.register_forward_hook(lambda _, __, output: self._keep(output)))

    @property
    def last_states(self) -> Tensor | None:
        """The states of row L - 1, (layers + 1, D): the input of layer 0, then the output of each
        layer, without the final norm.

        They are on the CPU.
        """
        return torch.stack([state.cpu() for state in self.states]) if self.states else None

    @property
    def first_logits(self) -> Tensor | None:
        """The (V,) logits after row L - 1, on the CPU."""
        return self.first[0].cpu() if self.first else None

    def margins(self, count: int) -> Tensor | None:
        """Return the margins of `count` new tokens, (count,),
        or None if several sequences were decoded together.
        """
        rows = range(self.length - 1, self.length - 1 + count)
        return torch.stack([self.by_row[row] for row in rows]).cpu() if all(r in self.by_row for r in rows) else None

    # torch adds or removes a hook and its `with_kwargs` flag in two steps; between them, a hook
    # that another thread calls gets no kwargs.
    def _begin(self, model: nn.Module, args: tuple, kwargs: dict | None = None) -> None:
        if threading.get_ident() == self.thread:
            cache = (kwargs or {}).get("past_key_values")
            self.start = 0 if cache is None else int(cache.get_seq_length())

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict | None = None) -> None:
        if threading.get_ident() == self.thread:
            x_BLD = args[0] if args else (kwargs or {})["hidden_states"]
            self.stop = self.start + x_BLD.shape[1]
            self._keep(x_BLD)

    def _keep(self, output: Any) -> None:
        x_BLD = output[0] if isinstance(output, tuple) else output
        if threading.get_ident() == self.thread and not self.first:  # the first forward contains row L - 1
            self.states.append(x_BLD[0, self.length - 1 - self.start].clone())

    def _end(self, model: nn.Module, args: tuple, output: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        logits_BRV = output.logits.detach()
        first_row = self.stop - logits_BRV.shape[1]
        if not self.first:
            self.first.append(logits_BRV[0, self.length - 1 - first_row].clone())
        if len(logits_BRV) == 1:
            self.by_row |= {first_row + i: margin for i, margin in enumerate(margins(logits_BRV[0]))}


def last_states(text: Any, given: dict[str, Tensor], positions_3L: Tensor) -> Tensor:
    """Recompute the states of the last prompt token, (layers + 1, D), from `given`."""
    watched = share_weights(text)
    readout = Readout(watched, watched.model.layers, positions_3L.shape[1])
    inputs = {"inputs_embeds": given["merge/inputs_embeds"], "deepstack_embeds": given.get("merge/deepstack")}
    rows = {name: x[None].to(text.device, text.dtype) for name, x in inputs.items() if x is not None}
    watched(position_ids=positions_3L[:, None].to(text.device), logits_to_keep=1, use_cache=False, **rows)
    return torch.stack(readout.states).cpu()
