"""Explorers and whole notebooks in JupyterLab, as a person uses them. Oracle of the numbers: refvl's functions.

Two notebooks are run from top to bottom; with ALL=1 all of them, in about as many minutes.
"""

import os
import shutil

import nbformat
import pytest
from explorer_oracles import ORACLES
from explorers_in import NOTEBOOKS, OUT, all_notebooks, check_controls, check_reach, made, shown
from nbformat.v4 import new_code_cell, new_notebook

from refvl.viz.explorers.gallery import GALLERY

pytestmark = pytest.mark.browser
RUN = all_notebooks() if os.environ.get("ALL") == "1" else ["01_patches_and_windows", "02_mrope"]
MINUTES = 60_000
VIEW = "application/vnd.jupyter.widget-view+json"
FAILED, STDERR = (
    f".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.{kind}']" for kind in ("error", "stderr")
)


def run_all(page) -> None:
    """Run > Run All Cells in a notebook not yet run, and wait until every cell has its number, or one has failed.

    A folded cell has a placeholder without a number.
    """
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    assert page.locator(".jp-Dialog").all_inner_texts() == []
    page.wait_for_function(
        """failed => { const shown = '.jp-CodeCell .jp-InputPrompt:not(.jp-Placeholder-prompt)';
                       const prompts = [...document.querySelectorAll(shown)];
                       return document.querySelector(failed)
                         || prompts.length && prompts.every(p => /\\[\\d+\\]/.test(p.textContent)); }""",
        arg=FAILED, timeout=10 * MINUTES,
    )  # fmt: skip
    assert page.locator(FAILED).all_inner_texts() == []


def write(lab, name: str, *cells: str):
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.root / name)


@pytest.fixture(scope="module")
def gallery(lab, chromium):
    """A notebook with a cell per explorer, run; the page and what its console said."""
    cells = [f"{name} = GALLERY[{name!r}](); {name}" for name in GALLERY]
    write(lab, "gallery.ipynb", "from refvl.viz.explorers.gallery import GALLERY", *cells)
    page, heard = lab.open(chromium, "gallery.ipynb"), []
    page.on("pageerror", lambda error: heard.append(str(error)))
    run_all(page)
    page.wait_for_function(
        f"() => document.querySelectorAll('.refvl[data-index]').length === {len(GALLERY)}", timeout=10 * MINUTES
    )
    yield page, heard
    page.context.close()


@pytest.mark.parametrize("name", GALLERY)
def test_an_explorer_is_live(name, gallery):
    """Controls, keys and names as on the page, while the kernel hears of each step."""
    page, heard = gallery
    root = page.locator(".refvl").nth(list(GALLERY).index(name))
    root.scroll_into_view_if_needed()
    assert shown(root) == made(name).index
    check_controls(root, made(name), ORACLES[name])
    check_reach(root)
    root.screenshot(path=OUT / f"lab_{name}.png")
    assert heard == []


def test_plain_keys_are_the_explorers_not_the_notebooks(gallery):
    """JupyterLab, outside of an editor, walks through cells with arrows, adds one by B and deletes one
    by D, D.
    """
    page, _ = gallery
    cells, active = page.locator(".jp-Cell"), page.locator(".jp-Cell.jp-mod-active")
    for control in ("select", "input[type=range]:not([disabled])", "canvas[role=application]"):
        control = page.locator(f".refvl {control}").first
        control.focus()
        before = cells.count(), active.element_handle()
        for key in ("ArrowUp", "ArrowDown", "b", "d", "d"):
            control.press(key)
        assert cells.count() == before[0] and before[1].evaluate("cell => cell.classList.contains('jp-mod-active')")


def test_saved_and_not_run_it_is_a_picture_until_trusted(lab, chromium):
    """A fresh clone: the figure and no repr; after `jupyter trust`, live without running a cell."""
    from nbclient import NotebookClient

    name = next(iter(GALLERY))
    write(lab, "saved.ipynb", f"from refvl.viz.explorers.gallery import GALLERY\nGALLERY[{name!r}]()")
    notebook = nbformat.read(lab.root / "saved.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, store_widget_state=True).execute()
    nbformat.write(notebook, lab.root / "saved.ipynb")
    page = lab.open(chromium, "saved.ipynb")
    page.wait_for_selector(".jp-OutputArea img", timeout=MINUTES)
    assert page.locator(".refvl").count() == 0
    assert "Explorer(" not in page.locator(".jp-Notebook").inner_text()
    page.context.close()
    lab.trust("saved.ipynb")
    page = lab.open(chromium, "saved.ipynb")
    root = page.wait_for_selector(".refvl[data-index]", timeout=2 * MINUTES)
    before = root.get_attribute("data-index")
    page.locator(".refvl input[type=range]:not([disabled])").first.press("ArrowRight")
    page.wait_for_function(f"() => document.querySelector('.refvl').dataset.index !== '{before}'", timeout=MINUTES)
    page.context.close()


def test_the_live_page_answers_in_a_notebook(lab, chromium):
    """The kernel sends the page into a frame, and its model runs there."""
    write(lab, "live.ipynb", "from refvl import viz\nviz.live()")
    page = lab.open(chromium, "live.ipynb")
    run_all(page)
    frame = page.wait_for_selector("iframe[title^='Broken']", timeout=2 * MINUTES).content_frame()
    frame.wait_for_selector(".answer .said", timeout=2 * MINUTES)
    assert frame.evaluate("refvl.break([]), refvl.ask('Where is the circle?')")["text"] == "top right"
    page.context.close()


@pytest.mark.parametrize("name", RUN)
def test_a_notebook_runs_from_top_to_bottom(name, lab, chromium):
    """By the menu; no cell fails, nothing is written to stderr, and every explorer that was saved is drawn."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    views = sum(VIEW in output.get("data", ()) for cell in code for output in cell.outputs)
    explorers, pages = (sum(name in cell.source for cell in code) for name in ("explore_", "viz.live("))
    assert views == explorers + pages
    for cell in code:
        cell.update(outputs=[], execution_count=None)  # numbers then mean that it ran
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, lab.root / f"{name}.ipynb")
    for path in [*NOTEBOOKS.glob("*.py"), *NOTEBOOKS.glob("*.toml")]:
        shutil.copy(path, lab.root)
    page = lab.open(chromium, f"{name}.ipynb")
    run_all(page)
    page.wait_for_function(
        "count => document.querySelectorAll('.refvl[data-index]').length === count", arg=explorers, timeout=10 * MINUTES
    )
    page.screenshot(path=OUT / f"lab_{name}.png")
    assert page.locator(STDERR).all_inner_texts() == page.locator(FAILED).all_inner_texts() == []
    page.context.close()
