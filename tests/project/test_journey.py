"""The path of one answer: how much there is to read, and the page that shows it.

Oracles: functions counted by hand in a small folder, `sys.setprofile` as a second recorder, the trace of the same
request, another count of code lines, an HTML parser.

`BUDGETS` keeps the path from growing unseen. To renew it after a change that is worth its lines, or that took some
away: `PYTHONPATH=.:tests .venv/bin/python tests/project/test_journey.py`
"""

import re
import sys
from functools import cache
from html import unescape

import pytest
import torch
from project.test_lines import code_lines
from random_models import NEEDS_5_23
from shipped import VARIANTS, is_read_here

import refvl
from refvl.paths import DATA
from refvl.study.follow import ASK, LIBRARY, SENTENCES, Numbers, follow, measure, pieces, record
from refvl.study.source import Source
from refvl.viz.journey import SHIPPED, coloured, page

# functions, file changes, files, lines entered, those that check, code lines of the files
BUDGETS = {
    "qwen2_5_vl": Numbers(97, 49, 16, 704, 67, 1611),
    "qwen3_vl": Numbers(100, 57, 19, 714, 67, 1859),
    "glm4v": Numbers(98, 56, 18, 718, 67, 1801),
    "minicpmv": Numbers(108, 64, 20, 761, 69, 2261),
    "minicpmv4_7": Numbers(99, 56, 19, 739, 70, 2014),
    "step3": Numbers(101, 56, 18, 744, 72, 2070),
    "clip": Numbers(116, 53, 17, 862, 114, 1906),
}
MAX_PAGE = 600_000  # bytes


@cache
def model(checkpoint: str):
    """With torch's linear layers, so that the path is the same on every CPU."""
    return refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", linear="torch", progress=False)


@cache
def journey(name: str):
    asked = SHIPPED[name]
    return follow(model(asked.checkpoint), asked.question, **asked.options)


@cache
def html(name: str) -> str:
    return page(journey(name), title=SHIPPED[name].checkpoint)


def here(names) -> list:
    """Those whose checkpoint this transformers cannot read are skipped."""
    return [n if is_read_here(SHIPPED[n].checkpoint) else pytest.param(n, marks=NEEDS_5_23) for n in names]


each_journey = pytest.mark.parametrize("name", here(SHIPPED))


@pytest.mark.parametrize("name", here(BUDGETS))
def test_the_path_does_not_grow(name):
    """Fewer is always right; more has to be written into the table."""
    now, allowed = journey(name).numbers, BUDGETS[name]
    over = {field: (n, m) for field, n, m in zip(Numbers._fields, now, allowed, strict=True) if n > m}
    assert over == {}, f"{name}: (now, allowed); the docstring of this file says how to renew the table"


def test_every_shipped_checkpoint_has_a_budget():
    """Except for variants, which take the path of the model from which their training began."""
    folders = {path.name for path in (DATA / "checkpoints").iterdir() if path.is_dir()}
    assert {asked.checkpoint for asked in SHIPPED.values()} | VARIANTS == folders
    assert set(BUDGETS) == set(SHIPPED) - {"clip_pruned"}


