"""The rows of the explorers, computed again without their tables."""

import itertools
import math
from copy import copy
from functools import cache as kept

import numpy as np
import torch

from refvl.positions import compute_retention_mask, restrict_positions
from refvl.serving.parallel import get_count_assignment, get_load_balance_assignment
from refvl.study.watch import probabilities
from refvl.viz.explorers.gallery import GALLERY, SIZES
from refvl.viz.explorers.mrope import QUERY, SECTIONS
from refvl.viz.explorers.stale import replay_stale


def graph(explorer, state: tuple) -> dict:
    """The buffers are filled by hand, and the graph is replayed whole; the model answers from a merged prompt."""
    [stale] = state
    model, captured, run = explorer.model, explorer.captured, explorer.run
    filled = [(trace.patches[0].pixel_values, model.encoder.plan(trace.layouts)) for trace in (explorer.first, run)]
    captured.fill(*filled[0])
    left = {name: buffer.clone() for name, buffer in captured.buffers.items()}
    captured.fill(*filled[1])
    if stale in left:
        captured.buffers[stale].copy_(left[stale])
    embeds = captured.graph.replay()[: len(run.embeds[0])].clone()
    changed = copy(run)
    changed.inputs_embeds = run.inputs_embeds.clone()
    changed.inputs_embeds[run.spans[0].offset :][: len(embeds)] = embeds
    with torch.inference_mode():
        logits = model.language_model(
            inputs_embeds=changed.inputs_embeds[None], position_ids=run.positions[:, None], logits_to_keep=1
        ).logits
    errors = replay_stale(captured, *filled)["" if stale == "none" else stale].errors
    return {
        "operations": [0 if e == 0 else level(1 + 254 * math.log10(max(e, 1e-3) / 1e-3) / 4) for e in errors],
        "tokens": ((embeds - run.embeds[0]).norm(dim=1) / run.embeds[0].norm(dim=1)).view(3, 3),
        "answer": model.answers([changed], max_new_tokens=16)[0],
        "probability": round(float(logits.softmax(-1).max()), 3),
    }


def level(value: float) -> int:
    """1 to 255, truncated."""
    return int(min(255, max(1, value)))


def walk(prompt, rule: str) -> np.ndarray:
    """Positions (3, N), token by token: text counts on all axes, a medium starts where the text stopped, text goes on
    after the largest position. The other conventions change what a step lasts, or where text goes on."""
    starts, rows, follows = {span.offset: span for span in prompt.spans}, [], 0
    while len(rows) < len(prompt.ids):
        span = starts.get(len(rows))
        if span is None:
            rows.append((follows,) * 3)
            follows += 1
            continue
        factor = span.t_factor
        if "whole seconds" in rule and span.t > 1:
            factor = 2.0 * int(span.t_factor / 2)
        thw = itertools.product(range(span.t), range(span.h), range(span.w))
        rows += [(follows + int(t * factor), follows + h, follows + w) for t, h, w in thw]
        if "uses max(h, w)" in rule:
            follows += max(span.h, span.w)
        elif "uses w positions" in rule:
            follows += span.w
        else:
            follows += max(int((span.t - 1) * factor) + 1, span.h, span.w)
    found = np.array(rows).T
    if "bfloat16" in rule:  # eight bits: from 256 on every second, from 512 on every fourth, ties to even
        step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(found, 1))) - 7, 0)
        found = (np.round(found / step) * step).astype(int)
    return found


def positions(explorer, state: tuple) -> dict:
    """The rule read token by token, and what each token is of."""
    *sizes, convention = state
    prompt, family, none = explorer.prompt(*sizes), sizes[0], convention == "nothing"
    like_text = "plain text" in convention
    assert none or like_text or family == "Qwen2.5-VL"  # the others write text between frames: no release differs
    found, other = walk(prompt, "nothing"), walk(prompt, convention)
    other = np.tile(np.arange(len(prompt.ids)), (3, 1)) if like_text else other
    N, steps = len(prompt.ids), 0
    kinds, places, extents = np.zeros(N, int), np.zeros((N, 3), int), np.ones((N, 3), int)
    total = sum(span.t for span, kind in zip(prompt.spans, prompt.kinds, strict=True) if kind == "video")
    for span, kind in zip(prompt.spans, prompt.kinds, strict=True):
        own = slice(span.offset, span.offset + span.num_tokens)
        kinds[own] = {"image": 1, "video": 2}[kind]
        places[own] = np.argwhere(np.ones((span.t, span.h, span.w)))
        extents[own] = (total if kind == "video" else 1, span.h, span.w)
        if kind == "video":  # the frames of a video may be spans of their own
            places[own, 0] += steps
            steps += span.t
    tokenizer = explorer.processors[family].tokenizer
    return {
        "positions": found, "delta": int(found.max()) + 1 - N,
        "words": np.array([explorer.shared["words"].index(tokenizer.decode([int(i)])) for i in prompt.ids]),
        "kinds": kinds, "places": places, "extents": extents,
        "other": None if none else other, "other_delta": None if none else int(other.max()) + 1 - N,
    }  # fmt: skip


