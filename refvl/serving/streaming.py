"""Text as it is generated: transformers' `generate` runs in a thread that ends when the caller stops reading."""

from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, StoppingCriteriaList, TextIteratorStreamer

from refvl.language.model import TokenTimer
from refvl.serving.options import is_static
from refvl.trace import Record


def stream_answer(model: Any, trace: Record, max_new_tokens: int | None, options: dict) -> Iterator[str]:
    """Yield the answer to a prepared prompt piece by piece; the caller's streamer and stopping
    criteria also apply.

    Closing or deleting the generator ends the generation and its thread within one token. Errors in
    the thread are raised in this function.
    """
    streamer = TextIteratorStreamer(model.processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    both = TokenTimer(None, [streamer, options.pop("streamer", None)])
    stopped, failures = Event(), []
    if torch.__version__ < "2.13" and is_static(model.language_model, options):
        # the compiled decode step uses no graphs, because only one thread could record them (pytorch issue 123177)
        options = {"compile_config": CompileConfig(mode="default")} | options

    def stop(input_ids: Tensor, scores, **kwargs) -> Tensor:
        return torch.full((len(input_ids),), stopped.is_set(), device=input_ids.device)

    stops = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), stop])

    def work() -> None:
        try:
            model.decode([trace], max_new_tokens, streamer=both, stopping_criteria=stops, **options)
        except BaseException as error:  # otherwise an exception in the thread would be lost
            failures.append(error)
            streamer.on_finalized_text("", stream_end=True)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from (piece for piece in streamer if piece)
    finally:
        stopped.set()
        thread.join()
    if failures:
        raise failures[0]
