"""The tiny Step3: its pages and its checkpoint.

Oracles: pixels for what pages say of themselves, and the measurement for what crops are worth.
`test_training.py` holds its training against the public path.
"""

import numpy as np
import pytest

import refvl
from data.training import demo_scenes, pages
from data.training.evaluate_step3 import evaluate, set_crops
from data.training.tiny_family import STEP3
from refvl.pixels.media import load_image

SAMPLE = 24


@pytest.fixture(scope="module")
def vlm():
    return refvl.load(STEP3.folder, device="cpu", progress=False)


def drawn(count: int, split: str = "select", **how) -> list[pages.Page]:
    return [pages.draw_page(split, i, **how) for i in range(count)]


def test_pages_are_a_function_of_split_and_number():
    """No held-out page can be drawn in training; and no two letters differ in their brightness
    alone."""
    found = {(split, pages.draw_page(split, index)) for split in pages.SPLITS for index in range(100)}
    assert len({page for _, page in found}) == len(found) == 100 * len(pages.SPLITS)
    assert pages.draw_page("test", 3) == pages.draw_page("test", 3)
    drawings = {"".join(rows) for rows in pages.LETTERS.values()}
    assert {drawing.count("#") for drawing in drawings} == {9} and len(drawings) == len(pages.LETTERS)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_box_stands_inside_one_patch_in_its_colour(crowded):
    """Oracle: the pixels. Around a box, its patch is background."""
    for page in drawn(20, crowded=crowded):
        pixels, background = pages.render(page).astype(float), np.array(page.background)
        for box in page.boxes:
            x, y = box.corner
            square = pixels[y : y + 9, x : x + 9]
            ink = square.min(-1) >= 250
            filled = np.abs(square - np.array(box.rgb)).max(-1) <= 1
            assert (ink ^ filled).all() and filled.sum() == 72
            letter = ["".join(".#"[p] for p in row) for row in ink[2:7, 2:7].astype(int)]
            assert letter == list(pages.LETTERS[box.letter])
            patch = pixels[y // 14 * 14 :, x // 14 * 14 :][:14, :14]
            assert (np.abs(patch - background).max(-1) > 60).sum() == 72
            nearest = min(pages.COLORS, key=lambda c: np.abs(np.array(pages.COLORS[c]) - box.rgb).sum())
            assert nearest == box.color


def test_labels_and_answers_agree_with_the_boxes():
    names, colors = list(pages.LETTERS), list(pages.COLORS)
    for page in drawn(30):
        crops, quarters = pages.crop_labels(page), pages.quarter_labels(page)
        assert (crops[:, 0] > 0).sum() == (quarters[:, 0] > 0).sum() == len(page.boxes)
        questions = pages.all_questions(page)
        for box in page.boxes:
            x, y = box.corner
            expected = [1 + names.index(box.letter), 1 + colors.index(box.color)]
            assert crops[y // 56 * 4 + x // 56].tolist() == expected
            assert quarters[y // 112 * 2 + x // 112].tolist() == expected
            place = ("top", "bottom")[y // 112] + " " + ("left", "right")[x // 112]
            asked = f"Which letter is in the {box.color} box?"
            assert pages.Question("letter", asked, box.letter) in questions["letter"]
            assert pages.Question("place", f"Where is the {box.color} box?", place) in questions["place"]


@pytest.mark.parametrize("kind", pages.PHRASES)
def test_crops_tell_the_letter_and_the_overview_does_not(vlm, kind):
    """A sample of what is measured, on other pages."""
    shares = {}
    for crops in (True, False):
        set_crops(vlm, crops)
        right = evaluate(vlm, kind, SAMPLE, split="select")
        shares[crops] = sum(right) / len(right)
    assert shares[True] >= 0.9
    assert shares[False] <= 0.4 if kind == "letter" else shares[False] >= 0.85


def test_the_demo_page_is_read(vlm):
    """All of its questions, from the file; with graphs, and in one batch."""
    page = demo_scenes.demo_page()
    assert np.array_equal(np.asarray(load_image(demo_scenes.PAGE)), pages.render(page))
    graphed = refvl.load(STEP3.folder, device="cpu", progress=False, graphs={"max_budget": 64})
    asked = [question for questions in pages.all_questions(page).values() for question in questions]
    requests = [{"prompt": question.text, "images": [demo_scenes.PAGE]} for question in asked]
    assert graphed.chat_batch(requests, max_new_tokens=16) == [question.answer for question in asked]
    assert graphed.graphs.path_stats()["local"].hits
    assert graphed.graphs.path_stats()["global"].hits
