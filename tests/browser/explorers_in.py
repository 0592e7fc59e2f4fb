"""What the tests of pages and of JupyterLab do with an explorer on the screen."""

from functools import cache
from pathlib import Path

from explorer_oracles import assert_agree

from refvl.paths import DATA
from refvl.viz.explorers.gallery import GALLERY

OUT = DATA.parent / "outputs" / "browser"  # screenshots
NOTEBOOKS = DATA.parent / "notebooks"
SCRIPTS = ("contrast", "reach", "sweep", "written")
CONTRAST, REACH, SWEEP, WATCH = (Path(__file__).with_name(f"{name}.js").read_text() for name in SCRIPTS)
PIXELS = "root => [...root.querySelectorAll('canvas')].map(c => c.toDataURL()).join()"


@cache
def made(name: str):
    """The explorer `name` of the gallery as Python has it."""
    return GALLERY[name]()


def all_notebooks() -> list[str]:
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def shown(root) -> int:
    """The number of the state that is drawn, once the animation frames have come."""
    root.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return int(root.get_attribute("data-index"))


def check_numbers(root, explorer, oracle) -> None:
    """What the picture is drawn from is what refvl computes for that state."""
    state = explorer.states[shown(root)]
    assert_agree(root.evaluate("root => root.read()"), oracle(explorer, state))


def check_controls(root, explorer, oracle) -> None:
    """Every control, moved by a key, leads to another state and picture, with the right numbers."""
    unfold(root)
    controls = root.locator("input[type=range], select")
    names = [control["name"] for control in sorted(explorer.controls, key=lambda control: control["rare"])]
    assert controls.count() == len(names)
    check_numbers(root, explorer, oracle)
    for number, name in enumerate(names):
        control, before, pixels = controls.nth(number), shown(root), root.evaluate(PIXELS)
        if control.is_disabled():
            assert not control.is_visible(), name
            continue
        _press(control)
        assert shown(root) != before, name
        assert root.evaluate(PIXELS) != pixels, name
        check_numbers(root, explorer, oracle)


def unfold(root) -> None:
    """Open the rare controls and the exact numbers, if the explorer has any."""
    root.evaluate("root => root.querySelectorAll('details').forEach(details => { details.open = true; })")


def _press(control) -> None:
    """One step on, or back where it stands at the end."""
    place, last = (int(v) for v in control.evaluate("c => [c.value, c.max || c.options.length - 1]"))
    control.focus()
    down = control.evaluate("c => c.tagName") == "SELECT"
    forward, back = ("ArrowDown", "ArrowUp") if down else ("ArrowRight", "ArrowLeft")
    control.press(forward if place < last else back)


def check_reach(root) -> None:
    """Everything has a name; arrow keys select items of the first canvas that has any.

    The pointer shows them, and both are said in words.
    """
    _check_names(root)
    canvas = root.locator("canvas[role=application]").first
    if not canvas.count():
        return
    canvas.focus()
    canvas.press("ArrowRight")
    shown(root)
    first = root.locator(".readout").inner_text()
    assert first
    for key in ("ArrowRight", "ArrowDown"):
        canvas.press(key)
    shown(root)
    assert root.locator(".readout").inner_text() != first
    canvas.press("Escape")
    shown(root)
    assert root.locator(".readout").inner_text() == ""


def _check_names(root) -> None:
    """Controls and pictures have names that a screen reader can say; the Tab key stops only where keys
    do something.
    """
    unseen = "root => [...root.querySelectorAll('button')].filter(b => !/\\w/.test(b.textContent)).length"
    assert root.evaluate(unseen) == 0  # a button shows in a word what will move, and its name contains that
    assert root.evaluate(
        "root => [...root.querySelectorAll('button')].every(b => b.ariaLabel.includes(b.textContent.slice(2)))"
    )
    names = root.evaluate(
        "root => [...root.querySelectorAll('canvas, input, select, button')].map(e => e.getAttribute('aria-label'))"
    )
    assert names and all(name and len(name) > 3 for name in names)
    assert root.get_attribute("role") == "group" and root.get_attribute("aria-label")
    assert root.locator("canvas[tabindex='0']").count() == root.locator("canvas[role=application]").count()


def open_offline(chromium, file, width: int = 1400, height: int = 900) -> tuple:
    """A page in an offline browser, what it says, and what it asks for."""
    page = chromium.new_context(offline=True, viewport={"width": width, "height": height}).new_page()
    heard, asked = [], []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda ask: asked.append(ask.url))
    page.goto(file.as_uri())
    return page, heard, asked
