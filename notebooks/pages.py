"""The course as self-contained pages: an index, every executed notebook, every explorer, and the files they name.

    notebooks/*.ipynb -> notebooks/*.html     outputs as they were saved, explorers live, one file each
    GALLERY           -> explorers/*.html     and *.png, the image shown with a link to each
    SHIPPED           -> journeys/*.html      one answer of each model, line by line
    LIVE              -> live*.html           a model that runs in the page
    docs/*.md         -> docs/*.html          the guides, and a page for each question
    reference.py      -> reference.html       every public name, and one search for names and guides
    STATIONS          -> index.html           the journey from pixels to an answer, and where to read on
    STILL             -> og.png               the image shown with a link to the site
    *.py, *.md        -> files/*.html         the files that the stations and notebooks link to

`make site` checks all pages and writes them to site/: no link is dead, no page loads anything, every image has alt
text, and sizes stay below MAX_NOTEBOOK, MAX_EXPLORER, MAX_JOURNEY and MAX_LIVE.
"""

import base64
import html
import io
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import nbformat
import reference
import typer
from heads import in_order
from PIL import Image
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from refvl.study.follow import follow
from refvl.viz.explorers import host
from refvl.viz.explorers import page as page_of_explorers
from refvl.viz.explorers.gallery import GALLERY, small_model
from refvl.viz.journey import SHIPPED, TITLE
from refvl.viz.journey import page as page_of_journey
from refvl.viz.live.page import ALT, LIVE, SITE, STILL
from refvl.viz.live.page import page as page_of_live

ROOT, STYLE = Path(__file__).resolve().parents[1], Path(__file__).with_suffix(".css")
MAX_NOTEBOOK, MAX_EXPLORER, MAX_JOURNEY, MAX_LIVE = 600_000, 220_000, 600_000, 3_000_000  # bytes
MIN_WORDS = 3  # in an alt text
STATE, VIEW = "application/vnd.jupyter.widget-state+json", "application/vnd.jupyter.widget-view+json"
FORMULA = re.compile(r"(?<![\w$\\])\$([^$\n]+)\$(?![\w$])")
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
BADGE = re.compile(r"!\[([^\]]*)\]\(https:[^)]*\)")
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.S)


@dataclass(frozen=True, slots=True)
class Station:
    """A stop on the journey: a description, and the notebooks, files and explorers that show
    it.

    stage: the number of the stage of "One image, line by line" that shows the stop.
    """

    name: str
    what: str
    notebooks: tuple[str, ...]
    files: tuple[str, ...]
    explorers: tuple[str, ...] = ()
    stage: int = 1


INDEX = tomllib.loads((ROOT / "notebooks/pages.toml").read_text(encoding="utf-8"))
STATIONS = [Station(**values) for values in INDEX["stations"]]
EXPLORERS = INDEX["explorers"]
# reader -> goal, and pages in order, each given as a notebook's number, an explorer's name, or an address
READERS = INDEX["readers"]

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' blob:; \
style-src 'unsafe-inline'; img-src data: blob:"><link rel="icon" href="data:,">
<title>{title}</title><style>{style}</style></head>
<body>{body}</body></html>
"""


def build(out: Path, base: str = "") -> dict[str, int]:
    """Write the site into `out`; return the size of each page by path. Raise ValueError if the site is broken.

    base: the address of the published site, which link previews need. Notebooks are not run: if they changed, run `make
    notebooks` first.
    """
    paths = in_order((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    pages = {f"notebooks/{path.stem}.html": notebook_page(nbformat.read(path, 4), path.parent) for path in paths}
    made = {name: [GALLERY[view]() for view in (name, *views)] for name, (_, *views) in EXPLORERS.items()}
    pages |= {f"explorers/{name}.html": explorer_page(name, made, paths) for name in EXPLORERS}
    pages |= {f"journeys/{name}.html": journey_page(name) for name in SHIPPED}
    pages |= live_pages() | guides()
    pages["reference.html"] = document("refvl: search and API reference", reference.body(), style=reference.LOOK)
    pages["index.html"] = index_page(paths, made)
    named = sorted(set(re.findall(r'href="(?:\.\./)*files/([^"#]+)\.html', "".join(pages.values()))))
    pages |= {f"files/{name}.html": file_page(name) for name in named}
    stills = {f"explorers/{name}.png": explorers[0].still() for name, explorers in made.items()}
    stills["og.png"] = STILL.read_bytes()
    for name, text in pages.items():
        own = name.replace(".html", ".png")
        pages[name] = with_preview(text, base, own if own in stills else "og.png")
    if problems := list(check(pages)):
        raise ValueError("the site is broken:\n" + "\n".join(problems))
    for name, content in ({name: text.encode() for name, text in pages.items()} | stills).items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return {name: len(text.encode()) for name, text in pages.items()}


def document(title: str, body: str, *, style: str = "") -> str:
    """Return a whole page: `body` is HTML, and `style` is CSS in addition to the site's own."""
    return PAGE.format(title=html.escape(title), body=body, style=STYLE.read_text() + style)


