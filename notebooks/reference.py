"""The search of the site: the guides, and every public name with its signature, docstring, source, test and notebook.

    PUBLIC      -> the modules whose names are public
    entries()   -> one Entry per name: from the docstring and the files that use the name
    body()      -> the HTML of reference.html, with a search that runs in the page

A name that no test or notebook contains gets the test or notebook of its file (`home` in
reference.toml).
"""

import ast
import html
import importlib
import inspect
import json
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import refvl

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "refvl": "load a model, record a run, compare two",
    "refvl.encoders": "vision encoders, a class per family",
    "refvl.positions": "positions of tokens, and which video tokens are kept",
    "refvl.graphs": "encoder graphs: budgets, capture, replay",
    "refvl.parallel": "items shared by several processes",
    "refvl.boxes": "boxes and points in answers",
    "refvl.serving.adapters": "LoRA adapters",
    "refvl.serving.export": "embeddings for another engine",
    "refvl.viz": "figures and explorers",
}
TABLES = tomllib.loads((ROOT / "notebooks/reference.toml").read_text(encoding="utf-8"))
HOME, UNITS = TABLES["home"], TABLES["units"]
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
  found.textContent = `${count} of ${entries.length} entries`;
});
</script>"""
LOOK = """.entry { border-top: 1px solid var(--line); padding: .2rem 0 .6rem; overflow-wrap: anywhere }
.entry h3 { margin: .6rem 0 .2rem }
.entry .doc { white-space: pre-wrap; margin: .3rem 0 }
#found { display: block } #search { font: inherit; width: 97%; padding: .4rem }"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A public name, with the files that define, test and use it."""

    module: str
    name: str
    signature: str
    doc: str
    source: str  # file in the repository
    line: int  # the line of its definition; 0 for values
    test: str  # file in the repository
    notebook: str  # without its suffix
    is_shown: bool  # whether the notebook uses the name; otherwise it explains the name's file

    @property
    def anchor(self) -> str:
        """The id of the name's section in the page."""
        return f"{self.module}.{self.name}"


def public() -> Iterator[tuple[str, str, Any]]:
    """Yield (module, name, object) of every public name: those in `__all__`, or else defined in the module's file."""
    for module in PUBLIC:
        room = getattr(refvl, module.removeprefix("refvl."), None) or importlib.import_module(module)
        names = getattr(room, "__all__", None) or [
            name
            for name, value in vars(room).items()
            if not name.startswith("_")
            and (inspect.isroutine(value) or inspect.isclass(value))
            and value.__module__.split(".")[-1] == module.split(".")[-1]
        ]
        yield from ((module, name, unwrapped(getattr(room, name))) for name in names)


def unwrapped(value: Any) -> Any:
    """Return the function inside decorators such as torch's; return any other object unchanged."""
    return inspect.unwrap(value) if inspect.isfunction(value) else value


