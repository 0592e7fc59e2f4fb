"""README.md, CONTRIBUTING.md and docs/ tell the truth; `snippets.py` runs what they show.

Oracles: files, the Makefile, pyproject.toml. `PYTHONPATH=notebooks python tests/project/test_readme.py` writes the
list of files in docs/map.md.
"""

import ast
import json
import re
import tomllib
from pathlib import Path

import heads

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXT = "\n".join(PAGES.values())
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", TEXT + CONTRIBUTING, flags=re.S | re.M)
MAP = ROOT / "docs/map.md"
ROOMS = "pixels processors encoders positions language graphs serving study tools viz viz/explorers viz/live"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))


def listed(folder: str) -> str:
    """The first paragraph of the docstring of each file in a folder, as Markdown."""
    docs = {path: ast.get_docstring(ast.parse(path.read_text())) for path in (ROOT / folder).glob("*.py")}
    said = {path: doc.split("\n\n")[0].replace("\n", " ") for path, doc in docs.items()}
    rows = "".join(f"- [{path.name}](../{folder}/{path.name}): {said[path]}\n" for path in sorted(said))
    return f"### {folder}\n\n{rows}\n"


def written_map() -> str:
    """docs/map.md, with the list of files as the files describe themselves."""
    files = "".join(map(listed, ["refvl", *(f"refvl/{name}" for name in ROOMS.split()), "notebooks"]))
    return re.sub(r"(?<=## Files\n\n).*(?=## What)", lambda _: files, MAP.read_text(), flags=re.S)


def is_repository_path(word: str) -> bool:
    """A word that means a file here: its first part is a name at the top of the repository."""
    first = word.split("/")[0]
    is_path = re.fullmatch(r"[\w./*-]+", word) and first not in ("", ".", "outputs", ".venv")
    return bool(is_path) and (ROOT / first).exists()


def test_the_map_repeats_what_the_files_say():
    """Every folder of the library with code is listed."""
    assert {str(path.parent.relative_to(ROOT / "refvl")) for path in ROOT.glob("refvl/*/**/*.py")} == set(ROOMS.split())
    assert MAP.read_text() == written_map(), "run: PYTHONPATH=notebooks python tests/project/test_readme.py"


def test_the_course_has_a_row_with_minutes_and_a_link_for_every_notebook():
    """Oracle: the first cell of each notebook; a difference of ten minutes does not matter."""
    rows = re.findall(r"^\| \[`notebooks/(\w+\.ipynb)`\]\((\S+)\) \| (\d+) \|", PAGES[ROOT / "docs/course.md"], re.M)
    assert [name for name, _, _ in rows] == [path.name for path in heads.chapters()[:-1]]
    for name, link, minutes in rows:
        first = "".join(json.loads((ROOT / "notebooks" / name).read_text())["cells"][0]["source"])
        said = re.search(r"^\*\*Time\.\*\* (\d+) minutes", first, re.M)
        assert link == f"../notebooks/{name}" and abs(int(minutes) - int(said[1])) <= 10, f"{name}: {said[0]}"


def test_links_and_pictures_lead_somewhere():
    links = [
        (path, target)
        for path, text in PAGES.items()
        for target in re.findall(r"\]\(([^)]+)\)", text)
        if not re.match(r"https?:|#", target)
    ]
    assert links and [target for path, target in links if not (path.parent / target).exists()] == []


def test_addresses_of_the_readme_come_from_one_setting():
    """All are absolute, for PyPI. Oracles: `Repository` in pyproject.toml, and the tree."""
    repository = heads.repository()
    owner, name = repository.split("/")[-2:]
    home = f"https://{owner}.github.io/{name}/"
    links = set(re.findall(r"\]\(([^)]+)\)", README)) - {home}
    place = rf"https://[\w./]+/{owner}/{name}/(?:blob/)?(main|actions)/(.+?)(?:/badge\.svg)?"
    folders = {"main": ROOT, "actions": ROOT / ".github"}
    places = [re.fullmatch(place, link).groups() for link in links]
    assert [path for kind, path in places if not (folders[kind] / path).exists()] == []
    assert set(re.findall(r"https?://[^\s)}\"]+", README)) == links | {home, repository}
    assert PROJECT["urls"]["Homepage"] == home
    assert all(url.startswith((repository, home)) for url in PROJECT["urls"].values())


def test_extras_exist():
    named = re.findall(r"extra `([\w-]+)`|`([\w-]+)` extra|refvl\[([\w-]+)\]", TEXT)
    assert len(named) > 4 and {"".join(names) for names in named} <= PROJECT["optional-dependencies"].keys()


def test_the_readme_is_short():
    """An image that moves and the API on the first screens; the rest is in docs/."""
    assert len(README.splitlines()) <= 110 and len(README.split()) <= 850
    assert README.index("live.webp") < README.index("\n## ")


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
    named = re.findall(r"`make ([a-z-]+)", PROSE) + re.findall(r"^make ([a-z-]+)", TEXT + CONTRIBUTING, re.M)
    assert {"demo", "test", "test-slow", "notebooks"} <= set(named) <= TARGETS


if __name__ == "__main__":
    MAP.write_text(written_map())