def explorer_page(name: str, made: dict[str, list], notebooks: list[Path]) -> str:
    """Return the page `name`, with one explorer or several, and with links to its neighbours,
    its notebook and the index.
    """
    names = list(made)
    place = names.index(name)
    [notebook] = [path for path in notebooks if path.name.startswith(EXPLORERS[name][0])]
    before, after = names[place - 1], names[(place + 1) % len(names)]
    links = [
        (f"{before}.html", f"← {made[before][0].title}"),
        (f"../notebooks/{notebook.stem}.html", f"Notebook: {title_of(nbformat.read(notebook, as_version=4))}"),
        ("../index.html", "All notebooks and explorers"),
        (f"{after}.html", f"{made[after][0].title} →"),
    ]
    foot = "".join(f'<a href="{address}">{html.escape(text)}</a>' for address, text in links)
    return page_of_explorers(*made[name], foot=f"<nav>{foot}</nav>")


def journey_page(name: str) -> str:
    """Follow an answer of a shipped model and return its page, with links to the pages of the other models."""
    asked = SHIPPED[name]
    journey = follow(small_model(asked.checkpoint), asked.question, **asked.options)
    links = {other.name: "" if key == name else f"{key}.html" for key, other in SHIPPED.items()}
    files = "../files/refvl/{}.html"
    return page_of_journey(journey, title=asked.checkpoint, links=links, index="../index.html", files=files)


def live_pages() -> dict[str, str]:
    """Return the page of each model that runs in the browser, with links to the others and to the index."""

    def others(checkpoint: str) -> dict[str, str]:
        return {f"the same with {LIVE[name]}": SITE[name] for name in LIVE if name != checkpoint}

    return {SITE[name]: page_of_live(name, index="index.html", links=others(name)) for name in LIVE}


def guides() -> dict[str, str]:
    """Return the pages of docs/*.md and of each question, by address."""

    def embedded(match: re.Match) -> str:
        return small((ROOT / "docs" / match[2]).read_bytes(), match[1], side=1200)

    texts = dict[str, str]()
    for path in (ROOT / "docs").glob("*.md"):
        texts[path.stem] = re.sub(r"!\[(.*?)\]\((.*?)\)", embedded, path.read_text(encoding="utf-8"), flags=re.S)
    for question in re.split(r"^## (?=\d)", texts["questions"], flags=re.M)[1:]:
        texts[f"question-{question.split('.')[0]}"] = f"# {question}"
    cell = nbformat.v4.new_markdown_cell
    back = cell('<a href="../index.html">Index</a> · <a href="../reference.html">Search</a>')
    made = {f"docs/{stem}.html": nbformat.v4.new_notebook(cells=[cell(text), back]) for stem, text in texts.items()}
    return {address: notebook_page(notebook, ROOT / "docs") for address, notebook in made.items()}


def notebook_page(notebook: Any, folder: Path) -> str:
    """Return an executed notebook of `folder` as one page: explorers run, images have alt text, formulas are text."""
    prepare(notebook, folder)
    body, _ = exporter().from_notebook_node(notebook)
    return document(title_of(notebook), f"<main>{body}</main>", style=highlighting())


@cache
def exporter() -> Any:
    """Return one exporter for all notebooks, so templates are compiled once; our own notebooks need no sanitising."""
    from nbconvert import HTMLExporter

    return HTMLExporter(template_name="basic", filters={"clean_html": lambda text: text})


@cache
def highlighting() -> str:
    """Return the CSS for highlighted code, light and dark."""
    light, dark = (HtmlFormatter(style=s).get_style_defs(".highlight") for s in ("friendly", "github-dark"))
    return f"{light} @media (prefers-color-scheme: dark) {{ {dark} }} .highlight {{ background: none }}"


