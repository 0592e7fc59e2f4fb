"""The checks of the notebooks' exercises. Oracle: they pass the printed solutions, refuse the printed stubs, and say
where a solution with one mistake differs first."""

import ast
import contextlib
import hashlib
import math
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import exercises
import pytest
import torch

nbformat, peft = pytest.importorskip("nbformat"), pytest.importorskip("peft")
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CELLS = [c for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")) for c in nbformat.read(path, as_version=4).cells]
PRINTED = [re.findall(r"<details>.*?```python\n(.*?)```.*?</details>", cell.source, re.S) for cell in CELLS]
KNOWN = {"exercises": exercises, "hashlib": hashlib, "math": math, "torch": torch}  # imported by a notebook before


def by_name(sources):
    return {re.findall(r"exercises\.check_(\w+)\(", source)[-1]: source for source in sources}


SOLUTIONS = by_name(source for found in PRINTED for source in found)
STUBS = by_name(cell.source for cell in CELLS if "exercise" in cell.metadata.get("tags", ()))
CHECKS = [name.removeprefix("check_") for name in vars(exercises) if name.startswith("check_")]
REPAIRS = {name for name, stub in STUBS.items() if "..." not in stub}
UNASKED = {"times_as_fast"}  # repairs that no model runs with

# a phrase of the exercise's solution, what a reader might write instead, and what is said then
MISTAKES = [
    ("count_tokens", "round(height / 28), round(width / 28)", "height // 28, width // 28",
     r"427 x 640 .* be 345, got 330"),
    ("merge_embeddings", "span.offset : span.offset", "spans[0].offset : spans[0].offset",
     r"two images: element \[1, 0\] should be"),
    ("window_index", "torch.cat(windows)", "tokens.flatten()", r"h=2, w=4, side=2: element \[2\] should be 4, got 2"),
    ("window_index", "torch.cat(windows)", "windows", "expected a tensor, got list"),
    ("patch_rows", "3, 6, 4, 7, 2, 1, 5, 8", "3, 6, 4, 7, 1, 2, 5, 8", r"one block: element \[0, 196\] should be"),
    ("mrope_positions", "= int(torch.stack(columns).max()) + 1", "+= span.num_tokens", "a wide image: positions"),
    ("mrope_positions", "+ 1 - num_tokens", "- num_tokens", "text alone: delta.*, got -1"),
    ("grid_positions", "* t_factor)", "* int(t_factor))", r"t_factor=1.4: element \[0, 6\] should be 4, got 3"),
    ("retention_mask", "-score[i].item()", "(-score[i].item(), -i)",
     r"nothing changes.*: element \[6\] should be True, got False"),
    ("restrict_positions", "- int(keep.sum())", "- positions.shape[1]", "some tokens pruned: delta: should be"),
    ("replay", "in operations:", "in operations[::-1]:", "two operations: element"),
    ("run_batches", ".clone()", "", r"smallest first: element \[1\]"),
    ("read_table", "rows[:, None] * side + columns", "rows[:, None] + side * columns",
     r"element \[\d+, \d+\] should be"),
    ("frame_sample", "int(index / fps) for", "round(index / fps) for",
     r"timestamps: element \[\d+\]: should be \d+, got"),
    ("slice_grid", "math.ceil", "math.floor", r"should be \(\d, \d\), got"),
    ("read_sets", "zip(k.split(patches_per_set), v.split(patches_per_set), strict=True)", "[(k, v)]",
     "two slices, .*expected"),
    ("slice_boxes", "in range(rows)", "in reversed(range(rows))",
     r"columns=2, rows=2.*element \[0\]: should be \(0, 0, 4, 3\)"),
    ("crop_layout", "> 0.2", "> 0", r"should be CropLayout\(.*\), got"),
    ("crop_layout", "short < 32", "False", r"31 x 200 px .*rows=0, columns=0\), got"),
    ("join_order", "in counts:", "in [sum(counts) // len(counts)] * len(counts):",
     r"counts=\[1, 2\].*(element|expected shape)"),
    ("load_balance", "(load + sizes[i], rank)", "(load + 1, rank)",
     r"num_gpus=2: order: element \[1\]: should be 2, got"),
    ("restore_order", "[embeds[i] for", "[embeds[order[i]] for", "on 2 ranks: element"),
    ("cache_bytes", "num_key_value_heads", "num_attention_heads", "should be 57344, got 401408"),
    ("rgb_frame", "[..., ::-1]", "[..., [1, 0, 2]]", r"a pixel: element \[0, 0, 0\] should be"),
    ("exponent", "[-4:]", "", r"linear behind a fixed cost: should be 0.6\d+, got 0.5"),
    ("times_as_fast", "median(a / b for a, b in zip(theirs[1:], ours[1:], strict=True))",
     "median(theirs[1:]) / statistics.median(ours[1:])", "rounds unlike each other: should be 1.5, got 1.333"),
    ("mrope_axes", "torch.where(pairs < limit, third, 0)", "third",
     r"\[24, 20, 20\]: element \[61\] should be 0, got 1"),
    ("video_steps", "timestamps[-1]]", "0.0]", r"element \[1\]: should be <1.0 .*, got <0.5 "),
    ("merged_weight", " / rank", "", "rank=2: element"),
    ("adapter_name", 'old.startswith("visual.")', "False", "'visual.* should be"),
    ("embeddings", ".clone()", "", "a view of the buffer: element"),
    ("embeddings", ", weights)", ", 1)", "no model in the key: element"),
    ("max_pixels", "(patch_size * merge_size)", "28", "patch_size=16, .*: should be 1310720, got 1003520"),
    ("split_thought", "answer.strip()", "answer.strip(), text", r"both tags: expected \(thought, answer\), got tuple"),
    ("split_thought", '.replace("<answer>", "")', "", "with <answer>: answer: should be It is a cup., got <answer>"),
    ("segment_attention", "softmax(-1)", "softmax(-2)", r"one segment: element \[0, 0, 0\] should be"),
    ("rms_norm", ".mean(-1, keepdim=True)", ".mean()", r"five patches: element \[0, 0\] should be"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def done(tmp_path, monkeypatch):
    """What is done is remembered elsewhere."""
    monkeypatch.setattr(exercises, "DONE", tmp_path / "progress")
    return exercises.DONE


def verdict_of(source, known=()):
    """Run an exercise's cell, whose last line calls its check."""
    *body, call = ast.parse("from __future__ import annotations\n" + source).body
    names = dict(known)
    exec(compile(ast.Module(body, []), "solution", "exec"), names)
    verdict = eval(compile(ast.Expression(call.value), "solution", "eval"), names)
    assert len(repr(verdict).splitlines()) == 1
    return verdict


def test_every_exercise_has_a_stub_a_solution_and_mistakes():
    assert sorted(CHECKS) == sorted(STUBS) == sorted(SOLUTIONS) == sorted({name for name, *_ in MISTAKES})
    assert len(SOLUTIONS) == sum(map(len, PRINTED))


@pytest.mark.parametrize("name", SOLUTIONS)
def test_printed_solutions_pass_their_check(name):
    """They stand alone: each imports what it uses. Oracle of what a model with a repair answers: the scenes."""
    verdict = verdict_of(SOLUTIONS[name])
    assert verdict.status == "right" and re.match(r"in \d+ cases(;|$)", verdict.line), verdict
    if name in REPAIRS - UNASKED:
        assert re.search(r'; asked ".+", the model answers ".+", which is correct$', verdict.line)


@pytest.mark.parametrize("name", STUBS)
def test_stubs_start_red(name):
    """What is seen in the wild, and what a model says with it: the right answer is named, too."""
    verdict = verdict_of(STUBS[name], KNOWN)
    assert verdict.status == ("wrong" if name in REPAIRS else "not yet")
    if name in REPAIRS - UNASKED:
        assert re.search(r'; asked ".+", the model answers ".*"; correct is ".+"$', verdict.line)


@pytest.mark.parametrize(("name", "phrase", "instead", "message"), MISTAKES)
def test_the_first_difference_is_named(monkeypatch, name, phrase, instead, message):
    """Oracle: the mistake itself, which differs from the printed solution in one thought. No model is asked."""
    monkeypatch.setattr(exercises, "_tiny", None)
    assert phrase in SOLUTIONS[name]
    verdict = verdict_of(SOLUTIONS[name].replace(phrase, instead), KNOWN)
    assert verdict.status == "wrong" and re.search(message, verdict.line), verdict


def test_the_model_that_raises_is_one_line():
    """A shape that the model cannot take, from a function that is wrong already in its first case."""
    verdict = exercises.check_patch_rows(lambda pixels, config: pixels.flatten()[:1])
    assert verdict.status == "wrong" and "; a model with it raised " in repr(verdict)
    assert len(repr(verdict).splitlines()) == 1


def window_index(h, w, side):
    tokens = torch.arange(h * w).view(h, w)
    return torch.cat([part.flatten() for rows in tokens.split(side) for part in rows.split(side, 1)])


def reading_order(h, w, side):
    return torch.arange(h * w)


def test_hints_come_one_inside_the_other():
    """Three, each in a block of its own that is closed; none once it is right."""

    def stub(h, w, side): ...

    shown = exercises.check_window_index(stub)._repr_html_()
    assert re.findall(r"<details><summary>hint (\d)</summary>", shown) == ["1", "2", "3"]
    assert shown.endswith("</details>" * 3)
    assert "hint" not in exercises.check_window_index(window_index)._repr_html_()


def test_a_stub_is_not_yet_wrong_and_a_constant_is_no_stub():
    def with_a_docstring(h, w, side):
        """The order (h * w,) of the tokens."""
        ...  # your code here

    verdict = exercises.check_window_index(with_a_docstring)
    assert repr(verdict) == f"{exercises.MARKS['not yet']} not yet: write the body of with_a_docstring"
    assert exercises.check_count_tokens(lambda height, width: 3).status == "wrong"


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


@pytest.mark.slow
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
