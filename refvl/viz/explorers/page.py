"""An explorer without a kernel: its saved state and its module, inlined into HTML."""

import html
import json
from collections.abc import Mapping
from itertools import count

from ipywidgets import Widget

from refvl.viz.explorers.base import FOLDER, Explorer
from refvl.viz.style import filled

_IDS = count()


def page(explorer: Explorer, *, foot: str = "") -> str:
    """Return the explorer as one HTML file, with a policy against loading anything else.

    foot: HTML for its end.
    """
    [entry] = Widget.get_manager_state(widgets=[explorer])["state"].values()
    body = host(entry, text=explorer.describe(), keep=True)
    words = {name: html.escape(getattr(explorer, name)) for name in ("title", "asks", "terms", "action", "takeaway")}
    return filled(FOLDER / "page.html", **words, style=(FOLDER / "page.css").read_text(), body=body, foot=foot)


def host(entry: Mapping, *, text: str = "", keep: bool = False) -> str:
    """Return HTML that runs a widget's saved state, as stored in notebooks.

    text: shown if scripts are off. keep: whether the address stores the state, so a link can
    restore it.
    """
    state = {key: value for key, value in entry["state"].items() if not str(value).startswith("IPY_MODEL_")}
    content = json.dumps({"state": state, "buffers": entry.get("buffers", [])}, separators=(",", ":"))
    return filled(
        FOLDER / "host.html",
        id=f"explorer-{next(_IDS)}",
        text=html.escape(text),
        keep=json.dumps(keep),
        state=content.replace("<", "\\u003c"),  # no "<" could end the script
    )