def prepare(notebook: Any, folder: Path) -> None:
    """Change a notebook in place into a form that a page can show; see `notebook_page`."""
    notebook.cells = [cell for cell in notebook.cells if "remove-cell" not in cell.metadata.get("tags", ())]
    models = notebook.metadata.pop("widgets", {}).get(STATE, {}).get("state", {})
    said = title_of(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            sentence = first_sentence(cell.source)
            said = sentence if len(sentence.split()) >= MIN_WORDS else said
            cell.source = as_page(cell.source, folder)
        for output in cell.get("outputs", []):
            if "data" in output:
                show_output(output, models, said)


def show_output(output: Any, models: dict, said: str) -> None:
    """Replace a widget with a live explorer, and other images with WebP; `said` is the alt text if there is none."""
    data, metadata = output.data, output.setdefault("metadata", {})
    entry = models.get(data.pop(VIEW, {}).get("model_id"))
    if entry and "_esm" in entry["state"]:
        still = lighter(data["image/png"], "image/png")
        output.data = {"text/html": host(entry, text=data["text/plain"], still=still)}
        return
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            alt, width = metadata.get(kind, {}).get("alt") or said, metadata.get(kind, {}).get("width")
            size = f' width="{width}"' if width else ""
            output.data = {"text/html": f'<img alt="{html.escape(alt)}"{size} src="{lighter(data[kind], kind)}">'}


def lighter(encoded: str, kind: str) -> str:
    """Return the `data:` address of an image, as WebP if that is smaller."""
    buffer, raw = io.BytesIO(), base64.b64decode(encoded)
    Image.open(io.BytesIO(raw)).convert("RGB").save(buffer, "webp", quality=82)
    if len(buffer.getvalue()) < len(raw):
        kind, raw = "image/webp", buffer.getvalue()
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def as_page(source: str, folder: Path) -> str:
    """Return Markdown whose links lead to pages, and whose formulas and badges are text; code is unchanged."""
    parts = CODE.split(BADGE.sub(r"\1", source))  # text, code, text, ...
    for i in range(0, len(parts), 2):
        parts[i] = FORMULA.sub(lambda match: formula(match[1]), LINK.sub(lambda m: page_link(m[1], folder), parts[i]))
    return "".join(parts)


def formula(text: str) -> str:
    """Return a formula of letters, digits and signs. Raises ValueError for TeX, which needs a library on the page."""
    if re.search(r"[\\^_{}]", text):
        raise ValueError(f"formula: write ${text}$ in plain text or MathML")
    return f"<i>{text}</i>"


def page_link(target: str, folder: Path) -> str:
    """Return the target of a notebook's link on the site: the page of another notebook or of a file."""
    if target == "index.ipynb":
        return "../index.html"
    if target.endswith(".ipynb"):
        return f"../notebooks/{Path(target).stem}.html"
    if (path := (folder / target).resolve()).parent == ROOT / "docs":
        return f"../docs/{path.stem}.html"
    return f"../files/{path.relative_to(ROOT)}.html"


def file_page(name: str) -> str:
    """Return the page of a file of the repository, with highlighted code."""
    back, lexer = "../" * (name.count("/") + 1), get_lexer_for_filename(name)
    body = highlight((ROOT / name).read_text(encoding="utf-8"), lexer, HtmlFormatter(lineanchors="L"))
    return document(name, f'<p><a href="{back}index.html">Index</a></p><h1>{name}</h1>{body}', style=highlighting())


def title_of(notebook: Any) -> str:
    """Return the title of a notebook: the first line of its first cell, without the heading marker."""
    return notebook.cells[0].source.splitlines()[0].lstrip("# ")


def first_sentence(source: str) -> str:
    """Return the first sentence of prose in a cell, without markup."""
    prose = [line for line in CODE.sub(" ", source).splitlines() if line and line[0] not in "#<|-*>!"]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*_$]", r"\1", " ".join(prose))
    return re.split(r"(?<=[.?!:])\s", plain.strip())[0].rstrip(":")


def with_preview(text: str, base: str, still: str) -> str:
    """Return a page with the metadata for link previews: a title, and the image `still` at `base`."""
    title = re.search(r"<title>(.*?)</title>", text, re.S)
    image = html.escape(f"{base.rstrip('/')}/{still}" if base else still)
    meta = {"og:title": title[1] if title else "refvl", "og:type": "article", "og:image": image}
    tags = "".join(f'<meta property="{name}" content="{value}">' for name, value in meta.items())
    return text.replace("</title>", f"</title>{tags}", 1)


