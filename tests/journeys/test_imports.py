"""What a start imports, which is nearly all of a tiny model's time to its first answer.

Oracle: `sys.modules`.
"""

import subprocess
import sys

import pytest

from refvl.paths import DATA

pytestmark = pytest.mark.thorough

NEVER = {  # by nothing that answers a question about a picture
    "IPython", "anywidget", "av", "google", "ipywidgets", "matplotlib", "pandas", "pydantic", "pytest", "rich",
    "scipy", "sklearn", "tensorflow", "torchaudio", "typer", "webdataset",
}  # fmt: skip
OTHERS = ("refvl.viz", "refvl.tools", "refvl.serving.export", "refvl.study.boxes", "refvl.serving.parallel")
CHAT = f"""
model = refvl.load({str(DATA / "checkpoints" / "tiny-qwen2_5_vl")!r}, progress=False)
assert model.chat("What color is the circle?", images=[{str(DATA / "pictures" / "scene.png")!r}]) == "red"
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Modules in a fresh process after `import refvl`, and after an answer."""
    code = f"import sys, refvl\nprint(*sys.modules)\n{CHAT}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    first, last = (set(line.split()) for line in done.stdout.splitlines()[-2:])
    return {"import": first, "chat": last}


def test_import_refvl_takes_nothing_along(imported):
    assert {name.split(".")[0] for name in imported["import"]} & {"torch", "transformers", "numpy", "PIL"} == set()
    assert {name for name in imported["import"] if name.startswith("refvl")} == {"refvl"}


def test_an_answer_imports_what_it_needs(imported):
    """No package that draws, decodes videos or parses command lines; of transformers' models this
    family's."""
    assert {name.split(".")[0] for name in imported["chat"]} & NEVER == set()
    assert {name for name in imported["chat"] if name.startswith(OTHERS)} == set()
    code = {name for name in imported["chat"] if name.startswith("transformers.models.") and ".modeling_" in name}
    assert {name.split(".")[2] for name in code} == {"auto", "qwen2_5_vl"}
