"""The API reference of the site: every public name with its signature, docstring, source, test and notebook.

    PUBLIC      -> the modules whose names are public
    entries()   -> one Entry per name: from the docstring and the files that use the name
    page()      -> reference.html, with a search that runs in the page

A name that no test or notebook spells is shown where its file is tested and taught: `HOME`.
"""

import ast
import html
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "refvl": "load a model, record a run, compare two",
    "refvl.encoders": "vision encoders, a class per family",
    "refvl.positions": "positions of tokens, and which video tokens are kept",
    "refvl.graphs": "encoder graphs: budgets, capture, replay",
    "refvl.parallel": "items shared by several processes",
    "refvl.boxes": "boxes and points in answers",
    "refvl.serving.adapters": "LoRA adapters",
    "refvl.serving.handover": "embeddings for another engine",
    "refvl.viz": "figures and explorers",
}
HOME = {  # the file of a definition: its test, its notebook
    "encoders/glm4v.py": ("encoders/test_grid_towers.py", "06"),
    "encoders/glm_ocr.py": ("encoders/test_grid_towers.py", "06"),
    "encoders/minicpmv.py": ("encoders/test_minicpmv_encoder.py", "07"),
    "encoders/kimi_k25.py": ("journeys/test_kimi_generate.py", "10"),
    "encoders/minicpmv4_6.py": ("journeys/test_folded_generate.py", "07"),
    "encoders/navit_siglip.py": ("encoders/test_navit_siglip.py", "07"),
    "encoders/siglip_vit.py": ("encoders/test_siglip_vit.py", "07"),
    "encoders/resampler.py": ("encoders/test_resampler.py", "07"),
    "encoders/resampler2.py": ("encoders/test_resampler.py", "07"),
    "encoders/qwen2_5_vl.py": ("contracts/test_encoders.py", "01"),
    "encoders/qwen3_vl.py": ("journeys/test_qwen3_generate.py", "12"),
    "encoders/vision_utils.py": ("encoders/test_vision_info.py", "10"),
    "viz/minicpmv.py": ("viz/test_viz_minicpmv.py", "07"),
    "viz/timings.py": ("viz/test_viz.py", "00"),
    "positions/evs.py": ("positions/test_evs.py", "03"),
    "positions/canvas.py": ("positions/test_canvas.py", "07"),
    "positions/mrope.py": ("positions/test_mrope.py", "02"),
    "positions/packed.py": ("positions/test_packed.py", "13"),
    "positions/pruners.py": ("journeys/test_pruning.py", "03"),
    "positions/tables.py": ("positions/test_tables.py", "07"),
    "positions/timestamps.py": ("positions/test_timestamps.py", "06"),
    "positions/vidcom2.py": ("positions/test_vidcom2.py", "03"),
    "graphs/budgets.py": ("graphs/test_graph_budgets.py", "05"),
    "graphs/manager.py": ("graphs/test_graph_manager.py", "04"),
    "contracts.py": ("graphs/test_graph_manager.py", "04"),
    "serving/model.py": ("journeys/test_generate.py", "00"),
    "serving/parallel.py": ("journeys/test_parallel.py", "09"),
    "serving/adapters.py": ("journeys/test_adapters.py", "13"),
    "study/boxes.py": ("journeys/test_boxes.py", "12"),
    "study/report.py": ("journeys/test_compare.py", "00"),
    "viz/attention.py": ("journeys/test_watch.py", "02"),
    "viz/evs.py": ("viz/test_viz_positions.py", "03"),
    "viz/explore.py": ("project/test_site.py", "00"),
    "viz/families.py": ("project/test_notebooks.py", "10"),
    "viz/glm4v.py": ("project/test_notebooks.py", "06"),
    "viz/graphs.py": ("project/test_notebooks.py", "04"),
    "viz/positions.py": ("viz/test_viz_positions.py", "02"),
}
SEARCH = """<script>
const box = document.getElementById("search"), found = document.getElementById("found");
const entries = [...document.querySelectorAll("section.entry")];
const texts = entries.map((entry) => entry.textContent.toLowerCase());
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let count = 0;
  entries.forEach((entry, i) => {
    const hit = words.every((word) => texts[i].includes(word));
    entry.hidden = !hit;
    count += hit;
  });
  const parts = document.querySelectorAll("div.module");
  parts.forEach((part) => { part.hidden = !part.querySelector("section:not([hidden])"); });
  found.textContent = `${count} of ${entries.length} names`;
});
</script>"""
LOOK = """.entry { border-top: 1px solid var(--line); padding: .2rem 0 .6rem } .entry h3 { margin: .6rem 0 .2rem }
.entry .doc { white-space: pre-wrap; margin: .3rem 0 }
#found { display: block } #search { font: inherit; width: 97%; padding: .4rem }"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A public name, and where it is written, tested and used."""

    module: str
    name: str
    signature: str
    doc: str
    source: str  # file in the repository
    line: int  # of its definition; 0 for values
    test: str  # file in the repository
    notebook: str  # without its suffix

    @property
    def anchor(self) -> str:
        """The id of its section in the page."""
        return f"{self.module}.{self.name}"


