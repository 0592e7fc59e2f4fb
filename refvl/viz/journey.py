"""One image, line by line, as a page: the code of a real run in call order,
with the results of each stage.

    from refvl.study.follow import follow
    from refvl.viz.journey import page

    journey = follow(model, "What color is the circle?", images=["data/pictures/scene.png"])
    Path("journey.html").write_text(page(journey, title="tiny-qwen2_5_vl"), encoding="utf-8")

The page is one file of plain HTML that loads nothing, so you can read it without a kernel, a
network or scripts.
"""

import html
import io
import keyword
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from refvl.paths import DATA
from refvl.study.follow import SENTENCES, Function, Journey, count_checks, pieces, shapes
from refvl.viz.stage_values import first_picture, values
from refvl.viz.style import filled, variables

TITLE = "One image, line by line"
FILES = Path(__file__)  # the .html, .css and .js files have the same name
SAID = (  # the labels of `Numbers`
    "functions entered", "jumps to a different file", "files", "lines of code in these functions",
    "of these, lines that only check something", "lines of code in these files",
)  # fmt: skip


class Asked(NamedTuple):
    """A question about a file of the repository, for a shipped checkpoint."""

    name: str
    checkpoint: str
    question: str
    options: dict[str, Any]  # images, videos, and other arguments of `VLM.chat`


_SCENE, _CIRCLE = {"images": [DATA / "pictures" / "scene.png"]}, "What color is the circle?"
_CLIP, _WAY = {"videos": [DATA / "clips" / "scene.mp4"]}, "Which way does the circle move?"
SHIPPED = {
    "qwen2_5_vl": Asked("Qwen2.5-VL", "tiny-qwen2_5_vl", _CIRCLE, _SCENE),
    "qwen3_vl": Asked("Qwen3-VL", "tiny-qwen3_vl", _CIRCLE, _SCENE),
    "glm4v": Asked("GLM-4.1V", "tiny-glm4v", _CIRCLE, _SCENE),
    "minicpmv": Asked("MiniCPM-V 4.5", "tiny-minicpmv-4_5", _CIRCLE, _SCENE),
    "minicpmv4_7": Asked("MiniCPM-V 4.7", "tiny-minicpmv-4_7", "Where is the circle?", _SCENE),
    "step3": Asked(
        "Step3-VL", "tiny-step3", "Which letter is in the red box?", {"images": [DATA / "pictures" / "page.png"]}
    ),
    "clip": Asked("Qwen2.5-VL, a video", "tiny-qwen2_5_vl", _WAY, _CLIP),
    "clip_pruned": Asked("Qwen2.5-VL, a video pruned by half", "tiny-qwen2_5_vl", _WAY, _CLIP | {"pruning_rate": 0.5}),
}


def page(
    journey: Journey, *, title: str = "", links: Mapping[str, str] | None = None, index: str = "", files: str = ""
) -> str:
    """Return a journey as one HTML file.

    title: the model's name. links: the addresses of the pages of several journeys by name, "" for
    this journey. index: the address of a page to go back to. files: the address of the page of a
    library file, with {} for the file's name.
    """
    made = shapes(journey)
    stages, number = list[str](), 0
    for place, (stage, functions) in enumerate(journey.stages, 1):
        is_new = all(stage != before for before, _ in journey.stages[: place - 1])
        aside = _made(stage, made.get(stage, ""), values(journey, stage)) if is_new else ""
        articles = [_article(journey, function, number + i, files) for i, function in enumerate(functions)]
        stages.append(_section(place, stage, aside, articles))
        number += len(functions)
    numbers = zip(SAID, journey.numbers, strict=True)
    items = "".join(_menu_item(name, address) for name, address in (links or {}).items())
    return filled(
        FILES.with_suffix(".html"),
        title=html.escape(f"{title}: {TITLE.lower()}" if title else TITLE),
        style=style(),
        back=f'<p class="back"><a href="{index}">All notebooks and explorers</a></p>' if index else "",
        heading=TITLE,
        menu=f'<nav aria-label="Journeys"><ul class="journeys">{items}</ul></nav>' if items else "",
        picture=first_picture(journey),
        question=html.escape(journey.question),
        model=f"<code>{html.escape(title)}</code>" if title else "The model",
        answer=html.escape(journey.trace.text),
        numbers="".join(f"<div><dt>{said}</dt><dd>{value:,}</dd></div>" for said, value in numbers),
        way=_way(journey),
        steps=_steps(journey),
        stages="\n".join(stages),
        script=FILES.with_suffix(".js").read_text(encoding="utf-8"),
    )