FILES = {
    "shop.py": '''"""A shop."""

from house import bank
from house.checks import check_coin


def sell(coin, *rest):
    """Sell.

    Twice.
    """
    # a comment
    check_coin(coin)
    if coin > 9:
        raise ValueError(
            "coin"
        )
    if coin > 5:
        return bank.keep(
            coin
        )
    else:
        for _ in range(2):
            paid = bank.keep(coin)
    return [bank.keep(x) for x in (1, 2)] + list(bank.each(paid))
''',
    "bank.py": """import functools


@functools.cache
def vault():
    return []


def keep(coin):
    vault().append(coin)
    try:
        return coin
    except TypeError as error:
        raise ValueError from error


def each(count):
    for i in range(count):
        yield (lambda: i)()


def rob():
    return vault()
""",
    "checks.py": '''LIMIT = 3


def check_coin(coin):
    """Check."""
    coin = int(coin)
    return coin
''',
}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A small library, of which everything was counted by hand."""
    folder = tmp_path / "house"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "house"]:
        del sys.modules[name]


def test_a_small_house(house):
    """Functions in the order of first entry; generators count again when resumed, lambdas belong to what is around.

    Lines are whole statements; `else` with what follows it; nothing of an untaken branch. By hand: sell has 14
    lines, of which 5 check; check_coin 3 and 3; keep 6 and 2; vault 2, each 3, without `@`.
    """
    from house import shop

    found = record(lambda: shop.sell(3), house)
    sell, check_coin, keep, vault, each = found
    named = {"sell": (7, 1), "check_coin": (4, 1), "keep": (9, 4), "vault": (4, 1), "each": (17, 4)}
    assert {f.name: (f.first, f.calls) for f in found} == named and [f.name for f in found] == [*named]
    assert [f.caller for f in found] == [None, ("shop.py", 13), ("shop.py", 24), ("bank.py", 10), ("shop.py", 25)]
    assert {f.stage for f in found} == {ASK}
    ran = [{7, 13, 14, 18, 22, 23, 24, 25}, {9, 10, 11, 12}, {4, 5, 6}, {17, 18, 19}]
    assert [f.ran.intersection(f.lines) for f in (sell, keep, vault, each)] == ran
    [rich, *_] = record(lambda: shop.sell(7), house)
    assert rich.ran.intersection(rich.lines) == {7, 13, 14, 18, 19, 20, 21}

    lines, checks, files = 14 + 3 + 6 + 2 + 3, 5 + 3 + 2, (2 + 14) + (1 + 1 + 2 + 6 + 3 + 2) + (1 + 3)
    assert measure(found) == Numbers(5, 2, 3, lines, checks, files)

    folded = [(lines[0], lines[-1]) for checks, lines in pieces(sell) if checks]
    assert folded == [(13, 17)], "lines that check, and the comment between two of them"
    assert [lines[0] for checks, lines in pieces(sell) if not checks] == [7, 12, *range(18, 26)]
    assert [(lines[0], lines[-1]) for _, lines in pieces(check_coin)] == [(4, 7)]
    assert sell.docstring == "Sell.\n\nTwice."


def test_a_tracer_that_was_there_is_put_back():
    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(ZeroDivisionError):
            record(lambda: 1 / 0)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert not model("tiny-qwen2_5_vl").language_model._forward_pre_hooks


@pytest.mark.parametrize("file", ["pipeline.py", "merge.py", "positions/mrope.py", "encoders/tower.py", "checks.py"])
def test_code_lines_are_those_of_another_count(file):
    """Oracle: the count of `test_lines`."""
    source = Source(LIBRARY / file)
    assert len(source.code) == code_lines(LIBRARY / file)
    assert source.checks <= source.code
    assert (source.checks == source.code) is (file == "checks.py")


@each_journey
def test_functions_are_those_that_a_profiler_sees(name):
    """Oracle: `sys.setprofile`, on one more answer; the same functions, in the same order, as often."""
    asked, seen = SHIPPED[name], {}
    answer, root = model(asked.checkpoint).chat, f"{LIBRARY}/"
    found = journey(name)  # first: a model's first answer also enters what it computes once

    def profile(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            key = code.co_filename.removeprefix(root), code.co_qualname, code.co_firstlineno
            seen[key] = seen.get(key, 0) + 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        text = answer(asked.question, **asked.options)
    finally:
        sys.setprofile(before)
    assert list(seen.items()) == [((f.file, f.name, f.first), f.calls) for f in found.functions]
    assert found.trace.text == text


@each_journey
def test_stages_are_those_of_the_trace(name):
    """In its order, each once, after what runs before the first; each has a sentence."""
    found = journey(name)
    stages = [stage for stage, _ in found.stages]
    assert stages == [ASK, *found.trace.seconds]
    assert set(stages) <= set(SENTENCES)
    assert [f for _, functions in found.stages for f in functions] == found.functions
    assert [int(scores.argmax()) for scores in found.scores] == found.trace.token_ids
    assert found.functions[0].caller is None
    for number, function in enumerate(found.functions[1:], 1):
        caller = found.number_of(function.caller)
        assert caller < number and function.caller[1] in found.functions[caller].ran


def test_the_listing_holds_every_function_and_every_line_that_ran():
    found = journey("qwen2_5_vl")
    text = str(found).splitlines()
    for number, function in enumerate(found.functions, 1):
        [place] = [i for i, line in enumerate(text) if line.startswith(f"{number}. ")]
        assert text[place].startswith(f"{number}. {function.file}:{function.first} {function.name}")
    assert [line for line in text if line.startswith("== ")] == [
        f"== {stage} ==  {shapes}".rstrip() for stage, shapes in [(ASK, ""), *(r[:2] for r in found.trace.rows())]
    ]
    ran = [f.ran.intersection(lines) for f in found.functions for checks, lines in pieces(f) if not checks]
    assert sum(map(len, ran)) == sum(line[6:7] == "|" for line in text) > 300


HEADING = re.compile(r"<(h[123])\b[^>]*>(.*?)</h[123]>", re.S)
FIGURES = re.compile(r'<(?:img\b[^>]*\balt|svg\b[^>]*\baria-label)="([^"]*)"')


@each_journey
def test_a_page_holds_every_stage_and_every_function_in_order(name):
    found, text = journey(name), html(name)
    expected, number = [("h1", "One image, line by line")], 0
    for place, (stage, functions) in enumerate(found.stages, 1):
        expected.append(("h2", f"{place} {stage}"))
        for function in functions:
            number += 1
            expected.append(("h3", f"{number} {function.name}"))
    assert [(tag, unescape(re.sub(r"<[^>]*>", "", inner))) for tag, inner in HEADING.findall(text)] == expected
    ran = [line for f in found.functions for line in f.lines if line in f.ran and line not in f.source.docstrings]
    assert len(re.findall('class="l ran"', text)) == len(ran) + 1  # one stands in the legend
    code = [unescape(re.sub(r"<[^>]*>", "", line)) for line in coloured(LIBRARY / "pipeline.py")[1:]]
    assert code == (LIBRARY / "pipeline.py").read_text().splitlines()


@each_journey
def test_a_page_loads_nothing_and_says_what_it_shows(name):
    """Links lead to places on it, and pictures have words."""
    text = html(name)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert "default-src 'none'" in text and len(text.encode()) <= MAX_PAGE
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|<script[^>]* src", text)
    assert [address for address in re.findall(r'\bsrc="([^"]*)"', text) if not address.startswith("data:")] == []
    assert set(re.findall(r'<a\b[^>]*href="#([^"]*)"', text)) <= set(ids) and len(set(ids)) == len(ids)
    words = FIGURES.findall(text)
    assert len(words) > 6 and [alt for alt in words if len(alt.split()) < 3] == []


SHOWN = {
    "qwen2_5_vl": ["A grid of 6 x 6 patches", "window_index: the index", "cosines of the angles", "Positions of"],
    "minicpmv": ["Slice 1 of 5, 4 x 4 patches"],
    "step3": ["patches in the order of their rows, 16 per line", "Heat map of embeddings of item 1"],
    "clip_pruned": ["Tokens of video 1 kept per step", "6 of the 6 sampled frames"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_each_family_has_its_pictures(name):
    """What is drawn is found by the kind of each tensor; a field that goes takes its picture along."""
    words = " | ".join(map(unescape, FIGURES.findall(html(name))))
    assert [phrase for phrase in SHOWN[name] if phrase not in words] == []


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prefill_chunk": 8}], ids=str)
def test_a_page_has_an_answer_to_every_shape_of_request(options):
    """Text alone, beams, chunks, several pictures: what there is nothing of is left out."""
    images = [DATA / "pictures/coffee.jpg"] * 3 if options else []
    found = follow(model("tiny-qwen2_5_vl"), "What is it <b>?", images=images, max_new_tokens=2, **options)
    text = page(found, index="index.html", links={"here": "", "there": "x.html"}, files="files/{}.html")
    stages = [re.sub(r"<[^>]*>", "", inner) for tag, inner in HEADING.findall(text) if tag == "h2"]
    assert stages == [f"{place} {stage}" for place, (stage, _) in enumerate(found.stages, 1)]
    assert {"index.html", "x.html", "files/pipeline.py.html"} <= set(re.findall(r'<a\b[^>]*href="([^"]*)"', text))
    assert "What is it &lt;b&gt;?" in text


if __name__ == "__main__":
    torch.set_num_threads(1)
    for shipped in SHIPPED:
        if shipped != "clip_pruned":
            print(f'    "{shipped}": Numbers{tuple(journey(shipped).numbers)},')
