"""The live page, offline in Chromium. Oracle: refvl's answers to the same scenes, and what the page declares."""

import io
import os

import numpy as np
import pytest
from explorers_in import CONTRAST, OUT, open_offline
from PIL import Image
from shipped import shipped

from data.training import scenes
from refvl.viz.live import page as live_page

pytestmark = pytest.mark.browser
THINGS = [("circle", "red", 2), ("square", "blue", 3), ("star", "yellow", 7)]
WHERE = "Where is the circle?"
LIMIT = 3_000_000
WIDTHS = {390: 844, 768: 1024, 1400: 900}
ODD = ["", "#s=circle.constructor.2", "#b=constructor", "#b=__proto__&v=constructor", "#k=photo&f=constructor"]
ODD += ["#k=photo&f=__proto__", "#s=circle.red.9_x", "#a=99&w=99&j=99", "#q=%3Cb%3Ex%3C/b%3E", "#s=", "#k=clip&s="]
ODD += ["#s=circle.red.2.99.1", "#v=word&b=lines&s=star.blue.0", "#k=clip&s=circle.red.0_square.blue.1_star.green.3"]


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
    page.evaluate("refvl.go(''), refvl.break([])")
    page.evaluate("things => refvl.scene(things)", scene_of(things))
    return page.evaluate("question => refvl.ask(question)", question)


def settle(page) -> None:
    page.evaluate("refvl.settled()")
    page.wait_for_timeout(300)


def both(page) -> list[str]:
    settle(page)
    return page.evaluate("[refvl.state.A, refvl.state.B].map(refvl.state.said)")


