"""Every notebook with its models on the simulated device, chosen by REFVL_DEVICE. Oracle: the notebooks' own asserts.

A GPU computes in bfloat16 unless a notebook loads in float32, which it says. What CUDA refuses, the device refuses.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_notebook import NOTEBOOKS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb")))
def test_a_notebook_runs_on_a_gpu(name):
    """In a process of its own, from an empty state: each sets torch's own options."""
    root = NOTEBOOKS.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("run_notebook.py")), name]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
