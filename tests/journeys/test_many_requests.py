"""Many requests. Oracle: `chat`, request by request."""

import fcntl
import json
import os
import re
import signal

import pytest
import torch
from checkpoint_factory import make_checkpoint
from encode_processes import start, wait_for

import refvl
from refvl.paths import DATA
from refvl.serving.requests import answer_file

PHOTO, CLIP = DATA / "pictures" / "scene.png", DATA / "clips" / "scene.mp4"
GOOD = [
    {"prompt": "What is it?", "images": [str(PHOTO)]},
    {"prompt": "Where?", "max_new_tokens": 3},
    {"prompt": "What moves?", "videos": [str(CLIP)], "pruning_rate": 0.5},
    {"prompt": "And this?", "images": [str(PHOTO), str(PHOTO)], "max_new_tokens": 7},
    {"prompt": [{"role": "user", "content": "Hm?"}]},
]
BAD = {
    1: ({"prompt": "What?", "images": ["nowhere.png"]}, "no such file: nowhere.png"),
    3: ({"prompt": "What?", "color": 1}, "unknown key 'color'"),
    4: ({"prompt": "What?", "max_new_tokens": 0}, "max_new_tokens: must be at least 1"),
    7: ("What?", "expected a dict"),
}
COMMON = {"max_new_tokens": 5, "pruning_rate": 0.0}


