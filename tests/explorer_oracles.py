"""What every explorer of the gallery has to show in a state, computed again by refvl's functions without its table."""

from functools import cache

import torch

from refvl.pixels.media import load_image
from refvl.pixels.patches import plan_grid
from refvl.positions import compute_retention_mask, get_window_index, merge_block_coordinates, restrict_positions
from refvl.viz.explorers.tower import project_colors
from refvl.viz.patches import with_token_budget


def windows(explorer, state: tuple) -> dict:
    name, budget, size = state
    picture = load_image(explorer.images[name])
    grid = plan_grid(picture.height, picture.width, with_token_budget(explorer.config, budget))
    index, lengths = get_window_index([grid], window_size=size)
    return {
        "photo": list(explorer.images).index(name), "grid": grid[1:], "patches": merge_block_coordinates([grid]),
        "window_index": index, "cu_window_seqlens": lengths,
    }  # fmt: skip


@cache
def watched(model, asked):
    return model.trace(asked.prompt, images=[asked.picture], attentions=True, hidden_states=True)


def segments_of(trace, block: int) -> torch.Tensor:
    """(N,) by going through the windows patch by patch."""
    numbers = torch.zeros(len(trace.patches[0].pixel_values), dtype=torch.int64)
    for number, (rows, _) in enumerate(trace.tower_attentions[block]):
        for patch in rows.tolist():
            numbers[patch] = number
    return numbers


def of_head(weights: torch.Tensor, head) -> torch.Tensor:
    return (255 * (weights.mean(0) if head == "mean" else weights[head])).round().int()


def attention(explorer, state: tuple) -> dict:
    question, token, layer, head, block, tower_head = state
    asked = explorer.watched[question]
    trace = watched(explorer.model, asked)
    read = len(trace.input_ids) + token - 1  # tokens that are there when this one is chosen
    tower = torch.zeros(len(trace.tower_attentions[block][0].weights), *[len(trace.patches[0].pixel_values)] * 2)
    for rows, weights in trace.tower_attentions[block]:
        for query, patch in enumerate(rows.tolist()):
            tower[:, patch, rows] = weights[:, query]
    return {
        "question": list(explorer.watched).index(question), "token": token - 1,
        "weights": of_head(trace.attentions[layer][:, read - 1, :read], head), "tower": of_head(tower, tower_head),
        "segments": segments_of(trace, block),
    }  # fmt: skip


def tower(explorer, state: tuple) -> dict:
    picture, stage = state
    traces = [watched(explorer.model, asked) for asked in explorer.watched.values()]
    number, after = list(explorer.watched).index(picture), explorer.controls[1]["options"].index(stage)
    trace = traces[number]
    none = torch.zeros(len(trace.patches[0].pixel_values), dtype=torch.int64)
    return {
        "picture": number, "stage": after,
        "colors": project_colors([torch.stack(t.tower_hidden_states) for t in traces])[number][after],
        "norms": trace.tower_hidden_states[after].float().norm(dim=-1),
        "segments": segments_of(trace, after - 1) if after else none,
    }  # fmt: skip


def evs(explorer, state: tuple) -> dict:
    question, q = state
    number = [clip["name"] for clip in explorer.clips].index(question)
    shared = explorer.clips[number]["shared"]
    trace = explorer.model.trace(
        shared["prompt"], videos=[explorer.clips[number]["video"]], pruning_rate=q, hidden_states=True
    )
    keep = compute_retention_mask(trace.embeds[0], shared["thw"], 1, q)
    positions, delta = restrict_positions(trace.full_positions, trace.keep)
    logits = explorer.model.language_model.lm_head(trace.hidden_states[-1][len(trace.input_ids) - 1]).detach()
    chances = dict(enumerate(logits.softmax(-1).tolist()))
    words = {explorer.model.processor.tokenizer.decode([token]).replace(" ", "␣"): p for token, p in chances.items()}
    return {
        "keep": keep, "kept": trace.keep, "positions": positions, "delta": delta, "tokens": len(trace.input_ids),
        "answer": trace.text, "chances": [round(words[word], 4) for word in shared["words"]], "clip": number,
    }  # fmt: skip


ORACLES = {"windows": windows, "attention": attention, "tower": tower, "evs": evs}
