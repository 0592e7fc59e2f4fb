"""Chat templates in checkpoint folders are untrusted programs, so they are rendered under limits.

    is_plain(template)   yes: transformers renders it in this process, as usual
                         no:  `render_in_child` renders each prompt under limits on CPU time, memory and characters

The work of a plain template is proportional to the size of the request. It loops over the messages and their parts, and
stores only numbers and parts of the request. The templates of the released families meet this condition. Other
templates may also be harmless, but only limits can guarantee that. Examples of harmful constructs are `'a' * 10**10`, a
nested loop over all messages, and a string that is doubled 40 times.
"""

import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes

SECONDS = 2  # the limit of CPU time for a prompt
PATIENCE = 60  # the limit of wall-clock time in seconds, for a busy machine
MEMORY = 2**28  # the limit of address space in bytes, in addition to the process's own
CHARACTERS = 2**23  # the maximum length of a rendered prompt
WHOLE = {"messages", "tools", "documents"}  # names of the request's parts in transformers
METHODS = {"split", "strip", "lstrip", "rstrip", "startswith", "endswith", "get"}  # none of these makes a string longer
FILTERS = {"trim", "first", "last", "list", "default", "length", "count", "tojson", "string"}
PLAIN = (
    nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem, nodes.Slice,
    nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.Test, nodes.If, nodes.Filter,
    nodes.Call, nodes.Keyword, nodes.For, nodes.Assign, nodes.Add, nodes.Sub, nodes.Neg, nodes.Concat, nodes.Continue,
    nodes.Break, nodes.List, nodes.Tuple,
)  # fmt: skip
LONGEST = 2**14  # the maximum number of characters of a plain template


class Refused(Exception):
    """A construct whose work or text may grow faster than the size of the request."""


def is_plain(template: str) -> bool:
    """Return whether a template's work is proportional to the request; also False if the template cannot be parsed."""
    if len(template) > LONGEST:
        return False
    try:
        tree = jinja2.Environment(extensions=[jinja2.ext.loopcontrols]).parse(template)
        walk = _Walk(tree)
        for node in tree.body:
            walk.check(node)
    except (jinja2.TemplateError, RecursionError, Refused):
        return False
    return True


class _Walk:
    """A walk over a template's tree; it raises `Refused` for a construct that is not allowed.

    loop: the innermost loop around a node.
    """

    def __init__(self, tree: nodes.Template):
        kept: list[Any] = [(node.target, node.node) for node in tree.find_all(nodes.Assign)]
        self.assigned = {target.name for target, _ in kept if isinstance(target, (nodes.Name, nodes.NSRef))}
        self.namespaces = {
            target.name: value for target, value in kept if isinstance(target, nodes.Name) and _is_namespace(value)
        }
        values = [(target.attr, value) for target, value in kept if isinstance(target, nodes.NSRef)]
        values += [(pair.key, pair.value) for call in self.namespaces.values() for pair in call.kwargs]
        others = {target.name for target, value in kept if isinstance(target, nodes.Name) and not _is_number(value)}
        numbers = self.assigned - others
        self.texts = {  # attributes of nodes that may contain text
            attr
            for attr, value in values
            if not (_is_number(value) or (isinstance(value, nodes.Name) and value.name in numbers))
        }
        self.loop_of = dict[str, nodes.For | None]()  # name -> the loop in which it is assigned

    def check(self, node: nodes.Node, loop: nodes.For | None = None) -> None:
        """Check a node and all nodes below it."""
        _require(isinstance(node, PLAIN))
        match node:
            case nodes.For():
                self._check_loop(node, loop)
            case nodes.List() | nodes.Tuple():
                _require(all(isinstance(item, nodes.Const) for item in node.items))
            case nodes.Filter():
                _require(node.name in FILTERS)
            case nodes.Call():
                is_method = isinstance(node.node, nodes.Getattr) and node.node.attr in METHODS
                _require(is_method or _is_namespace(node) or _is_named(node.node, "raise_exception"))
            case nodes.Assign():
                self._check_assignment(node, loop)
        if _spells(node):
            _require(sum(map(_spells, _below(node))) == 1)  # each level would double the backslashes of the inner one
        if loop is not None:
            is_read = isinstance(node, (nodes.Output, nodes.Assign, nodes.Filter, nodes.Call)) and not _is_count(node)
            operands = [node.expr, *(operand.expr for operand in node.ops)] if isinstance(node, nodes.Compare) else []
            for read in [node] * is_read + [operand for operand in operands if not _is_role(operand)]:
                self._check_texts(read, loop)
        for child in node.iter_child_nodes():
            if isinstance(child, nodes.Name) and child.ctx == "load" and child.name in self.namespaces:
                _require(isinstance(node, nodes.Getattr))  # nested namespaces would be written many times
            self.check(child, node if isinstance(node, nodes.For) and child is not node.iter else loop)

    def _check_loop(self, node: nodes.For, loop: Any) -> None:
        """Require that a loop iterates over the messages or, inside such a loop, over a part of the current message."""
        root: Any = node.iter
        target: Any = node.target
        while isinstance(root, (nodes.Getattr, nodes.Getitem)):
            root = root.node
        _require(isinstance(root, nodes.Name) and isinstance(target, nodes.Name) and not node.recursive)
        is_whole = root.name in WHOLE or self.loop_of.get(root.name, loop) is None
        _require(is_whole if loop is None else root.name == loop.target.name)
        _require(target.name not in {*WHOLE, *self.assigned})
        self.loop_of[target.name] = node  # a later loop may reuse the name

    def _check_assignment(self, node: nodes.Assign, loop: nodes.For | None) -> None:
        """Require that the value is a number, a part of the request, or one stored text plus such parts."""
        _require(isinstance(node.target, (nodes.Name, nodes.NSRef)) and not any(map(_spells, _below(node.node))))
        if not all(_is_number(part) for part in _below(node.node) if isinstance(part, nodes.Add)):
            _require(sum(name in self.assigned for name, _ in _texts(node)) <= 1)  # x + x would double
        if isinstance(node.target, nodes.Name):
            name = node.target.name
            _require(name not in WHOLE and self.loop_of.setdefault(name, loop) is loop)

    def _check_texts(self, node: nodes.Node, loop: nodes.For) -> None:
        """Require that a loop reads, writes and stores only parts of its current item, never the whole request."""
        for name, attr in _texts(node):
            if name in self.namespaces:
                _require(attr not in self.texts)
            else:
                _require(name not in WHOLE and self.loop_of.get(name, loop) is loop)