def mrope(explorer, state: tuple) -> dict:
    """The definition in float64: plane i turns by position / theta^(i / planes), the score is the mean cosine."""
    (sections, interleaved), theta, *key = SECTIONS[state[0]], *state[1:]
    planes = sum(sections)
    if interleaved:  # t, h, w in turns while h and w have planes left, then t
        axes = [i % 3 if i % 3 and i // 3 < sections[i % 3] else 0 for i in range(planes)]
    else:
        axes = [0] * sections[0] + [1] * sections[1] + [2] * sections[2]
    turn = np.array([theta ** (-i / planes) for i in range(planes)])
    angles, query = np.array(key)[axes] * turn, np.array(list(QUERY.values()))[axes] * turn
    cosines = np.cos(angles - query) / planes
    parts = np.array([cosines[np.array(axes) == axis].sum() for axis in range(3)])
    return {"axes": np.array(axes), "cos": np.cos(angles), "sin": np.sin(angles), "parts": parts, "score": parts.sum()}


def assert_agree(got, wanted, name: str = "row") -> None:
    """Nested numbers and texts are the same, whatever holds them; numbers with a fraction as 32 bits tell them.

    A float32 has 24 bits; angles of up to 16 rad take 4 of them, sums of up to 64 terms 6: 1e-5 of
    the largest is left with room to spare for other processors.
    """
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), name
        for key in wanted:
            assert_agree(got[key], wanted[key], f"{name}[{key!r}]")
    elif isinstance(wanted, list | tuple) and any(isinstance(item, dict | str) or np.ndim(item) for item in wanted):
        assert len(got) == len(wanted), name
        for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_agree(one, other, f"{name}[{i}]")
    elif isinstance(wanted, str) or wanted is None:
        assert got == wanted, name
    else:
        found, right = np.asarray(got, dtype=np.float64).ravel(), np.asarray(wanted, dtype=np.float64).ravel()
        assert found.shape == right.shape, name
        whole = np.asarray(wanted).dtype.kind in "biu"
        np.testing.assert_allclose(found, right, rtol=0, atol=0 if whole else 1e-5 * np.abs(right).max(initial=1))


@kept
def watched(model, asked):
    return model.trace(asked.prompt, images=[asked.picture], attentions=True, hidden_states=True)


def segments_of(trace, block: int) -> torch.Tensor:
    """(N,) by going through the windows patch by patch."""
    numbers = torch.zeros(len(trace.patches[0].pixel_values), dtype=torch.int64)
    for number, (rows, _) in enumerate(trace.tower_attentions[block]):
        for patch in rows.tolist():
            numbers[patch] = number
    return numbers


def of_head(weights: torch.Tensor, head, steps: int) -> torch.Tensor:
    return (steps * (weights.mean(0) if head == "mean" else weights[head])).round().int()


def attention(explorer, state: tuple) -> dict:
    question, token, layer, head = state
    asked = explorer.watched[question]
    trace = watched(explorer.model, asked)
    read = len(trace.input_ids) + token - 1  # tokens that are there when this one is chosen
    blocks, patches = range(len(trace.tower_attentions)), len(trace.patches[0].pixel_values)
    tower = torch.zeros(len(blocks), len(trace.tower_attentions[0][0].weights), patches, patches)
    for block, (rows, weights) in ((i, segment) for i in blocks for segment in trace.tower_attentions[i]):
        for query, patch in enumerate(rows.tolist()):
            tower[block, :, patch, rows] = weights[:, query]
    return {
        "question": list(explorer.watched).index(question), "token": token - 1,
        "layer": layer, "head": 0 if head == "mean" else 1 + head,
        "weights": of_head(trace.attentions[layer][:, read - 1, :read], head, 65535),
        "tower": (255 * tower.mean(1)).round().int(), "segments": torch.stack([segments_of(trace, b) for b in blocks]),
    }  # fmt: skip