def style() -> str:
    """Return the palette of figures and explorers as variables, followed by the style sheet."""
    return variables() + FILES.with_suffix(".css").read_text(encoding="utf-8")


def _menu_item(name: str, address: str) -> str:
    where = f'href="{address}"' if address else 'href="#top" aria-current="page"'
    return f"<li><a {where}>{html.escape(name)}</a></li>"


def _steps(journey: Journey) -> str:
    """Return a navigation bar that stays at the top and links to every stage."""
    items = "".join(
        f'<li><a href="#stage-{place}">{place} {html.escape(stage)}</a></li>'
        for place, (stage, _) in enumerate(journey.stages, 1)
    )
    return f'<nav class="steps" aria-label="Stages"><ol>{items}</ol></nav>'


@dataclass(frozen=True, slots=True)
class _Map:
    """Pixel coordinates in the figure of the path: files from top to bottom,
    functions from left to right.
    """

    files: list[str]
    step: float  # the distance between functions
    left: int = 178
    top: int = 22
    lane: int = 17  # the distance between files

    def x(self, number: float) -> float:
        return self.left + number * self.step

    def y(self, file: str) -> float:
        return self.top + (self.files.index(file) + 0.5) * self.lane


def _way(journey: Journey) -> str:
    """Return a figure with a point per function, which shows the jumps from file to file."""
    count = len(journey.functions)
    at = _Map(list(dict.fromkeys(f.file for f in journey.functions)), max(4.0, 800 / count))
    width, height = at.x(count) + 6, at.top + len(at.files) * at.lane + 6
    parts = [_lane(at, file, width) for file in at.files]
    start = 0
    for place, (_, functions) in enumerate(journey.stages, 1):
        parts.append(f'<path class="stage" d="M{at.x(start):.1f} 6V{height}"/>')
        is_narrow = len(functions) * at.step < 12  # px; then the number is to the left of the line
        where = f'x="{at.x(start) - 3:.1f}" text-anchor="end"' if is_narrow else f'x="{at.x(start) + 3:.1f}"'
        parts.append(f'<text class="stage" {where} y="12">{place}</text>')
        start += len(functions)
    points = [(at.x(i + 0.5), at.y(f.file)) for i, f in enumerate(journey.functions)]
    parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    for i, ((x, y), function) in enumerate(zip(points, journey.functions, strict=True), 1):
        name = f"<title>{i} {html.escape(function.name)}</title>"
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{min(3, at.step * 0.45):.1f}">{name}</circle>'
        parts.append(f'<a href="#f{i}" tabindex="-1">{dot}</a>')
    label = f"{count} functions in {len(at.files)} files, with {journey.numbers.file_changes} jumps between files"
    return (
        f'<figure class="way"><div tabindex="0" role="group" aria-label="The path through the files">'
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}">{"".join(parts)}</svg></div>'
        "<figcaption>The path through the files. Each point is a function; the numbers are stages.</figcaption>"
        "</figure>"
    )


def _lane(at: _Map, file: str, width: float) -> str:
    line = f'<path class="lane" d="M{at.left} {at.y(file)}H{width:.0f}"/>'
    return f'{line}<text class="file" x="{at.left - 8}" y="{at.y(file)}">{html.escape(file)}</text>'


def _made(stage: str, text: str, figures: Sequence[str]) -> str:
    """Return the column with a stage's results."""
    if not text and not figures:
        return ""
    said = f'<p class="made">{html.escape(text)}</p>' if text else ""
    return f'<aside aria-label="Results of the stage {html.escape(stage)}">{said}{"".join(figures)}</aside>'


def _section(place: int, stage: str, aside: str, articles: Sequence[str]) -> str:
    """Return a stage: its explanation, its results, and its functions."""
    name = f"stage-{place}"
    return (
        f'<section id="{name}" aria-labelledby="{name}-name"><header>'
        f'<h2 id="{name}-name" tabindex="-1"><span>{place}</span> {html.escape(stage)}</h2>'
        f"<p>{html.escape(SENTENCES.get(stage, ''))}</p></header>{aside}\n"
        f'<div class="functions">{"".join(articles)}</div></section>'
    )


