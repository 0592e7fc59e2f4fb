"""An explorer without a kernel: its saved state and its module, inlined into HTML."""

import html
import json
from collections.abc import Mapping
from itertools import count

from ipywidgets import Widget

from refvl.viz.explorers.base import Explorer

_IDS = count()
_HOST = """<div class="explorer" id="{id}"></div>
<noscript><p>{text}</p></noscript>
<script type="application/json" id="{id}-state">{state}</script>
<script type="module">
const keep = {keep}, {{ state, buffers }} = JSON.parse(document.getElementById("{id}-state").textContent), on = {{}};
for (const {{ path, data }} of buffers) {{
  const place = path.slice(0, -1).reduce((value, key) => value[key], state);
  place[path.at(-1)] = new DataView(Uint8Array.from(atob(data), c => c.charCodeAt(0)).buffer);
}}
const kept = /^#(\\d+)\\.(-?\\d+)$/.exec(keep ? location.hash : "");
const states = state.table.states?.length ?? state.controls.reduce((n, control) => n * control.options.length, 1);
if (kept && kept[1] < states) [state.index, state.selected] = [+kept[1], +kept[2]];
const model = {{ get: key => state[key], send() {{}}, save_changes() {{}},
  set(key, value) {{ state[key] = value;
    if (keep) history.replaceState(null, "", `#${{state.index}}.${{state.selected}}`);
    on["change:" + key]?.forEach(f => f()); }},
  on: (event, f) => (on[event] ||= new Set()).add(f), off: (event, f) => on[event]?.delete(f) }};
const url = URL.createObjectURL(new Blob([state._esm], {{ type: "text/javascript" }}));
const {{ default: widget }} = await import(url);
await widget.render({{ model, el: document.getElementById("{id}") }});
</script>"""
_STYLE = """:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --muted: #5a6069; --link: #00588a }
@media (prefers-color-scheme: dark) { :root { --paper: #111; --ink: #e8e8e8; --muted: #a9b1bc; --link: #7cc0ff } }
body { margin: 1rem auto; padding: 0 1rem; max-width: 72rem; font: 16px/1.5 system-ui, sans-serif;
  background: var(--paper); color: var(--ink) }
a { color: var(--link) } .title { color: var(--muted); font-size: 14px; margin: 0 } main > p { max-width: 44rem }
h1 { font: 500 clamp(1.6rem, 4vw, 2.25rem)/1.15 Georgia, serif; margin: .2rem 0 .6rem; text-wrap: balance }
.explorer { margin: 1rem -8px } .takeaway { font: 1.3rem/1.4 Georgia, serif; margin: 1.6rem 0 }
nav { display: flex; flex-wrap: wrap; gap: 0 1.5rem; justify-content: space-between; font-size: 14px }
nav a { min-height: 44px; display: flex; align-items: center }"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' blob:; \
style-src 'unsafe-inline'; img-src data: blob:">
<link rel="icon" href="data:,"><meta name="color-scheme" content="light dark"><title>{title}</title>
<style>{style}</style></head>
<body><main><p class="title">{title}</p><h1>{asks}</h1><p><b>Try this.</b> {action}</p>
{body}
<p class="takeaway">{takeaway}</p></main>{foot}</body></html>
"""


def page(explorer: Explorer, *, foot: str = "") -> str:
    """Return the explorer as one HTML file; the browser is told to load nothing else. foot: HTML below it."""
    [entry] = Widget.get_manager_state(widgets=[explorer])["state"].values()
    body = host(entry, text=explorer.describe(), keep=True)
    words = {name: html.escape(getattr(explorer, name)) for name in ("title", "asks", "action", "takeaway")}
    return _PAGE.format(**words, style=_STYLE, body=body, foot=foot)


def host(entry: Mapping, *, text: str = "", keep: bool = False) -> str:
    """Return HTML that runs a widget's saved state, as stored in notebooks.

    text: shown if scripts are off. keep: the address stores the state, so a link leads back to it.
    """
    state = {key: value for key, value in entry["state"].items() if not str(value).startswith("IPY_MODEL_")}
    content = json.dumps({"state": state, "buffers": entry.get("buffers", [])}, separators=(",", ":"))
    # no "<" is left that could end the script
    return _HOST.format(
        id=f"explorer-{next(_IDS)}",
        text=html.escape(text),
        keep=json.dumps(keep),
        state=content.replace("<", "\\u003c"),
    )
