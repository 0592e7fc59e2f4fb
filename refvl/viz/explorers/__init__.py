"""Explorers: Python computes a table, one plain ES module draws it, in Jupyter and on a page without a kernel.

How to write one, NAME, in four steps; `windows.py` and `windows.js` are the example:

1. `NAME.py`, a subclass of `Explorer` whose `__init__` fills the table with numbers of refvl's functions:

       class NameExplorer(Explorer):
           _esm = module("NAME")
           title = "What it is"
           asks = "What does it answer?"          # its page begins with these
           terms = "A budget is the largest number of tokens."
           action = "Drag the budget."
           takeaway = "More tokens, more windows."    # and ends with this sentence

           def __init__(self, ...):
               super().__init__(
                   [Control("budget", "max tokens", [64, 128, 256]), Control("window", "window, px", [56, 112])],
                   rows,              # a dict per state, with everything that is drawn there
                   shared={...},      # data that all states draw; images by `photo(image)`
                   start=(128, 112),  # an option per control: the initial state
               )

           def figure(self):          # the current state as a matplotlib Figure, by plot_* functions
           def describe(self):        # the current state as one plain sentence: alt text, and output in a terminal

   Values are nested lists and dicts, numbers, strings, arrays and tensors; equal arrays are stored once. The states are
   all combinations of options; the last control changes fastest. If combinations repeat others or do not exist, name
   those that do: `states=[(64, 56), (128, 56), (128, 112)]`. A control then offers the options that exist for those of
   the controls before it. An explorer too large for a dict per state overrides `row(index)` and draws from `shared`.
   `fill` replaces the table later. The public function is `explore_NAME(...)` in `refvl/viz/explore.py`, which imports
   the class when it is called, so `refvl.viz` itself does not need anywidget.

2. `NAME.js`, which looks numbers up and draws them, and computes none; `shared.js` describes its helpers.

3. One line in `gallery.GALLERY`: the explorer on files of the repository. It becomes a page and is tested.

4. One line in `tests/explorer_oracles.py`: the expected `row(index)`, computed again without the table.

In the next cell, `explorer.index` (the state), `explorer.options` (its options by name) and `explorer.selected` (the
item clicked or reached by arrow keys, -1 for none) follow the reader; setting `index` or `selected` changes the view.
`page(explorer)` returns the explorer as a single HTML file that needs neither kernel nor network.
"""

try:
    import anywidget  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("explorers need anywidget: pip install 'refvl[notebooks]'", name="anywidget") from error

from refvl.viz.explorers.base import Control, Explorer, module, photo
from refvl.viz.explorers.page import host, page
from refvl.viz.explorers.windows import WindowsExplorer

__all__ = ["Control", "Explorer", "WindowsExplorer", "host", "module", "page", "photo"]
