# SPDX-License-Identifier: Apache-2.0
# make bench   eight MPI ranks on a checkpoint of tests/data, one table
# make test    ruff, mypy, pytest
# make lint    ruff and mypy only
# make compile-check   compile a covering set of kernels without a GPU and inspect them (make compile-all: every one)
# All of them create .venv/ and install what they need on first use; a second run installs nothing.

.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
COMPILER := $(VENV)/.compiler
KERNELS ?= build/kernels
# two workers, each with whole files: a file's fixtures are built once
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

# A test machine has few cores and many ranks: one thread a process, root allowed (containers), ranks not pinned.
export OMP_NUM_THREADS ?= 1
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1

BENCH_RANKS ?= 8
BENCH_CHECKPOINT ?= tests/data/modelopt_nvfp4_deepseek_v3
BENCH_LAYER ?= 1
BENCH_ARGS ?=

.PHONY: help venv bench test lint compile-check compile-all clean

help:
	@sed -n '2,6s/^# //p' Makefile

venv: $(STAMP)

# One system requirement: Python 3.10+ with venv. Said in one line when it is not there.
$(STAMP): setup.py Makefile
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "error: '$(PYTHON)' not found. Install it:  apt-get update && apt-get install -y python3 python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: '$(PYTHON)' is older than 3.10. Install a newer one and name it (make PYTHON=python3.11 ...):  apt-get update && apt-get install -y python3.11 python3.11-venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' has no venv module. Install it:  apt-get update && apt-get install -y $$(basename "$(PYTHON)")-venv" >&2; exit 1; }
	@echo "creating $(VENV)/ and installing into it (once, about two minutes)"
	test -x $(PY) || "$(PYTHON)" -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

bench: $(STAMP)
	$(VENV)/bin/mpirun --oversubscribe --bind-to none -n $(BENCH_RANKS) $(PY) -m microbench --engine cpu \
	  --checkpoint $(BENCH_CHECKPOINT) --layer $(BENCH_LAYER) $(BENCH_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy

test: lint
	$(PY) -m pytest $(PYTEST_ARGS)

# the DSL, pinned as in vendored_kernels/registry.py, the disassembler, and a C compiler where the system has none
$(COMPILER): $(STAMP)
	@echo "installing the kernel compiler (once, about a minute)"
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[compile]'
	@command -v cc >/dev/null 2>&1 || $(PY) -m pip install --quiet --disable-pip-version-check ziglang
	@touch $@

compile-check: $(COMPILER)
	$(PY) tools/compile_check.py $(KERNELS)
	$(PY) -m pytest tests/cpu/test_sm90_compile.py tests/cpu/test_sm100_compile.py

compile-all: $(COMPILER)
	$(PY) tools/compile_check.py $(KERNELS) --all --json $(KERNELS)/compile-all.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
