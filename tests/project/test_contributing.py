"""CONTRIBUTING.md and CHANGELOG.md tell the truth. Oracles: files, the Makefile, the imports of the library."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", TEXT, flags=re.S | re.M)
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.S | re.M)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]
STAGES = ("processors", "encoders", "language")  # in which every family has a file
WALK_THROUGH = re.search(r"^## Add a family\n(.*?)^## ", TEXT, re.S | re.M).group(1)


def named_files(text: str) -> set[str]:
    """What stands between backticks and begins with a folder or file of the repository; * matches any name."""
    words = re.findall(r"`([\w./*-]+)`", text)
    return {word for word in words if (ROOT / word.split("/")[0]).exists() and not word.startswith(".venv/")}


def test_named_files_exist():
    assert [name for name in named_files(TEXT) if not list(ROOT.glob(name))] == []


def test_walk_through_names_one_file_per_stage():
    """A family's file in each stage that it needs, the table of families and both contract suites."""
    stages = {f"refvl/{stage}/step3_vl.py" for stage in STAGES}
    suites = {f"tests/contracts/test_{kind}.py" for kind in ("encoders", "processors")}
    assert stages | suites | {"refvl/families.py", "CHANGELOG.md"} <= named_files(WALK_THROUGH)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z-]+)", PROSE)) | {command[1] for command in COMMANDS if command[0] == "make"}
    assert {"demo", "test", "test-slow", "notebooks"} <= named <= targets
