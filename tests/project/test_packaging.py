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
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
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
    assert SpecifierSet(PROJECT["requires-python"]).contains("3.11")
    assert pip["pip"] == [f"torch=={VERSIONS['torch']}", "-c constraints.txt", f"-e .[{INSTALLED_EXTRAS}]"]


def test_ci_runs_the_two_commands_of_the_readme_and_what_they_leave_out():
    """`.ci/run` in two parts, so that a newcomer's command is tried; GitHub, where Python differs, as a whole."""
    block = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert re.findall(r"^make (\S+)", block, re.M) == ["demo", "test"]
    script = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.M)
    (job,) = WORKFLOW["jobs"].values()
    assert script == ["demo", "test", "test-rest"]
    runs = [run for step in job["steps"] if (run := step.get("run", "")).startswith("make ")]
    assert runs == ["make demo", "make test-all", "make test-slow"]


def test_one_source_of_the_version():
    """Nothing but `refvl.__version__` says it, and CHANGELOG.md has an entry for it."""
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "refvl.__version__"}
    assert re.search(rf"^## \[?{re.escape(refvl.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
