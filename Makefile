# Everything a newcomer needs: `make demo`, then `make test`. Each target sets up .venv if it is missing or outdated.

PYTHON ?= python3
MODEL  ?= qwen2_5_vl
TORCH  ?= $(shell grep '^torch==' constraints.txt)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# TESTS passes more arguments to pytest
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal
BOTH   := $(PYTEST) --nbmake --nbmake-timeout=60 tests notebooks
QUANTISED := tests/contracts/test_capabilities.py tests/journeys/test_quantized.py
# The oldest releases that pyproject.toml allows, as "torch==2.11.*"
OLDEST := $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+),.*/"\1==\2.*"/p' pyproject.toml)
ANSWERS := import torch; from refvl.tools.gpu_checks import check_answers as check; \
  assert all(row["passed"] for row in check(torch.device("cpu")))
# Only the imported modules are compiled, on their first import; without bytecode, every process would compile them again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo lint quick cpu test test-rest test-all test-notebooks test-claims falsify test-quantised test-slow test-portable test-browser test-cuda-sim test-shapes test-rented test-vllm lab notebooks site train clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## answer questions about an image and a video; print every stage, write its figures
	$(BIN)/python -m refvl demo --out outputs/demo

lint: $(STAMP) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The types are checked beside the tests, which do not always need two cores
test: $(STAMP) ## in four minutes: style, types, the quick tier of the tests, the notebooks 00 to 05
	$(MAKE) --no-print-directory --jobs=3 lint cpu quick

quick: $(STAMP)
	$(BOTH) --tier quick $(TESTS)

cpu: $(STAMP)
	@$(BIN)/python tests/portable.py --cpu

test-rest: $(STAMP) ## the tests and notebooks that `make test` leaves out
	$(BOTH) --tier rest $(TESTS)

test-all: lint cpu ## style, types, all tests with their coverage, every notebook
	$(BOTH) --cov --cov-report= $(TESTS)
	$(MAKE) test-claims

test-notebooks: $(STAMP) ## every notebook
	$(PYTEST) --nbmake --nbmake-timeout=60 notebooks

test-claims: $(STAMP) ## notebooks with three other sets of parameters, and with values that break a claim (NB=12 runs one)
	@$(BIN)/python -c 'import papermill' 2>/dev/null || $(PIP) -c constraints.txt -e '.[claims]'
	OMP_NUM_THREADS=1 NB=$(NB) $(BIN)/python -m pytest -m claims tests/project/test_claims.py

falsify: $(STAMP) ## each notebook with 20 drawn sets of parameters, in hours (NB=12 SETS=5 SEED=2027-01-31)
	@$(BIN)/python -c 'import papermill' 2>/dev/null || $(PIP) -c constraints.txt -e '.[claims]'
	OMP_NUM_THREADS=1 NB=$(NB) SETS=$(or $(SETS),20) SEED=$(SEED) $(BIN)/python -m pytest -rA -m claims -k drawn tests/project/test_claims.py

test-quantised: $(STAMP) ## the tests that need torchao, in .venv-quantised: its import writes warnings that no other run should show
	@test -f .venv-quantised/.installed || $(MAKE) .venv-quantised/.installed
	.venv-quantised/bin/python -W ignore -c 'import torchao'
	OMP_NUM_THREADS=1 .venv-quantised/bin/python -m pytest -q -k 'quantised or quantized' $(QUANTISED)

# Everything but torchao comes from .venv
.venv-quantised/.installed: constraints.txt
	$(BIN)/python -m venv --clear .venv-quantised
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
	  "$$(.venv-quantised/bin/python -c 'import site; print(site.getsitepackages()[0])')/with_venv.pth"
	.venv-quantised/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt torchao
	@touch $@

test-slow: $(STAMP) ## the tests that take minutes, and the costly ones over every family
	$(PYTEST) -m slow

test-portable: $(STAMP) ## the tests under every set of vector instructions that this CPU has, with one thread and with two
	$(BIN)/python tests/portable.py

