"""An explorer without a kernel: its saved state and its module, inlined into HTML."""

import html
import io
import json
from collections.abc import Mapping
from itertools import count

from ipywidgets import Widget
from PIL import Image

from refvl.viz.explorers.base import FOLDER, Explorer, photo
from refvl.viz.style import filled

_IDS = count()


def page(*explorers: Explorer, foot: str = "") -> str:
    """Return the explorers as one HTML file, with a policy that forbids loading anything else.

    If there are several explorers, each has a tab. foot: HTML for the end of each explorer.
    """
    first, tabs = explorers[0], len(explorers) > 1
    views = "".join(_view(explorer, number, foot, tabs) for number, explorer in enumerate(explorers))
    style = (FOLDER / "page.css").read_text()
    words = {name: html.escape(getattr(first, name)) for name in ("title", "asks")}
    return filled(FOLDER / "page.html", **words, style=style, views=views)


def _view(explorer: Explorer, number: int, foot: str, tabs: bool) -> str:
    """Return an explorer with its words, after the button of its tab if there are `tabs`."""
    [entry] = Widget.get_manager_state(widgets=[explorer])["state"].values()
    still = photo(Image.open(io.BytesIO(explorer.still())), side=720)
    body = host(entry, text=explorer.describe(), still=still, keep=number == 0)
    parts = ("title", "asks", "terms", "action", "takeaway")
    words = {name: html.escape(getattr(explorer, name)) for name in parts}
    tab = f'<input type="radio" name="view" id="view-{number}"{" checked" * (number == 0)}>'
    tab += f'<label for="view-{number}">{words["title"]}</label>'
    return filled(FOLDER / "view.html", **words, tab=tab if tabs else "", body=body, foot=foot)


def host(entry: Mapping, *, text: str, still: str, keep: bool = False) -> str:
    """Return HTML that runs a widget's saved state, as stored in notebooks.

    still: the address of an image that is shown if scripts are off. text: the alt text of that
    image. keep: whether the address of the page stores the state, so a link can restore it.
    """
    state = {key: value for key, value in entry["state"].items() if not str(value).startswith("IPY_MODEL_")}
    content = json.dumps({"state": state, "buffers": entry.get("buffers", [])}, separators=(",", ":"))
    return filled(
        FOLDER / "host.html",
        id=f"explorer-{next(_IDS)}",
        text=html.escape(text),
        still=still,
        keep=json.dumps(keep),
        state=content.replace("<", "\\u003c"),  # because "<" could end the script
    )
