"""pyproject.toml, constraints.txt, environment.yml, Makefile and CI say the same thing. Oracle: each other."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")]
VERSIONS = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in PINS}
REQUIREMENTS = [Requirement(line) for line in PROJECT["dependencies"]] + [
    Requirement(line) for extra, lines in EXTRAS.items() if extra != "flash" for line in lines
]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
INSTALLED_EXTRAS = "notebooks,test"


def conda_and_pip_lines() -> tuple[list[str], list[str]]:
    conda = [line for line in ENVIRONMENT["dependencies"] if isinstance(line, str)]
    (pip,) = [line["pip"] for line in ENVIRONMENT["dependencies"] if isinstance(line, dict)]
    return conda, pip


def two_commands() -> list[str]:
    """The first code block of the README, without comments: what a newcomer types."""
    block = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    return [command for line in block.splitlines() if (command := line.split("#")[0].strip()).startswith("make ")]


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


def test_flash_attention_is_optional_and_never_pinned():
    assert any("flash-attn" in line for line in EXTRAS["flash"])
    assert "flash-attn" not in VERSIONS and all(r.name != "flash-attn" for r in REQUIREMENTS)
    _, pip = conda_and_pip_lines()
    assert not any("flash" in line for line in pip)
    assert re.search(r"^ *# .*GPU option.*flash-attn", (ROOT / "environment.yml").read_text(), re.M)
    assert f"# - {EXTRAS['flash'][0]}" in (ROOT / "environment.yml").read_text()


def test_conda_environment_is_the_pip_environment():
    conda, pip = conda_and_pip_lines()
    assert ENVIRONMENT["name"] == PROJECT["name"]
    assert conda == ["python=3.11", "pip"]
    assert SpecifierSet(PROJECT["requires-python"]).contains("3.11")
    assert pip == [f"torch=={VERSIONS['torch']}", "-c constraints.txt", f"-e .[{INSTALLED_EXTRAS}]"]


def test_makefile_installs_torch_first_and_then_the_same_extras():
    torch_line, project_line = re.findall(r"^\t\$\(PIP\) (.*)$", MAKEFILE, re.M)
    assert "grep '^torch==' constraints.txt" in torch_line
    assert project_line == f"-c constraints.txt -e '.[{INSTALLED_EXTRAS}]'"
    assert re.search(r"^\$\(STAMP\): constraints.txt pyproject.toml$", MAKEFILE, re.M)


def test_makefile_and_workflow_ask_for_the_python_of_pyproject():
    major, minor = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"]).groups()
    assert f"sys.version_info < ({major}, {minor})" in MAKEFILE
    assert f"Python {major}.{minor} or newer" in MAKEFILE
    assert f'python-version: "{major}.{minor}"' in (ROOT / ".github/workflows/ci.yml").read_text()


def test_every_command_but_help_and_clean_needs_the_environment():
    targets = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M).group(1).split())
    with_environment = set(re.findall(r"^([a-z-]+): \$\(STAMP\) ## ", MAKEFILE, re.M))
    assert targets - with_environment == {"help", "clean"}


def test_ci_runs_exactly_the_two_commands_of_the_readme():
    assert two_commands() == ["make demo", "make test"]
    script = re.findall(r"^make .*$", (ROOT / ".ci/run").read_text(), re.M)
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert script == two_commands()
    assert [step["run"] for step in job["steps"] if "run" in step] == two_commands()


def test_ci_script_is_strict_and_executable():
    script = ROOT / ".ci/run"
    assert "set -euo pipefail" in script.read_text() and script.stat().st_mode & 0o111


def test_license_is_apache_2():
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