def index_page(paths: list[Path], made: dict[str, list]) -> str:
    """Return the index: the live page, an order for three readers, the journey, the explorers and the notebooks."""
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in paths}
    titles = {f"notebooks/{stem}.html": title_of(notebook) for stem, notebook in notebooks.items()}
    titles |= {f"explorers/{name}.html": explorers[0].title for name, explorers in made.items()}
    titles |= {"live.html": "Broken, and sure: one thing exchanged", "reference.html": "Search and API reference"}
    titles |= {f"journeys/{name}.html": f"{TITLE}: {asked.name}" for name, asked in SHIPPED.items()}
    minutes = {"live.html": 8} | {f"notebooks/{stem}.html": minutes_of(book) for stem, book in notebooks.items()}
    counts = {
        "notebooks that were run": len(notebooks), "explorers": len(made), "models that run in the page": len(LIVE),
        "answers line by line": len(SHIPPED), "hours to read and try": round(sum(minutes.values()) / 60),
    }  # fmt: skip
    lines = "".join(f'<li><a href="journeys/{name}.html">{html.escape(a.name)}</a></li>' for name, a in SHIPPED.items())
    body = [
        "<main class=index><h1>From pixels to an answer</h1><p class=lead>How an image or a video becomes tokens of a "
        "language model, in code that was checked against the released programs.</p>",
        f"{live_item()}<p class=numbers>"
        f"{''.join(f'<span><b>{number}</b> {what}</span>' for what, number in counts.items())}</p>",
        "<h2>Where to start</h2><div class=readers>",
        *(reader_item(name, **reader, titles=titles, minutes=minutes) for name, reader in READERS.items()),
        "</div><h2>The journey</h2><ol class=journey>",
        *(station_item(place, station, titles) for place, station in enumerate(STATIONS, 1)),
        "</ol><h2>Explorers</h2><p>Each asks one question. Nothing is loaded, and every number is refvl's.</p>",
        "<ol class=cards>",
        *(explorer_item(name, explorers[0]) for name, explorers in made.items()),
        "</ol><h2>Notebooks</h2><ol class=cards>",
        *(course_item(stem, notebook, minutes[f"notebooks/{stem}.html"]) for stem, notebook in notebooks.items()),
        f"</ol><h2>{TITLE}</h2><p>The code that ran for one answer, in call order, with the result of each stage.</p>"
        f"<ul>{lines}</ul><h2>Documentation and API</h2>",
        '<p><a href="reference.html">Search</a> the guides and every public name.</p></main>',
    ]
    return document("refvl: from pixels to an answer", "\n".join(body))


def live_item() -> str:
    """Return the section for the live page, which visitors should open first, with a still
    image of that page.
    """
    still = small(STILL.read_bytes(), ALT, side=960)
    names = " ".join(f'<a href="{SITE[name]}">{family}</a>' for name, family in LIVE.items())
    return (
        f'<div class=live><a href="live.html">{still}</a><div>'
        '<h2><a href="live.html">Broken, and sure</a></h2><p>The same picture and the same weights, twice. Row and '
        "column are exchanged, and the model is wrong without a doubt. Break something else: it runs in the page.</p>"
        f"<p><small>{names}</small></p></div></div>"
    )


def reader_item(name: str, wants: str, pages: tuple[str, ...], titles: dict[str, str], minutes: dict[str, int]) -> str:
    """Return a section with the goal of one kind of reader, and this reader's pages in order."""
    addresses = [next(a for a in titles if a == p or re.search(rf"/{p}(_|[.]html)", a)) for p in pages]
    items = "".join(f'<li><a href="{address}">{html.escape(titles[address])}</a></li>' for address in addresses)
    total = sum(minutes.get(address, 5) for address in addresses)
    time = f"{total} minutes" if total < 100 else f"{total / 60:.0f} hours"
    return f"<section><h3>{name}</h3><p>{wants} <small>About {time}.</small></p><ol>{items}</ol></section>"


def station_item(place: int, station: Station, titles: dict[str, str]) -> str:
    """Return a stop of the journey as a list item, with links to its notebooks, explorers and files."""
    links = [(a, titles[a]) for n in station.notebooks for a in titles if a.startswith(f"notebooks/{n}")]
    links += [(f"explorers/{name}.html", f"▶ {titles[f'explorers/{name}.html']}") for name in station.explorers]
    links.append((f"journeys/qwen2_5_vl.html#stage-{station.stage}", "line by line"))
    items = "".join(f'<li><a href="{address}">{html.escape(text)}</a></li>' for address, text in links)
    files = "".join(f'<li><a href="files/refvl/{name}.html">{name}</a></li>' for name in station.files)
    return (
        f"<li><h3>{place} {station.name}</h3><p>{station.what}</p><ul>{items}</ul>"
        f"<details><summary>Files: {len(station.files)}</summary><ul>{files}</ul></details></li>"
    )


