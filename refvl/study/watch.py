"""`VLM.trace` keeps the results of every stage; on request,
it also keeps attention weights and hidden states.

    trace              a run as in `chat`, on watched copies of tower and language model if needed
    TowerWatch         a copy of the encoder with hooks, whose recorded values fill a trace
    media_attention    the attention of a new token to each token of an image or video
    probabilities      the probability of every vocabulary entry, before each new token was chosen
    SegmentAttention   the attention among the rows of one window, frame, slice or square of the tower

The hooks are on copies, so no other call in any thread runs them, and no forward depends on them.
Graphs are not used, because their replays return no intermediate values. The tower's attention
weights are computed from its queries and keys. The attention weights of the language model come
from transformers, which returns them only with eager attention.

Shape suffixes: N patch rows, E tower width, H heads, K head dimension, S rows of a segment; Q
queries and T keys of a step of generation.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments
from refvl.language.model import CausalTextModel
from refvl.pipeline import Request
from refvl.pixels.patches import RESIZERS
from refvl.serving.features import first_rows, in_patch_order, keep_output, share_weights
from refvl.serving.long_prompts import read_in_chunks
from refvl.study.interventions import with_replacements
from refvl.study.readout import Readout
from refvl.study.report import FLOAT16_LIMIT, Trace


class SegmentAttention(NamedTuple):
    """The attention within one segment in a tower block."""

    # (S,) int64: indices into the patch rows of all media, in the order of `Trace.patches`; -1: a class token
    rows: Tensor
    weights: Tensor  # (H, S, S): query, key; the sum over the keys is 1


class TowerWatch:
    """A copy of an encoder, `encoder`, that shares the weights and records, in later forwards,
    attentions and hidden states of its blocks.
    """

    def __init__(self, encoder: Any, *, attentions: bool, hidden_states: bool):
        self.encoder = share_weights(encoder)
        blocks = list(self.encoder.blocks)
        self.segments = [list[list[Tensor]]() for _ in blocks if attentions]  # by block, then by pass through them
        self.states = [list[Tensor]() for _ in range(len(blocks) + 1) if hidden_states]
        if attentions:
            for block, kept in zip(blocks, self.segments, strict=True):
                block.register_forward_pre_hook(partial(_watch_segments, kept))
        if hidden_states:
            blocks[0].register_forward_pre_hook(lambda _, args: self.states[0].append(args[0]))
            for block, states in zip(blocks, self.states[1:], strict=True):
                block.register_forward_hook(partial(keep_output, states))

    def fill(self, trace: Trace) -> None:
        """Fill `tower_attentions` and `tower_hidden_states` of a trace, using its plans
        (`metadata`), one per forward.
        """
        rows, start = list[Tensor](), 0  # for each pass, the index of the patch row at each position
        for metadata in trace.metadata:
            runs = self.encoder.block_rows(metadata)
            rows += [torch.where(places < 0, places, places + start) for places in runs]
            start += sum(int((places >= 0).sum()) for places in runs)
        if rows:
            trace.tower_attentions = [_by_segment(runs, rows) for runs in self.segments]
            trace.tower_hidden_states = [in_patch_order(runs, rows) for runs in self.states]


def keep_language(trace: Trace, output: Any, config: Any) -> None:
    """Fill the trace's `attentions` and `hidden_states` from the output of the language model's
    `generate`.

    transformers returns one tensor for the whole prompt and one for each later token.
    """
    if output.attentions is not None:
        found = (_square(steps) for steps in zip(*output.attentions, strict=True))
        kinds = getattr(config, "layer_types", None) or range(len(output.attentions[0]))
        trace.attentions = [None if kind == "linear_attention" else next(found) for kind in kinds]
    if output.hidden_states is not None:
        trace.hidden_states = [torch.cat(steps, dim=1)[0] for steps in zip(*output.hidden_states, strict=True)]


def media_attention(trace: Trace, medium: int = 0, token: int = 0) -> Tensor:
    """Return the attention of new token `token` to each token of an item,
    (layers with weights, H, M); it is 0 for pruned tokens.

    trace: a trace with attentions. Raises ValueError if the trace has none.
    """
    if not trace.attentions:
        raise ValueError("trace: expected attentions, got none; use trace(..., attentions=True)")
    runs = [len(patches.media_tokens.runs) for patches in trace.patches]
    spans = trace.spans[sum(runs[:medium]) : sum(runs[: medium + 1])]
    places = torch.cat([torch.arange(span.offset, span.offset + span.num_tokens) for span in spans])
    keys = (trace.keep.cumsum(0) - 1).clamp(min=0)[places]  # the index among the kept tokens
    taken = torch.stack([x[:, len(trace.input_ids) - 1 + token] for x in trace.attentions if x is not None])
    return taken[..., keys] * trace.keep[places].to(taken)


@torch.inference_mode()
def probabilities(language_model: CausalTextModel, trace: Trace) -> Tensor:
    """Return (T, vocabulary) probabilities just before each of T new tokens was chosen;
    the trace needs hidden states.
    """
    return language_model.lm_head(trace.hidden_states[-1][len(trace.input_ids) - 1 :]).float().softmax(-1)


class _WatchedSegments:
    """A wrapper around the `Segments` that a block receives; it keeps each segment's weights."""

    def __init__(self, segments: Segments, kept: list[list[Tensor]]):
        self.segments, self.kept = segments, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.segments, name)

    def attend(self, q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, backend: str) -> Tensor:
        lengths = self.segments.cu_seqlens.diff().tolist()
        pairs = zip(q_NHK.split(lengths), k_NHK.split(lengths), strict=True)
        self.kept.append([attention_weights(q_SHK, k_SHK) for q_SHK, k_SHK in pairs])
        return self.segments.attend(q_NHK, k_NHK, v_NHK, backend)


