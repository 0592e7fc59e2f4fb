"""The prose of the repository, in blocks: Markdown, docstrings, comments and longer strings. Code is left out."""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md", "data/configs/README.md", *PAGES)
ROOMS = ("refvl", "benchmarks", "data/training")  # folders of Python files
LIST = re.compile(r"\A(?:#+|[-*+>]|\d+\.) +")
DIRECTIVE = re.compile(r"# ?(?:type:|noqa|fmt:|pragma|mypy:|ruff:|!|%%)")
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_\[]*(?:[A-Z0-9~]|(?:vLLM|transformers|torch|refvl)\b|[\w, ]+: ))")
ALIGNED = re.compile(r"\S {2,}\S")  # a line of a table in a docstring
NOT_AN_END = re.compile(r"(?:\b(?:e\.g|i\.e|vs|cf|etc|[Nn]o|[Ff]ig|eq|approx)|\b[A-Z]|\.\.)\.$")
WORD = re.compile(r"[A-Za-z~][A-Za-z'\-]*")


class Block(NamedTuple):
    """A paragraph, list item, heading, table row, docstring paragraph, comment or string."""

    file: str
    line: int
    text: str
    is_table: bool = False


def markdown_blocks(file: str, lines: Iterable[str], first: int = 1) -> Iterator[Block]:
    """Yield the blocks of Markdown without code and doctests; a line with aligned columns is a table row."""
    fenced, found, start = False, list[str](), first
    for number, line in enumerate(lines, first):
        bare = line.strip()
        is_fence, is_table = bare.startswith(("```", "~~~")), bare.startswith("|") or bool(ALIGNED.search(bare))
        is_new = is_fence or fenced or is_table or not bare or LIST.match(bare) or bare.startswith((">>>", "..."))
        if is_new and found:
            yield Block(file, start, "\n".join(found))
            found = []
        fenced ^= is_fence
        is_code = fenced or is_fence or not bare or bare.startswith((">>>", "...", "<!--"))
        if is_table and not is_code:
            yield Block(file, number, bare, is_table=True)
        elif not is_code and (found or is_table or not line.startswith("    ")):
            start = start if found else number
            found.append(LIST.sub("", bare, count=1) if not found else bare)
    if found:
        yield Block(file, start, "\n".join(found))


def doc_blocks() -> Iterator[Block]:
    for name in DOCS:
        yield from markdown_blocks(name, (ROOT / name).read_text().splitlines())


def notebook_blocks() -> Iterator[Block]:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield from markdown_blocks(f"notebooks/{path.name}", "".join(cell["source"]).splitlines())


def python_blocks() -> Iterator[Block]:
    """Yield docstrings by paragraph and comments; of the library also strings of three words or more (messages)."""
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        source, file = path.read_text(), str(path.relative_to(ROOT))
        nodes = list(ast.walk(ast.parse(source)))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr) and _is_text(node.value)]
        for node in docstrings:
            lines = node.value.splitlines()
            indent = " " * min((len(t) - len(t.lstrip()) for t in lines[1:] if t.strip()), default=0)
            yield from markdown_blocks(file, [t.removeprefix(indent) for t in lines], node.lineno)
        for node in nodes:
            is_prose = _is_text(node) and node.value.count(" ") >= 2 and not re.search(r"[;{] *\n", node.value)
            if is_prose and node not in docstrings and file.startswith("refvl"):  # others are questions and JSON keys
                yield Block(file, node.lineno, node.value)
        yield from _comments(file, source)


def _is_text(node) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _comments(file: str, source: str) -> Iterator[Block]:
    """Yield trailing comments one by one, and neighbouring lines of comments as one block."""
    rows, found = source.splitlines(), list[tuple[int, str]]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        (row, column), text = token.start, token.string.lstrip("# ")
        if found and (row != found[-1][0] + 1 or rows[row - 1][:column].strip()):
            yield Block(file, found[0][0], "\n".join(t for _, t in found))
            found = []
        found.append((row if not rows[row - 1][:column].strip() else -9, text))
    if found:
        yield Block(file, found[0][0], "\n".join(t for _, t in found))


def script_blocks() -> Iterator[Block]:
    """Yield comments and strings of three words or more of the explorers' JavaScript."""
    literal = re.compile(r"""//[^\n]*|"(?:[^"\\\n]|\\.)*"|`(?:[^`\\]|\\.)*`""")
    for path in sorted((ROOT / "refvl" / "viz").rglob("*.js")):
        source = path.read_text()
        for match in literal.finditer(source):
            text = re.sub(r"\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", "~", match[0])
            if match[0].startswith("//") or (text.count(" ") >= 2 and "{" not in text):  # no styles
                yield Block(str(path.relative_to(ROOT)), source.count("\n", 0, match.start()) + 1, text.strip('/"` '))


def without_code(text: str) -> str:
    """Leave out code, math, links' targets and addresses."""
    text = re.sub(r"``[^`]+``|`[^`]*`|\$\$.+?\$\$|\$[^$\n]*\$|\{[^{}]*\}", "~", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)|<[^<>]+>|\bhttps?://\S+|\b[\w/.-]+/[\w/.-]+\.\w+", "", text)
    return text


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a block."""
    text, start = re.sub(r"\s+", " ", without_code(text)), 0
    for end in END.finditer(text):
        if not NOT_AN_END.search(text[start : end.start()]):
            yield text[start : end.end()].strip()
            start = end.end()
    yield text[start:].strip()
