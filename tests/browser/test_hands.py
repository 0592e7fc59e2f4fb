"""Every canvas of every explorer under a mouse, a finger and keys, at three widths and in both themes.

Oracles: no error reaches the page; the sizes that a phone shows; the contrast of WCAG 2 between a
text and what was painted where it is written.
"""

import pytest
from explorers_in import CONTRAST, SWEEP, WATCH, made, shown, unfold

from refvl.viz.explorers import page as page_of
from refvl.viz.explorers.gallery import GALLERY
from refvl.viz.style import THEMES

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
WITH_AXES = {"windows", "positions", "mrope", "evs"}  # explorers that draw t, h or w
SMALLEST, LEAST_CONTRAST, TARGET = 11, 4.5, 44  # CSS pixels, WCAG AA, CSS pixels


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
    """Tapped and pulled.

    One that scrolls over a canvas moves the page, and neither a control nor a choice.
    """
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
    """With an item chosen, and every control moved to its ends.

    Each word has contrast; on canvases it has a size and is not cut off.
    The page is no wider than the screen.
    Only t, h and w have their colours.
    """
    device = PHONE if width == 390 else {"viewport": {"width": width, "height": 900}}
    page = opened(WATCH, **device, color_scheme=theme, reduced_motion="reduce")
    root = page.locator(".refvl")
    unfold(root)
    for canvas in page.locator("canvas[role=application]").all():
        canvas.press("ArrowRight")
    page.evaluate(SWEEP)
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


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
@pytest.mark.parametrize("file", ["mrope", "packing", "families"], indirect=True)
def test_states_move_unless_the_reader_wants_no_motion(opened, motion):
    """After a step, canvases change for a quarter of a second more; with reduced motion they are there
    at once.
    """
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
