# Every target sets up what it needs in a virtual environment of its own and is cheap when that is
# already there. A fresh machine needs Python 3.11 or newer, git and make. Choose the interpreter
# with `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/jax-0.10.txt
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
JAX_09 := VENV=.venv-jax09 CONSTRAINTS=constraints/jax-0.9.txt
KFAC := .venv-kfac
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-matrix pytest lint bench docs constraints freeze clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.group-examples ## run the demonstration
	@echo "==> demo: what curvax does, on small problems"
	@$(BIN)/python -m examples.demo

test: lint pytest ## lint, types, the test suite and the documentation's examples

test-all: lint $(VENV)/.group-test ## as test, with the slow tests and more random examples
	@echo "==> test-all: the whole suite in $(VENV), slow tests included"
	@$(PYTEST) -m "slow or not slow" --hypothesis-profile=thorough

test-matrix: ## the test suite on the oldest and the newest JAX series we support
	@echo "==> test-matrix: JAX 0.9"
	@$(MAKE) --no-print-directory pytest $(JAX_09)
	@echo "==> test-matrix: JAX 0.10"
	@$(MAKE) --no-print-directory pytest

pytest: $(VENV)/.group-test ## the test suite alone
	@echo "==> pytest: the suite and the documentation's examples in $(VENV)"
	@$(PYTEST)

lint: $(VENV)/.group-lint ## style, format and types
	@echo "==> lint: ruff check"
	@$(BIN)/ruff check .
	@echo "==> lint: ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> lint: basedpyright"
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: $(VENV)/.group-bench $(KFAC)/.kfac-jax ## run every benchmark in turn
	@set -e; for script in $(BENCHMARKS); do \
	  echo "==> bench: $$script"; $(BIN)/python $$script; \
	done

docs: $(VENV)/.group-docs ## build the documentation into site/
	@echo "==> docs: building site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site
	@echo "    open site/index.html"

constraints: ## pin the newest development versions again, in both constraints files
	@$(MAKE) --no-print-directory freeze JAX='0.10.*' GROUPS='examples test lint docs bench' \
	  CONSTRAINTS=constraints/jax-0.10.txt
	@$(MAKE) --no-print-directory freeze JAX='0.9.*' GROUPS='examples test' \
	  CONSTRAINTS=constraints/jax-0.9.txt

freeze:
	@echo "==> constraints: resolving JAX $(JAX) into $(CONSTRAINTS)"
	@rm -rf .venv-freeze
	@$(PYTHON) -m venv .venv-freeze
	@.venv-freeze/bin/python -m pip --disable-pip-version-check install --quiet --upgrade pip
	@.venv-freeze/bin/python -m pip install --quiet 'jax==$(JAX)' -e . $(addprefix --group ,$(GROUPS))
	@.venv-freeze/bin/python -m pip list --format=freeze --exclude-editable --exclude setuptools \
	  > $(CONSTRAINTS)
	@rm -rf .venv-freeze

clean: ## remove the environments, the caches and the built documentation
	@echo "==> clean"
	@rm -rf .venv .venv-* site build dist .pytest_cache .ruff_cache .hypothesis

# Set-up. One stamp for the package, one for each dependency group of pyproject.toml.

$(BIN)/python:
	@echo "==> set-up: creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "curvax needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.curvax: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "==> set-up: installing curvax into $(VENV)"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) pip
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[disk,plot,linear,optax]'
	@touch $@

.PRECIOUS: $(VENV)/.group-%
$(VENV)/.group-%: $(VENV)/.curvax
	@echo "==> set-up: installing the $* tools into $(VENV)"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --group $*
	@touch $@

# Whom benchmarks/curvature.py compares with; it needs a JAX that is older than ours.
$(KFAC)/.kfac-jax:
	@echo "==> set-up: installing kfac-jax 0.0.8 and JAX 0.8.2 into $(KFAC)"
	@$(PYTHON) -m venv $(KFAC)
	@$(KFAC)/bin/python -m pip --disable-pip-version-check install --quiet \
	  'kfac-jax==0.0.8' 'jax==0.8.2' 'jaxlib==0.8.2'
	@touch $@