def attention_weights(q_SHK: Tensor, k_SHK: Tensor) -> Tensor:
    """Return softmax(q k / sqrt(K)), (H, S, S), in float32 as in transformers' eager attention."""
    scores_HSS = q_SHK.transpose(0, 1) @ k_SHK.permute(1, 2, 0) * q_SHK.shape[-1] ** -0.5
    return scores_HSS.softmax(-1, dtype=torch.float32).to(q_SHK.dtype)


def _watch_segments(kept: list[list[Tensor]], block: nn.Module, args: tuple) -> tuple:
    return tuple(_WatchedSegments(arg, kept) if isinstance(arg, Segments) else arg for arg in args)


def _by_segment(runs: list[list[Tensor]], rows: list[Tensor]) -> list[SegmentAttention]:
    segments = list[SegmentAttention]()
    for weights, places in zip(runs, rows, strict=True):
        lengths = [w.shape[-1] for w in weights]
        segments += map(SegmentAttention, first_rows(places, lengths).split(lengths), weights)
    return segments


def _square(steps: Sequence[Tensor]) -> Tensor:
    """Stack weights (1, H, Q, T) of the prompt and of each new token into (H, all Q, all Q),
    zero for later keys.

    T may be smaller than the number of keys so far, because a sliding window contains only the last
    keys. T may also be larger, because a static cache has free space after the keys.
    """
    total, seen, rows = sum(step.shape[2] for step in steps), 0, []
    for step in steps:
        seen += step.shape[2]
        weights_HQT = step[0, :, :, :seen]
        rows.append(F.pad(weights_HQT, (seen - weights_HQT.shape[-1], total - seen)))
    return torch.cat(rows, dim=1)


