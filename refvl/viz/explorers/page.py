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
const {{ state, buffers }} = JSON.parse(document.getElementById("{id}-state").textContent), on = {{}};
for (const {{ path, data }} of buffers) {{
  const place = path.slice(0, -1).reduce((value, key) => value[key], state);
  place[path.at(-1)] = new DataView(Uint8Array.from(atob(data), c => c.charCodeAt(0)).buffer);
}}
const model = {{ get: key => state[key], send() {{}}, save_changes() {{}},
  set(key, value) {{ state[key] = value; on["change:" + key]?.forEach(f => f()); }},
  on: (event, f) => (on[event] ||= new Set()).add(f), off: (event, f) => on[event]?.delete(f) }};
const url = URL.createObjectURL(new Blob([state._esm], {{ type: "text/javascript" }}));
const {{ default: widget }} = await import(url);
await widget.render({{ model, el: document.getElementById("{id}") }});
</script>"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' blob:; \
style-src 'unsafe-inline'; img-src data: blob:">
<link rel="icon" href="data:,"><meta name="color-scheme" content="light dark"><title>{title}</title>
<style>:root {{ color-scheme: light dark }} body {{ margin: 1.5rem auto; padding: 0 1rem; max-width: 72rem; \
font: 16px/1.5 system-ui, sans-serif }}
h1 {{ font-size: 1.4rem }}</style></head>
<body><main><h1>{title}</h1>
{body}
</main>{foot}</body></html>
"""


def page(explorer: Explorer, *, foot: str = "") -> str:
    """The explorer as one HTML file; the browser is told to load nothing else. foot: HTML below it."""
    [entry] = Widget.get_manager_state(widgets=[explorer])["state"].values()
    body = host(entry, text=explorer.describe())
    return _PAGE.format(title=html.escape(explorer.title), body=body, foot=foot)


def host(entry: Mapping, *, text: str = "") -> str:
    """HTML that runs a widget's saved state, as notebooks keep it. text: where scripts are off."""
    state = {key: value for key, value in entry["state"].items() if not str(value).startswith("IPY_MODEL_")}
    content = json.dumps({"state": state, "buffers": entry.get("buffers", [])}, separators=(",", ":"))
    # no "<" is left that could end the script
    return _HOST.format(id=f"explorer-{next(_IDS)}", text=html.escape(text), state=content.replace("<", "\\u003c"))
