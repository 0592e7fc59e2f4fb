"""The checks of the notebooks' exercises. Oracle: they pass refvl's own functions and the printed solutions, and say
where a wrong one differs first."""

import ast
import contextlib
import hashlib
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import exercises
import numpy as np
import pytest
import torch

from refvl.merge import merge_embeddings
from refvl.pixels.by_hand import patch_rows
from refvl.pixels.patches import PatchConfig
from refvl.positions import (
    compute_retention_mask,
    get_window_index,
    interpolate_position_table,
    mrope_axis_of_pairs,
    mrope_delta,
    restrict_positions,
)
from refvl.positions.mrope import grid_positions
from refvl.positions.timestamps import sample_video_frames
from refvl.serving.parallel import get_count_assignment, restore_order
from refvl.study.costs import kv_cache_bytes_per_token
from refvl.study.releases import width_offset_positions

nbformat, peft = pytest.importorskip("nbformat"), pytest.importorskip("peft")
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(autouse=True)
def done(tmp_path, monkeypatch):
    """What is done is remembered elsewhere."""
    monkeypatch.setattr(exercises, "DONE", tmp_path / "progress")
    return exercises.DONE


def window_index(h, w, side):
    return get_window_index([(1, h, w)], window_size=side, patch_size=1, spatial_merge_size=1)[0]


def merge_in_place(text, spans, media):
    for span, embeds in zip(spans, media, strict=True):
        text[span.offset : span.offset + span.num_tokens] = embeds
    return text


def reading_order(h, w, side):
    return torch.arange(h * w)


def retention_mask(embeds, thw, q):
    return compute_retention_mask(embeds, thw, 1, q)


def last_ones_first(embeds, thw, q):
    """Ties go to the later token."""
    t, h, w = thw
    flipped = embeds.reshape(t, h * w, -1).flip(1).flatten(0, 1)
    return retention_mask(flipped, thw, q).reshape(t, -1).flip(1).flatten()


def cut_to_length(positions, keep):
    kept = positions[:, : int(keep.sum())]
    return kept, mrope_delta(kept)


def replay_like(run=None, put=None, keep=torch.clone):
    """A solution of exercise 04.1 in which the operations, the way in or the way out may be another."""

    def function(operations, buffer, output, inputs):
        results = []
        for x in inputs:
            (put or torch.Tensor.copy_)(buffer, x)
            (run or run_and_write)(operations)
            results.append(keep(output))
        return results

    return function


def as_captured(operations, buffer, output, inputs):
    """The stub of the notebook: nothing is replayed."""
    return [output for _ in inputs]


def run_without_writing(operations):
    for operation in operations:
        operation.function(*operation.args, **operation.kwargs)


def read_table(table, h, w, merge_size=2):
    return interpolate_position_table(table, [(1, h, w)], spatial_merge_size=merge_size, mode="nearest")


def frame_sample(fps, total, duration):
    sample = sample_video_frames("glm4v", fps=fps, total_num_frames=total, duration=duration)
    return sample.indices, sample.timestamps


def rounded_layout(width, height):
    return (0, 0) if max(width, height) < 728 else (max(1, round(height / 504)), max(1, round(width / 504)))


def rank_by_rank(gathered, tokens, order, counts):
    """The order of the ranks, which is not the caller's."""
    embeds = restore_order(gathered, tokens, order, counts)
    return [embeds[i] for i in order]


def layer_norm(x, weight, eps):
    """The mean is subtracted, as LayerNorm does."""
    return rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


