"""pyproject.toml, constraints.txt, environment.yml, Makefile, hooks and CI say the same thing. Oracle: each other."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import refvl
from refvl.tools.cli import app

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
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
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


def test_conda_environment_is_the_pip_environment():
    conda, pip = conda_and_pip_lines()
    assert ENVIRONMENT["name"] == PROJECT["name"]
    assert conda == ["python=3.11", "pip"]
    assert SpecifierSet(PROJECT["requires-python"]).contains("3.11")
    assert pip == [f"torch=={VERSIONS['torch']}", "-c constraints.txt", f"-e .[{INSTALLED_EXTRAS}]"]


def test_makefile_installs_torch_first_and_then_the_same_extras():
    pip_line, torch_line, project_line = re.findall(r"^\t(?:-@)?\$\(PIP\) (.*)$", MAKEFILE, re.M)
    assert "grep '^pip==' constraints.txt" in pip_line
    assert "grep '^torch==' constraints.txt" in torch_line
    assert project_line == f"-c constraints.txt -e '.[{INSTALLED_EXTRAS}]'"
    assert re.search(r"^\$\(STAMP\): constraints.txt pyproject.toml$", MAKEFILE, re.M)


def test_makefile_and_workflow_ask_for_the_python_of_pyproject():
    major, minor = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"]).groups()
    assert f"sys.version_info < ({major}, {minor})" in MAKEFILE
    assert f"Python {major}.{minor} or newer" in MAKEFILE
    assert PYPROJECT["tool"]["mypy"]["python_version"] == f"{major}.{minor}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{major}{minor}"
    (job,) = WORKFLOW["jobs"].values()
    versions = job["strategy"]["matrix"]["python"]
    assert versions[0] == f"{major}.{minor}" and all(
        SpecifierSet(PROJECT["requires-python"]).contains(v) for v in versions
    )
    assert any(step.get("with", {}).get("python-version") == "${{ matrix.python }}" for step in job["steps"])


def test_every_command_but_help_and_clean_needs_the_environment():
    """`test-shapes` and `test-vllm` make their own, with a CUDA build of torch and with vLLM; `lint` passes it on."""
    targets = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M).group(1).split())
    with_environment = set(re.findall(r"^([a-z-]+): (?:\$\(STAMP\)|lint) ## ", MAKEFILE, re.M))
    assert targets - with_environment == {"help", "clean", "test-shapes", "test-vllm"}


def test_torchao_has_an_environment_of_its_own():
    """Its import writes warnings into demo and notebooks, so neither `make test` nor CI may install it."""
    assert not [line for extra in INSTALLED_EXTRAS.split(",") for line in EXTRAS[extra] if "torchao" in line]
    assert recipe(".venv-quantised/.installed").rstrip().endswith("--no-deps -c constraints.txt torchao\n\t@touch $@")
    assert "torchao" in VERSIONS and ".venv-quantised/bin/python -m pytest" in recipe("test-quantised")


def test_ci_runs_the_two_commands_of_the_readme_and_what_they_leave_out():
    """`.ci/run` in two parts, so that a newcomer's command is tried; GitHub, where Python differs, as a whole."""
    assert two_commands() == ["make demo", "make test"]
    script = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.M)
    (job,) = WORKFLOW["jobs"].values()
    assert script == ["demo", "test", "test-rest"]
    runs = [run for step in job["steps"] if (run := step.get("run", "")).startswith("make ")]
    assert runs == ["make demo", "make test-all"]


def recipe(target: str) -> str:
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M).group(1)


