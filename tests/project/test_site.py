"""The site that `make site` writes. Oracle: the checks of `pages.py`, each seen to find what it looks for."""

import pytest

pytest.importorskip("nbconvert")
pytest.importorskip("anywidget")

import nbformat
import pages
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from refvl.viz.journey import SHIPPED

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The whole site; building it raises where a link is dead, a page loads something or is too large."""
    folder = tmp_path_factory.mktemp("site")
    return folder, pages.build(folder)


@pytest.mark.slow
def test_every_notebook_and_every_explorer_has_a_page(written):
    """The index links each of them, and none is too heavy."""
    folder, sizes = written
    limits = {f"explorers/{name}.html": 220_000 for name in pages.EXPLORERS}
    for path in (pages.ROOT / "notebooks").glob("[0-9]*.ipynb"):
        limits[f"notebooks/{path.stem}.html"] = 600_000
    limits |= {f"journeys/{name}.html": 600_000 for name in SHIPPED}
    limits |= {"live.html": 3_000_000, "live-qwen3_vl.html": 3_000_000}
    assert {name for name in limits if not 0 < sizes[name] <= limits[name]} == set()
    found = pages.Names()
    found.feed((folder / "index.html").read_text())
    assert set(limits) <= set(found.links)


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<a href="gone.html">x</a>', "links gone.html, which is not there"),
        ('<a href="#gone">x</a>', "links #gone, which is not there"),
        ('<img alt="" src="data:image/png;base64,AA==">', "1 images with an alt text of fewer than 3 words"),
        ('<img alt="x y z" src="https://example.org/x.png">', "loads https://example.org/x.png"),
        ('<script src="x.js"></script>', "loads x.js"),
        ('<link rel="stylesheet" href="x.css">', "loads x.css"),
        ("x" * 220_001, "220,001 bytes, allowed are 220,000"),
    ],
)
def test_problems_are_found(page, problem):
    sound = '<a href="../index.html#here">x</a><a href="https://a.org">y</a><img alt="x y z" src="data:image/png,">'
    written = {"index.html": '<p id="here">', "explorers/x.html": sound}
    assert list(pages.check(written)) == []
    assert list(pages.check(written | {"explorers/x.html": page})) == [f"explorers/x.html: {problem}"]


@pytest.fixture
def notebook(tmp_path):
    """A lesson with a formula, links, an image, and an explorer whose state was saved."""
    widget = {"model_module": "anywidget", "state": {"_esm": "export default 1</script>", "index": 3}, "buffers": []}
    view = {pages.VIEW: {"model_id": "m"}, "text/plain": "An explorer.", "image/png": PNG}
    cells = [
        new_markdown_cell("# A title\n\nA claim about $K/2$ < 3. [Next](01_x.ipynb#part), [file](../README.md), `$x$`"),
        new_code_cell("plot()", outputs=[new_output("display_data", {"image/png": PNG, "text/plain": "<Figure>"})]),
        new_code_cell("view", outputs=[new_output("display_data", view)]),
    ]
    made = new_notebook(cells=cells, metadata={"widgets": {pages.STATE: {"state": {"m": widget}}}})
    path = pages.ROOT / "notebooks" / "lesson.ipynb"
    return path, nbformat.reads(nbformat.writes(made), as_version=4)


def test_a_notebook_becomes_a_page(notebook, monkeypatch):
    path, made = notebook
    monkeypatch.setattr(pages.nbformat, "read", lambda *_, **__: made)
    page = pages.notebook_page(nbformat.read(path, 4), path.parent)
    assert "<i>K/2</i>" in page and "<code>$x$</code>" in page
    assert 'href="../notebooks/01_x.html#part"' in page and 'href="../files/README.md.html"' in page
    assert '<img alt="A claim about K/2 &lt; 3."' in page and "<Figure>" not in page
    assert page.count("<script") == page.count("</script>") == 2  # the state and the host, none ended early
    assert '"index":3' in page and '<noscript><img alt="An explorer."' in page
