"""Answer many requests: as many as fit are decoded together, each with its own media, limits and errors."""

from collections.abc import Iterable, Iterator, Sequence
from traceback import clear_frames
from typing import Any

from tqdm.auto import tqdm

from refvl.checks import check_positive_int
from refvl.pipeline import Request
from refvl.serving.options import count_option
from refvl.trace import Record

BATCH_TOKENS = 2**14  # the maximum number of tokens in a batch, including padding and answers


def chat_batch(
    model: Any,
    requests: Sequence[dict],
    *,
    max_new_tokens: int = 128,
    pruning_rate: float = 0.0,
    pruning: str = "evs",
    allow_special_tokens: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    return_exceptions: bool = False,
    progress: bool = True,
    **generate_kwargs,
) -> list:
    """Answer independent requests, in order, decoding them together with left padding.

    requests: one dict per request, with the arguments `prompt`, `images` and `videos` of
    `chat`. A request may also set `max_new_tokens` and `pruning_rate`, which override this
    call's arguments. batch_tokens: a limit on the number of requests in a batch times the
    length of the longest one, including its answer. Consecutive requests are decoded together
    within this limit; a longer request runs alone. return_exceptions: whether a failed request
    gets its error in place of an answer while the other requests continue; otherwise, the first
    error is raised. progress: whether to show a progress bar, after two seconds. A raised error
    has a note that names `requests[i]`.

    Padding and batching change an answer only if the logits of the best two tokens differ by
    less than the rounding error. A batch takes as long as its longest answer, and batches
    run one after the other. For many users or a steady load, use a serving engine, which
    adds and removes requests at every token (`refvl.serving.export` prepares embeddings for
    it).
    """
    model.check_options("chat_batch", generate_kwargs, max_new_tokens)
    check_positive_int(batch_tokens, "batch_tokens")
    common = {"max_new_tokens": max_new_tokens, "pruning_rate": pruning_rate, "pruning": pruning}
    common["allow_special_tokens"] = allow_special_tokens
    answers = list[str | Exception]()
    with tqdm(total=len(requests), desc="answer", delay=2, leave=False, disable=not progress) as bar:
        for answer in answer_each(model, requests, common, batch_tokens, **generate_kwargs):
            if isinstance(answer, Exception) and not return_exceptions:
                answer.add_note(f"in requests[{len(answers)}]")
                raise answer
            answers.append(answer)
            bar.update()
    return answers


def answer_each(
    model: Any, requests: Iterable[dict], common: dict, batch_tokens: int = BATCH_TOKENS, **generate_kwargs
) -> Iterator[str | Exception]:
    """Yield the answers of `chat_batch` one by one as batches finish.

    common: default arguments for requests that do not set them.
    """
    check_positive_int(common["max_new_tokens"], "max_new_tokens")
    Request("", pruning_rate=common["pruning_rate"], pruning=common.get("pruning", "evs"))  # checks both values
    waiting, limits = list[Record | Exception](), list[int]()
    beams = count_option(model.language_model, generate_kwargs, "num_beams")
    for request in requests:
        made, limit = _prepare(model, request, common)
        longest = max([len(t.input_ids) for t in [*waiting, made] if isinstance(t, Record)], default=0)
        together = (len(waiting) + 1) * (longest + max([limit, *limits]))
        # with beams, only requests of equal limits share a batch, because beam search may depend on the limit
        if waiting and (together > batch_tokens or (beams > 1 and {limit} != set(limits))):
            yield from _answers_or_errors(model, waiting, limits, **generate_kwargs)
            waiting, limits = [], []
        waiting.append(made)
        limits.append(limit)
    yield from _answers_or_errors(model, waiting, limits, **generate_kwargs)


def _prepare(model: Any, request: dict, common: dict) -> tuple[Record | Exception, int]:
    """Return a request's record (only the fields that `answers` reads) or its error, and its token limit."""
    try:
        if not isinstance(request, dict):
            raise TypeError(f"request: expected a dict of arguments of `chat`, got {type(request).__name__}")
        request = common | request
        limit = check_positive_int(request.pop("max_new_tokens"), "max_new_tokens")
        read = model.read(Request(**request))
    except Exception as error:  # decoders may raise errors of any kind, and memory may run out
        clear_frames(error.__traceback__)
        return error, 1
    ready = Record(input_ids=read.input_ids, inputs_embeds=read.inputs_embeds, deepstack=read.deepstack)
    ready.positions, ready.delta = read.positions, read.delta
    return ready, limit


def _answers_or_errors(
    model: Any, made: list[Record | Exception], limits: list[int], **generate_kwargs
) -> Iterator[str | Exception]:
    """Yield each answer, cut at its own limit, or the error; if a batch fails, its requests are retried one by one."""
    traces = {i: trace for i, trace in enumerate(made) if isinstance(trace, Record)}
    answers = dict[int, str]()
    try:
        if traces:
            most = max(limits[i] for i in traces)
            ids = model.decode(list(traces.values()), most, **generate_kwargs).sequences.tolist()
            answers = {i: model.processor.text(row[: limits[i]]) for i, row in zip(traces, ids, strict=True)}
    except Exception as error:
        clear_frames(error.__traceback__)  # the traceback's frames keep references to the batch's tensors
        if len(made) == 1:
            made = [error]
    for i, trace in enumerate(made):
        if isinstance(trace, Exception):
            yield trace
        elif i in answers:
            yield answers[i]
        else:
            yield from _answers_or_errors(model, [trace], [limits[i]], **generate_kwargs)


def answers(model: Any, traces: Sequence[Record], *, max_new_tokens: int = 128, **generate_kwargs) -> list[str]:
    """Answer prepared prompts by decoding them together. A caller may change a trace's positions and delta beforehand.

    Only the input_ids, inputs_embeds, deepstack, positions and delta of each trace are used.
    """
    model.check_options("answers", generate_kwargs, max_new_tokens)
    if not traces:
        return []
    ids = model.decode(list(traces), max_new_tokens, **generate_kwargs).sequences
    return [model.processor.text(answer) for answer in ids.tolist()]