def center(page, place: int) -> tuple[float, float]:
    box = page.locator(".side canvas").first.bounding_box()
    return tuple(box[a] + box["width"] * (i + 0.5) / 3 for a, i in (("x", place % 3), ("y", place // 3)))


def test_it_answers_as_refvl_does(opened):
    """Ten random scenes as the page painted them, and questions of every kind."""
    checkpoint, page, _, _, _ = opened
    rng = np.random.default_rng(7)
    model = shipped(checkpoint)
    for _ in range(10):
        count = int(rng.integers(1, 5))
        shapes = rng.permutation(scenes.SHAPES)[:count]
        colors = rng.permutation(list(scenes.COLORS))[:count]
        things = [(str(s), str(c), int(p)) for s, c, p in zip(shapes, colors, rng.permutation(9)[:count], strict=True)]
        shape, color, _ = things[0]
        for question in (f"Where is the {shape}?", f"What shape is the {color} object?", "Tell me a joke"):
            found = show(page, things, question)
            pixels = page.evaluate("Array.from(refvl.pixels()[0])")
            image = Image.fromarray(np.array(pixels, np.uint8).reshape(84, 84, 3))
            assert found["text"] == model.chat(question, images=[image]).strip()
            assert found["margin"] > 0


def test_a_clip_and_photographs(opened):
    """What is transparent in a photo is white, as in refvl.

    A file that is none is refused, until the next one.
    """
    checkpoint, page, _, _, _ = opened
    if checkpoint == "tiny-qwen2_5_vl":
        page.evaluate("things => refvl.clip(things, 'left')", scene_of([("circle", "green", 5), ("cross", "black", 0)]))
        assert page.evaluate("refvl.ask('Which way does the circle move?')")["text"] == "left"
        page.evaluate("refvl.broken('evs', 'Which way does the circle move?')")
        assert page.evaluate("refvl.state.B.keep.length") == page.evaluate("refvl.state.ids.length") - 18
    page.evaluate("refvl.photo('coffee')")
    assert "coffee" in page.evaluate("refvl.ask('What is in the picture?')")["text"]
    clear = Image.new("RGBA", (60, 40))
    file = io.BytesIO()
    clear.paste((255, 0, 0, 255), (20, 10, 40, 30))
    clear.save(file, "png")
    page.locator("#make").click()
    for name, content, why in (("a.txt", b"text", "cannot"), ("a.png", file.getvalue(), "")):
        page.locator("#own").set_input_files({"name": name, "mimeType": "image/png", "buffer": content})
        page.wait_for_timeout(500)
        assert why in page.locator("#why").text_content() and bool(why) == bool(page.locator("#why").text_content())
    page.locator("#edit .close").first.click()
    assert page.evaluate("[...refvl.pixels()[0].slice(0, 3)]") == [255, 255, 255]
    page.locator("#share").click()
    assert "not in the link" in page.locator("#unshared").text_content()
    page.keyboard.press("Escape")
    show(page, THINGS, WHERE)


def test_everything_that_can_be_exchanged_bites_where_the_page_puts_it(opened):
    """And its link says the same to somebody else.

    Where an answer stays, there is a reason, and only there.
    """
    _, page, _, _, address = opened
    other = page.context.new_page()
    for name in page.evaluate("refvl.breaks"):
        page.evaluate("name => refvl.choose(name)", name)
        intact, broken = both(page)
        shared = page.evaluate("refvl.share()")
        assert intact != broken and broken in shared["alt"]
        other.goto("about:blank")
        other.goto(address + "#" + shared["url"].split("#")[1])
        assert both(other) == [intact, broken], name
        if name == "back":
            page.evaluate("refvl.go('attention')")
            assert "told the wrong time" in page.locator("#line").text_content()
            page.evaluate("refvl.go('')")
    other.close()
    for question, place in ((WHERE, 2), (WHERE, 4), ("Where is the cross?", 2)):
        show(page, [("circle", "red", place)], WHERE)
        found = page.evaluate("q => refvl.broken('swap', q)", question)
        assert (found["reason"] is None) == (found["text"] != found["intact"]) == (question == WHERE and place == 2)
    show(page, THINGS, WHERE)


def test_odd_addresses_and_inputs_are_said(opened):
    _, page, _, _, address = opened
    other = page.context.new_page()
    for odd in ODD:
        other.goto("about:blank")
        other.goto(address + odd)
        assert both(other)[0] and not other.evaluate("document.querySelectorAll('#words b:not([class])').length"), odd
        if odd == "#s=":
            assert "empty scene" in other.locator("#line").text_content()
        if odd.startswith("#k=clip&s=circle") and other.evaluate("refvl.state.kind") == "clip":
            assert "boxed in" in other.locator("#line").text_content()
    other.goto("about:blank")
    other.goto(address + "#on=0&q=" + "Ask" * 40)
    settle(other)
    assert "cut after 24 tokens" in other.locator(".said").first.text_content()
    other.close()


def test_keys_reach_everything(opened):
    """Space is the tour, Escape and Back close a box, and each shape can be moved, asked about and removed."""
    _, page, _, _, _ = opened
    show(page, THINGS, WHERE)
    page.evaluate("document.activeElement.blur()")
    stages = page.evaluate("refvl.state.stages")
    for stage in stages[:3]:
        page.keyboard.press("Space")
        assert page.evaluate("refvl.state.stage") == stage
    page.keyboard.press("Shift+Space")
    assert f"v={stages[1]}" in page.evaluate("refvl.share().url")
    page.keyboard.press("Escape")
    page.wait_for_function("() => refvl.state.stage === ''")
    page.evaluate("refvl.go('word')")
    page.go_back()
    page.wait_for_function("() => refvl.state.stage === ''")
    shapes = page.locator(".things button")
    assert shapes.count() == 3
    shapes.nth(0).focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("refvl.answer()")["text"] == "middle right"
    page.keyboard.press("Delete")
    assert shapes.count() == 2
    page.locator("#map button").nth(4).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("refvl.state.stage") == stages[5]


@pytest.mark.parametrize("touch", [False, True])
def test_a_shape_is_dragged(opened, touch):
    """While an answer is computed, the one before it is dimmed. A finger drags a token."""
    _, page, _, _, _ = opened
    show(page, THINGS, WHERE)
    page.evaluate("refvl.break('swap')")
    page.evaluate("stage => refvl.go(stage)", "tokens" if touch else "")
    settle(page)
    start, end = center(page, 2), center(page, 5)
    steps = [tuple(a + (b - a) * k / 6 for a, b in zip(start, end, strict=True)) for k in range(7)]
    if touch:
        session = page.context.new_cdp_session(page)
        for k, (x, y) in enumerate(steps):
            kind = "touchMove" if k else "touchStart"
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
        session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    else:
        page.mouse.move(*start)
        page.mouse.down()
        for step in steps:
            page.mouse.move(*step)
        assert page.evaluate("refvl.scene(refvl.state.things), document.body.className.includes('busy')")
        page.mouse.up()
    assert both(page) == ["middle right", "bottom center"]


@pytest.mark.parametrize("kind", ["picture", "clip", "photo"])
def test_every_box_takes_any_pointer(opened, kind):
    """Both panels are pressed and dragged all over.

    The last test says whether anything complained.
    """
    checkpoint, page, _, _, _ = opened
    if kind == "clip" and checkpoint != "tiny-qwen2_5_vl":
        return
    show(page, THINGS, WHERE)
    if kind == "clip":
        page.evaluate("things => refvl.clip(things, 'left')", scene_of(THINGS))
    if kind == "photo":
        page.evaluate("refvl.photo('rocket')")
    page.evaluate("refvl.break('swap')")
    for stage in ["", *page.evaluate("refvl.state.stages")]:
        page.evaluate("stage => refvl.go(stage)", stage)
        settle(page)
        for canvas in (0, 1):
            box = page.locator(".side canvas").nth(canvas).bounding_box()
            for x, y in [(i / 4, j / 4) for i in range(1, 4) for j in range(1, 4)]:
                page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
                page.mouse.down()
                page.mouse.move(box["x"] + y * box["width"], box["y"] + x * box["height"])
                page.mouse.up()
        for head in page.locator(".heads button:visible").all()[:3]:
            head.click()
        if stage:
            page.locator("#numbers").dispatch_event("click")
            assert page.locator("#rows dd").count() > 1
            page.keyboard.press("Escape")
    assert show(page, THINGS, WHERE)["text"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_box_fits_and_can_be_read(opened, width, theme):
    """No sideways scroll, text of at least 11 px and 4.5:1, one screen at 1400 x 900.

    Screenshots are kept.
    """
    checkpoint, page, _, _, _ = opened
    page.set_viewport_size({"width": width, "height": WIDTHS[width]})
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    show(page, THINGS, WHERE)
    page.evaluate("refvl.break('swap')")
    for stage in ["", *page.evaluate("refvl.state.stages")]:
        page.evaluate("stage => refvl.go(stage)", stage)
        settle(page)
        size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        assert size[0] <= width and (width < 1400 or size[1] <= WIDTHS[width]), stage
        assert page.evaluate(CONTRAST) == []
        sizes = "[...document.querySelectorAll('body *')].filter(e => e.offsetParent && e.textContent.trim())"
        assert page.evaluate(f"Math.min(...{sizes}.map(e => parseFloat(getComputedStyle(e).fontSize)))") >= 11
        page.screenshot(path=OUT / f"{checkpoint}_{width}_{theme}_{stage or 'open'}.png")
    page.emulate_media(reduced_motion="no-preference", color_scheme="light")
    page.set_viewport_size({"width": 1400, "height": 900})


def test_without_scripts_there_is_a_figure(opened, chromium):
    page = chromium.new_context(java_script_enabled=False).new_page()
    page.goto(opened[-1])
    assert page.locator("noscript img").evaluate("i => [i.naturalWidth > 600, i.alt.length > 40]") == [True, True]
    page.context.close()


def test_a_still_for_the_index_and_the_notebook(opened):
    """RECORD=1 keeps it in data/figures, with the moving picture of the README: flipped, dragged,
    looked into.
    """
    checkpoint, page, _, _, _ = opened
    if checkpoint != "tiny-qwen2_5_vl":
        return
    frames: list[Image.Image] = []

    def shoot(count: int = 1) -> None:
        for _ in range(count):
            page.wait_for_timeout(60)
            frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize((744, 504)))

    page.set_viewport_size({"width": 1240, "height": 840})
    show(page, THINGS, WHERE)
    shoot()
    page.locator("#switch").click()
    both(page)
    shoot(3)
    page.mouse.move(1, 1)
    page.screenshot(path=OUT / "live.png")
    for stage, place in (("", 5), ("", 8), ("", 5), ("positions", 5), ("attention", 5), ("attention", 1), ("", 2)):
        page.evaluate("stage => refvl.go(stage)", stage)
        page.evaluate("place => { refvl.state.things[0].place = place; refvl.ask(refvl.state.q); }", place)
        both(page)
        shoot(4)
    if os.environ.get("RECORD") == "1":
        picture = Image.open(OUT / "live.png").convert("RGB")
        picture.quantize(160, dither=Image.Dither.NONE).save(live_page.STILL, optimize=True)
        times = [1200] + [120, 120, 1500] + 7 * [120, 120, 120, 1100]
        moving = live_page.STILL.with_suffix(".webp")
        frames[0].save(moving, save_all=True, append_images=frames[1:], duration=times, loop=0, quality=70, method=6)
    page.set_viewport_size({"width": 1400, "height": 900})


def test_nothing_was_asked_for_and_nothing_complained(opened):
    """Last, after all that was done with the page."""
    _, _, heard, asked, address = opened
    assert {url.split("#")[0] for url in asked if not url.startswith(("data:", "blob:", "about:"))} == {address}
    assert heard == []
