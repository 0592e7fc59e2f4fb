"""Measurements of speed, costs and agreement, whose results are in data/measurements.

`python -m refvl bench` runs `tower`, `graphs` and `performance`; `families`, `against` and `vllm_serving` are
run as modules. Some results have no script in this tree: `ablations`, `cost_curves_cpu`, `prefill_chunks_cpu`,
`pruning_accuracy` and `quantized`. Each was made by the script of the same name in `benchmarks/` at
commit 8923bd7. `vllm_serving.py` at that commit made the part of `vllm` about MiniCPM-V and Step3.
"""