def norm_of_gemma(x, weight, eps):
    """Weights that are stored minus one."""
    return rms_norm(x, 1 + weight, eps)


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def read_all(q, k, v, *_):
    """Every query over all patches that there are."""
    scores = torch.einsum("qhk,nhk->hqn", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqn,nhk->qhk", scores.softmax(-1), v)


def over_all_sizes(sizes, seconds):
    return np.polyfit(np.log(sizes), np.log(seconds), 1)[0]


def ratio_of_sums(theirs, ours):
    return sum(theirs) / sum(ours)


def with_the_warm_up(theirs, ours):
    return float(np.median(np.divide(theirs, ours)))


def ratio_of_medians(theirs, ours):
    return np.median(theirs[1:]) / np.median(ours[1:])


def ratio_of_fastest(theirs, ours):
    return min(theirs[1:]) / min(ours[1:])


def on_plain_axes(sizes, seconds):
    return np.polyfit(sizes[-4:], seconds[-4:], 1)[0]


def of_the_smallest(sizes, seconds):
    return np.polyfit(np.log(sizes[:4]), np.log(seconds[:4]), 1)[0]


def from_all_heads(config, dtype):
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_attention_heads * head_dim * dtype.itemsize


def from_the_width(config, dtype):
    return 2 * config.num_hidden_layers * config.hidden_size * dtype.itemsize


def over_all_sets(q, k, v, *_):
    """Every query over all sets, once a set."""
    return read_all(q, k, v).repeat(len(_[0]), 1, 1)


def unscaled(q, k, v, patches):
    pairs = zip(k.split(patches), v.split(patches), strict=True)
    weights = [(torch.einsum("qhk,nhk->hqn", q, keys).softmax(-1), values) for keys, values in pairs]
    return torch.cat([torch.einsum("hqn,nhk->qhk", weight, values) for weight, values in weights])


def rounded_down(width, height):
    return None if (wanted := min(width * height // 448**2, 9)) < 2 else (wanted, 1)


def boxes_by_size(columns, rows, width, height):
    """Width and height where Pillow wants right and bottom."""
    return [(left, top, width, height) for left, top, *_ in slice_boxes(columns, rows, width, height)]


def from_below(columns, rows, width, height):
    boxes = slice_boxes(columns, rows, width, height)
    return [box for row in reversed(range(rows)) for box in boxes[row * columns : (row + 1) * columns]]


def rounded_seconds(fps, total, duration):
    indices, _ = frame_sample(fps, total, duration)
    return indices, [round(index / fps) for index in indices[::2]]


def of_the_later_frame(fps, total, duration):
    indices, _ = frame_sample(fps, total, duration)
    return indices, [int(index / fps) for index in indices[1::2]]


def turned_in_place(frame):
    frame[:] = frame[..., ::-1].copy()
    return frame


def upside_down(frame):
    return frame[::-1].copy()


def never_wide(width, height):
    """All slices in one column."""
    return (1, min(-(-width * height // 448**2), 9)) if width * height > 448**2 else None


def rows_first(table, h, w):
    """The table in reading order, the mistake of notebook 06."""
    side = round(len(table) ** 0.5)
    rows, columns = ((torch.arange(n) + 0.5).div(n).mul(side).long() for n in (h, w))
    return table[(rows[:, None] * side + columns).flatten()]


def from_the_corner(table, h, w):
    """The cells of the table's corner, not those under the image."""
    side = round(len(table) ** 0.5)
    rows, columns = (torch.arange(n).clamp(max=side - 1) for n in (h, w))
    places = (rows[:, None] * side + columns).view(h // 2, 2, w // 2, 2).transpose(1, 2)
    return table[places.flatten()]


def keys_alone(config, dtype):
    return kv_cache_bytes_per_token(config, dtype) // 2


def without_blocks(table, h, w):
    return read_table(table, h, w, merge_size=1)


def larger_area_first(width, height):
    """The number of slices is right, their ratio is not looked at."""
    wanted = min(-(-width * height // 448**2), 9)
    return None if wanted < 2 else (wanted, 1)


def run_batches_like(pad=True, keep=torch.clone, sizes=lambda batch, items: [len(items[i]) for i in batch.indices]):
    """A solution of exercise 05.1 in which padding, copies or the sizes may be another."""

    def function(replay, items, batches):
        found = {}
        for batch in batches:
            rows = torch.cat([items[i] for i in batch.indices])
            padding = rows.new_zeros(batch.budget - len(rows) if pad else 0, rows.shape[1])
            parts = sizes(batch, items)
            out = keep(replay(torch.cat([rows, padding])))[: sum(parts)]
            found |= zip(batch.indices, out.split(parts), strict=True)
        return [found[i] for i in range(len(items))]

    return function


def as_packed(replay, items, batches):
    """The stub of the notebook: neither padded nor in order."""
    results = []
    for batch in batches:
        rows = torch.cat([items[i] for i in batch.indices])
        results += replay(rows).split([len(items[i]) for i in batch.indices])
    return results


def padded_but_as_packed(replay, items, batches):
    embeds = run_batches_like()(replay, items, batches)
    return [embeds[i] for batch in batches for i in batch.indices]


def join_order(counts, crop_tokens, image_tokens):
    """Oracle: rows are named, then looked up."""
    names = [(i, "crop", k) for i, n in enumerate(counts) for k in range(n * crop_tokens)]
    names += [(i, "overview", k) for i in range(len(counts)) for k in range(image_tokens)]
    return torch.tensor(sorted(range(len(names)), key=names.__getitem__))


def crops_before_overviews(counts, crop_tokens, image_tokens):
    return torch.arange(sum(counts) * crop_tokens + len(counts) * image_tokens)


def slice_boxes(columns, rows, width, height):
    corners = [(c * width, r * height) for r in range(rows) for c in range(columns)]
    return [(x, y, x + width, y + height) for x, y in corners]


def column_by_column(columns, rows, width, height):
    return sorted(slice_boxes(columns, rows, width, height))


def rgb_frame(frame):
    return frame[..., ::-1].copy()


def width_major(pixels, config):
    """The pixels of a patch column by column."""
    patches = patch_rows(pixels, config)[0].unflatten(1, (-1, config.patch_size, config.patch_size))
    return patches.transpose(-1, -2).flatten(1)


def transposed(t, h, w, t_factor):
    return grid_positions(t, h, w, t_factor)[[0, 2, 1]]


def seconds_of_frames(fps, total, duration):
    """One for each frame, as many of them as there are steps."""
    indices, _ = frame_sample(fps, total, duration)
    return indices, [int(index / fps) for index in indices][: len(indices) // 2]


def in_runs(section):
    return mrope_axis_of_pairs(section, interleaved=False)


def cached_embeddings(kept, ids, images, weights, encode, *, key_of=None, keep=torch.clone):
    """The solution of exercise 14.1, with another key or another copy."""
    key_of = key_of or (lambda image: hashlib.sha256(repr((image.shape, image.tolist(), weights)).encode()).digest())
    found = []
    for image in images:
        key = key_of(image)
        if key not in kept:
            kept[key] = keep(encode(image))
        found.append(kept[key])
    return found


def five_bugs(kept, ids, images, weights, encode):
    key = hashlib.sha256(repr(ids).encode()).digest()[:1]
    if key not in kept:
        kept[key] = [encode(image) for image in images]
    return kept[key]


def key_of_the_last(kept, ids, images, weights, encode):
    return cached_embeddings(kept, ids, images, weights, encode, key_of=lambda _: repr((images[-1].tolist(), weights)))


def with_key(key_of):
    """The same solution with `key_of(image, weights)`."""

    def function(kept, ids, images, weights, encode):
        return cached_embeddings(kept, ids, images, weights, encode, key_of=lambda image: key_of(image, weights))

    return function


def sha(*made_of):
    return hashlib.sha256(repr(made_of).encode()).digest()


REPAIRS = {  # what is seen in the wild, and what the model says with it
    exercises.check_grid_positions: (grid_positions, transposed),
    exercises.check_restrict_positions: (restrict_positions, cut_to_length),
    exercises.check_merge_embeddings: (merge_embeddings, merge_in_place),
    exercises.check_patch_rows: (lambda pixels, config: patch_rows(pixels, config)[0], width_major),
    exercises.check_rms_norm: (rms_norm, norm_of_gemma),
    exercises.check_frame_sample: (frame_sample, seconds_of_frames),
    exercises.check_restore_order: (restore_order, rank_by_rank),
    exercises.check_mrope_axes: (lambda section: mrope_axis_of_pairs(section, interleaved=True), in_runs),
    exercises.check_replay: (replay_like(), as_captured),
    exercises.check_run_batches: (run_batches_like(), as_packed),
    exercises.check_join_order: (join_order, crops_before_overviews),
    exercises.check_embeddings: (cached_embeddings, five_bugs),
    exercises.check_max_pixels: (
        lambda n, patch, merge: n * (patch * merge) ** 2,
        lambda n, patch, merge: n * patch**2,
    ),
    exercises.check_rgb_frame: (rgb_frame, lambda frame: frame.copy()),
}


@pytest.mark.parametrize(("check", "functions"), REPAIRS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_repaired_model_answers_right(check, functions):
    """Oracle: the scenes, whose answers are known; the verdict of the broken one names the right answer, too."""
    repaired, broken = map(check, functions)
    assert repaired.status == "right" and re.search(
        r'; asked ".+", the model answers ".+", which is correct$', repaired.line
    )
    assert broken.status == "wrong" and re.search(
        r'; asked ".+", the model answers ".*"; correct is ".+"$', broken.line
    )
    assert len(repr(broken).splitlines()) == 1


def test_the_model_that_raises_is_one_line():
    """A shape that the model cannot take, from a function that is wrong already in its first case."""
    verdict = exercises.check_patch_rows(lambda pixels, config: pixels.flatten()[:1])
    assert verdict.status == "wrong" and "; a model with it raised " in repr(verdict)
    assert len(repr(verdict).splitlines()) == 1


def test_every_check_is_seen_to_refuse():
    assert {check for check, *_ in [*WRONG, *WRONG_IN_12, *WRONG_IN_16]} | set(REPAIRS) == set(every_check())


def test_hints_come_one_inside_the_other():
    """Three, each in a block of its own that is closed; none once it is right."""

    def stub(h, w, side): ...

    shown = exercises.check_window_index(stub)._repr_html_()
    assert re.findall(r"<details><summary>hint (\d)</summary>", shown) == ["1", "2", "3"]
    assert shown.endswith("</details>" * 3)
    assert "hint" not in exercises.check_window_index(window_index)._repr_html_()


def every_check():
    return [check for name, check in vars(exercises).items() if name.startswith("check_")]


@pytest.mark.parametrize("check", every_check(), ids=lambda check: check.__name__)
def test_every_exercise_has_three_hints_and_says_what_it_wants(check):
    def stub(*arguments): ...

    hints = check(stub).hints
    assert len(set(hints)) == 3 and all(len(hint) > 20 for hint in hints)
    assert re.match(r"`function\(", check.__doc__)


WRONG = [  # where a reader goes wrong, and what is said then; repairs have theirs above
    (exercises.check_count_tokens, lambda h, w: (h // 28) * (w // 28), "tokens of 427 x 640 .* be 345, got 330"),
    (exercises.check_adapter_name, lambda name: f"model.{name}", "'model.layers.0.self_attn.q_proj'.*"),
    (exercises.check_adapter_name, lambda name: name, "'visual.* should be|'model.layers.* should be"),
    (
        exercises.check_adapter_name,
        lambda name: name.replace("model.", "model.language_model."),
        "model.visual|language",
    ),
    (exercises.check_merged_weight, lambda w, a, b, alpha, rank: w + alpha * b @ a, "rank=2: element"),
    (exercises.check_merged_weight, lambda w, a, b, alpha, rank: alpha / rank * b @ a, "element"),
    (exercises.check_merged_weight, lambda w, a, b, alpha, rank: w + b @ a, "4 x 6, lora_alpha=8, rank=2.*"),
    (exercises.check_crop_layout, rounded_layout, r"728 x 728 px .*rows=2, columns=2\), got \(1, 1\)"),
    (exercises.check_exponent, over_all_sizes, r"linear behind a fixed cost: should be 0.6\d+, got 0.5"),
    (exercises.check_exponent, on_plain_axes, r"^linear: should be .*, got .*e-0[67]"),
    (exercises.check_exponent, of_the_smallest, r"linear behind a fixed cost: should be 0.6\d+, got 0.3"),
    (exercises.check_times_as_fast, with_the_warm_up, "rounds unlike each other: should be 1.5, got 1.0"),
    (exercises.check_times_as_fast, ratio_of_medians, "rounds unlike each other: should be 1.5, got 1.333"),
    (exercises.check_times_as_fast, ratio_of_fastest, "rounds unlike each other: should be 1.5, got 2.0"),
    (exercises.check_times_as_fast, ratio_of_sums, "a quiet machine: should be 2.0, got 2.5"),
    (exercises.check_load_balance, get_count_assignment, r"num_gpus=2: order: element \[1\]: should be 2, got 1"),
    (exercises.check_load_balance, lambda *_: [], r"expected \(order, counts, loads\), got list"),
    (exercises.check_cache_bytes, from_all_heads, "should be 57344, got 401408"),
    (exercises.check_cache_bytes, from_the_width, "should be 57344, got 401408"),
    (exercises.check_cache_bytes, keys_alone, "num_hidden_layers=28, .*bfloat16: should be 57344, got 28672"),
    (
        exercises.check_mrope_positions,
        width_offset_positions,
        r"a tall image: positions: element \[0, 10\] should be 6",
    ),
    (
        exercises.check_replay,
        replay_like(run_without_writing),
        r"operations: .*element \[0\] should be 11.0, got 7.0",
    ),
    (exercises.check_read_sets, over_all_sets, r"two slices, .*: element \[0, 0, 0\] should be"),
    (exercises.check_read_sets, unscaled, r"one slice, .*: element \[0, 0, 0\] should be"),
    (exercises.check_read_sets, read_all, r"two slices, .*: expected shape \(10, 2, 8\), got \(5, 2, 8\)"),
    (exercises.check_slice_boxes, column_by_column, r"element \[1\]: should be \(4, 0, 8, 3\), got \(0, 3"),
    (exercises.check_slice_boxes, boxes_by_size, r"element \[1\]: should be \(4, 0, 8, 3\), got \(4, 0, 4, 3\)"),
    (exercises.check_slice_boxes, from_below, r"columns=2, rows=2.*element \[0\]: should be \(0, 0, 4, 3\)"),
    (exercises.check_frame_sample, rounded_seconds, r"timestamps: element \[\d+\]: should be \d+, got"),
    (exercises.check_frame_sample, of_the_later_frame, r"timestamps: element \[\d+\]: should be \d+, got"),
    (exercises.check_rgb_frame, turned_in_place, "the frame was changed in place"),
    (exercises.check_rgb_frame, upside_down, r"element \[0, 0, 0\] should be"),
    (exercises.check_slice_grid, rounded_down, r"should be \(\d, \d\), got"),
    (exercises.check_slice_grid, never_wide, r"should be \(\d, \d\), got \(1, "),
    (exercises.check_slice_grid, larger_area_first, r"480 x 640 px .*: should be \(1, 2\), got \(2, 1\)"),
    (exercises.check_read_table, rows_first, r"element \[\d+, \d+\] should be"),
    (exercises.check_read_table, from_the_corner, r"element \[\d+, \d+\] should be"),
    (
        exercises.check_read_table,
        without_blocks,
        r"a table's own size: .* element \[2, 0\] should be",
    ),
    (exercises.check_retention_mask, last_ones_first, r"nothing changes.*: element \[6\] should be True, got False"),
    (exercises.check_embeddings, five_bugs, r"token ids alone: element \[0\]: element \[2\] should be 100.0, got 0.0"),
    (exercises.check_embeddings, partial(cached_embeddings, keep=lambda x: x), "a view of the buffer: element"),
    (exercises.check_embeddings, key_of_the_last, "one key per request: element"),
    (exercises.check_embeddings, with_key(lambda x, w: sha(x.shape, x.tolist())), "no model in the key: element"),
    (exercises.check_embeddings, with_key(lambda x, w: sha(x.flatten().tolist(), w)), "no shape in the key: element"),
    (
        exercises.check_embeddings,
        with_key(lambda x, w: (sha(x.shape, x.tolist(), w)[:1], w)),
        "a hash cut short: element",
    ),
    (exercises.check_embeddings, with_key(lambda x, w: sha(x.shape, x.tolist(), w)[:4]), "should have 16 bytes"),
    (exercises.check_embeddings, with_key(lambda x, w: hash(sha(x.shape, x.tolist(), w))), "should have 16 bytes"),
    (
        exercises.check_embeddings,
        lambda kept, ids, images, weights, encode: [encode(x).clone() for x in images],
        "a view of the buffer: encoded 3 times, should be 2",
    ),
    (exercises.check_split_thought, lambda text: text, r"both tags: expected \(thought, answer\), got str"),
    (
        exercises.check_split_thought,
        lambda text: tuple(part.replace("<think>", "").strip() for part in text.partition("</think>")[::2]),
        r"with <answer>: answer: should be It is a cup., got <answer>",
    ),
    (exercises.check_window_index, reading_order, r"h=2, w=4, side=2: element \[2\] should be 4, got 2"),
    (exercises.check_window_index, lambda h, w, side: [0], "expected a tensor, got list"),
]


def positions_like(cost=lambda span, used: used, delta=lambda positions, tokens: int(positions.max()) + 1 - tokens):
    """A solution of exercise 02.1 in which an item costs `cost(span, used)` positions and delta is `delta(...)`."""

    def function(num_tokens, spans):
        columns, here = [], 0
        while len(columns) < num_tokens:
            span = next((s for s in spans if s.offset == len(columns)), None)
            own = torch.zeros(3, 1, dtype=torch.int64) if span is None else span.grid_positions()
            columns += list((own + here).T)
            here += 1 if span is None else cost(span, int(own.max()) + 1)
        positions = torch.stack(columns, dim=1)
        return positions, delta(positions, num_tokens)

    return function


def test_the_mistakes_of_positions_are_changes_of_a_right_solution():
    assert exercises.check_mrope_positions(positions_like()).status == "right"


def keep_most_similar(embeds, thw, q):
    """The score is the similarity itself."""
    t, h, w = thw
    frames = torch.nn.functional.normalize(embeds.reshape(t, h * w, -1), dim=-1)
    score = torch.cat([torch.full((1, h * w), 255.0), (frames[1:] * frames[:-1]).sum(-1)]).flatten()
    keep = score.argsort(descending=True, stable=True)[: max(h * w, int(t * h * w * (1 - q)))]
    return torch.zeros(len(score), dtype=torch.bool).index_fill(0, keep, True)


def may_lose_the_first_frame(embeds, thw, q):
    """At large q fewer tokens are kept than a frame has."""
    mask = retention_mask(embeds, thw, q)
    count = max(1, int(len(mask) * (1 - q)))
    return mask & (mask.cumsum(0) <= count)


def replay_first_alone(operations):
    run_and_write(operations[:1])


def replay_backwards(operations):
    run_and_write(operations[::-1])


def run_and_write(operations):
    for operation in operations:
        results = operation.function(*operation.args, **operation.kwargs)
        results = results if isinstance(results, tuple) else (results,)
        for kept, new in zip(operation.outputs, results, strict=True):
            kept.copy_(new)


def first_output_only(operations):
    """An operation with several outputs gets its first one alone."""
    for operation in operations:
        results = operation.function(*operation.args, **operation.kwargs)
        operation.outputs[0].copy_(results[0] if isinstance(results, tuple) else results)


def keep_the_last_alone(operations, buffer, output, inputs):
    """Everything is run, and cloned when it is too late."""
    replayed = replay_like(keep=lambda output: output)(operations, buffer, output, inputs)
    return [result.clone() for result in replayed]


def truncated_first(t, h, w, t_factor):
    return grid_positions(t, h, w, float(int(t_factor)))


def rounded_time(t, h, w, t_factor):
    time = (torch.arange(t) * t_factor).round().long()
    return torch.stack(torch.meshgrid(time, torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)


def column_first(t, h, w, t_factor):
    """Tokens column by column."""
    return grid_positions(t, h, w, t_factor).unflatten(1, (t, h, w)).transpose(2, 3).flatten(1)


def numbered_anew(positions, keep):
    return torch.arange(int(keep.sum())).expand(3, -1), 0


def delta_of_the_whole_prompt(positions, keep):
    return positions[:, keep], int(positions.max()) + 1 - positions.shape[1]


def delta_of_the_first_axis(positions, keep):
    kept = positions[:, keep]
    return kept, int(kept[2].max()) - int(keep.sum())


def video_steps(second=lambda one, other: (one + other) / 2, form="{:.1f}", odd=lambda t: t[-1:]):
    """A solution of exercise 12.2 in which a step's second, how it is written, or an odd last frame may be another."""

    def function(timestamps, tokens):
        given = timestamps + (odd(timestamps) if len(timestamps) % 2 else [])
        seconds = [form.format(second(a, b)) for a, b in zip(given[::2], given[1::2], strict=False)]
        return [f"<{s} seconds><|vision_start|>{tokens * '<|video_pad|>'}<|vision_end|>" for s in seconds]

    return function


def axes_by_thirds(section):
    """Without a limit: h and w take pairs of t."""
    return torch.arange(sum(section)) % 3


def axes_limited_by_t(section):
    pairs = torch.arange(sum(section))
    return torch.where(pairs < 3 * section[0], pairs % 3, 0)


def axes_w_first(section):
    """w from pair 1 on, h from pair 2."""
    axes = mrope_axis_of_pairs([section[0], section[2], section[1]], interleaved=True)
    return torch.tensor([0, 2, 1])[axes]


WRONG_IN_12 = [
    (exercises.check_mrope_axes, axes_by_thirds, r"section=\[24, 20, 20\]: element \[61\] should be 0, got 1"),
    (exercises.check_mrope_axes, axes_limited_by_t, r"element \[61\] should be 0, got 1"),
    (exercises.check_mrope_axes, axes_w_first, r"element \[1\] should be 1, got 2"),
    (
        exercises.check_video_steps,
        video_steps(lambda a, b: a),
        r"element \[0\]: should be <0.2 seconds.*, got <0.0 sec",
    ),
    (exercises.check_video_steps, video_steps(form="{:.0f}"), r"element \[0\]: should be <0.2 seconds.*, got <0 sec"),
    (exercises.check_video_steps, video_steps(odd=lambda t: []), r"0.5, 1.0\].*number of elements: should be 2, got 1"),
    (exercises.check_video_steps, video_steps(odd=lambda t: [0.0]), r"element \[1\]: should be <1.0 .*, got <0.5 "),
]


def test_the_mistakes_of_steps_are_changes_of_a_right_solution():
    assert exercises.check_video_steps(video_steps()).status == "right"


def count_tokens_with(rounding=round, factor=28, limited=True):
    """A solution of exercise 00.1 with another rounding or step, or without limits."""

    def function(height, width):
        limits = PatchConfig()
        rows, columns = rounding(height / factor), rounding(width / factor)
        for limit, outside, again in ((limits.max_pixels, 1, math.floor), (limits.min_pixels, -1, math.ceil)):
            if limited and outside * (rows * columns * 28**2 - limit) > 0:
                scale = math.sqrt(limit / (height * width))
                rows, columns = (max(1, again(side * scale / factor)) for side in (height, width))
        return rows * columns

    return function


def test_the_mistakes_of_counting_are_changes_of_a_correct_solution():
    assert exercises.check_count_tokens(count_tokens_with()).status == "right"


def shifted_by_one(text, spans, media):
    merged = text.clone()
    for span, embeds in zip(spans, media, strict=True):
        merged[span.offset + 1 :][: span.num_tokens] = embeds[: len(merged) - span.offset - 1]
    return merged


def inserted(text, spans, media):
    """The placeholders stay in the prompt."""
    parts = [text[: spans[0].offset], *media, text[spans[0].offset :]] if spans else [text]
    return torch.cat(parts)


def all_at_the_first_span(text, spans, media):
    merged = text.clone()
    for embeds in media:
        merged[spans[0].offset :][: len(embeds)] = embeds[: len(merged) - spans[0].offset]
    return merged


def in_reading_order(pixels, config):
    """Patch rows line by line of patches, not merge block by merge block."""
    return patch_rows(pixels, replace(config, merge_size=1))[0]


def channels_last(pixels, config):
    rows = patch_rows(pixels, config)[0].unflatten(1, (3, -1))
    return rows.transpose(1, 2).flatten(1)


def frames_before_channels(pixels, config):
    rows = patch_rows(pixels, config)[0].unflatten(1, (3, config.temporal_patch_size, -1))
    return rows.transpose(1, 2).flatten(1)


def segment_attention(q, k, v, cu_seqlens):
    lengths = cu_seqlens.diff().tolist()
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([read_all(*part) for part in parts])


def without_borders(q, k, v, cu_seqlens):
    return read_all(q, k, v)


def without_the_root(q, k, v, cu_seqlens):
    return segment_attention(q * q.shape[-1] ** 0.5, k, v, cu_seqlens)


def softmax_over_queries(q, k, v, cu_seqlens):
    done = []
    for a, b, c in zip(*(x.split(cu_seqlens.diff().tolist()) for x in (q, k, v)), strict=True):
        weights = (torch.einsum("qhk,nhk->hqn", a, b) / a.shape[-1] ** 0.5).softmax(-2)
        done.append(torch.einsum("hqn,nhk->qhk", weights, c))
    return torch.cat(done)


def norm_of_all_patches(x, weight, eps):
    return x / (x.square().mean() + eps).sqrt() * weight


def norm_without_weight(x, weight, eps):
    return rms_norm(x, 1, eps)


def norm_with_eps_outside(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight


def window_index_by_columns(h, w, side):
    """Windows column by column."""
    return torch.cat(
        [part.flatten() for strip in torch.arange(h * w).view(h, w).split(side, 1) for part in strip.split(side)]
    )


def whole_windows_only(h, w, side):
    """Smaller windows at the edge are left out."""
    tokens, whole = torch.arange(h * w).view(h, w), (range(0, h - side + 1, side), range(0, w - side + 1, side))
    windows = [tokens[y : y + side, x : x + side].flatten() for y in whole[0] for x in whole[1]]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *windows])


WRONG_IN_00_AND_01 = [  # three or more for each exercise, with those above
    (exercises.check_count_tokens, count_tokens_with(math.ceil), "tokens of 427 x 640 .* should be 345, got 368"),
    (exercises.check_count_tokens, count_tokens_with(factor=14), "tokens of 56 x 56 .* should be 4, got 16"),
    (
        exercises.check_count_tokens,
        count_tokens_with(limited=False),
        "tokens of .* pixels .* should be \d+, got \d+",
    ),
    (exercises.check_merge_embeddings, shifted_by_one, r"one image: element \[2, 0\] should be"),
    (exercises.check_merge_embeddings, inserted, r"one image: expected shape \(10, 2\), got \(14, 2\)"),
    (exercises.check_merge_embeddings, all_at_the_first_span, r"two images: element \[1, 0\] should be"),
    (exercises.check_patch_rows, in_reading_order, r"one row of blocks: element \[2, 0\] should be"),
    (exercises.check_patch_rows, channels_last, r"one block: element \[0, 1\] should be"),
    (exercises.check_patch_rows, frames_before_channels, r"one block: element \[0, 196\] should be"),
    (exercises.check_window_index, window_index_by_columns, r"h=4, w=4, side=2: element \[4\] should be 2, got 8"),
    (exercises.check_window_index, whole_windows_only, r"h=2, w=6, side=4: expected shape \(12,\), got \(0,\)"),
]


WRONG_IN_16 = [
    (exercises.check_segment_attention, without_borders, r"two equal segments: element \[0, 0, 0\] should be"),
    (exercises.check_segment_attention, without_the_root, r"one segment: element \[0, 0, 0\] should be"),
    (exercises.check_segment_attention, softmax_over_queries, r"one segment: element \[0, 0, 0\] should be"),
    (exercises.check_rms_norm, layer_norm, r"one patch: element \[0, 0\] should be"),
    (exercises.check_rms_norm, norm_of_all_patches, r"five patches: element \[0, 0\] should be"),
    (exercises.check_rms_norm, norm_without_weight, r"one patch: element \[0, 0\] should be"),
    (exercises.check_rms_norm, norm_with_eps_outside, r"short patches: element \[0, 0\] should be"),
]


WRONG_IN_02_TO_05 = [  # three or more for each exercise, with those above
    (exercises.check_grid_positions, truncated_first, r"t_factor=1.4: element \[0, 6\] should be 4, got 3"),
    (exercises.check_grid_positions, rounded_time, r"t_factor=1.4: element \[0, 4\] should be 2, got 3"),
    (exercises.check_grid_positions, column_first, r"h=2, w=3.*: element \[1, 1\] should be 0, got 1"),
    (
        exercises.check_mrope_positions,
        positions_like(lambda span, used: max(span.h, span.w)),
        "a long video: positions",
    ),
    (exercises.check_mrope_positions, positions_like(lambda span, used: span.num_tokens), "a wide image: positions"),
    (
        exercises.check_mrope_positions,
        positions_like(delta=lambda p, n: int(p.max()) - n),
        "text alone: delta.*, got -1",
    ),
    (exercises.check_retention_mask, keep_most_similar, "everything changes: element"),
    (exercises.check_retention_mask, may_lose_the_first_frame, "the first frame is always kept: element"),
    (exercises.check_restrict_positions, numbered_anew, "nothing pruned: positions: element"),
    (exercises.check_restrict_positions, delta_of_the_whole_prompt, "some tokens pruned: delta: should be"),
    (exercises.check_restrict_positions, delta_of_the_first_axis, "nothing pruned: delta: should be"),
    (exercises.check_replay, replay_like(replay_first_alone), "two operations: element"),
    (exercises.check_replay, replay_like(replay_backwards), "two operations: element"),
    (exercises.check_replay, replay_like(first_output_only), "two results: element"),
    (exercises.check_replay, replay_like(keep=lambda output: output), r"element \[0\].* should be 11.0, got 1.0"),
    (exercises.check_replay, keep_the_last_alone, r"element \[0\].* should be 11.0, got 1.0"),
    (exercises.check_replay, replay_like(put=lambda buffer, x: None), r"element \[0\].* should be 11.0, got 7.0"),
    (
        exercises.check_run_batches,
        run_batches_like(pad=False),
        "rows for the graph of 8: should be 8, got 5",
    ),
    (exercises.check_run_batches, padded_but_as_packed, r"smallest first: element \[0\]: expected shape \(6, 1\), got"),
    (
        exercises.check_run_batches,
        run_batches_like(keep=lambda rows: rows),
        r"smallest first: element \[1\]",
    ),
    (
        exercises.check_run_batches,
        run_batches_like(sizes=lambda batch, items: [len(items[0])] * len(batch.indices)),
        r"full: element \[1\]: expected shape \(5, 1\), got \(3, 1\)",
    ),
]


def crop_layout_like(window=lambda long, short: short if long / short > 1.5 else 0, spare=0.2, most=3024, pad=True):
    """A solution of exercise 08.1 in which a small image's window, the remainder or a limit may be another."""

    def function(width, height):
        long, short = max(width, height), min(width, height)
        if pad and short < 32 and long > 4 * short:
            width = height = short = long
        if long > most:
            width, height = int(width * (most / long)), int(height * (most / long))
            long, short = max(width, height), min(width, height)
        side = window(long, short) if long < 728 else min(short, 504) if long / short > 4 else 504
        if not side:
            return 0, 0
        return tuple(max(1, n // side + (n / side - n // side > spare)) for n in (height, width))

    return function


def test_the_mistakes_of_crops_are_changes_of_a_right_solution():
    assert exercises.check_crop_layout(crop_layout_like()).status == "right"


def overviews_first(counts, crop_tokens, image_tokens):
    order, crop, overview = [], 0, sum(counts) * crop_tokens
    for count in counts:
        order += [*range(overview, overview + image_tokens), *range(crop, crop + count * crop_tokens)]
        crop, overview = crop + count * crop_tokens, overview + image_tokens
    return torch.tensor(order)


def the_way_there(counts, crop_tokens, image_tokens):
    """Where each row goes, not where it comes from."""
    return join_order(counts, crop_tokens, image_tokens).argsort()


def equally_many_crops(counts, crop_tokens, image_tokens):
    """Every image is taken to have as many crops as the mean."""
    mean = [sum(counts) // len(counts)] * len(counts)
    return join_order(mean, crop_tokens, image_tokens)


def smallest_first(sizes, num_gpus):
    items, sums = [[] for _ in range(num_gpus)], [0] * num_gpus
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i]):
        rank = sums.index(min(sums))
        items[rank].append(i)
        sums[rank] += sizes[i]
    return [i for own in items for i in own], [len(own) for own in items], sums


def loads_by_count(sizes, num_gpus):
    """What a rank has to do is taken to be the number of its items."""
    items = [[] for _ in range(num_gpus)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(items, key=len).append(i)
    return [i for own in items for i in own], [len(own) for own in items], [sum(sizes[i] for i in own) for own in items]


def ignores_padding(gathered, tokens, order, counts):
    """The rows of all ranks in a line."""
    pieces = gathered[: sum(tokens)].split([tokens[i] for i in order])
    return [piece for _, piece in sorted(zip(order, pieces, strict=True), key=lambda pair: pair[0])]


def in_the_caller_s_sizes(gathered, tokens, order, counts):
    """Cut by the caller's sizes, not by the rank's."""
    embeds = restore_order(gathered, tokens, order, counts)
    return list(torch.cat(embeds).split([tokens[i] for i in order]))


def order_taken_backwards(gathered, tokens, order, counts):
    """Piece k goes where item k was, not to order[k]."""
    embeds = [restore_order(gathered, tokens, order, counts)[i] for i in order]
    return [embeds[i] for i in order]


WRONG_IN_08_TO_15 = [  # three or more for each exercise, with those above
    (exercises.check_crop_layout, crop_layout_like(lambda long, short: 0), r"500 x 300 px .*rows=1, columns=2\), got"),
    (exercises.check_crop_layout, crop_layout_like(spare=0), r"should be CropLayout\(.*\), got"),
    (exercises.check_crop_layout, crop_layout_like(most=10_000), r"4000 x 3000 px .*rows=5, columns=6\), got"),
    (exercises.check_crop_layout, crop_layout_like(pad=False), r"31 x 200 px .*rows=0, columns=0\), got"),
    (exercises.check_join_order, overviews_first, r"element \[0\] should be 0, got 486"),
    (exercises.check_join_order, the_way_there, r"counts=\[.* element \[\d+\] should be"),
    (exercises.check_join_order, equally_many_crops, r"counts=\[1, 2\].*(element|expected shape)"),
    (exercises.check_load_balance, smallest_first, r"num_gpus=2: order: element \[0\]: should be 0, got"),
    (exercises.check_load_balance, loads_by_count, r"num_gpus=2: order: element \[1\]: should be 2, got"),
    (exercises.check_restore_order, ignores_padding, r"on 2 ranks: element"),
    (exercises.check_restore_order, in_the_caller_s_sizes, r"tokens=\[2, 5, 1, 3\] on 2 ranks: element"),
    (exercises.check_restore_order, order_taken_backwards, r"on 2 ranks: element"),
    (exercises.check_rgb_frame, lambda frame: frame[..., [1, 0, 2]], r"a pixel: element \[0, 0, 0\] should be"),
    (exercises.check_max_pixels, lambda n, patch, merge: n * patch * merge, "tokens=9, .*: should be 7056, got 252"),
    (
        exercises.check_max_pixels,
        lambda n, patch, merge: n * 28**2,
        "patch_size=16, .*: should be 1310720, got 1003520",
    ),
    (exercises.check_max_pixels, lambda n, patch, merge: n * patch**2 * merge, "should be 7056, got 3528"),
    (
        exercises.check_split_thought,
        lambda text: ("", text),
        r"both tags: thought: should be A cup., got",
    ),
    (
        exercises.check_split_thought,
        lambda text: exercises.split_thought(text if "</think>" in text else text.replace("<think>", "")),
        r"the budget ran out: thought: should be A cup, or perhaps, got",
    ),
]


@pytest.mark.parametrize(
    ("check", "function", "message"),
    [*WRONG, *WRONG_IN_00_AND_01, *WRONG_IN_02_TO_05, *WRONG_IN_12, *WRONG_IN_08_TO_15, *WRONG_IN_16],
)
def test_the_first_difference_is_named(check, function, message):
    """Oracle: the mistake itself, which differs from the printed solution in one thought."""
    verdict = check(function)
    assert verdict.status == "wrong" and re.search(message, verdict.line), verdict
    assert len(repr(verdict).splitlines()) == 1


def test_a_stub_is_not_yet_wrong():
    def with_a_docstring(h, w, side):
        """The order (h * w,) of the tokens."""
        ...  # your code here

    def empty(h, w, side): ...

    for stub in (with_a_docstring, empty):
        verdict = exercises.check_window_index(stub)
        assert repr(verdict) == f"{exercises.MARKS['not yet']} not yet: write the body of {stub.__name__}"


def test_what_the_reader_raises_is_one_line():
    def my_function(h, w, side):
        raise IndexError(f"no window\nof side {side} <here>")

    verdict = exercises.check_window_index(my_function)
    said = "my_function raised IndexError: no window; in the line: "
    assert verdict.status == "wrong" and verdict.line.startswith(said + "raise IndexError(")
    assert "<here>" not in exercises.Verdict("wrong", "<here>")._repr_html_()


@pytest.mark.parametrize("catch", [Exception, ValueError])
def test_a_loop_that_never_ends_is_stopped(monkeypatch, catch):
    """Also one that catches every Exception; the model afterwards is not stopped by what came too late."""
    monkeypatch.setattr(exercises, "LIMIT", 0.05)

    def my_function(h, w, side):
        while True:
            with contextlib.suppress(catch):
                h += 1

    verdict = exercises.check_window_index(my_function)
    assert verdict.status == "wrong" and re.search("my_function took longer than .* in the line: ", verdict.line)
    assert exercises.check_window_index(window_index).status == "right"


@pytest.mark.thorough
def test_a_debugger_still_steps_after_a_check():
    """What was raised in a thread and then taken back kept the interpreter busy for ever, once it was traced."""
    code = (
        "import sys, exercises\n"
        "assert exercises.check_window_index(lambda h, w, side: 1).status == 'wrong'\n"
        "sys.settrace(lambda frame, event, value: None)\n"
        "(lambda: None)()\n"
        "sys.settrace(None)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=NOTEBOOKS, timeout=120, check=True)


def test_a_wrong_result_is_drawn_beside_the_expected_one():
    """Oracle: counted by hand. h=2, w=4: 0 1 4 5 2 3 6 7 is expected, so that four of eight cells differ."""
    picture = exercises.check_window_index(reading_order).picture
    assert "4 of the 8 cells shown differ" in picture and "data:image/svg+xml," in picture
    svg = ElementTree.fromstring(unquote(picture.split('src="data:image/svg+xml,')[1].rstrip('">')))
    cells = [path.get("stroke") for path in svg.iter("{http://www.w3.org/2000/svg}path")]
    assert cells == 2 * [None, None, *4 * ["#d95f02"], None, None]
    assert exercises.check_window_index(window_index).picture == ""


@pytest.mark.parametrize(
    ("want", "got", "differ"), [(4, 3, 1), ([1.0, 2.0], [1.0], 0), (torch.eye(9), torch.ones(9, 9), 48)]
)
def test_what_is_drawn_starts_before_the_first_difference(want, got, differ):
    assert f" {differ} of the " in exercises.beside(want, got)
    assert not exercises.beside(want, "no number") and not exercises.beside([[1], [1, 2]], got)


def test_a_constant_is_no_stub():
    assert exercises.check_count_tokens(lambda height, width: 3).status == "wrong"


def done_exercises():
    return [name for chapter in exercises.progress().chapters for name, is_done in chapter.exercises.items() if is_done]


def test_progress_is_remembered_until_it_is_wrong_again(done):
    """Oracle: the notebooks' own cells."""
    assert not done_exercises()
    exercises.check_window_index(window_index)
    assert done_exercises() == ["window index"]
    assert repr(exercises.progress()).count(exercises.MARKS["right"]) == 1
    assert re.search(r">1 of \d+ done<", exercises.progress()._repr_html_())
    exercises.check_window_index(reading_order)
    assert not list(done.iterdir())


def test_progress_lists_every_exercise():
    """Each notebook has one at least, and each check is called by one notebook at most."""
    chapters = exercises.progress().chapters
    assert [chapter.name for chapter in chapters] == [path.stem for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))]
    names = [name for chapter in chapters for name in chapter.exercises]
    assert all(chapter.exercises for chapter in chapters) and len(names) == len(set(names))


def test_minutes_come_from_words_lines_and_exercises():
    """What is collapsed, tables, addresses of links, imports and comments are not read. Oracle: counted by hand."""
    text = [
        "a " * 200 + "\n| no | word |\n[" + "b " * 199 + "b](no/word)",
        "<details>\nno word\n</details>\n```\nno word\n```",
    ]
    imports = "import torch\nfrom torch import (\n    Tensor,\n    nn,\n)\n\n# a comment\n"
    code = [imports + 17 * "x = 1\n", "for i in x:\n" + 6 * "    i = important(i)\n"]
    assert exercises.minutes_of(text, code, exercises=2) == 2 + 4 + 20


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(exercises, "DONE", tmp_path / "file" / "progress")
    assert exercises.check_window_index(window_index).status == "right"


def solutions() -> list[str]:
    """The code of every collapsed solution."""
    notebooks = [nbformat.read(path, as_version=4) for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))]
    cells = [cell.source for notebook in notebooks for cell in notebook.cells]
    blocks = [re.findall(r"<details>.*?```python\n(.*?)```.*?</details>", source, re.S) for source in cells]
    return [code for found in blocks for code in found]


def test_solutions_are_found():
    """Every exercise has one."""
    assert len(solutions()) == sum(len(chapter.exercises) for chapter in exercises.progress().chapters)


@pytest.mark.parametrize("code", solutions())
def test_printed_solutions_pass_their_check(code):
    """They stand alone: each imports what it uses, defines its function and, last, calls its check."""
    *body, call = ast.parse(code).body
    assert isinstance(call, ast.Expr) and "check_" in ast.unparse(call)
    names: dict = {}
    exec(compile(ast.Module(body, []), "solution", "exec"), names)
    verdict = eval(compile(ast.Expression(call.value), "solution", "eval"), names)
    assert verdict.status == "right" and re.match(r"in \d+ cases(;|$)", verdict.line), verdict