def test_what_make_test_leaves_out_is_all_the_rest():
    """Of the tests by their tier, of the notebooks by one pattern: it takes some and is left out elsewhere."""
    assert (
        "--tier quick" in recipe("test") and "--tier rest" in recipe("test-rest") and "--tier" not in recipe("test-all")
    )
    assert "notebooks/$(FIRST_NOTEBOOKS)" in recipe("test")
    assert "notebooks --ignore-glob='*/$(FIRST_NOTEBOOKS)'" in recipe("test-rest")
    assert recipe("test-all").rstrip().endswith("$(NBMAKE) notebooks\n\t$(MAKE) test-claims")
    pattern = re.search(r"^FIRST_NOTEBOOKS := (.*)$", MAKEFILE, re.M).group(1)
    taken = sorted(path.name[:2] for path in (ROOT / "notebooks").glob(pattern))
    assert taken == ["00", "01", "02", "03", "04", "05"]


def test_ci_script_is_strict_and_executable():
    script = ROOT / ".ci/run"
    assert "set -euo pipefail" in script.read_text() and script.stat().st_mode & 0o111


def test_license_is_apache_2():
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_hooks_are_local_and_run_the_tools_of_make_test():
    """No hook fetches anything: each runs a tool of .venv, at the version that constraints.txt pins."""
    (repository,) = HOOKS["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert all(hook["language"] == "system" for hook in repository["hooks"])
    tools = {entry.split()[0].removeprefix(".venv/bin/") for entry in entries}
    assert tools == {"ruff", "mypy", "python"} and all(entry.startswith(".venv/bin/") for entry in entries)
    assert [file for entry in entries for file in re.findall(r"tests/\S+", entry) if not (ROOT / file).exists()] == []


def test_one_source_of_the_version():
    """Nothing but `refvl.__version__` says it, and CHANGELOG.md has an entry for it."""
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "refvl.__version__"}
    assert re.search(rf"^## \[?{re.escape(refvl.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


@pytest.mark.thorough
def test_a_release_is_built_from_its_tag_and_published_without_a_token():
    """The step that compares tag and version passes for this version, and for no other."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "build"
    [check] = [step["run"] for step in jobs["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", "")]
    for tag, passes in ((f"v{refvl.__version__}", True), (f"v{refvl.__version__}0", False)):
        done = subprocess.run(["bash", "-c", check], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag})
        assert (done.returncode == 0) == passes


@pytest.mark.thorough
def test_the_scheduled_workflow_lifts_the_upper_bounds(tmp_path):
    """Of torch and transformers, and of nothing else. Oracle: the requirements, parsed."""
    steps = yaml.safe_load((ROOT / ".github/workflows/newest.yml").read_text())["jobs"]["without-upper-bounds"]["steps"]
    [lift] = [step["run"] for step in steps if step.get("run", "").startswith("sed")]
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    subprocess.run(["bash", "-c", lift], cwd=tmp_path, check=True)
    lifted = [
        Requirement(x) for x in tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    for before, after in zip(map(Requirement, PROJECT["dependencies"]), lifted, strict=True):
        bounds = {str(s) for s in before.specifier if s.operator != "<"}
        assert before.name == after.name and {str(s) for s in after.specifier} == bounds
    assert len([r for r in lifted if r.name in ("torch", "transformers")]) == 2


def test_templates_for_issues_name_commands_that_exist():
    """`python -m refvl COMMAND` in a form is a command of the command line."""
    named = set()
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form)
        named |= set(re.findall(r"python -m refvl ([a-z-]+)", path.read_text()))
    commands = {(command.name or command.callback.__name__).replace("_", "-") for command in app.registered_commands}
    assert {"info", "check-gpu", "trace"} == named <= commands


def test_conduct_and_security_are_short_and_say_whom_to_write_to():
    conduct = (ROOT / "CODE_OF_CONDUCT.md").read_text().splitlines()
    assert len([line for line in conduct if line and not line.startswith("#")]) == 3 and "maintainer" in conduct[-1]
    assert "Report a vulnerability" in (ROOT / "SECURITY.md").read_text()


def test_the_citation_can_be_read():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PROJECT["license"] and PROJECT["name"] in citation["title"] and citation["authors"]
