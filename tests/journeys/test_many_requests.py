"""Many requests. Oracle: `chat`, request by request."""

import json
import re

import pytest

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
    3: ({"prompt": "What?", "color": 1}, "unexpected keyword argument 'color'"),
    4: ({"prompt": "What?", "max_new_tokens": 0}, "max_new_tokens: must be at least 1"),
    7: ("What?", "expected a dict"),
}
COMMON = {"max_new_tokens": 5, "pruning_rate": 0.0}


def mixed():
    """The good requests and the bad among them."""
    good, count = iter(GOOD), len(GOOD) + len(BAD)
    return [BAD[i][0] if i in BAD else next(good) for i in range(count)]


@pytest.fixture(scope="module")
def want(vlm):
    return [vlm.chat(**(COMMON | request)) for request in GOOD]


@pytest.mark.parametrize(("batch_tokens", "batches"), [(2**14, [5]), (1, [1] * 5), (160, None)])
def test_answers_do_not_depend_on_the_batch(vlm, want, monkeypatch, batch_tokens, batches):
    seen, decode = [], vlm.decode

    def counted(traces, *args, **kwargs):
        seen.append(len(traces))
        return decode(traces, *args, **kwargs)

    monkeypatch.setattr(vlm, "decode", counted)
    assert vlm.chat_batch(GOOD, batch_tokens=batch_tokens, **COMMON) == want
    assert sum(seen) == 5 and (seen == batches if batches else 1 < len(seen) < 5)


def test_an_error_stands_where_its_answer_would(vlm, want):
    answers = vlm.chat_batch(mixed(), return_exceptions=True, **COMMON)
    for i, (_, message) in BAD.items():
        assert isinstance(answers[i], (ValueError, TypeError, OSError))
        assert message in str(answers[i])
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
    with pytest.raises(ValueError, match="batch_tokens"):
        vlm.chat_batch(GOOD, batch_tokens=0)


# --- files of requests ------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "requests.jsonl"
    first, *others = [request for request in mixed() if isinstance(request, dict)]
    path.write_text("\n".join([json.dumps(first | {"id": "a"}), "", *map(json.dumps, others)]))
    return path


def read(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_file_of_requests_becomes_a_file_of_answers(vlm, want, file, tmp_path):
    """The second run repeats only the requests that failed."""
    out = tmp_path / "out"
    errors = answer_file(vlm, file, out, common=COMMON, progress=False)
    assert [said["id"] for said in read(out)] == ["a", *range(3, 10)]
    assert [said["answer"] for said in read(out) if "answer" in said] == want
    assert sorted(errors) == [3, 5, 6] and read(out)[1]["error"] == errors[3]
    before = out.read_text()
    assert answer_file(vlm, file, out, common=COMMON, progress=False) == errors
    assert out.read_text().startswith(before)
    assert [said["id"] for said in read(out)[8:]] == sorted(errors)


MALFORMED = {  # the files of requests and of answers
    "requests.jsonl, line 2: Expecting value": ("{}\nno json", ""),
    "requests.jsonl, line 3: expected a new id, got 1, which an earlier line has": ('{"id": 1}\n\n{"id": 1}', ""),
    "out, line 1: expected keys id and answer, or id and error": ("{}", '{"prompt": "What?"}\n'),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_files(vlm, tmp_path, message):
    """The file of answers stays as it is."""
    requests, answers = MALFORMED[message]
    (tmp_path / "requests.jsonl").write_text(requests)
    (tmp_path / "out").write_text(answers)
    with pytest.raises(ValueError, match=re.escape(message)):
        answer_file(vlm, tmp_path / "requests.jsonl", tmp_path / "out", common=COMMON, progress=False)
    assert (tmp_path / "out").read_text() == answers


def test_the_command_line(checkpoint, want, file, shell):
    status, out, err = shell("chat", checkpoint, "--jsonl", file, "--max-new-tokens", 5)
    assert status == 1
    assert out == f"answers in {file}.answers.jsonl\n"
    assert len(err.splitlines()) == 3
    assert [said["answer"] for said in read(file.with_name("requests.jsonl.answers.jsonl")) if "answer" in said] == want