@cache
def texts(pattern: str) -> dict[str, str]:
    """Return the text of files by path in the repository; for notebooks, the text of the cells."""
    found = {}
    for path in sorted(ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        found[path.relative_to(ROOT).as_posix()] = text
    return found


@cache
def words(pattern: str) -> dict[str, Counter[str]]:
    """Return how often each word occurs in each of the `texts`."""
    return {path: Counter(re.findall(r"\w+", text)) for path, text in texts(pattern).items()}


def most_uses(name: str, pattern: str) -> str:
    """Return the file that contains the word `name` most often; "" if none does."""
    counts = words(pattern)
    best = max(counts, key=lambda path: counts[path][name])
    return best if counts[best][name] else ""


def entries() -> list[Entry]:
    """Return one entry per public name. Raises KeyError, naming the file, for a name without a test or a notebook."""
    books = {Path(path).name[:2]: Path(path).stem for path in texts("notebooks/[0-9]*.ipynb")}
    made = []
    for module, name, value in public():
        if callable(value):
            source = Path(inspect.getsourcefile(value) or "").resolve().relative_to(ROOT).as_posix()
            line = inspect.findsource(value)[1] + 1
            is_error = isinstance(value, type) and issubclass(value, Exception)
            signature = name + ("(message)" if is_error else str(inspect.signature(value)))
        else:
            source, line, signature = f"{module.replace('.', '/')}/vidcom2.py", 0, name
        home = source.removeprefix("refvl/")
        test = most_uses(name, "tests/**/test_*.py") or f"tests/{HOME[home][0]}"
        shown = Path(most_uses(name, "notebooks/[0-9]*.ipynb")).stem
        notebook = shown or books[HOME[home][1]]
        doc = (
            docstring(value) if callable(value) else f"Keys: {', '.join(map(repr, value))}; see `{module}.find_pruner`."
        )
        if counted := units(value, name):
            doc += "\n\nUnits: " + "; ".join(f"{argument}: {unit}" for argument, unit in counted.items()) + "."
        made.append(Entry(module, name, signature, doc, source, line, test, notebook, bool(shown)))
    return made


def docstring(value: Any) -> str:
    """Return the docstring and, for a class, those of its own public methods, each after the signature."""
    parts = [inspect.getdoc(value) or ""]
    for name, function in methods(value):
        parts.append(f"{name}{inspect.signature(function)}\n{textwrap.indent(inspect.getdoc(function) or '', '    ')}")
    return "\n\n".join(parts)


def units(value: Any, name: str) -> dict[str, str]:
    """Return the unit of every numeric argument of a function or class; "" for one that `UNITS` lacks."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
        return {}
    unit_of = {argument: unit for unit, arguments in UNITS.items() for argument in arguments.split()}
    numeric = [
        p.name for p in inspect.signature(value).parameters.values() if re.search(r"\b(int|float)\b", str(p.annotation))
    ]
    return {argument: unit_of.get(f"{name}.{argument}", unit_of.get(argument, "")) for argument in numeric}


def methods(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public methods that a class defines itself, with their names."""
    if inspect.isclass(value):
        for name, method in vars(value).items():
            function = getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(function):
                yield name, function


def raises(value: Any) -> bool:
    """Return whether the body of a function has a `raise` or calls a check; then its docstring names the errors."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    calls = [getattr(n.func, "id", getattr(n.func, "attr", "")) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree)) or any(
        name.lstrip("_").startswith("check_") for name in calls
    )


def body() -> str:
    """Return the page's HTML: a search, and a section per name under its module."""
    made = entries()
    parts = [
        '<p><a href="index.html">All notebooks and explorers</a></p><main><h1>Search and API reference</h1>',
        '<p><label for="search">Search guides, questions, names, arguments and docstrings</label>'
        '<input id="search" type="search" autocomplete="off"> <small id="found"></small></p>',
        '<div class="module"><h2>Guides</h2>',
        *guides(),
        "</div><p>Shapes: N patches, M merged tokens, L prompt tokens, D width.</p>",
    ]
    for module, what in PUBLIC.items():
        parts.append(f'<div class="module"><h2 id="{module}">{module}</h2><p>{what}</p>')
        parts += [section(entry) for entry in made if entry.module == module]
        parts.append("</div>")
    return "\n".join([*parts, "</main>", SEARCH])


def guides() -> Iterator[str]:
    """Yield a section for each heading of docs/*.md; its text is hidden, but the search finds it."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        for part in re.split(r"^#{1,3} (?=[A-Z\d])", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
            title, _, text = part.replace("`", "").partition("\n")
            place = f"docs/{path.stem}.html#{title.replace(' ', '-')}"
            if number := re.match(r"\d+(?=\.)", title):
                place = f"docs/question-{number[0]}.html"
            said = f'<h3><a href="{html.escape(place)}">{html.escape(title)}</a></h3>'
            yield f'<section class="entry">{said}<div hidden>{html.escape(text)}</div></section>'


def section(entry: Entry) -> str:
    """Return the section of a name: signature, docstring, and links to its source, its test and a notebook."""
    place = f"#L-{entry.line}" if entry.line else ""
    shown = f"{'used' if entry.is_shown else 'explained'} in notebook {entry.notebook[:2]}"
    links = [(f"files/{entry.source}.html{place}", entry.source), (f"files/{entry.test}.html", entry.test)]
    links.append((f"notebooks/{entry.notebook}.html", shown))
    where = " · ".join(f'<a href="{address}">{html.escape(text)}</a>' for address, text in links)
    return (
        f'<section class="entry" id="{entry.anchor}"><h3>{entry.name}</h3><pre>{html.escape(entry.signature)}</pre>'
        f'<div class="doc">{html.escape(entry.doc)}</div><small>{where}</small></section>'
    )
