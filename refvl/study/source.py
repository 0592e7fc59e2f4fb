"""A parsed file of the library: its code lines, the lines that only check arguments, its functions, and its statements.

Code lines exclude blank lines, comments and docstrings. All line numbers start at 1.
"""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

_CHECK = re.compile(r"_?check_|_refuse|_misfit|_report")  # functions with these names only check arguments
_NO_CODE = {  # kinds of tokens that are not code
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


class Source:
    """A parsed file of the library. All line numbers start at 1.

    lines: the text of each line. code: the line numbers of all code, without blank lines,
    comments and docstrings. checks: the numbers of code lines that only check arguments: a `raise`,
    an `if` that ends in one, an `except`, a call or a definition of a check function, and all of
    checks.py. docstrings: the line numbers of all docstrings. functions: the node of each function,
    keyed by its first line, including decorators.
    """

    def __init__(self, path: Path):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        self.lines = ["", *text.splitlines()]
        self.docstrings = {line for node in ast.walk(tree) for line in _docstring(node)}
        self.code = _tokens(text) - self.docstrings
        self.checks = self.code & (self.code if path.name.endswith("checks.py") else _checks(tree))
        self.functions = {_first(node): node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._statements = _statements(tree)

    def code_of(self, first: int) -> set[int]:
        """Return the numbers of the code lines of the function that begins at `first`, without decorators."""
        return self.code.intersection(_span(self.functions[first])) if first in self.functions else set()

    def whole(self, events: set[int]) -> frozenset[int]:
        """Extend the executed lines to whole statements, because the interpreter reports only some
        lines of a statement.
        """
        ran = {line for span in self._statements if not events.isdisjoint(span) for line in span}
        after = 0
        for line in sorted(self.code, reverse=True):  # `else:` is not a statement; it counts if the next line runs
            if self.lines[line].strip() in ("else:", "finally:") and after in ran:
                ran.add(line)
            after = line
        return frozenset(ran & self.code)


@cache
def source_of(path: Path) -> Source:
    """Return the parsed file at `path`; each file is parsed only once."""
    return Source(path)


def _docstring(node: ast.AST) -> range:
    """Return the line numbers of a node's docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, kinds) and ast.get_docstring(node) is not None:
        return _span(node.body[0])
    return range(0)


def _tokens(text: str) -> set[int]:
    """Return the numbers of lines with more than a comment."""
    kept = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in _NO_CODE)
    return {line for token in kept for line in range(token.start[0], token.end[0] + 1)}


def _checks(tree: ast.Module) -> set[int]:
    """Return the numbers of lines that only check arguments."""
    found = set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Raise() | ast.ExceptHandler():
                found.update(_span(node))
            case ast.If(body=[*_, ast.Raise() as last]):
                found.update(range(node.lineno, _span(last).stop))
            case ast.FunctionDef(name=name) if _CHECK.match(name):
                found.update(_span(node))
            case ast.Expr(value=ast.Call(func=function)) | ast.Assign(value=ast.Call(func=function)):
                if _CHECK.match(getattr(function, "id", getattr(function, "attr", ""))):
                    found.update(_span(node))
    return found


def _statements(tree: ast.Module) -> list[range]:
    """Return the line numbers of every statement, or only of its head if it has a body."""
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            start, stop = _first(node), _span(node).stop
            if body := getattr(node, "body", None):
                stop = max(node.lineno + 1, _first(body[0]))
            spans.append(range(start, stop))
    return spans


def _span(node: ast.stmt | ast.ExceptHandler) -> range:
    """Return the line numbers of a node, without decorators."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _first(node: ast.stmt | ast.ExceptHandler) -> int:
    """Return the number of a node's first line, including decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
