"""README.md, CONTRIBUTING.md and docs/ tell the truth. Oracles: files, the Makefile, the help, signatures."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
from pathlib import Path

import heads
import pytest

import refvl

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXT = "\n".join(PAGES.values())
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.S | re.M)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", TEXT + CONTRIBUTING, flags=re.S | re.M)
MAP = (ROOT / "docs/map.md").read_text()
TREE = next(body for body in re.findall(r"^```\n(.*?)^```", MAP, re.S | re.M) if body.startswith("refvl/"))
COMMANDS = [
    command
    for language, body in BLOCKS
    if language == "bash"
    for line in body.splitlines()
    if (command := shlex.split(line, comments=True))
]
PYTHON = [body for language, body in BLOCKS if language == "python"]
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))


def tree_paths() -> list[str]:
    """The paths of the tree: two spaces of indentation per folder."""
    stack, paths = [], []
    for line in TREE.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        stack = [*stack[:depth], line.split()[0]]
        paths.append("".join(stack))
    return paths


def is_repository_path(word: str) -> bool:
    """A word that means a file here: its first part is a name at the top of the repository."""
    first = word.split("/")[0]
    is_path = re.fullmatch(r"[\w./*-]+", word) and first not in ("", ".", "outputs", ".venv")
    return bool(is_path) and (ROOT / first).exists()


def test_tree_names_what_exists():
    paths = tree_paths()
    assert len(paths) > 50 and [path for path in paths if not (ROOT / path).exists()] == []
    assert [path for path in paths if (ROOT / path).is_dir() != path.endswith("/")] == []


def test_tree_forgets_no_file_of_the_library():
    named = set(tree_paths())
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "refvl").rglob("*.py") if not p.name.startswith("__")}
    assert {f for f in files if f not in named and not f.startswith("refvl/viz/")} == set()


def test_the_course_has_a_row_with_minutes_and_a_link_for_every_notebook():
    """Oracle: the first cell of each notebook; a difference of ten minutes does not matter."""
    rows = re.findall(r"^\| \[`(notebooks/\w+\.ipynb)`\]\((\S+)\) \| (\d+) \|", README, re.M)
    assert [path for path, _, _ in rows] == [f"notebooks/{path.name}" for path in heads.chapters()[:-1]]
    for path, link, minutes in rows:
        first = "".join(json.loads((ROOT / path).read_text())["cells"][0]["source"])
        said = re.search(r"^\*\*Time\.\*\* (\d+) minutes", first, re.M)
        assert link == path and abs(int(minutes) - int(said[1])) <= 10, f"{path}: {said[0]}"


def test_links_and_pictures_lead_somewhere():
    links = [
        (path, target)
        for path, text in PAGES.items()
        for target in re.findall(r"\]\(([^)]+)\)", text)
        if not re.match(r"https?:|#", target)
    ]
    assert links and [target for path, target in links if not target_of(path, target).exists()] == []


def target_of(page: Path, link: str) -> Path:
    """On GitHub, `../../actions/workflows/NAME` beside the README is the page, or the badge, of a workflow."""
    workflow = re.fullmatch(r"\.\./\.\./actions/workflows/([\w.]+?)(/badge\.svg)?", link)
    return ROOT / ".github/workflows" / workflow[1] if workflow else page.parent / link


def test_paths_in_prose_exist():
    words = re.findall(r"`([^`\n]+)`", PROSE)
    words = [word for word in words if is_repository_path(word) or re.fullmatch(r"\S+\.(ipynb|py|md)", word)]
    assert words and [w for w in words if not list(ROOT.glob(w))] == []


def test_the_walk_through_names_one_file_per_stage():
    """A family's file in each stage that it needs, the table of families and both contract suites."""
    walk = re.search(r"^## Add a family\n(.*?)^## ", CONTRIBUTING, re.S | re.M)[1]
    stages = {f"refvl/{stage}/step3_vl.py" for stage in ("processors", "encoders", "language")}
    suites = {f"tests/contracts/test_{kind}.py" for kind in ("encoders", "processors")}
    assert stages | suites | {"refvl/families.py", "CHANGELOG.md"} <= set(re.findall(r"`([\w./*-]+)`", walk))


def test_make_targets_exist():
    named = re.findall(r"`make ([a-z-]+)", PROSE) + [words[1] for words in COMMANDS if words[0] == "make"]
    named += re.findall(r"^make ([a-z-]+)", CONTRIBUTING, re.M)
    assert {"demo", "test", "test-slow", "notebooks"} <= set(named) <= TARGETS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_exist(words, monkeypatch, shell):
    monkeypatch.setenv("COLUMNS", "200")
    match words:
        case ["make", target]:
            assert target in TARGETS
        case ["python", "-m", "refvl", command, *arguments] | ["torchrun", _, _, "-m", "refvl", command, *arguments]:
            check_command_line(command, arguments, shell)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None
        case ["pip", "install", *_, project]:
            extra = re.fullmatch(r"\.\[(.*)\]", project).group(1)
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert extra in project["optional-dependencies"]
        case ["source", script]:
            assert script == ".venv/bin/activate"
        case _:
            pytest.fail(f"README: no check for the command {' '.join(words)!r}")
    assert [w for w in words if "/" in w and is_repository_path(w) and not (ROOT / w).exists()] == []


def check_command_line(command: str, arguments: list[str], shell) -> None:
    """The command and its options stand in the help that the command line prints of itself."""
    status, shown, _ = shell(command, "--help")
    assert not status
    assert {a for a in arguments if a.startswith("--") and not re.search(rf"{a}\b", shown)} == set()


ANSWERED = re.findall(r"^python -m refvl (chat (?:data/|tiny-).*?) +# (.+)$", TEXT, re.M)


@pytest.mark.parametrize(("command", "answer"), ANSWERED, ids=[answer for _, answer in ANSWERED])
def test_answers_beside_commands_are_the_models(command, answer, monkeypatch, shell):
    """The comment behind a `chat` command is what the shipped model says."""
    monkeypatch.chdir(ROOT)
    status, said, _ = shell(*shlex.split(command), "--device", "cpu")
    assert not status and said.strip() == answer


@pytest.mark.parametrize("source", PYTHON)
def test_python_blocks_use_names_that_exist(source):
    """Imports work; calls of refvl's functions, and of methods of the model, bind to their signatures."""
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), "README.md", "exec"), names := {"model": refvl.VLM})
    bound = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if owner in names:
                self = [None] if inspect.isclass(names[owner]) else []
                keywords = {keyword.arg: None for keyword in node.keywords}
                bound.append(inspect.signature(getattr(names[owner], name)).bind(*self, *node.args, **keywords))
    assert bound, "no call of refvl's: what is the block for?"


@pytest.mark.thorough
def test_the_python_of_the_readme_runs(monkeypatch):
    """Every block, in the root of a clone. Oracle: the shapes that its comments give."""
    monkeypatch.chdir(ROOT)
    names = dict[str, object]()
    for source in re.findall(r"^```python\n(.*?)^```", README, re.S | re.M):
        exec(compile(source, "README.md", "exec"), names)
    assert names["embeddings"].ndim == 4 and [x.ndim for x in names["states"]] == [4, 4]
    assert names["states"][0].shape[-1] == names["tower"].encoder.config.hidden_size
