"""The live page, offline in Chromium. Oracle: refvl's answers to the same scenes, and what the page declares."""

import os

import numpy as np
import pytest
from explorers_in import CONTRAST, OUT, open_offline
from PIL import Image
from shipped import shipped

from data.training import scenes
from refvl.viz.live import page as live_page
from refvl.viz.live.widget import STILL

pytestmark = pytest.mark.browser
THINGS = [("circle", "red", 2), ("square", "blue", 3), ("star", "yellow", 7)]
LIMIT = 3_000_000
WIDTHS = {390: 844, 768: 1024, 1400: 900}


@pytest.fixture(scope="module", params=live_page.LIVE)
def opened(request, chromium, tmp_path_factory):
    """(checkpoint, the page in an offline browser, what was said and asked for, its address)."""
    file = tmp_path_factory.mktemp("live") / "live.html"
    file.write_text(live_page.page(request.param), encoding="utf-8")
    assert file.stat().st_size < LIMIT
    page, heard, asked = open_offline(chromium, file)
    page.evaluate("refvl.ask('Where is the circle?')")
    yield request.param, page, heard, asked, file.as_uri()
    page.context.close()


def scene_of(things: list[tuple[str, str, int]]) -> list[dict]:
    return [{"shape": shape, "color": color, "place": place} for shape, color, place in things]


def show(page, things: list[tuple[str, str, int]], question: str) -> dict:
    page.evaluate("refvl.break([])")
    page.evaluate("things => refvl.scene(things)", scene_of(things))
    return page.evaluate("question => refvl.ask(question)", question)


def settle(page) -> None:
    page.evaluate("() => new Promise(done => setTimeout(done, 300))")


def test_it_answers_as_refvl_does(opened):
    """Ten random scenes as the page painted them, and questions of every kind."""
    checkpoint, page, _, _, _ = opened
    rng, model = np.random.default_rng(7), shipped(checkpoint)
    for _ in range(10):
        count = int(rng.integers(1, 5))
        shapes, colors = rng.permutation(scenes.SHAPES)[:count], rng.permutation(list(scenes.COLORS))[:count]
        things = [(str(s), str(c), int(p)) for s, c, p in zip(shapes, colors, rng.permutation(9)[:count], strict=True)]
        shape, color, _ = things[0]
        for question in (f"Where is the {shape}?", f"What shape is the {color} object?", "Tell me a joke"):
            found = show(page, things, question)
            pixels = page.evaluate("Array.from(refvl.pixels()[0])")
            image = Image.fromarray(np.array(pixels, np.uint8).reshape(84, 84, 3))
            assert found["text"] == model.chat(question, images=[image]).strip()
            assert found["margin"] > 0


def test_a_clip_and_a_photograph(opened):
    checkpoint, page, _, _, _ = opened
    if checkpoint == "tiny-qwen2_5_vl":
        page.evaluate("things => refvl.clip(things, 'left')", scene_of([("circle", "green", 5), ("cross", "black", 0)]))
        assert page.evaluate("refvl.ask('Which way does the circle move?')")["text"] == "left"
        page.locator("#evs").dispatch_event("click")
        assert page.evaluate("refvl.ask('Which way does the circle move?')")["text"] == "left"
        assert page.evaluate("refvl.state.drop.size") == 14
    page.evaluate("refvl.photo('coffee')")
    assert "coffee" in page.evaluate("refvl.ask('What is in the picture?')")["text"]
    show(page, THINGS, "Where is the circle?")


def test_what_is_broken_changes_the_answer_and_can_be_fixed(opened):
    _, page, _, _, _ = opened
    assert show(page, THINGS, "Where is the circle?")["text"] == "top right"
    page.locator("[data-name=swap]").dispatch_event("click")
    assert page.evaluate("refvl.ask('Where is the circle?')")["text"] == "bottom left"
    page.locator("#mend").click()
    assert page.evaluate("refvl.ask('Where is the circle?')")["text"] == "top right"


def test_space_goes_on_and_back_and_the_address_keeps_the_place(opened):
    _, page, _, _, address = opened
    page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    for key, name in (("Space", "Patches"), ("Space", "List"), ("Shift+Space", "Patches")):
        page.keyboard.press(key)
        page.locator("#rail [aria-current]", has_text=name).wait_for(timeout=20_000)
        page.evaluate("() => new Promise(done => setTimeout(done, 2000))")
    assert "c=1" in page.evaluate("location.hash")
    again = page.context.new_page()
    again.goto(address + "#c=7&s=star.green.6&q=Where+is+the+star%3F&b=swap")
    assert again.evaluate("refvl.answer().then(() => [refvl.state.said, refvl.state.isBroken()])") == [
        "top right",
        True,
    ]
    again.close()


