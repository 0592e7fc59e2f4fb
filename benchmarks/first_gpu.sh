#!/usr/bin/env bash
# The first fifteen minutes on a GPU, the most valuable part first. In the root of a clone:
#     OUT=folder bash benchmarks/first_gpu.sh
# Every step has its own time limit and writes its own file line by line, so a step that fails or hangs ends alone.
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
{ nvidia-smi; which gcc; python3 -m pip list; } > "$OUT/machine.txt" 2>&1

step() { # seconds, name, module and its arguments
  timeout -k 5 "$1" python3 -m "${@:3}" > "$OUT/$2.txt" 2>&1
  echo "$2: exit status $?" | tee -a "$OUT/steps.txt"
}

step 90 check refvl check-gpu --out "$OUT/check.json"
step 170 tower benchmarks.tower --device cuda --repeats 10 --write
step 100 graphs benchmarks.graphs --device cuda --repeats 10 --write
step 170 all refvl check-gpu --all --out "$OUT/all.json"
cp data/measurements/*_cuda.json "$OUT"
