"""Run a notebook on the simulated device, cell by cell: `python tests/cuda_sim/run_notebook.py NAME`."""

import os
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def run(name: str, device: str = "cuda") -> None:
    """Every code cell of notebooks/NAME.ipynb, its models on `device`. Raises what a cell raises.

    The last line says how many bytes kernels have written in bfloat16. Weights that are loaded as float32 are read
    from files in bfloat16, and nothing is written in it.
    """
    import matplotlib.pyplot as plt
    import nbformat
    import torch
    from IPython.core.interactiveshell import InteractiveShell
    from simulated_cuda import simulated_cuda

    os.environ["REFVL_DEVICE"] = device
    os.chdir(NOTEBOOKS)
    sys.path.insert(0, str(NOTEBOOKS))
    shell = InteractiveShell.instance()
    notebook = nbformat.read(f"{name}.ipynb", as_version=4)
    with simulated_cuda() as machine:
        for number, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                print(f"--- {name}, cell {number}", flush=True)
                shell.run_cell(cell.source).raise_error()
                plt.close("all")
        print(f"bytes in bfloat16: {machine.written[torch.bfloat16]}")


if __name__ == "__main__":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # as in tests/conftest.py
    os.environ["MPLBACKEND"] = "agg"
    run(*sys.argv[1:])
