"""An answer line by line, as a page in Chromium. Oracle: the journey that the page was made of."""

import pytest
from explorers_in import CONTRAST, open_offline, unfold
from project.test_journey import html, journey

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def opened(chromium, tmp_path_factory):
    """The page of one journey in an offline browser, and what was said and asked for."""
    file = tmp_path_factory.mktemp("journeys") / "page.html"
    file.write_text(html("qwen2_5_vl"), encoding="utf-8")
    page, heard, asked = open_offline(chromium, file)
    yield page, heard, asked, file.as_uri()
    page.context.close()


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_nothing_is_cut_off(opened, width):
    page = opened[0]
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_arrow_keys_go_from_stage_to_stage(opened):
    page = opened[0]
    page.set_viewport_size({"width": 1400, "height": 900})
    page.evaluate("scrollTo(0, 0)")
    for place, (stage, _) in enumerate(journey("qwen2_5_vl").stages, 1):
        page.keyboard.press("ArrowRight")
        page.wait_for_function("name => document.activeElement.id === name", arg=f"stage-{place}-name")
        page.locator(".steps [aria-current]", has_text=f"{place} {stage}").wait_for(timeout=5000)
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("name => document.activeElement.id === name", arg=f"stage-{place - 1}-name")


def test_checks_unfold_together(opened):
    page = opened[0]
    page.locator("#unfold").click()
    assert page.evaluate("[...document.querySelectorAll('details.fold')].every(fold => fold.open)")
    page.locator("#unfold").click()
    assert page.evaluate("[...document.querySelectorAll('details.fold')].every(fold => !fold.open)")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_in_both_themes(opened, theme):
    """Also of what is folded."""
    page = opened[0]
    page.emulate_media(color_scheme=theme)
    unfold(page.locator("body"))
    assert page.evaluate(CONTRAST) == []


def test_nothing_was_asked_for_and_nothing_complained(opened):
    """Last, after all that was done with the page."""
    _, heard, asked, address = opened
    assert [url for url in asked if not url.startswith("data:")] == [address] and heard == []


def test_the_reference_the_guides_and_files_fit_a_phone(chromium, tmp_path):
    """Long names and signatures wrap: no page is wider than the screen.

    A search finds the page of a question.
    """
    import pages
    import reference

    made = {"reference.html": pages.document("search", reference.body(), style=reference.LOOK)} | pages.guides()
    made["file.html"] = pages.file_page("tests/encoders/test_minicpmv_encoder.py")
    page = chromium.new_page(viewport={"width": 390, "height": 844}, is_mobile=True)
    (tmp_path / "docs").mkdir()
    for name, text in reversed(made.items()):
        (tmp_path / name).write_text(text, encoding="utf-8")
        page.goto((tmp_path / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
    page.fill("#search", "where is the box")
    page.get_by_role("link", name="1. Where is the box?").click()
    assert page.url == (tmp_path / "docs/question-1.html").as_uri()
    page.close()
