"""The nine functions that a reader writes. Oracles: slow formulas and the library in cases.py; for the check itself,
planted mistakes, which have to be red, and other right versions, which have to be green; for the model, its own ids."""

import contextlib
import math
import re
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote
from xml.etree import ElementTree

import checking
import pytest
import solutions
import torch
import track
from cases import LIBRARY
from checking import MARKS, Verdict, beside, judge
from track import NAMES, TASKS

NOTEBOOKS = Path(track.__file__).parent
MISTAKES = [(name, mistake) for name in NAMES for mistake in TASKS[name]["mistakes"]]


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """The reader's file and folder are elsewhere; all functions are still stubs."""
    path = tmp_path / "mine.py"
    path.write_text((NOTEBOOKS / "mine.py").read_text())
    module = ModuleType("mine")
    module.__file__ = str(path)
    exec(compile(path.read_text(), path, "exec"), vars(module))
    monkeypatch.setattr(track, "mine", module)
    for where, name, file in ((checking, "DONE", ""), (track, "DONE", ""), (track, "DRAWN", "scene.json"),
                              (track, "PREDICTED", "predictions.json")):  # fmt: skip
        monkeypatch.setattr(where, name, tmp_path / "progress" / file)
    return module


def window_index(grids, side):
    keys = [(i, f, y // side, x // side) for i, (t, h, w) in enumerate(grids) for f in range(t) for y in range(h)
            for x in range(w)]  # fmt: skip
    index = sorted(range(len(keys)), key=keys.__getitem__)
    windows = dict.fromkeys(keys[n] for n in index)
    return torch.tensor(index), torch.tensor(index).argsort(), [keys.count(key) for key in windows]


class Other:
    """Right, and rounded in other ways: double precision, two cosines, other products. Copies have one right result."""

    window_index = staticmethod(window_index)

    def target_size(height, width, factor, min_pixels, max_pixels):
        a, b = round(height / factor), round(width / factor)
        if a * b * factor**2 > max_pixels:
            scale = (max_pixels / (height * width)) ** 0.5
            a, b = max(1, int(height * scale / factor)), max(1, int(width * scale / factor))
        elif a * b * factor**2 < min_pixels:
            scale = (min_pixels / height / width) ** 0.5
            a, b = math.ceil(height * scale / factor), math.ceil(width * scale / factor)
        return a * factor, b * factor

    def rotate(x, row, column, theta=10000.0):
        half = x.shape[-1] // 2
        speed = 1 / theta ** (torch.arange(0, half, 2).double() / half)
        angle = torch.cat([torch.outer(row.double(), speed), torch.outer(column.double(), speed)], 1)
        cos, sin = (torch.cat([a, a], 1)[:, None] for a in (angle.cos(), angle.sin()))
        other = torch.cat([-x[..., half:], x[..., :half]], -1)
        return (x.double() * cos + other.double() * sin).to(x.dtype)

    def attend(q, k, v, lengths):
        segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(segment[:, None] != segment[None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    def fold(x, merge, project, inverse):
        return project(x.unflatten(0, (-1, merge * merge)).flatten(1)[inverse])

    def mrope(length, spans):
        columns, position, starts = [], 0, {span[0]: span[1:] for span in spans}
        while len(columns) < length:
            if len(columns) in starts:
                t, h, w, factor = starts[len(columns)]
                item = [(position + int(i * factor), position + j, position + k)
                        for i in range(t) for j in range(h) for k in range(w)]  # fmt: skip
                columns, position = columns + item, max(map(max, item)) + 1
            else:
                columns, position = [*columns, (position,) * 3], position + 1
        return torch.tensor(columns).T, max(map(max, columns)) + 1 - length

    def evs(embeds, steps, rate, positions, offset):
        M, n = len(embeds), len(embeds) // steps
        unit = torch.nn.functional.normalize(embeds.float(), dim=-1)
        scores = [9.0] * n + (1 - (unit[n:] * unit[:-n]).sum(-1)).tolist()
        best = sorted(range(M), key=lambda i: (-scores[i], i))[: max(n, int(M * (1 - rate)))]
        keep = torch.tensor([not offset <= i < offset + M or i - offset in best for i in range(positions.shape[1])])
        return keep, positions[:, keep], positions[:, keep].max().item() + 1 - int(keep.sum())


@pytest.mark.parametrize("name", NAMES)
def test_right_functions_are_green_whatever_their_shape(name, mine):
    """The solution, and another version. Both are kept, with the task above them, and then they are the reader's."""
    versions = [getattr(solutions, name)]
    if hasattr(Other, name):
        versions.append(getattr(Other, name))
    for right in versions:
        verdict = track.check(right)
        assert verdict.status == "right" and re.fullmatch(r"in 20\d cases; stored in mine.py", verdict.line), verdict
        kept = Path(mine.__file__).read_text()
        assert mine.__dict__[name].__doc__ and kept.count(f"def {name}(") == 1 and list(track.written()) == [name]
    assert track.check(mine.__dict__[name]).status == "right" and (track.DONE / name).exists()


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_every_planted_mistake_is_red_and_recognised(name, mistake):
    """Its name is not unique if another mistake gives the same results on all cases."""
    verdict = track.check(track.planted(name, mistake))
    assert verdict.status == "wrong" and len(verdict.hints) == 3 and not track.written()
    if name != "replay":
        assert "it behaves like this mistake: " in verdict.line, verdict


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_the_model_notices_a_mistake_or_the_reason_is_given(name, mistake):
    """At most a quarter of the mistakes change no answer."""
    board = track.run(name, mistake=mistake)
    assert board.note.startswith("No answer changes. ") is ("why" in TASKS[name]["mistakes"][mistake]), board
    assert board.note.endswith(f"The check says: {name} is wrong.")
    silent = sum("why" in TASKS[name]["mistakes"][mistake] for name, mistake in MISTAKES)
    assert len(MISTAKES) >= 90 and silent <= len(MISTAKES) / 4


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_s_stage_is_watched_like_the_library_s(name):
    model, [asked] = track.load_model(False), track.questions("motion", 1)
    both = [m.trace(**asked.arguments, pruning_rate=0.5, attentions=True, hidden_states=True, max_new_tokens=2)
            for m in (model, model.with_stages(**{name: getattr(solutions, name)}))]  # fmt: skip
    for kept in ("tower_attentions", "tower_hidden_states", "hidden_states"):
        torch.testing.assert_close(*(getattr(trace, kept) for trace in both), rtol=1e-4, atol=1e-4)


def test_with_all_nine_every_answer_is_the_library_s(mine):
    vars(mine).update({name: getattr(solutions, name) for name in NAMES})
    track.scene({"top left": "red circle", "bottom right": "blue star"})
    board = track.finish(4)
    assert board.whose == "All nine are yours." and "40 of 40 answers" in board.note
    assert ("Where is the circle?", "top left", "top left") in board.own
    assert "def window_index" in Path(mine.__file__).with_suffix(".html").read_text()


def test_a_prediction_is_kept_and_shown_and_without_it_the_board_is_folded():
    board = track.run("fold", predicted={"place": 3, "shape": 24})
    assert "3 (21 off)" in repr(board) and "none yet" in board.whose and "<details>" not in board._repr_html_()
    assert '"place": 3' in track.PREDICTED.read_text()
    assert track.run("fold", predicted={"place": None})._repr_html_().startswith("<details>")
    assert track.predict("Where?", None, 7).folded and repr(track.predict("Where?", 5, 7)).endswith("5; it is 7.")


def test_names_from_outside_are_not_kept_and_what_is_printed_is_shown_once(capsys):
    def fold(x, merge, project, inverse):
        print("a line")
        return solutions.fold(x, merge, project, inverse)

    verdict = track.check(fold)
    assert verdict.line.endswith("define them inside it") and not track.written()
    assert repr(verdict).count("a line") == repr(track.run(fold)).count("a line") == 3 and not capsys.readouterr().out


def test_a_stub_shows_its_task_and_others_are_refused():
    def fold(x, merge, project, inverse):
        """My own text."""
        ...

    verdict = track.check(fold)
    assert verdict.status == "not yet" and "Turn patches into tokens" in repr(verdict)
    assert "hint 3" in verdict._repr_html_()
    for call in (lambda: track.check(max), lambda: track.run("max"), lambda: track.scene({"here": "red circle"})):
        with pytest.raises(ValueError, match="expected"):
            call()


def judged(function):
    return judge(function, [("a case", (torch.zeros(2),), torch.tensor([[1, 2]]))])


@pytest.mark.parametrize(("got", "said"), [
    (torch.tensor([[1.0, 2]]), "dtype int64, got float32"), (torch.tensor([1, 2]), r"shape \(1, 2\), got \(2,\)"),
    ([1, 2], "a tensor, got a list"), (torch.tensor([[1, 3]]), r"1 of 2 differ; element \[0, 1\] should be 2, got 3"),
    (torch.zeros(1, 2, dtype=torch.int64, device="meta"), "device cpu, got meta"),
])  # fmt: skip
def test_what_differs_is_named(got, said):
    assert re.search(said, judged(lambda x: got).line)


def test_changed_arguments_and_errors_are_one_line():
    def my_function(x):
        raise IndexError("no window\nhere")

    assert "changed its argument: x: " in judged(lambda x: torch.tensor([[1, 2]]) + 0 * int(x.add_(1).sum())).line
    assert "my_function raised IndexError: no window; in the line: raise IndexError(" in judged(my_function).line
    assert "<here>" not in Verdict("wrong", "<here>")._repr_html_()


@pytest.mark.parametrize("catch", [Exception, ValueError])
def test_a_loop_that_never_ends_is_stopped(monkeypatch, catch):
    """Also one that catches every Exception; what comes afterwards is not stopped by what came too late."""
    monkeypatch.setattr(checking, "LIMIT", 0.05)

    def my_function(x):
        while True:
            with contextlib.suppress(catch):
                x = x + 1

    assert re.search("my_function took longer than .* in the line: ", judged(my_function).line)
    assert judged(lambda x: torch.tensor([[1, 2]])).status == "right"


def test_both_values_are_drawn_and_written_from_just_before_the_first_difference():
    """Oracle: counted by hand. h=2, w=4: 0 1 4 5 2 3 6 7 is expected, so that four of eight cells differ."""
    want, _, _ = LIBRARY["window_index"]([(1, 2, 4)], 2)
    picture = beside(want, torch.arange(8))
    svg = ElementTree.fromstring(unquote(picture.split('src="data:image/svg+xml,')[1].rstrip('">')))
    cells = [path.get("stroke") for path in svg.iter("{http://www.w3.org/2000/svg}path")]
    assert cells == 2 * [None, None, *4 * ["#d95f02"], None, None] and "4 of the 8 cells" in picture
    assert repr(Verdict("wrong", "", want=want, got=torch.arange(8))).count("*") == 8
    assert " 48 of the " in beside(torch.eye(9), torch.ones(9, 9)) and not beside(4, "no number")
    assert repr(Verdict("right", "in 3 cases")) == f"{MARKS['right']} right: in 3 cases"
