"""The checks of the notebooks' exercises. Oracle: they pass refvl's own functions and the printed solutions, and say
where a wrong one differs first."""

import ast
import re
from pathlib import Path

import exercises
import numpy as np
import pytest
import torch

from refvl.graphs import plan_batches
from refvl.merge import merge_embeddings
from refvl.pixels.by_hand import patch_rows
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


def run_without_writing(operations):
    return [operation.function(*operation.args, **operation.kwargs) for operation in operations]


def alone(output_tokens, budgets, max_items):
    return plan_batches(output_tokens, budgets, 1)


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


def read_all(q, k, v, *_):
    """Every query over all patches that there are."""
    scores = torch.einsum("qhk,nhk->hqn", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqn,nhk->qhk", scores.softmax(-1), v)


def over_all_sizes(sizes, seconds):
    return np.polyfit(np.log(sizes), np.log(seconds), 1)[0]


def ratio_of_sums(theirs, ours):
    return sum(theirs) / sum(ours)


def keys_alone(config, dtype):
    return kv_cache_bytes_per_token(config, dtype) // 2


def first_of_two(timestamps):
    return [float(second) for second in timestamps[::2]]


def without_blocks(table, h, w):
    return read_table(table, h, w, merge_size=1)


def larger_area_first(width, height):
    """The number of slices is right, their ratio is not looked at."""
    wanted = min(-(-width * height // 448**2), 9)
    return None if wanted < 2 else (wanted, 1)


def kept_outputs(replay, inputs):
    return [replay(x).clone() for x in inputs]


def one_memory(replay, inputs):
    return [replay(x) for x in inputs]


def unpack(outputs, batches, tokens):
    found = {}
    for rows, batch in zip(outputs, batches, strict=True):
        sizes = [tokens[i] for i in batch.indices]
        found |= zip(batch.indices, rows[: sum(sizes)].split(sizes), strict=True)
    return [found[i] for i in range(len(tokens))]


def as_packed(outputs, batches, tokens):
    order = [i for batch in batches for i in batch.indices]
    embeds = unpack(outputs, batches, tokens)
    return [embeds[i] for i in order]


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


REPAIRS = {  # what is seen in the wild, and what the model says with it
    exercises.check_grid_positions: (grid_positions, transposed),
    exercises.check_restrict_positions: (restrict_positions, cut_to_length),
    exercises.check_merge_embeddings: (merge_embeddings, merge_in_place),
    exercises.check_patch_rows: (lambda pixels, config: patch_rows(pixels, config)[0], width_major),
    exercises.check_frame_sample: (frame_sample, seconds_of_frames),
    exercises.check_restore_order: (restore_order, rank_by_rank),
    exercises.check_mrope_axes: (lambda section: mrope_axis_of_pairs(section, interleaved=True), in_runs),
    exercises.check_kept_outputs: (kept_outputs, one_memory),
    exercises.check_unpack: (unpack, as_packed),
    exercises.check_join_order: (join_order, crops_before_overviews),
    exercises.check_rgb_frame: (rgb_frame, lambda frame: frame.copy()),
}


@pytest.mark.parametrize(("check", "functions"), REPAIRS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_repaired_model_answers_right(check, functions):
    """Oracle: the scenes, whose answers are known; the verdict of the broken one names the right answer, too."""
    repaired, broken = map(check, functions)
    assert repaired.status == "right" and re.search(r'; asked ".+" the model says ".+", which is right$', repaired.line)
    assert broken.status == "wrong" and re.search(r'; asked ".+" the model says ".*", right is ".+"$', broken.line)
    assert len(repr(broken).splitlines()) == 1


def test_the_model_that_raises_is_one_line():
    """A shape that the model cannot take, from a function that is wrong already in its first case."""
    verdict = exercises.check_patch_rows(lambda pixels, config: pixels.flatten()[:1])
    assert verdict.status == "wrong" and "; a model with it raised " in repr(verdict)
    assert len(repr(verdict).splitlines()) == 1


def test_every_check_is_seen_to_refuse():
    assert {check for check, *_ in WRONG} | set(REPAIRS) == set(every_check())


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
    (exercises.check_merged_weight, lambda w, a, b, alpha, rank: w + b @ a, "4 x 6, lora_alpha=8, rank=2.*"),
    (exercises.check_crop_layout, rounded_layout, r"728 x 728 px .*rows=2, columns=2\), got \(1, 1\)"),
    (exercises.check_exponent, over_all_sizes, r"linear behind a fixed cost: element \[\] should be 0.6\d+, got 0.5"),
    (exercises.check_times_as_fast, ratio_of_sums, r"a quiet machine: element \[\] should be 2.0, got 2.5"),
    (
        exercises.check_greedy_batches,
        alone,
        r"200\].*: element \[0\]: should be Batch\(indices=\(0, 1\), budget=64\), got",
    ),
    (exercises.check_greedy_batches, lambda *_: [], r"\[30, 30, 200\].*: number of elements: should be 2, got 0"),
    (exercises.check_step_seconds, first_of_two, r"1.5\]: element \[0\]: should be 0.25, got 0.0"),
    (exercises.check_load_balance, get_count_assignment, r"num_gpus=2: order: element \[1\]: should be 2, got 1"),
    (exercises.check_load_balance, lambda *_: [], r"expected \(order, counts, loads\), got list"),
    (exercises.check_cache_bytes, keys_alone, "num_hidden_layers=28, .*bfloat16: should be 57344, got 28672"),
    (
        exercises.check_mrope_positions,
        width_offset_positions,
        r"a tall image: positions: element \[0, 10\] should be 6",
    ),
    (exercises.check_replay, run_without_writing, r"two operations, .*: element \[0\] should be 11.0, got 7.0"),
    (exercises.check_read_sets, read_all, r"two slices, .*: expected shape \(10, 2, 8\), got \(5, 2, 8\)"),
    (exercises.check_slice_boxes, column_by_column, r"element \[1\]: should be \(4, 0, 8, 3\), got \(0, 3"),
    (exercises.check_slice_grid, larger_area_first, r"480 x 640 px .*: should be \(1, 2\), got \(2, 1\)"),
    (
        exercises.check_read_table,
        without_blocks,
        r"a table's own size: .* element \[2, 0\] should be",
    ),
    (exercises.check_retention_mask, last_ones_first, r"nothing changes.*: element \[6\] should be True, got False"),
    (exercises.check_window_index, reading_order, r"h=2, w=4, side=2: element \[2\] should be 4, got 2"),
    (exercises.check_window_index, lambda h, w, side: [0], "expected a tensor, got list"),
]


@pytest.mark.parametrize(("check", "function", "message"), WRONG)
def test_the_first_difference_is_named(check, function, message):
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
        assert repr(verdict) == f"{exercises.MARKS['not yet']} not yet: {stub.__name__} is to be written"


def test_what_the_reader_raises_is_one_line():
    def my_function(h, w, side):
        raise IndexError(f"no window\nof side {side} <here>")

    verdict = exercises.check_window_index(my_function)
    assert (verdict.status, verdict.line) == ("wrong", "my_function raised IndexError: no window")
    assert "<here>" not in exercises.Verdict("wrong", "<here>")._repr_html_()


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
    """Each notebook has two at least, and each check is called by one notebook at most."""
    chapters = exercises.progress().chapters
    assert [chapter.name for chapter in chapters] == [path.stem for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))]
    names = [name for chapter in chapters for name in chapter.exercises]
    assert min(len(chapter.exercises) for chapter in chapters) >= 2 and len(names) == len(set(names))


def test_minutes_come_from_words_cells_and_exercises():
    """What is collapsed, code, tables and addresses of links are not read."""
    text = [
        "a " * 240 + "\n| no | word |\n[" + "b " * 239 + "b](no/word)",
        "<details>\nno word\n</details>\n```\nno word\n```",
    ]
    assert exercises.minutes_of(text, code_cells=12, exercises=2) == 2 + 4 + 8


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