def _article(journey: Journey, function: Function, number: int, files: str) -> str:
    """Return a function: its location, its first caller, its docstring, and its lines."""
    rows, ran = list[str](), True
    for checks, lines in pieces(function):
        stops = not (checks or lines[0] in function.ran or lines[0] not in function.source.code)
        links = _calls(journey, function, lines)
        rows.append(_fold(function, lines, links) if checks else _line(function, lines[0], links, stops and ran))
        ran = not stops
    name = re.sub(r"([._])", r"\1<wbr>", html.escape(function.name))
    return (
        f'<article id="f{number + 1}"><h3><span>{number + 1}</span> {name}</h3>'
        f'<p class="facts">{_facts(journey, function, files)}</p>{_said(function.docstring)}'
        f'<div class="code">{"".join(rows)}</div></article>\n'
    )


def _facts(journey: Journey, function: Function, files: str) -> str:
    """Return a function's file and line, its first caller, and the number of calls."""
    file = html.escape(function.file)
    facts = [f'<a href="{files.format(file)}">{file}</a>' if files else file, f"line {function.first}"]
    caller = journey.number_of(function.caller)
    if caller is not None and function.caller is not None:
        name = html.escape(journey.functions[caller].name)
        facts.append(f'first called from <a href="#f{caller + 1}">{caller + 1} {name}</a>, line {function.caller[1]}')
    if function.calls > 1:
        facts.append(f"entered {function.calls} times")
    return ", ".join(facts)


def _said(docstring: str) -> str:
    """Return a docstring as HTML: its first paragraph, and the others folded."""
    if not docstring:
        return ""
    first, _, others = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(docstring, quote=False)).partition("\n\n")
    others = "".join(f"<p>{paragraph}</p>" for paragraph in others.split("\n\n") if paragraph)
    more = f'<details class="more"><summary>more</summary>{others}</details>' if others else ""
    return f'<div class="said"><p>{first}</p>{more}</div>'


def _fold(function: Function, lines: range, links: str) -> str:
    """Return lines that only check arguments, folded, and links to functions that they enter."""
    indent = f'style="--i:{_indent(function, lines[0])}"'
    shown = [_line(function, line, "", False) for line in lines if line not in function.source.docstrings]
    below = f'<p class="calls" {indent}>{links}</p>' if links else ""
    summary = f"<summary {indent}>{count_checks(function, lines)}</summary>"
    return f'<details class="fold">{summary}{"".join(shown)}</details>{below}'


def _line(function: Function, line: int, links: str, stops: bool) -> str:
    """Return a line of code as HTML, without its function's margin.

    stops: whether it is the first of some lines that did not run.
    """
    code = coloured(function.path)[line][_margin(function, function.first) :]
    ran = " ran" if line in function.ran else ""
    spoken = '<span class="spoken">did not run: </span>' if stops else ""
    text = f'<span class="c" style="--i:{_indent(function, line)}">{spoken}{code}{links}</span>'
    return f'<div class="l{ran}"><span class="n">{line}</span>{text}</div>'


def _indent(function: Function, line: int) -> int:
    """Return the indentation of a line within its function, in columns."""
    return max(_margin(function, line) - _margin(function, function.first), 0)


def _margin(function: Function, line: int) -> int:
    text = function.source.lines[line]
    return len(text) - len(text.lstrip())


def _calls(journey: Journey, function: Function, lines: range) -> str:
    """Return links to the functions that are first entered from these lines."""
    return "".join(
        f' <a class="call" href="#f{i}">{i} {html.escape(other.name.rpartition(".")[2])}</a>'
        for i, other in enumerate(journey.functions, 1)
        if other.caller and other.caller[0] == function.file and other.caller[1] in lines
    )


@cache
def coloured(path: Path) -> list[str]:
    """Return every line of a file as HTML, by number: keywords are <b>, comments <i>,
    names of functions <em>.
    """
    text = path.read_text(encoding="utf-8")
    marks: dict[int, list[tuple[int, int, str]]] = {}
    for start, stop, tag in _marks(text):
        marks.setdefault(start[0], []).append((start[1], stop[1], tag))
    return [_marked(line, marks.get(number, [])) for number, line in enumerate(["", *text.splitlines()])]


def _marks(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Yield (line, column) of the start and the end of each coloured part, and its tag."""
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start, token.end, "i"
        elif token.type == tokenize.NAME and before in ("def", "class"):
            yield token.start, token.end, "em"
        elif token.type == tokenize.NAME and keyword.iskeyword(token.string):
            yield token.start, token.end, "b"
        before = token.string


def _marked(line: str, marks: Sequence[tuple[int, int, str]]) -> str:
    """Return a line as HTML, with tags around the marked columns."""
    done, at = "", 0
    for start, stop, tag in marks:
        done += f"{html.escape(line[at:start], quote=False)}<{tag}>{html.escape(line[start:stop], quote=False)}</{tag}>"
        at = stop
    return done + html.escape(line[at:], quote=False)
