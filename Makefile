# make run    set up .venv, run the default study, say where the report is
# make test   set up .venv, pass the tests
# make check  lint, types and the fast tests, in two minutes
# make help   all targets

PYTHON ?= python3
VENV   ?= .venv
CORES  ?= all
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: run test test-all test-kernels test-faults test-cluster check lint format typecheck pages setup flash-attn flash-attn-3 quack lock clean help

run: setup  ## run the default study on this machine
	snakemake --cores $(CORES)

test: setup lint typecheck  ## lint, the tests, the real workflow small; ten minutes
	pytest -q -m "not slow"

test-all: setup lint typecheck  ## also the slow ones: every world size, killed at random instants, real tunings; half an hour
	pytest -q

test-kernels: setup build/triton/.installed  ## the Triton kernels in Triton's interpreter, where no GPU is; a minute
	PYTHONPATH=build/triton pytest -q -k "interpreter" tests/model/test_fused.py tests/train/test_fused_adamw.py tests/benchmarks/test_kernels.py

# apart, since torch's CUDA build wants an older one; 3.9 is the first whose interpreter runs loops over tl.range
build/triton/.installed:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/triton triton==3.9.0
	@touch $@

test-faults: setup  ## processes killed, disks full, files damaged, ranks hung: docs/faults.md; ten minutes
	pytest -q -m faults

test-cluster: setup  ## a SLURM of two nodes on this machine (Debian, as root or by sudo), the workflow through it; 12 minutes
	MFUBENCH_CLUSTER=1 pytest -q -x tests/cluster

check: setup lint typecheck  ## lint, types, fast tests
	pytest -q -m "not slow and not registry" --ignore tests/workflow --ignore tests/train --ignore tests/data

lint: setup  ## style of Python and Snakemake code
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile rules workflow/Snakefile
	snakemake --lint

typecheck: setup  ## types
	mypy

format: setup  ## format Python and Snakemake code
	ruff check --fix .
	ruff format .
	snakefmt Snakefile rules workflow/Snakefile

pages: setup  ## the tables of docs/measured.md, plan.md and prediction.md, from the results that ship
	python -m benchmarks.measured_page
	python -m mfubench.planner.pages

setup: $(STAMP)  ## create .venv from the lock file

$(STAMP): requirements.lock requirements-gpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else \
	  f"Python {v[0]}.{v[1]} will not do: 3.11 to 3.13 is needed (make PYTHON=python3.12 …)")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "Python has no venv module here: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked packages into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-gpu.lock; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

flash-attn: setup  ## build FlashAttention-2 against the installed torch (CUDA toolkit needed, tens of minutes)
	@command -v nvcc >/dev/null 2>&1 || { echo "nvcc is not here: install the CUDA toolkit that torch was built for"; exit 1; }
	$(BIN)/python -m pip install --no-build-isolation flash-attn==2.8.3

flash-attn-3: setup  ## FlashAttention-3 for H100, H200: the library in xformers' wheel, and the CUDA runtime that it wants
	$(BIN)/python -m pip install --no-deps xformers==0.0.34 nvidia-cuda-runtime-cu12==12.8.90

quack: setup  ## quack-kernels for H100, H200: SwiGLU in the matmuls beside it; without dependencies that torch's CUDA 13 builds bring
	$(BIN)/python -m pip install --no-deps quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 nvidia-cutlass-dsl==4.7.1 \
	  nvidia-cutlass-dsl-libs-base==4.7.1 nvidia-cutlass-dsl-libs-core==4.7.1 nvidia-cutlass-dsl-libs-cu13==4.7.1 \
	  torch-c-dlpack-ext==0.1.5
	$(BIN)/python -c "import quack.gemm_interface"

lock:  ## make requirements.lock anew from pyproject.toml
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet ".[dev,slurm]"
	@{ sed -n '/^#/p' requirements.lock; build/lock/bin/python -m pip freeze --exclude mfubench | sed 's/+cpu$$//'; \
	  echo "setuptools==80.9.0"; } > build/requirements.lock && mv build/requirements.lock requirements.lock

clean:  ## remove the environment and caches, not the results
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14
