.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow check lint types compile gpu check-kernels integrations bench format docs links \
	check-python new-venv new-kernels-venv new-docs-venv new-integrations-venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

TRITON ?= 3.7.1
KERNELS := .venv-kernels/$(TRITON)
DOCS := .venv-docs
INTEGRATIONS := .venv-integrations
SPHINX := $(DOCS)/bin/python -m sphinx -W --keep-going -j auto

help:    ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED)  ## install the package, its tools and the git hooks into .venv
	@if [ -e .git ]; then $(BIN)/pre-commit install; fi

demo: $(INSTALLED)  ## train on handwritten digits with three seeds
	$(BIN)/onescan train digits --seeds 0 1 2

test: $(INSTALLED)  ## run the fast tests and doctests, with shapes checked in every call
	$(BIN)/python -m pytest -m "not compile and not gpu and not slow" -n auto --maxprocesses 8 --dist worksteal

# Shape checks take a third of the time, and the fast tests have them, so these tests run without.
test-slow: $(INSTALLED)  ## run the slow tests: killed runs, several processes, kernels, all options
	$(BIN)/python -m pytest -m "slow and not compile and not gpu" --jaxtyping-packages= \
		-n auto --maxprocesses 8 --dist worksteal tests

check: lint types test test-slow compile  ## run everything that a pull request must pass, on a CPU

lint: $(INSTALLED)  ## check style and find dead code
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: $(INSTALLED)  ## check static types
	$(BIN)/mypy

# Dynamo refuses functions that jaxtyping's hook has wrapped, so these run without it.
compile: $(INSTALLED)  ## run the tests of torch.compile and more export tests, without shape checks
	$(BIN)/python -m pytest -m compile -o addopts="--strict-markers"

# An environment that has onescan's dependencies, torch and pytest is used as it is: a machine with a
# GPU may have no network, and its own torch. It fails without a GPU, because skipped tests would look
# like a pass. GPU_TESTS=all adds other head widths and all tests.
HAS_ALL := import onescan, pytest, torch, triton
GPU_PYTHON := $(shell $(PYTHON) -c '$(HAS_ALL)' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(INSTALLED))  ## check every kernel on a GPU
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu.py $(if $(filter all,$(GPU_TESTS)),correctness --everything,quick)

check-kernels: $(KERNELS)/.installed  ## compile every kernel for seven GPUs, without one
	PYTHONPATH=. $(KERNELS)/bin/python benchmarks/check_kernels.py

# A separate environment, because timm needs torchvision, which needs a different version of torch
# from the one in .venv. From PyPI, torch includes several GB of GPU libraries on Linux;
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS can name a source of CPU builds.
integrations: $(INTEGRATIONS)/.installed  ## run the tests that need timm, PEFT, TRL and others, in .venv-integrations
	$(INTEGRATIONS)/bin/python -m pytest -m integrations \
		$$(grep -rl mark.integrations tests --include='test_*.py')

bench: $(INSTALLED)  ## compare speed and memory of one scan and softmax attention
	$(BIN)/python benchmarks/one_scan.py

# Warnings, which include broken links inside the site, are errors.
docs: $(DOCS)/.installed  ## build the documentation site in build/docs and run its notebooks
	$(SPHINX) -b html docs build/docs

links: $(DOCS)/.installed  ## check the site's links to other sites, which needs a network
	ONESCAN_DOCS_NOTEBOOKS=off $(SPHINX) -b linkcheck docs build/links

format: $(INSTALLED)  ## format the code and fix what ruff can fix
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# The stamp is written last and contains the directory. The venv is recreated if the stamp is missing
# (an interrupted installation), names another directory (a moved or copied venv), or if torch cannot
# be found (a change of Python). After a change of pyproject.toml, missing packages are installed.
INSTALLED_IN := from importlib.util import find_spec; find_spec("torch") and print(open("$(INSTALLED)").read())
ifneq ($(shell $(BIN)/python -c '$(INSTALLED_IN)' 2>/dev/null),$(CURDIR))
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

ifneq ($(filter docs links,$(MAKECMDGOALS)),)
INSTALLED_DOCS := from importlib.util import find_spec; find_spec("sphinx") and print(open("$(DOCS)/.installed").read())
ifneq ($(shell $(DOCS)/bin/python -c '$(INSTALLED_DOCS)' 2>/dev/null),$(CURDIR))
$(DOCS)/.installed: new-docs-venv
endif
endif

$(DOCS)/.installed: pyproject.toml constraints.txt
	@rm -f $@
	$(DOCS)/bin/python -m pip install -c constraints.txt -e '.[docs,train,vision,text,generation,export]'
	@printf '%s' '$(CURDIR)' > $@

ifneq ($(filter integrations,$(MAKECMDGOALS)),)
INSTALLED_INTEGRATIONS := from importlib.util import find_spec; \
	find_spec("timm") and print(open("$(INTEGRATIONS)/.installed").read())
ifneq ($(shell $(INTEGRATIONS)/bin/python -c '$(INSTALLED_INTEGRATIONS)' 2>/dev/null),$(CURDIR))
$(INTEGRATIONS)/.installed: new-integrations-venv
endif
endif

$(INTEGRATIONS)/.installed: pyproject.toml constraints-integrations.txt
	@rm -f $@
	$(INTEGRATIONS)/bin/python -m pip install -c constraints-integrations.txt \
		-e '.[generation,text,timm]' pytest hypothesis beartype peft trl bitsandbytes torchao \
		sentence-transformers
	@printf '%s' '$(CURDIR)' > $@

# One environment per Triton version, with nothing but Triton: TRITON=3.6.0 selects another one. The
# stamp is written last. After a change of Python, Triton cannot be imported.
ifneq ($(filter check-kernels,$(MAKECMDGOALS)),)
ifneq ($(shell $(KERNELS)/bin/python -c 'import triton; print(triton.__version__)' 2>/dev/null),$(TRITON))
$(KERNELS)/.installed: new-kernels-venv
endif
endif

$(KERNELS)/.installed:
	$(KERNELS)/bin/python -m pip install triton==$(TRITON)
	@touch $@

new-venv: check-python
	$(PYTHON) -m venv --clear $(VENV)

new-kernels-venv: check-python
	$(PYTHON) -m venv --clear $(KERNELS)

new-docs-venv: check-python
	$(PYTHON) -m venv --clear $(DOCS)

new-integrations-venv: check-python
	$(PYTHON) -m venv --clear $(INTEGRATIONS)

check-python:
	@$(PYTHON) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "onescan needs Python 3.11 or newer with the venv module; '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>&1). Choose another Python, as in" \
			"'make PYTHON=python3.12 setup', or install your system's python3-venv package." >&2; exit 1; }
