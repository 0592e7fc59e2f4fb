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
_STYLE = """:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --muted: #5a6069; --link: #00588a;
  --sans: -apple-system, "Segoe UI", "Inter", "Helvetica Neue", "Liberation Sans", Roboto, Arial, sans-serif;
  --serif: "Iowan Old Style", "Charter", "Palatino Linotype", Palatino, "Liberation Serif", Georgia, serif }
@media (prefers-color-scheme: dark) { :root { --paper: #111; --ink: #e8e8e8; --muted: #a9b1bc; --link: #7cc0ff } }
body { margin: 0 auto; padding: 1.5rem; max-width: 1640px; box-sizing: border-box; font: 17px/1.55 var(--sans);
  background: var(--paper); color: var(--ink) }
p { text-wrap: pretty } a { color: var(--link) } .title { color: var(--muted); font-size: 15px; margin: 0 }
h1 { font: 500 2rem/1.15 var(--serif); margin: .4rem 0 1rem; text-wrap: balance }
.takeaway { font: 1.3rem/1.4 var(--serif); margin: 1.2rem 0; padding-left: 1rem; border-left: 3px solid var(--ink) }
.terms { color: var(--muted); font-size: 16px }
.intro, .takeaway { max-width: 40rem } .explorer { margin: 0 -8px; min-width: 0 }
nav { display: flex; flex-wrap: wrap; gap: 0 1.5rem; font-size: 15px }
nav a { min-height: 44px; display: flex; align-items: center }
@media (min-width: 1100px) {
  main { display: grid; grid-template: auto auto 1fr / 300px minmax(0, 1fr); column-gap: 48px }
  .intro, .takeaway, nav { grid-column: 1 } .explorer { grid-area: 1 / 2 / span 3 }
  nav { flex-direction: column; align-self: start } }"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' blob:; \
style-src 'unsafe-inline'; img-src data: blob:">
<link rel="icon" href="data:,"><meta name="color-scheme" content="light dark"><title>{title}</title>
<style>{style}</style></head>
<body><main><div class="intro"><p class="title">{title}</p><h1>{asks}</h1>
<p class="terms">{terms}</p><p><b>Try this.</b> {action}</p></div>
{body}
<p class="takeaway">{takeaway}</p>{foot}</main></body></html>
"""


def page(explorer: Explorer, *, foot: str = "") -> str:
    """Return the explorer as one HTML file, with a policy against loading anything else. foot: HTML for its end."""
    [entry] = Widget.get_manager_state(widgets=[explorer])["state"].values()
    body = host(entry, text=explorer.describe(), keep=True)
    words = {name: html.escape(getattr(explorer, name)) for name in ("title", "asks", "terms", "action", "takeaway")}
    return _PAGE.format(**words, style=_STYLE, body=body, foot=foot)


def host(entry: Mapping, *, text: str = "", keep: bool = False) -> str:
    """Return HTML that runs a widget's saved state, as stored in notebooks.

    text: shown if scripts are off. keep: whether the address stores the state, so a link can restore it.
    """
    state = {key: value for key, value in entry["state"].items() if not str(value).startswith("IPY_MODEL_")}
    content = json.dumps({"state": state, "buffers": entry.get("buffers", [])}, separators=(",", ":"))
    # without any "<", which could end the script
    return _HOST.format(
        id=f"explorer-{next(_IDS)}",
        text=html.escape(text),
        keep=json.dumps(keep),
        state=content.replace("<", "\\u003c"),
    )
