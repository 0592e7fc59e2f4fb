"""Every explorer as one file, offline in Chromium. Oracle: refvl's functions, as in `explorer_oracles`."""

import io
import os

import pages
import pytest
from explorer_oracles import ORACLES
from explorers_in import OUT, REACH, SWEEP, check_controls, check_reach, made, open_offline, shown
from PIL import Image

from refvl.paths import DATA
from refvl.viz.explorers import page as page_of
from refvl.viz.explorers.gallery import GALLERY

pytestmark = pytest.mark.browser
STILLS = {"windows": 37, "attention": 5, "positions": 62}  # of docs/explorers.md: explorers, and the item selected


@pytest.fixture(scope="module", params=GALLERY)
def explorer(request, chromium, tmp_path_factory):
    """(name, its file, the page in an offline browser, what was said and asked for)."""
    name = request.param
    file = tmp_path_factory.mktemp("pages") / f"{name}.html"
    file.write_text(page_of(made(name)))
    page, heard, asked = open_offline(chromium, file, width=1200)
    page.wait_for_selector(".refvl[data-index]", timeout=60_000)
    yield name, file, page, heard, asked
    page.context.close()


def test_appears_and_every_control_changes_it(explorer):
    name, _, page, _, _ = explorer
    root = page.locator(".refvl")
    assert shown(root) == made(name).index
    check_controls(root, made(name), ORACLES[name])


def test_keyboard_pointer_and_screen_readers(explorer):
    check_reach(explorer[2].locator(".refvl"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_are_drawn(explorer, theme):
    """In the colours of viz.style, read back from the page; and the screenshots are kept."""
    from refvl.viz.style import THEMES

    name, _, page, _, _ = explorer
    page.emulate_media(color_scheme=theme)
    root = page.locator(".refvl")
    shown(root)
    assert root.evaluate("r => r.style.getPropertyValue('--ink')") == THEMES[theme]["ink"]
    page.screenshot(path=OUT / f"page_{name}_{theme}.png", full_page=True)


def test_the_address_leads_back_to_the_state(explorer):
    """What was done stands in the address; opened again, it shows the same.

    An address of elsewhere is ignored.
    """
    name, file, page, _, _ = explorer
    index, address = shown(page.locator(".refvl")), page.url
    assert address.startswith(f"{file.as_uri()}#{index}.")
    for hash_, wanted in ((address.partition("#")[2], index), ("9999999.3", made(name).index), ("x", made(name).index)):
        page.goto("about:blank")
        page.goto(f"{file.as_uri()}#{hash_}")
        page.wait_for_selector(".refvl[data-index]")
        assert shown(page.locator(".refvl")) == wanted


def test_nothing_was_asked_for_and_nothing_complained(explorer):
    """Last, after all that was done with the page."""
    _, file, _, heard, asked = explorer
    asked = {url.partition("#")[0] for url in asked if not url.startswith(("blob:", "data:", "about:"))}
    assert asked == {file.as_uri()}
    assert heard == []


@pytest.fixture(params=pages.EXPLORERS)
def front(request, tmp_path):
    """A page of the site, with the explorers that share it."""
    file = tmp_path / "front.html"
    file.write_text(page_of(*(made(name) for name in (request.param, *pages.EXPLORERS[request.param][1:]))))
    return file


def test_a_control_and_what_it_changes_fit_on_a_phone(front, chromium):
    """On every tab; and no control of any does harm."""
    page, heard, _ = open_offline(chromium, front, width=390, height=844)
    page.wait_for_selector(".refvl[data-index]", timeout=60_000)
    for number, root in enumerate(page.locator(".refvl").all()):
        if number:
            page.locator("label[for^=view]").nth(number).click()
        top, bottom = root.evaluate(REACH)
        assert 0 <= top < bottom <= 844
    page.evaluate(SWEEP)
    assert heard == []
    page.context.close()


def test_without_scripts_there_is_a_figure(front, chromium):
    page = chromium.new_context(java_script_enabled=False).new_page()
    page.goto(front.as_uri())
    still = page.locator("noscript img").first
    assert still.bounding_box()["height"] > 100 and len(still.get_attribute("alt")) > 20
    page.context.close()


@pytest.mark.parametrize("path", pages.in_order((pages.ROOT / "notebooks").glob("[0-9]*.ipynb")), ids=lambda p: p.stem)
def test_every_control_of_a_notebook_page(path, chromium, tmp_path):
    """On a phone, each is moved to its end; no complaint, no page wider than the screen."""
    file = tmp_path / f"{path.stem}.html"
    file.write_text(pages.notebook_page(pages.nbformat.read(path, 4), path.parent))
    page, heard, _ = open_offline(chromium, file, width=390, height=844)
    page.wait_for_timeout(1000)
    page.evaluate(SWEEP)
    assert heard == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.context.close()


@pytest.mark.parametrize("name", STILLS)
def test_a_still_for_the_readme(name, chromium, tmp_path):
    """The item is drawn and said; RECORD=1 keeps the picture in data/figures."""
    made(name).selected = STILLS[name]
    file = tmp_path / "still.html"
    file.write_text(page_of(made(name)))
    made(name).selected = -1
    page = chromium.new_page(viewport={"width": 1000, "height": 900})
    page.goto(file.as_uri())
    root = page.wait_for_selector(".refvl[data-index]", timeout=60_000)
    assert root.query_selector(".readout").inner_text()
    still = Image.open(io.BytesIO(root.screenshot())).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    still.save((DATA / "figures" if os.environ.get("RECORD") == "1" else OUT) / f"explorer_{name}.png", optimize=True)
    page.close()