def chances(explorer, words: list[str], logits: torch.Tensor) -> list[float]:
    """Probabilities of these words, spaces shown."""
    decode = explorer.model.processor.tokenizer.decode
    every = {decode([token]).replace(" ", "␣"): p for token, p in enumerate(logits.softmax(-1).tolist())}
    return [round(every[word], 4) for word in words]


def evs(explorer, state: tuple) -> dict:
    question, q = state
    number = [clip["name"] for clip in explorer.clips].index(question)
    shared, video = explorer.clips[number]["shared"], explorer.clips[number]["video"]
    trace = explorer.model.trace(shared["prompt"], videos=[video], pruning_rate=q, hidden_states=True)
    positions, delta = restrict_positions(trace.full_positions, trace.keep)
    logits = explorer.model.language_model.lm_head(trace.hidden_states[-1][len(trace.input_ids) - 1]).detach()
    return {
        "keep": compute_retention_mask(trace.embeds[0], shared["thw"], 1, q), "kept": trace.keep,
        "positions": positions, "delta": delta, "tokens": len(trace.input_ids),
        "answer": trace.text, "chances": chances(explorer, shared["words"], logits), "clip": number,
    }  # fmt: skip


def launches(explorer, state: tuple) -> dict:
    """The slower of host and device decides when each of equal operations ends; the other adds one of its steps."""
    launch, operation = state
    number = np.arange(1, 13)
    ends = number * max(launch, operation) + min(launch, operation)
    replay = launch + number * operation
    return {
        "host": np.stack([launch * number - launch, launch * number], axis=1),
        "eager": np.stack([ends - operation, ends], axis=1),
        "replay": np.stack([replay - operation, replay], axis=1),
        "idle": round(1 - 12 * operation / ends[-1], 4),
    }


def assignment(explorer, state: tuple) -> dict:
    """Who has which item is found by dealing out numbers; a rank is sooner done by the sum of all over the largest."""
    items, n, rule = state
    sizes = SIZES[:items]
    dealt = {"by size": get_load_balance_assignment(sizes, n), "by count": get_count_assignment(sizes, n)}
    assert (rule == "either") == (dealt["by size"] == dealt["by count"])
    order, counts, _ = dealt["by size" if rule == "either" else rule]
    own = [order[sum(counts[:rank]) : sum(counts[: rank + 1])] for rank in range(n)]
    loads = [sum(sizes[i] for i in ids) for ids in own]
    longest = [
        [max(get(sizes, k)[2]) for k in range(1, 9)] for get in (get_load_balance_assignment, get_count_assignment)
    ]
    return {
        "sizes": sizes, "ranks": [{"items": ids, "load": load} for ids, load in zip(own, loads, strict=True)],
        "speed_up": round(sum(sizes) / max(loads), 4), "speed_ups": sum(sizes) / np.array(longest),
    }  # fmt: skip


def deepstack(explorer, state: tuple) -> dict:
    """The rows of the encoder with zeros in the columns of the features that are left out, through the whole model."""
    question, name = state
    asked, kept, model = explorer.asked[question], explorer.subsets[name], explorer.model
    factors = torch.tensor([1, *kept]).repeat_interleave(explorer.width)
    changed = {"embeds": lambda rows: [row * factors for row in rows]}
    run = model.trace(asked.prompt, **asked.medium, hidden_states=True, replace=changed)
    number = list(explorer.asked).index(question)
    words = explorer.shared["questions"][number]["words"]
    said = probabilities(model.language_model, run)[0].log()
    return {"question": number, "kept": list(kept), "answer": run.text, "chances": chances(explorer, words, said)}


def own_row(explorer, state: tuple) -> dict:
    """The explorer's row, where each entry is one call of refvl: an oracle would repeat it."""
    return explorer.row(explorer.states.index(state))


INDEPENDENT = (
    positions, mrope, graph, attention, evs, launches, assignment, deepstack,
)  # fmt: skip
ORACLES = dict.fromkeys(GALLERY, own_row)
ORACLES |= {oracle.__name__: oracle for oracle in INDEPENDENT}
