"""Explorers: Python computes a table, and a plain ES module draws it,
in Jupyter or on a page without a kernel.

Writing an explorer called NAME takes five steps; `windows.py` and `windows.js` are an example:

1. `NAME.py`, a subclass of `Explorer` whose `__init__` fills the table with numbers that refvl's
functions compute:

       class NameExplorer(Explorer):
           _esm = module("NAME")

           def __init__(self, ...):
               super().__init__(
                   [Control("budget", "max tokens", [64, 128, 256]), Control("window", "window, px", [56, 112])],
                   rows,              # one dict per state, with everything that it draws
                   shared={...},      # data shared by all states; `photo(image)` adds an image
                   start=(128, 112),  # the initial state, one option per control
               )

           def figure(self):          # the current state as a matplotlib Figure, drawn by plot_* functions
           def describe(self):        # the current state as plain text: alt text, and the output in a terminal

   Values are nested lists and dicts, numbers, strings, arrays and tensors; equal arrays are stored once. The states are
   all combinations of options; the last control changes fastest. If some combinations repeat others or do not exist,
   list the valid ones: `states=[(64, 56), (128, 56), (128, 112)]`. A control then offers only the options that are
   valid for the current settings of earlier controls. An explorer that is too large for one dict per state overrides
   `row(index)` and draws from `shared`. `fill` can replace the table. The public function is `explore_NAME(...)` in
   `refvl/viz/explore.py`.

2. `NAME.js`, which looks numbers up and draws them, but computes none; `shared.js` describes the
helpers.

3. A table in `words.toml`: the page's title, question, explanation, and conclusion.

4. One line in `gallery.GALLERY`, which builds the explorer from files of the repository, for pages
and tests.

5. An oracle in `tests/explorer_oracles.py`, unless each entry of a row is the result of one call.

`explorer.index` (the state), `explorer.options` (its options by name) and `explorer.selected`
(the item chosen by a click or the arrow keys, -1 for none) contain the reader's latest choices.
Setting `index` or `selected` changes the view. `page(explorer)` returns the explorer as a
single HTML file that needs neither kernel nor network.
"""

try:
    import anywidget  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("explorers need anywidget: pip install 'refvl[notebooks]'", name="anywidget") from error

from refvl.viz.explorers.base import Control, Explorer, module, photo
from refvl.viz.explorers.page import host, page
from refvl.viz.explorers.windows import WindowsExplorer

__all__ = ["Control", "Explorer", "WindowsExplorer", "host", "module", "page", "photo"]