def minutes_of(notebook: Any) -> int:
    """Return the minutes that a notebook's first cell states."""
    return int(re.findall(r"[*]{2}Time[.][*]{2} (\d+) minutes", notebook.cells[0].source)[0])


def course_item(stem: str, notebook: Any, minutes: int) -> str:
    """Return a notebook's card: its largest image, and its title, question and time from the first cell."""
    found = re.findall(r"\*\*The question\.\*\* (.*?)(?:\n\n|\Z)", notebook.cells[0].source, re.S)
    question = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", found[0] if found else "")
    return (
        f'<li>{thumbnail(notebook)}<h3><a href="notebooks/{stem}.html">{html.escape(title_of(notebook))}</a></h3>'
        f"<p>{html.escape(question)}</p><p><small>{minutes} minutes</small></p></li>"
    )


def explorer_item(name: str, explorer: Any) -> str:
    """Return an explorer's card: its image, title and question."""
    picture = small(explorer.still(), f"The explorer {explorer.title}")
    link = f'<a href="explorers/{name}.html">{html.escape(explorer.title)}</a>'
    asks = f"<p>{html.escape(explorer.asks)}</p><p><small>with notebook {EXPLORERS[name][0]}</small></p>"
    return f"<li>{picture}<h3>{link}</h3>{asks}</li>"


def thumbnail(notebook: Any) -> str:
    """Return a thumbnail of the largest image among a notebook's outputs."""
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    found = [data[kind] for data in shown for kind in ("image/png", "image/jpeg") if kind in data]
    return (
        small(base64.b64decode(max(found, key=len)), f"A figure of {title_of(notebook)}") if found else "<span></span>"
    )


def small(encoded: bytes, alt: str, side: int = 400) -> str:
    """Return a thumbnail of an image, whose longer side has at most `side` pixels."""
    picture, buffer = Image.open(io.BytesIO(encoded)).convert("RGB"), io.BytesIO()
    picture.thumbnail((side, side))
    picture.save(buffer, "webp", quality=70)
    address = f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f'<img alt="{html.escape(alt)}" src="{address}">'


class Names(HTMLParser):
    """The links of a page, the resources that it loads, and its images without alt text."""

    def __init__(self):
        super().__init__()
        self.links, self.loads, self.ids, self.wordless = list[str](), list[str](), set[str](), 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found["id"]} if found.get("id") else set()
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif address := found.get("src") or (tag == "link" and found.get("href")):
            self.loads.append(address)
        self.wordless += tag == "img" and len((found.get("alt") or "").split()) < MIN_WORDS


def check(pages: dict[str, str]) -> Iterator[str]:
    """Yield every problem as a sentence: dead links, external resources, images without alt text, too many bytes."""
    read = {name: Names() for name in pages}
    for name, text in pages.items():
        read[name].feed(text)
    for name, found in read.items():
        limits = {"explorers": MAX_EXPLORER, "journeys": MAX_JOURNEY, "live": MAX_LIVE}
        limit = next((most for begin, most in limits.items() if name.startswith(begin)), MAX_NOTEBOOK)
        if (size := len(pages[name].encode())) > limit:
            yield f"{name}: {size:,} bytes, allowed are {limit:,}"
        yield from (f"{name}: loads {address[:60]}" for address in found.loads if not address.startswith("data:"))
        if found.wordless:
            yield f"{name}: {found.wordless} images with an alt text of fewer than {MIN_WORDS} words"
        for link in found.links:
            if not re.match(r"https?:|mailto:", link):
                path, _, part = link.partition("#")
                target = str((Path("/") / name).parent.joinpath(unquote(path)).resolve())[1:] if path else name
                places = read[target].ids if target in read else set[str]()
                if target not in read or (part and {part, unquote(part)}.isdisjoint(places)):  # as in browsers
                    yield f"{name}: links {link}, which is not there"


def main(
    out: Annotated[Path, typer.Option(help="folder to write to")] = ROOT / "site",
    base: Annotated[str, typer.Option(help="address of the site, for previews of links to it")] = "",
) -> None:
    """Write the site and print how many bytes each page has."""
    for name, size in build(out, base).items():
        print(f"{size:>9,}  {name}")


if __name__ == "__main__":
    typer.run(main)