def mixed():
    """The good requests and the bad among them."""
    good, count = iter(GOOD), len(GOOD) + len(BAD)
    return [BAD[i][0] if i in BAD else next(good) for i in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def vlm(folder):
    return refvl.load(folder, device="cpu", progress=False)


@pytest.fixture(scope="module")
def want(vlm):
    return [vlm.chat(**(COMMON | request)) for request in GOOD]


def sizes(vlm, monkeypatch):
    """How many prompts each batch held, as they are decoded."""
    seen, decode = [], vlm.decode
    monkeypatch.setattr(
        vlm, "decode", lambda traces, *args, **kw: seen.append(len(traces)) or decode(traces, *args, **kw)
    )
    return seen


@pytest.mark.parametrize(("batch_tokens", "batches"), [(2**14, [5]), (1, [1] * 5), (160, None)])
def test_answers_do_not_depend_on_the_batch(vlm, want, monkeypatch, batch_tokens, batches):
    seen = sizes(vlm, monkeypatch)
    assert vlm.chat_batch(GOOD, batch_tokens=batch_tokens, **COMMON) == want
    assert sum(seen) == 5 and (seen == batches if batches else 1 < len(seen) < 5)


def test_an_error_stands_where_its_answer_would(vlm, want):
    answers = vlm.chat_batch(mixed(), return_exceptions=True, **COMMON)
    for i, (_, message) in BAD.items():
        assert isinstance(answers[i], (ValueError, TypeError, OSError)) and message in str(answers[i])
    assert [answer for i, answer in enumerate(answers) if i not in BAD] == want


def test_a_batch_that_fails_is_tried_one_by_one(vlm, want, monkeypatch):
    """As where it does not fit into memory: the one that fails alone, too, is the only error."""
    decode = vlm.decode

    def fails(traces, *args, **kwargs):
        if len(traces) > 1 or len(traces[0].input_ids) > 40:
            raise MemoryError("too much")
        return decode(traces, *args, **kwargs)

    longest = max(len(vlm.trace(**(COMMON | request)).input_ids) for request in GOOD)
    monkeypatch.setattr(vlm, "decode", fails)
    answers = vlm.chat_batch(GOOD, return_exceptions=True, **COMMON)
    assert longest > 40
    assert sum(isinstance(answer, MemoryError) for answer in answers) >= 1
    assert all(answer == expected for answer, expected in zip(answers, want, strict=True) if isinstance(answer, str))


def test_the_first_error_is_raised_and_says_which(vlm):
    with pytest.raises(FileNotFoundError) as raised:
        vlm.chat_batch([GOOD[1], BAD[1][0]], **COMMON)
    assert raised.value.__notes__ == ["in requests[1]"]
    for name, value in (("batch_tokens", 0), ("return_exceptions", 1)):
        with pytest.raises((ValueError, TypeError), match=name):
            vlm.chat_batch(GOOD, **{name: value})


# --- files of requests ------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "requests.jsonl"
    first, *others = map(json.dumps, mixed())
    path.write_text("\n".join([first, "", *others, "no json", "[" * 100_000]))
    return path


def read(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_file_of_requests_becomes_a_file_of_answers(vlm, want, file, tmp_path):
    errors = answer_file(vlm, file, tmp_path / "out", common=COMMON, progress=False)
    entries = read(tmp_path / "out")
    assert [entry["line"] for entry in entries] == [1, *range(3, 13)]
    assert [entry["answer"] for entry in entries if "answer" in entry] == want
    assert sorted(errors) == [*(i + 2 for i in BAD), 11, 12] and all(
        errors[i].startswith("the line is not valid JSON (") for i in (11, 12)
    )


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_run_that_was_killed_is_continued(vlm, file, tmp_path, monkeypatch, cut):
    """Wherever the file of answers was cut off, it ends as if it had not been, and nothing is asked twice."""
    out = tmp_path / "out"
    answer_file(vlm, file, out, common=COMMON, progress=False)
    whole = out.read_bytes()
    kept = whole[: whole.index(b"\n", 300) + 1 + cut]
    out.write_bytes(kept)
    asked, answer_each = [], vlm.answer_each

    def count(todo, *settings):
        return answer_each((asked.append(request) or request for request in todo), *settings)

    monkeypatch.setattr(vlm, "answer_each", count)
    answer_file(vlm, file, out, common=COMMON, progress=False)
    assert out.read_bytes() == whole
    assert len(asked) == 11 - kept.count(b"\n")


@pytest.mark.thorough
def test_a_killed_process_is_continued(tmp_path, shell):
    """`kill -9` after the first of six batches; oracle: the same file, answered undisturbed."""
    file, whole, killed = (tmp_path / name for name in ("requests.jsonl", "whole", "killed"))
    line = json.dumps({"prompt": "What color is the circle?", "images": [str(PHOTO)], "max_new_tokens": 2000})
    file.write_text("\n".join([line] * 48))

    arguments = ["chat", DATA / "checkpoints" / "tiny-qwen2_5_vl", "--jsonl", file, "--device", "cpu", "--out"]
    process = start([*arguments, killed], tmp_path / "log")
    wait_for(lambda: killed.exists() and b"\n" in killed.read_bytes(), process)
    os.kill(process.pid, signal.SIGKILL)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    left = killed.read_bytes()
    for out in (killed, whole):
        assert not shell(*arguments, out)[0]
    undisturbed = whole.read_bytes()
    assert killed.read_bytes() == undisturbed != left and undisturbed.startswith(left)


@pytest.mark.parametrize("text", ['{"line": 1, "request": "0", "answer": "red"}\n', "notes", "[]\n", None])
def test_what_holds_anything_else_is_left_alone(vlm, file, tmp_path, text):
    """Answers to other requests, a file of somebody's, the requests themselves."""
    out = tmp_path / "out" if text else file
    out.write_text(text or file.read_text())
    before = out.read_bytes()
    with pytest.raises(ValueError, match=rf"out: .*{out.name}, line 1: does not answer that line of the requests"):
        answer_file(vlm, file, out, common=COMMON, progress=False)
    assert out.read_bytes() == before


def test_answers_of_another_model_or_setting_are_not_continued(vlm, folder, file, tmp_path):
    """Fewer new tokens, or some numbers of one matrix changed a little."""
    out, other = tmp_path / "out", refvl.load(folder, device="cpu", progress=False)
    answer_file(vlm, file, out, common=COMMON, progress=False)
    before = out.read_bytes()
    answer_file(other, file, out, common=COMMON, progress=False)  # loaded anew, it is the same
    assert out.read_bytes() == before
    refused = "line 1: was answered by a different model or with different settings; move the file away"
    with pytest.raises(ValueError, match=refused):
        answer_file(vlm, file, out, common=COMMON | {"max_new_tokens": 3}, progress=False)
    with torch.no_grad():
        other.language_model.lm_head.weight[:, ::100] += 1e-3
    with pytest.raises(ValueError, match=refused):
        answer_file(other, file, out, common=COMMON, progress=False)
    assert out.read_bytes() == before


def test_files_that_cannot_be_read_or_written(vlm, file, tmp_path):
    """A mistake that concerns all lines is no answer to each of them."""
    out = tmp_path / "out"
    for name, what in (
        ("", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        ("no/out", "cannot be written"),
    ):
        with pytest.raises(OSError, match=f"^out: .* {what}"):
            answer_file(vlm, file, tmp_path / name, common=COMMON, progress=False)
    for name, value in (("max_new_tokens", 0), ("pruning_rate", 1.5), ("pruning", "some")):
        with pytest.raises(ValueError, match=name):
            answer_file(vlm, file, out, common=COMMON | {name: value}, progress=False)
    assert not out.read_bytes()
    with pytest.raises(FileNotFoundError, match="jsonl: no such file"):
        answer_file(vlm, tmp_path / "none", out, common=COMMON)


def test_one_process_at_a_time_writes_answers(vlm, file, tmp_path):
    """A kernel's lock belongs to who opened the file: a second opening is as good as a second process."""
    with open(tmp_path / "out", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="out: .* is being written by another process"):
            answer_file(vlm, file, tmp_path / "out", common=COMMON)


def test_the_command_line(folder, want, file, shell):
    status, out, err = shell("chat", folder, "--jsonl", file, "--max-new-tokens", 5)
    assert status == 1 and out == f"answers in {file}.answers.jsonl\n" and len(err.splitlines()) == 6
    assert [e["answer"] for e in read(file.with_name("requests.jsonl.answers.jsonl")) if "answer" in e] == want
    for arguments, message in (
        (["--jsonl", file, "-i", PHOTO], "jsonl: its lines contain the requests; remove image"),
        (["Hi", "--out", "x"], "out: supported only with --jsonl"),
        ([], "prompt: expected a question, or a file of requests with --jsonl"),
    ):
        status, _, err = shell("chat", folder, *arguments)
        assert status == 1 and re.search(re.escape(message), err)
