.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow check lint types compile gpu check-kernels bench format \
	known-python new-venv new-kernels-venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

TRITON ?= 3.7.1
KERNELS := .venv-kernels/$(TRITON)

help:    ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED)  ## install the package, its tools and the git hooks into .venv
	@if [ -e .git ]; then $(BIN)/pre-commit install; fi

demo: $(INSTALLED)  ## train on handwritten digits with three seeds
	$(BIN)/onescan train digits --seeds 0 1 2

test: $(INSTALLED)  ## tests and doctests, with shapes checked in every call
	$(BIN)/python -m pytest -m "not compile and not gpu and not slow" -n auto --maxprocesses 8 --dist worksteal

test-slow: $(INSTALLED)  ## tests that take minutes: killed runs, several processes, kernels
	$(BIN)/python -m pytest -m "slow and not compile and not gpu" -n auto --maxprocesses 8 --dist worksteal tests

check: lint types test test-slow compile  ## everything a pull request must pass, on a CPU

lint: $(INSTALLED)  ## style and dead code
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: $(INSTALLED)  ## static types
	$(BIN)/mypy

# Dynamo refuses functions that jaxtyping's hook has wrapped, so these run without it.
compile: $(INSTALLED)  ## tests of torch.compile, without the shape hook
	$(BIN)/python -m pytest -m compile -o addopts="--strict-markers"

# Asked for by name, so it is done or refused: a skip here would look like a pass.
gpu: $(INSTALLED)  ## every kernel against its reference, on a GPU
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| { echo "make gpu: torch sees no GPU here, so nothing was tested." >&2; exit 1; }
	$(BIN)/python -m pytest -m "gpu and not compile" -n auto --maxprocesses 8 --dist worksteal tests
	$(BIN)/python -m pytest -m "gpu and compile" -o addopts="--strict-markers" tests

check-kernels: $(KERNELS)/.installed  ## compile every kernel for four GPUs, without one
	PYTHONPATH=. $(KERNELS)/bin/python benchmarks/check_kernels.py

bench: $(INSTALLED)  ## speed and memory of one scan beside softmax attention
	$(BIN)/python benchmarks/one_scan.py

format: $(INSTALLED)  ## rewrite what a formatter may rewrite
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# The stamp is written last and holds the directory: an interrupted install has none, a moved or
# copied venv names another place, and after a change of Python torch is out of sight. Each starts
# afresh; a change of pyproject.toml installs what is missing.
WHOLE := from importlib.util import find_spec; find_spec("torch") and print(open("$(INSTALLED)").read())
ifneq ($(shell $(BIN)/python -c '$(WHOLE)' 2>/dev/null),$(CURDIR))
$(INSTALLED): new-venv
endif

# pip.conf comes before the install and stays, so that a later `pip install timm` keeps torch too.
# It is a URI because pip splits the value at spaces.
$(INSTALLED): pyproject.toml constraints.txt
	@rm -f $@
	@$(BIN)/python -c 'from pathlib import Path; \
		print("[global]\nconstraint =", Path("constraints.txt").resolve().as_uri())' > $(VENV)/pip.conf
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@printf '%s' '$(CURDIR)' > $@

# Triton alone, in an environment for each version: TRITON=3.6.0 is another. The stamp is written
# last, and is out of sight after a change of Python.
ifneq ($(filter check-kernels,$(MAKECMDGOALS)),)
ifneq ($(shell $(KERNELS)/bin/python -c 'import triton; print(triton.__version__)' 2>/dev/null),$(TRITON))
$(KERNELS)/.installed: new-kernels-venv
endif
endif

$(KERNELS)/.installed:
	$(KERNELS)/bin/python -m pip install triton==$(TRITON)
	@touch $@

new-venv: known-python
	$(PYTHON) -m venv --clear $(VENV)

new-kernels-venv: known-python
	$(PYTHON) -m venv --clear $(KERNELS)

known-python:
	@$(PYTHON) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "onescan needs Python 3.11 or newer with its venv module, and '$(PYTHON)'" \
			"($$($(PYTHON) --version 2>&1)) is not that: name another, as in" \
			"'make PYTHON=python3.12 setup', or install your system's python3-venv." >&2; exit 1; }
