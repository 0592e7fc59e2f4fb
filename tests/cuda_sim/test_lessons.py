"""Every notebook with its models on the simulated device, chosen by REFVL_DEVICE. Oracle: the notebooks' own asserts.

There a model has the dtype of its checkpoint, bfloat16, as on a GPU, unless the notebook asks for float32, because its
tolerances are those of float32. What CUDA refuses, the device refuses.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from run_notebook import NOTEBOOKS

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb"))
IN_FLOAT32 = {"04_graph_capture", "09_data_parallel"}  # whole
PARTLY_IN_FLOAT32 = {"07_minicpmv", "12_qwen3_vl"}  # another model of theirs is in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_on_a_gpu_in_bfloat16(name):
    """In a process of its own, from an empty state: each sets torch's own options."""
    root = NOTEBOOKS.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("run_notebook.py")), name]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    [halved] = re.findall(r"^bytes in bfloat16: (\d+)$", done.stdout, re.M)
    assert (int(halved) == 0) == (name in IN_FLOAT32)


@pytest.mark.parametrize("name", NAMES)
def test_no_other_notebook_asks_for_float32(name):
    """All models that a cell puts on the device, `exercises.DEVICE`; those on "meta" hold no numbers."""
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    asks = bool(
        re.search(r"dtype.{1,3}\"?(torch\.)?float32", re.sub(r".*from_pretrained.*|.*device=\"cpu\".*", "", code))
    )
    assert asks == (name in IN_FLOAT32 | PARTLY_IN_FLOAT32)
