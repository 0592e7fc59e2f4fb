"""The suite under every set of vector instructions that this CPU has, with one thread and with two.

python tests/portable.py [pytest's arguments]    runs them all: `make test-portable`
python tests/portable.py --cpu                   says what CPU this is
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

LIMITS = {  # torch's own kernels, oneDNN's and MKL's; from the least to the most
    "default": {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {},
}
THREADS = (1, 2)


def cpu() -> str:
    """The CPU's model and what torch uses of it."""
    information = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", information.read_text(), re.M) if information.exists() else []
    model = models[0] if models else platform.processor() or platform.machine()
    return f"CPU: {model}, torch uses {torch.backends.cpu.get_cpu_capability()}"


def supported() -> list[str]:
    """The capabilities of this CPU; torch would not check before it runs an instruction that is not there."""
    names = list(LIMITS)
    best = torch.backends.cpu.get_cpu_capability().lower()
    return names[: names.index(best) + 1] if best in names else names[:1]


def run(capability: str, threads: int, arguments: list[str]) -> bool:
    limits = LIMITS[capability] | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads)}
    print(f"\n{' '.join(f'{name}={value}' for name, value in limits.items())}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *arguments]
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"}  # the threads of two workers share the cores
    return subprocess.run(command, env=os.environ | waiting | limits).returncode == 0


def main() -> int:
    print(cpu(), flush=True)
    if sys.argv[1:] == ["--cpu"]:
        return 0
    runs = [(capability, threads) for capability in supported() for threads in THREADS]
    passed = {case: run(*case, sys.argv[1:]) for case in runs}
    print()
    for (capability, threads), ok in passed.items():
        print(f"{capability}, OMP_NUM_THREADS={threads}: {'passed' if ok else 'FAILED'}")
    for capability in list(LIMITS)[len(supported()) :]:
        print(f"{capability}: skipped, this CPU lacks it")
    return int(not all(passed.values()))


if __name__ == "__main__":
    sys.exit(main())
