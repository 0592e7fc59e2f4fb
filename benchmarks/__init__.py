"""Measurements of speed, costs and agreement, whose results are in data/measurements.

`python -m refvl bench` runs `tower`, `graphs` and `performance`; `families`, `against` and `vllm_serving` are
run as modules. These results have no script in this tree: `ablations`, `cost_curves_cpu`, `prefill_chunks_cpu`,
`pruning_accuracy` and `quantized`. For each, the script with the same name in `benchmarks/` made the result at
commit 8923bd7. At that commit, `vllm_serving.py` made the part of `vllm` on MiniCPM-V and Step3.
"""