test-browser: $(STAMP) ## every explorer in Chromium, as a page and in JupyterLab (ALL=1 also runs every notebook; RECORD=1 saves screenshots)
	@$(BIN)/python -c 'import playwright' 2>/dev/null || $(PIP) -c constraints.txt -e '.[browser]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser -rs tests/browser

lab: $(STAMP) ## trust the shipped notebooks, so that their explorers are live, and open them in JupyterLab
	$(BIN)/jupyter trust notebooks/*.ipynb
	$(BIN)/jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/notebooks/index.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

test-cuda-sim: $(STAMP) ## the tests that need a GPU, on a simulated one
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "gpu and not allocator" --simulated-cuda

test-shapes: ## every released config on fake CUDA tensors, in .venv-cuda: needs a CUDA build (TORCH=torch==... selects a different one)
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install --quiet "$(TORCH)"
	@.venv-cuda/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || { \
	  echo "$(TORCH) is a build without CUDA where pip looks; name one that has it: make test-shapes TORCH=torch==..."; exit 1; }
	grep -v '^torch==' constraints.txt > .venv-cuda/constraints.txt
	.venv-cuda/bin/pip install --quiet -c .venv-cuda/constraints.txt -e '.[test]'
	.venv-cuda/bin/python -m pytest -m shapes tests/cuda_sim/test_shapes.py

test-rented: .venv-rented/.installed ## what a rented GPU machine runs, on a simulated GPU: the oldest torch and transformers, few packages
	.venv-rented/bin/python -m refvl --help > /dev/null
	OMP_NUM_THREADS=1 .venv-rented/bin/python -c '$(ANSWERS)'
	OMP_NUM_THREADS=1 .venv-rented/bin/python -m pytest -q -m "gpu and not allocator" --simulated-cuda
	OMP_NUM_THREADS=1 .venv-rented/bin/python -m pytest -q tests/cuda_sim/test_check_gpu.py

# Neither PyAV, nor Jupyter's packages, PEFT, accelerate and pytest-cov
.venv-rented/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-rented
	grep -vE '^(torch|transformers|huggingface_hub|setuptools)==' constraints.txt > .venv-rented/constraints.txt
	.venv-rented/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-rented/constraints.txt $(OLDEST) \
	  numpy pillow safetensors tqdm rich typer matplotlib pytest pytest-xdist hypothesis
	@touch $@

test-vllm: .venv-vllm/.installed ## the small models of Qwen and GLM in a running vLLM, request by request (N=40 asks more)
	.venv-vllm/bin/python -m benchmarks.vllm_serving -n $(or $(N),5)

.venv-vllm/.installed: benchmarks/vllm_env.sh
	benchmarks/vllm_env.sh .venv-vllm $(PYTHON)
	@touch $@

notebooks: $(STAMP) ## run the notebooks and keep their outputs
	OMP_NUM_THREADS=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.store_widget_state=True \
	  --ExecutePreprocessor.record_timing=False notebooks/[0-9]*.ipynb notebooks/index.ipynb

site: $(STAMP) ## the notebooks and explorers as pages that need neither kernel nor network, in site/ (BASE=https://... is their future address)
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/pages.py $(if $(BASE),--base $(BASE))

train: $(STAMP) ## train a small model again (MODEL=qwen2_5_vl, glm4v, minicpmv)
	$(BIN)/python -m data.training.train_tiny --model $(MODEL)

clean: ## remove .venv and everything that was generated
	rm -rf $(VENV) .venv-quantised .venv-rented outputs site build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*

# First a new pip, if available, because older ones take twice as long. Then torch alone by its pin, so that nothing else
# determines its build
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "refvl needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)."; \
	  echo "Name another one, for example: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12"; exit 1; }
	@echo "Installing the pinned versions into $(VENV) (the first time: a few minutes, about 2 GB)"
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	-@$(PIP) --upgrade "$$(grep '^pip==' constraints.txt)"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e '.[notebooks,test]'
	@touch $@