@pytest.mark.parametrize("kind", ["picture", "clip", "photo"])
def test_every_chapter_takes_any_pointer_and_key(opened, kind):
    """The stage is pressed, dragged and keyed all over; the last test says whether anything complained."""
    checkpoint, page, _, _, _ = opened
    if kind == "clip" and checkpoint != "tiny-qwen2_5_vl":
        return
    page.emulate_media(reduced_motion="reduce")
    show(page, THINGS, "Where is the circle?")
    if kind == "clip":
        page.evaluate("things => refvl.clip(things, 'left')", scene_of(THINGS))
    if kind == "photo":
        page.evaluate("refvl.photo('rocket')")
    for chapter in range(10):
        page.evaluate("c => refvl.go(c)", chapter)
        settle(page)
        box = page.locator("#stage").bounding_box()
        for x, y in [(i / 6, j / 6) for i in range(1, 6) for j in range(1, 6)]:
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
            page.mouse.down()
            page.mouse.move(box["x"] + y * box["width"], box["y"] + x * box["height"])
            page.mouse.up()
        page.locator("#stage").focus()
        for key in ("ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown", "Enter", "Delete"):
            page.keyboard.press(key)
    page.emulate_media(reduced_motion="no-preference")
    assert show(page, THINGS, "Where is the circle?")["text"]


def test_a_shape_is_dragged(opened):
    _, page, _, _, _ = opened
    show(page, THINGS, "Where is the circle?")
    page.evaluate("scrollTo(0, 0)")
    settle(page)
    box = page.locator("#pad").bounding_box()
    third = box["width"] / 6
    page.mouse.move(box["x"] + 5 * third, box["y"] + third)
    page.mouse.down()
    page.mouse.move(box["x"] + 3 * third, box["y"] + 3 * third, steps=4)
    page.mouse.up()
    settle(page)
    assert page.evaluate("refvl.ask('Where is the circle?')")["text"] == "center"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_chapter_fits_and_can_be_read(opened, width, theme):
    """No sideways scroll, text of at least 11 px and 4.5:1; screenshots of all ten chapters are kept."""
    checkpoint, page, _, _, _ = opened
    page.set_viewport_size({"width": width, "height": WIDTHS[width]})
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    show(page, THINGS, "Where is the circle?")
    page.evaluate("document.querySelectorAll('details.numbers').forEach(d => { d.open = true })")
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    smallest = "[...document.querySelectorAll('#story *, #bar *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    assert page.evaluate(f"Math.min(...{smallest})") >= 11
    page.evaluate("document.querySelectorAll('details.numbers').forEach(d => { d.open = false })")
    for chapter in range(10):
        page.evaluate("c => refvl.go(c)", chapter)
        settle(page)
        page.screenshot(path=OUT / f"{checkpoint}_{width}_{theme}_{chapter}.png")
    page.emulate_media(reduced_motion="no-preference", color_scheme="light")
    page.set_viewport_size({"width": 1400, "height": 900})
    page.evaluate("scrollTo(0, 0)")


def test_a_still_for_the_index_and_the_notebook(opened):
    """RECORD=1 keeps it in data/figures."""
    checkpoint, page, _, _, _ = opened
    if checkpoint != "tiny-qwen2_5_vl":
        return
    page.set_viewport_size({"width": 1180, "height": 860})
    show(page, THINGS, "Where is the circle?")
    page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    settle(page)
    page.screenshot(path=OUT / "live.png")
    if os.environ.get("RECORD") == "1":
        picture = Image.open(OUT / "live.png").convert("RGB")
        picture.quantize(160, dither=Image.Dither.NONE).save(STILL, optimize=True)
    page.set_viewport_size({"width": 1400, "height": 900})


def test_nothing_was_asked_for_and_nothing_complained(opened):
    """Last, after all that was done with the page."""
    _, _, heard, asked, address = opened
    assert {url.split("#")[0] for url in asked if not url.startswith(("data:", "blob:"))} == {address}
    assert heard == []
