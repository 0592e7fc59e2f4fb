"""Every canvas of every explorer under a mouse, a finger and keys, at three widths and in both themes.

Oracles: no error reaches the page; the sizes that a phone shows; the contrast of WCAG 2 between a text and what was
painted where it is written.
"""

import itertools
from pathlib import Path

import pytest
from explorers_in import CONTRAST, made, shown, unfold

from refvl.viz.explorers import page as page_of
from refvl.viz.explorers.gallery import GALLERY
from refvl.viz.style import THEMES

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
WITH_AXES = {"windows", "positions", "mrope", "evs"}  # explorers that draw t, h or w
SMALLEST, LEAST_CONTRAST, TARGET = 11, 4.5, 44  # CSS pixels, WCAG AA, CSS pixels
WATCH = (Path(__file__).parent / "written.js").read_text()


@pytest.fixture(scope="module", params=GALLERY)
def file(request, tmp_path_factory):
    """(the explorer's name, its page)"""
    path = tmp_path_factory.mktemp("hands") / f"{request.param}.html"
    path.write_text(page_of(made(request.param)))
    return request.param, path


@pytest.fixture
def opened(chromium, file):
    """Opens the page with a device's settings; after the test, no page may have complained."""
    contexts, heard = [], []

    def open_page(*scripts, **device):
        context = chromium.new_context(offline=True, **device)
        contexts.append(context)
        page = context.new_page()
        for script in scripts:
            page.add_init_script(script)
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto(file[1].as_uri())
        page.wait_for_selector(".refvl[data-index]", timeout=60_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard == []


def boxes(page) -> list[tuple[int, dict]]:
    """(number, its place on the screen) of every canvas, scrolled to one after the other."""
    canvases = page.locator(".refvl canvas")
    for number in range(canvases.count()):
        canvases.nth(number).scroll_into_view_if_needed()
        box = canvases.nth(number).bounding_box()
        if box["height"] > 4:
            yield number, box


def test_a_mouse_and_keys_everywhere(opened):
    """Pointed at, clicked, dragged across, and every key on what takes keys."""
    page = opened(viewport={"width": 1400, "height": 900})
    root = page.locator(".refvl")
    for number, box in boxes(page):
        left, top, width, height = box["x"], box["y"], box["width"], box["height"]
        for x, y in ((0.02, 0.02), (0.5, 0.5), (0.97, 0.97)):
            page.mouse.click(left + x * width, top + y * height)
        page.mouse.down()
        for x, y in ((0.8, 0.6), (0.4, 0.3), (-0.1, 0.1), (0.1, 1.2), (0.3, 0.7)):
            page.mouse.move(left + x * width, top + y * height)
        page.mouse.up()
        shown(root)
        canvas = root.locator("canvas").nth(number)
        if canvas.get_attribute("tabindex") == "0":
            canvas.focus()
            for key in ("ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown", "Escape", "ArrowLeft", "a", "Enter"):
                canvas.press(key)
        shown(root)


def test_a_finger_everywhere(opened):
    """Tapped and pulled; one that scrolls over a canvas moves the page, and neither a control nor a choice."""
    page = opened(**PHONE)
    root, touch = page.locator(".refvl"), page.context.new_cdp_session(page)

    def drag(*points):
        for kind, point in zip(["touchStart"] + ["touchMove"] * (len(points) - 1), points, strict=True):
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": point[0], "y": point[1]}]})
        touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        shown(root)

    state = "() => [document.querySelector('.refvl').dataset.index, document.querySelector('.readout').value]"
    for _, box in boxes(page):
        x, y = box["x"] + 0.2 * box["width"], box["y"] + 0.5 * box["height"]
        before = page.evaluate(state)
        drag(*((x + k / 10, y - 12 * k) for k in range(12)))
        assert page.evaluate(state) == before
    for _, box in boxes(page):
        x, y = box["x"] + 0.7 * box["width"], box["y"] + 0.5 * box["height"]
        page.touchscreen.tap(x, y)
        drag(*((x - 14 * k, y + k) for k in range(10)))


@pytest.mark.parametrize("width", [390, 768, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_word_can_be_read(opened, file, width, theme):
    """In the state shown and with an item chosen: the contrast of each word, and on canvases its size on the screen and
    that it is not cut off. The page is no wider than the screen; t, h and w alone have their colours."""
    device = PHONE if width == 390 else {"viewport": {"width": width, "height": 900}}
    page = opened(WATCH, **device, color_scheme=theme)
    root = page.locator(".refvl")
    unfold(root)
    for canvas in page.locator("canvas[role=application]").all():
        canvas.press("ArrowRight")
    shown(root)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    texts = page.evaluate("window.texts")
    assert [(t["text"], t["size"]) for t in texts if t["size"] < SMALLEST - 0.05] == []
    assert [(t["text"], round(t["contrast"], 2)) for t in texts if t["contrast"] < LEAST_CONTRAST] == []
    assert [t["text"] for t in texts if not t["inside"]] == []
    assert page.evaluate(CONTRAST) == []
    inks = set(page.evaluate("[...window.inks].map(String)"))
    axes = {THEMES[theme][name] for name in ("t", "h", "w", "w_text")}
    assert bool(inks & axes) == (file[0] in WITH_AXES) and inks


def test_a_finger_hits_every_control(opened):
    page = opened(**PHONE)
    unfold(page.locator(".refvl"))
    controls = ".refvl input:enabled, .refvl select:enabled, .refvl button, .refvl details:not([hidden]) > summary"
    sizes = page.evaluate(
        """controls => [...document.querySelectorAll(controls)]
        .map(e => e.getBoundingClientRect()).map(box => [box.width, box.height])""",
        controls,
    )
    assert sizes and min(min(size) for size in sizes) >= TARGET


@pytest.mark.parametrize("file", ["slices"], indirect=True)
def test_a_slice_is_found_again_in_the_prompt(opened):
    """Pointed at in the photo, it is framed there and in the strip of the prompt, and its tokens are said."""
    page = opened(viewport={"width": 1400, "height": 900})
    canvases, root = page.locator(".refvl canvas"), page.locator(".refvl")
    strip = "root => root.querySelectorAll('canvas')[4].toDataURL()"
    before = root.evaluate(strip)
    for number, said in ((0, "slice 1 of MiniCPM-V"), (1, "the overview of MiniCPM-V"), (2, "crop 1 of Step3-VL")):
        canvases.nth(number).hover(position={"x": 8, "y": 8})
        shown(root)
        assert root.locator(".readout").inner_text().lower().startswith(said.lower())
        assert root.evaluate(strip) != before
    canvases.nth(4).hover(position={"x": 94, "y": 14})
    shown(root)
    assert root.locator(".readout").inner_text().startswith("The overview of MiniCPM-V")


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
@pytest.mark.parametrize("file", ["mrope", "packing", "costs"], indirect=True)
def test_states_move_unless_the_reader_wants_no_motion(opened, motion):
    """After a step, canvases change for a quarter of a second more; with reduced motion they are there at once."""
    page = opened(viewport={"width": 1400, "height": 900}, reduced_motion=motion)
    root = page.locator(".refvl")
    seen = root.evaluate(
        """async root => {
            const frame = () => new Promise(requestAnimationFrame), slider = root.querySelector("input[type=range]");
            const pixels = () => [...root.querySelectorAll("canvas")].map(c => c.toDataURL()).join();
            const before = root.dataset.index;
            slider.value = +slider.value - 1; slider.dispatchEvent(new Event("input", { bubbles: true }));
            while (root.dataset.index === before) await frame();
            const first = pixels(); await new Promise(done => setTimeout(done, 1000)); await frame();
            return [first, pixels()]; }"""
    )
    assert (seen[0] == seen[1]) == (motion == "reduce")


BARS = """const { fillRect } = CanvasRenderingContext2D.prototype;
window.bars = [];
CanvasRenderingContext2D.prototype.fillRect = function (x, y, w, h) {
  const style = this.canvas.closest?.('.refvl')?.style;
  if (style && this.fillStyle === style.getPropertyValue('--highlight') && h !== 5 && w < 20) window.bars.push(h);
  return fillRect.call(this, x, y, w, h);
};"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("file", ["graph"], indirect=True)
def test_the_most_wrong_stands_out_most(opened, theme):
    """The orange bar of an operation is as tall as its error, and absent without one; its contrast is at least 3."""
    page = opened(WATCH, BARS, viewport={"width": 1400, "height": 900}, color_scheme=theme, reduced_motion="reduce")
    page.evaluate("window.bars.length = 0")
    page.locator("canvas[role=application]").first.press("ArrowRight")
    shown(page.locator(".refvl"))
    errors = page.evaluate("document.querySelector('.refvl').read().operations")
    heights = page.evaluate("window.bars")[: len(errors)]
    by_error = [height for error, height in sorted(zip(errors, heights, strict=True)) if error]
    assert len(by_error) > 20 and by_error[0] >= 4 and by_error[-1] > 3 * by_error[0]
    assert all(more >= less for less, more in itertools.pairwise(by_error))
    assert {height for error, height in zip(errors, heights, strict=True) if not error} == {0}
    assert page.evaluate(f"contrast('{THEMES[theme]['highlight']}', '{THEMES[theme]['empty']}')") >= 3


@pytest.mark.parametrize("file", ["positions"], indirect=True)
def test_the_prompt_is_read_token_by_token(opened):
    """The button goes on from the chosen token, stops when pressed again, and at the last token starts over."""
    page = opened(viewport={"width": 1400, "height": 900})
    button, said = page.locator(".refvl button").first, page.locator(".readout")
    token = lambda: int(said.inner_text().split()[1].strip(":"))  # noqa: E731

    def leaves(number: int) -> None:
        for _ in range(100):
            if token() != number:
                return
            page.wait_for_timeout(50)

    first = token()
    button.click()
    leaves(first)
    button.click()
    shown(page.locator(".refvl"))
    assert token() > first
    page.locator("canvas[role=application]").first.press("ArrowLeft")
    last = len(made("positions").row(made("positions").index)["kinds"]) - 1
    while token() < last:
        page.locator("canvas[role=application]").first.press("ArrowRight")
        shown(page.locator(".refvl"))
    button.click()
    leaves(last)
    assert token() < last
