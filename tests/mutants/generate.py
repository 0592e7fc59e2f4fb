"""Random one-line mutants of the stages and of serving, by cosmic-ray's operators.

    python -m venv /tmp/mutants && /tmp/mutants/bin/pip install cosmic-ray==8.7.0
    /tmp/mutants/bin/python tests/mutants/generate.py TREE OUT.jsonl --count 200 --seed 27

A line of code is drawn first, then an operator, then what it makes of the line: an operator with many replacements is
not drawn more often. Annotations, raised errors, texts and decorators are left alone: tests do not promise them.
"""

import argparse
import ast
import json
import random
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOMS = ("pixels", "processors", "encoders", "positions", "language", "graphs", "serving")
FILES = ("merge.py", "attention.py", "masked_attention.py", "pipeline.py")
# what serving/ holds now, in trees that are older than it
EARLIER = (
    "adapters.py", "handover.py", "parallel.py", "tools/export.py", "tools/images.py", "tools/lock.py",
    "tools/requests.py", "tools/shards.py",
)  # fmt: skip
OPERATORS = [
    name
    for name in cosmic_ray.plugins.operator_names()
    if name.startswith("core/") and not any(word in name for word in ("Decorator", "Exception", "Variable"))
]


def sources(tree: Path) -> list[Path]:
    """The files that mutants are made of."""
    rooms = [path for room in ROOMS for path in (tree / "refvl" / room).glob("*.py")]
    single = [tree / "refvl" / name for name in FILES]
    if not (tree / "refvl/serving").is_dir():
        single += [tree / "refvl" / name for name in EARLIER]
    return sorted(path for path in [*rooms, *single] if path.is_file() and path.name != "__init__.py")


def says_nothing(node: ast.AST) -> bool:
    """Statements that only say something to a person, or stand for what is not run."""
    if isinstance(node, ast.Expr):
        call = node.value
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        return isinstance(call, ast.Constant) or name.split(".")[0] in ("warnings", "logger", "print")
    is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert) or is_typing


def spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """From where to where mutants are not made, as (line, column) pairs."""
    closed: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        if says_nothing(node):
            closed.append(node)
        closed += getattr(node, "decorator_list", [])
        closed += [part for name in ("annotation", "returns") if (part := getattr(node, name, None)) is not None]
        if isinstance(node, ast.ClassDef):
            closed += node.bases
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "Annotated"):
            closed.append(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__"):
            closed.append(node)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in closed]


def possible(source: str) -> dict[int, dict[str, list[int]]]:
    """Line -> operator -> its occurrences in the file, as cosmic-ray counts them."""
    closed = spans(source)
    tree = get_ast(source)
    found: dict[int, dict[str, list[int]]] = {}
    for name in OPERATORS:
        operator, occurrence = cosmic_ray.plugins.get_operator(name)(), 0
        for node in ast_nodes(tree):
            in_signature = node.parent is not None and node.parent.type in ("param", "parameters")
            is_star = in_signature and node.type == "operator"
            for begin, end in operator.mutation_positions(node):
                is_open = not is_star and not any(first <= begin < last for first, last in closed)
                if begin[0] == end[0] and is_open:
                    found.setdefault(begin[0], {}).setdefault(name, []).append(occurrence)
                occurrence += 1
    return found


def kind(operator: str) -> str:
    """core/ReplaceBinaryOperator_Add_Sub -> ReplaceBinaryOperator."""
    return operator.removeprefix("core/").split("_")[0]


def draw(chosen: random.Random, path: Path, line: int, operators: dict[str, list[int]]) -> dict | None:
    """One mutant of a line, or None where what comes out is the same or is not Python."""
    source = path.read_text()
    name = chosen.choice(sorted({kind(operator) for operator in operators}))
    operator = chosen.choice(sorted(operator for operator in operators if kind(operator) == name))
    mutated = mutate_code(source, cosmic_ray.plugins.get_operator(operator)(), chosen.choice(operators[operator]))
    before, after = source.splitlines(), (mutated or source).splitlines()
    changed = [index for index, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
    if len(before) != len(after) or len(changed) != 1:
        return None
    try:
        same = ast.dump(ast.parse(source)) == ast.dump(ast.parse(mutated))
    except SyntaxError:
        return None
    place = changed[0]
    row = {"line": place + 1, "operator": operator.removeprefix("core/")}
    return None if same else row | {"before": before[place].strip(), "after": after[place].strip()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=27)
    options = parser.parse_args()

    lines = [(path, *item) for path in sources(options.tree) for item in sorted(possible(path.read_text()).items())]
    chosen = random.Random(options.seed)
    chosen.shuffle(lines)
    rows: list[dict] = []
    for path, line, operators in lines:
        if len(rows) == options.count:
            break
        if mutant := draw(chosen, path, line, operators):
            rows.append({"file": str(path.relative_to(options.tree))} | mutant)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} mutants of {len(lines)} lines in {options.out}")


if __name__ == "__main__":
    main()
