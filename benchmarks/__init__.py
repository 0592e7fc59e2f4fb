"""Measurements of speed, costs and agreement, whose results lie in data/measurements.

`python -m refvl bench` runs `tower`, `graphs` and `performance`; `families`, `against` and `vllm_serving` are run as
modules. These results have no script in this tree: `ablations`, `cost_curves_cpu`, `prefill_chunks_cpu`,
`pruning_accuracy` and `quantized`. Each was made by the script of its name in `benchmarks/` at commit 8923bd7. The part
of `vllm` on MiniCPM-V and Step3 was made by `vllm_serving.py` at that commit.
"""