def public() -> Iterator[tuple[str, str, Any]]:
    """(module, name, object) of every public name: `__all__`, or else what the module's own file defines."""
    for module in PUBLIC:
        room = importlib.import_module(module)
        names = getattr(room, "__all__", None) or [
            name
            for name, value in vars(room).items()
            if not name.startswith("_")
            and (inspect.isroutine(value) or inspect.isclass(value))
            and value.__module__.split(".")[-1] == module.split(".")[-1]
        ]
        yield from ((module, name, unwrapped(getattr(room, name))) for name in names)


def unwrapped(value: Any) -> Any:
    """The function behind decorators such as torch's; any other object as it is."""
    return inspect.unwrap(value) if inspect.isfunction(value) else value


@cache
def texts(pattern: str) -> dict[str, str]:
    """Files of the repository by path; of a notebook its cells alone."""
    found = {}
    for path in sorted(ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        found[path.relative_to(ROOT).as_posix()] = text
    return found


def most_uses(name: str, pattern: str) -> str:
    """The file that has `name` most often as a word, "" for none."""
    counts = {path: len(re.findall(rf"\b{name}\b", text)) for path, text in texts(pattern).items()}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] else ""


def entries() -> list[Entry]:
    """Every public name. Raises KeyError, naming the file, if nothing says where a name is tested or taught."""
    books = {Path(path).name[:2]: Path(path).stem for path in texts("notebooks/[0-9]*.ipynb")}
    made = []
    for module, name, value in public():
        if callable(value):
            source = Path(inspect.getsourcefile(value) or "").resolve().relative_to(ROOT).as_posix()
            line = inspect.getsourcelines(value)[1]
            is_error = isinstance(value, type) and issubclass(value, Exception)
            signature = name + ("(message)" if is_error else str(inspect.signature(value)))
        else:
            source, line, signature = f"{module.replace('.', '/')}/pruners.py", 0, name
        home = source.removeprefix("refvl/")
        test = most_uses(name, "tests/**/test_*.py") or f"tests/{HOME[home][0]}"
        notebook = Path(most_uses(name, "notebooks/[0-9]*.ipynb")).stem or books[HOME[home][1]]
        doc = docstring(value) if callable(value) else f"Of {', '.join(map(repr, value))}: see `{module}.find_pruner`."
        made.append(Entry(module, name, signature, doc, source, line, test, notebook))
    return made


def docstring(value: Any) -> str:
    """Its docstring and, of a class, those of its own public methods, each after the signature."""
    parts = [inspect.getdoc(value) or ""]
    if inspect.isclass(value):
        for name, method in vars(value).items():
            function = getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
                text = textwrap.indent(inspect.getdoc(function) or "", "    ")
                parts.append(f"{name}{inspect.signature(function)}\n{text}")
    return "\n\n".join(parts)


def raises(value: Any) -> bool:
    """Whether the body of a function has a `raise`, or calls a check: then its docstring says what it raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    calls = [getattr(n.func, "id", getattr(n.func, "attr", "")) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree)) or any(
        name.lstrip("_").startswith("check_") for name in calls
    )


def body() -> str:
    """The page's HTML: a search, and a section per name under its module."""
    made = entries()
    parts = [
        '<p><a href="index.html">All notebooks and explorers</a></p><main><h1>API reference</h1>',
        "<p>Every public name. Shapes: N patches, M merged tokens, L prompt tokens, D width.</p>",
        '<p><label for="search">Search names, arguments and docstrings</label>'
        f'<input id="search" type="search" autocomplete="off"> <small id="found">{len(made)} names</small></p>',
    ]
    for module, what in PUBLIC.items():
        parts.append(f'<div class="module"><h2 id="{module}">{module}</h2><p>{what}</p>')
        parts += [section(entry) for entry in made if entry.module == module]
        parts.append("</div>")
    return "\n".join([*parts, "</main>", SEARCH])


def section(entry: Entry) -> str:
    """One name: signature, docstring, and links to its source, its test and a notebook."""
    place = f"#L-{entry.line}" if entry.line else ""
    links = (
        (f"files/{entry.source}.html{place}", entry.source),
        (f"files/{entry.test}.html", entry.test),
        (f"notebooks/{entry.notebook}.html", f"notebook {entry.notebook[:2]}"),
    )
    where = " · ".join(f'<a href="{address}">{html.escape(text)}</a>' for address, text in links)
    return (
        f'<section class="entry" id="{entry.anchor}"><h3>{entry.name}</h3><pre>{html.escape(entry.signature)}</pre>'
        f'<div class="doc">{html.escape(entry.doc)}</div><small>{where}</small></section>'
    )
