"""pyproject.toml, constraints.txt, environment.yml, Makefile, hooks and CI say the same thing. Oracle: each other."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import refvl

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")]
VERSIONS = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in PINS}
REQUIREMENTS = [Requirement(line) for line in PROJECT["dependencies"]] + [
    Requirement(line) for extra, lines in EXTRAS.items() for line in lines
]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
JOBS = yaml.safe_load(WORKFLOWS["ci"])["jobs"]
INSTALLED_EXTRAS = "notebooks,test"


def test_constraints_pin_one_exact_release_each_and_torch_first():
    assert PINS[0].name == "torch"
    assert len(VERSIONS) == len(PINS)
    for pin in PINS:
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and "*" not in specifier.version and "+" not in specifier.version, str(pin)


def test_every_dependency_is_pinned_and_the_pin_fits():
    pins = {str(requirement): VERSIONS.get(canonicalize_name(requirement.name)) for requirement in REQUIREMENTS}
    assert len(pins) > 10 and [requirement for requirement, pin in pins.items() if pin is None] == []
    assert [(r, pin) for r, pin in pins.items() if not Requirement(r).specifier.contains(pin)] == []


def test_conda_environment_is_the_pip_environment():
    *conda, pip = ENVIRONMENT["dependencies"]
    assert ENVIRONMENT["name"] == PROJECT["name"]
    assert conda == ["python=3.11", "pip"]
    assert pip["pip"] == [f"torch=={VERSIONS['torch']}", "-c constraints.txt", f"-e .[{INSTALLED_EXTRAS}]"]


def test_ci_runs_the_two_commands_of_the_readme_and_what_they_leave_out():
    """`.ci/run` in two parts, so that a newcomer's command is tried; GitHub, where Python differs, as a whole."""
    assert re.findall(r"^make (\S+)", (ROOT / "README.md").read_text(), re.M) == ["demo", "test"]
    script = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.M)
    assert script == ["demo", "test", "test-rest"]
    runs = re.findall(r"- run: make (\S+)", WORKFLOWS["ci"])
    assert runs == ["demo", "test-all", "test-slow", "test-notebooks", "test-rented"] and len(JOBS) == 3


def test_workflows_pin_their_actions_and_begin_without_rights():
    for text in WORKFLOWS.values():
        actions = re.findall(r"uses: (.*)", text)
        assert actions and [a for a in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", a)] == []
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_ci_tries_every_python_that_is_claimed():
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert claimed == JOBS["demo-and-test"]["strategy"]["matrix"]["python"]
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(version) for version in claimed)


def test_the_citation_is_that_of_this_version():
    """In CITATION.cff and in the README. Oracles: pyproject.toml, CHANGELOG.md."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, released = refvl.__version__, str(citation["date-released"])
    assert citation["version"] == version and f"## {version} - {released}" in (ROOT / "CHANGELOG.md").read_text()
    assert [citation["url"], citation["repository-code"]] == [PROJECT["urls"][x] for x in ("Homepage", "Repository")]
    fields = {"title": citation["title"], "year": released[:4], "version": version, "url": citation["repository-code"]}
    bibtex = re.search(r"```bibtex\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert [value for name, value in fields.items() if f"{name} = {{{value}}}" not in bibtex] == []


def test_one_source_of_the_version():
    """Nothing but `refvl.__version__` says it; the test of the citation compares CHANGELOG.md."""
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "refvl.__version__"}