@contextmanager
def largest_values(model: Any, *, with_prefill: bool = True) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the largest magnitude of each layer's output in the tower and the language model;
    outputs for a single token do not count.

    Only layers that this thread runs are counted. Graphs and compiled blocks cannot run these
    hooks, so for them only the results of stages are used.
    """
    found, thread = {"encode": list[Tensor](), "prefill": list[Tensor]()}, threading.get_ident()

    def keep(stage, layer, arguments, output) -> None:
        x = output[0] if isinstance(output, tuple) else output
        is_prompt = isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[-2] > 1
        if is_prompt and threading.get_ident() == thread:
            found[stage].append(max_norm(x))

    layers = {"prefill": model.language_model.model.layers if with_prefill else ()}
    if model.graphs is None and not model.encoder.is_compiled:
        layers["encode"] = model.encoder.blocks
    with ExitStack() as hooks:
        for stage in layers:
            for layer in layers[stage]:
                hooks.enter_context(layer.register_forward_hook(partial(keep, stage)))
        yield found


def keep_largest(trace: Trace, found: dict[str, list[Tensor]]) -> None:
    """Set `largest` for each stage from the outputs of stages and layers;
    warn if values approach float16's limit.
    """
    made = {
        "patchify": [p.pixel_values for p in trace.patches],
        "encode": [*found["encode"], *trace.embeds],
        "merge": [] if trace.inputs_embeds is None else [trace.inputs_embeds],
        "prefill": found["prefill"],
    }
    filled = {stage: [x for x in tensors if x.numel()] for stage, tensors in made.items()}
    for stage, tensors in ((stage, tensors) for stage, tensors in filled.items() if tensors):
        largest = torch.tensor([float(max_norm(x)) for x in tensors]).amax().item()
        trace.largest[stage] = largest
        if any(x.dtype == torch.float16 for x in tensors) and not largest < FLOAT16_LIMIT / 2:
            reached = f"{stage}: values reach {largest:,.0f}, and float16 ends at {FLOAT16_LIMIT:,.0f}"
            warnings.warn(f"{reached}: answers may be nonsense ('!!!!'); load with dtype='bfloat16'", stacklevel=2)


def max_norm(x: Tensor) -> Tensor:
    """Return the largest magnitude (nan if any value is nan) on the tensor's device."""
    return torch.linalg.vector_norm(x.detach(), torch.inf)


def trace(
    model: Any,
    prompt: str | Sequence[dict],
    *,
    max_new_tokens: int = 128,
    attentions: bool = False,
    hidden_states: bool = False,
    prefill_chunk: int | None = None,
    replace: Mapping[str, Callable] | None = None,
    **options,
) -> Trace:
    """Run like `chat`, with the same arguments, but keep the result and the time of every stage:
    see `VLM.trace`.
    """
    asked = {name: options.pop(name) for name in Request.__dataclass_fields__ if name in options}
    model = copy.copy(model)  # the copy shares all parts
    model.record = Trace
    num_beams = model.check_options("trace", options, max_new_tokens)
    is_watched = attentions or hidden_states
    if prefill_chunk is not None and (is_watched or replace):
        raise ValueError("prefill_chunk: not supported with replace, attentions or hidden_states: stages run in parts")
    if is_watched and num_beams != 1:
        raise ValueError(f"num_beams: must be 1 with attentions or hidden_states, got {num_beams}")
    request = Request(prompt, **asked)
    if replace is not None:
        model = with_replacements(model, replace)
    if is_watched:
        tower = TowerWatch(model.encoder, attentions=attentions, hidden_states=hidden_states)
        model.encoder, model.language_model = tower.encoder, share_weights(model.language_model)
        model.graphs = model.media_cache = None  # a replay returns no intermediate values
        options |= {"output_attentions": attentions, "output_hidden_states": hidden_states}
    if attentions:
        model.family.require("attentions")
        model.language_model.set_attn_implementation("eager")
    answer = model.answer if num_beams == 1 else model.answer_with_beams
    with largest_values(model, with_prefill=num_beams == 1) as largest:
        if prefill_chunk is None:
            run = model.read(request)
        else:
            run, options = read_in_chunks(model, prefill_chunk, request, options)
        text = model.language_model
        with Readout(text, text.model.layers, len(run.input_ids)) as readout:
            output = answer(run, max_new_tokens, **options)
    run.resizer = RESIZERS[getattr(model.processor.image_config, "resize", "pillow")]
    run.first_logits, run.last_states = readout.first_logits, readout.last_states
    run.margins = readout.margins(len(run.token_ids))
    keep_largest(run, largest)
    if is_watched:
        tower.fill(run)
        keep_language(run, output, model.language_model.config)
    return run