def _require(condition: bool) -> None:
    if not condition:
        raise Refused


def _below(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _below(child)


def _texts(node: nodes.Node, attr: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names whose values may occur in a node's value, each with the attribute that is read."""
    if isinstance(node, nodes.Name):
        yield node.name, attr
    elif isinstance(node, nodes.CondExpr):
        yield from _texts(node.expr1)
        yield from _texts(node.expr2 or nodes.Const(""))
    elif not (isinstance(node, (nodes.Compare, nodes.Test, nodes.Not, nodes.Sub)) or _is_count(node)):
        for child in [node.node] if isinstance(node, nodes.Assign) else node.iter_child_nodes():
            yield from _texts(child, node.attr if isinstance(node, nodes.Getattr) else "")


def _is_named(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_namespace(node: nodes.Node) -> bool:
    is_call = isinstance(node, nodes.Call) and _is_named(node.node, "namespace")
    return is_call and not (node.args or node.dyn_args or node.dyn_kwargs)  # type: ignore[attr-defined]  # of calls


def _is_count(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Filter) and node.name in ("length", "count")


def _is_role(node: nodes.Node) -> bool:
    is_item = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return is_item or (isinstance(node, nodes.Getattr) and node.attr == "role")


def _is_number(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Add):
        return any(
            isinstance(side, nodes.Const) and not isinstance(side.value, str) for side in (node.left, node.right)
        )
    return isinstance(node, (nodes.Const, nodes.Sub))


def _spells(node: nodes.Node) -> bool:
    """Return whether a node writes a structure as text."""
    return isinstance(node, nodes.Concat) or (isinstance(node, nodes.Filter) and node.name in ("tojson", "string"))


def render_in_child(render: Callable[..., str], *args: Any, **options: Any) -> str:
    """Return `render(...)`, called in a forked child process whose time, memory and output are limited.

    Raises ValueError with the reason. The child process runs only the template and exits without any cleanup.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the child does not have
        child = os.fork()
    if child == 0:
        _render_and_exit(write, lambda: render(*args, **options))
    os.close(write)
    try:
        said = _read(read, 4 * CHARACTERS + 1)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if said[:1] == b"+" and len(said) <= 4 * CHARACTERS:
        return said[1:].decode("utf-8", "surrogatepass")
    if said[:1] == b"-":
        raise ValueError(said[1:].decode("utf-8", "replace"))
    raise ValueError(f"rendering takes more than {SECONDS} s, {MEMORY >> 20} MiB or {CHARACTERS:,} characters")


def _render_and_exit(write: int, render: Callable[[], str]) -> None:
    """Render in the child process, write the result into the pipe, and exit."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        if os.path.exists("/proc/self/statm"):
            with open("/proc/self/statm") as file:
                held = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        try:
            said = b"+" + render().encode("utf-8", "surrogatepass")
        except MemoryError:
            said = b""
        except Exception as error:
            said = f"-{type(error).__name__}: {str(error)[:400]}".encode("utf-8", "replace")
        for start in range(0, len(said), 2**16):
            os.write(write, said[start : start + 2**16])
    finally:
        os._exit(0)


def _read(pipe: int, most: int) -> bytes:
    """Return the child's output until it ends, up to `most` bytes; return nothing if it takes too long."""
    said, end = bytearray(), time.monotonic() + PATIENCE
    while len(said) < most:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return b""
        if not (piece := os.read(pipe, 2**16)):
            break
        said += piece
    return bytes(said)
