# Every target sets up its own virtual environment, and is cheap once that exists. A fresh machine
# needs Python 3.11 or newer, git and make. Choose the interpreter with
# `make test PYTHON=python3.13`; the versions of JAX and of all tools follow from it.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TESTS ?=

# Interpreters of `make test-matrix`. They must start; those of version managers are found as well.
PYTHON_OLDEST ?= $(shell "$(PYTHON)" scripts/find_python.py 3.11)
PYTHON_NEWEST ?= $(shell "$(PYTHON)" scripts/find_python.py newest)

# JAX 0.11 and later need Python 3.12.
OLDEST := constraints/jax-0.10-python-3.11.txt
NEWEST := constraints/jax-0.12-python-3.12.txt
VERSION := $(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CONSTRAINTS ?= $(if $(filter 3.11,$(VERSION)),$(OLDEST),$(NEWEST))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
KFAC := .venv-kfac
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-matrix test-newest pytest lint bench docs constraints freeze clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.group-examples ## run the demonstration
	@echo "==> demo: curvax on small problems"
	@$(BIN)/python -m examples.demo

test: lint pytest ## style, types, the test suite and the examples of the documentation

test-all: lint $(VENV)/.group-test ## the same with the slow tests and more random examples
	@echo "==> test-all: the complete suite in $(VENV), slow tests included"
	@$(PYTEST) -m "slow or not slow" --hypothesis-profile=thorough

test-matrix: ## the test suite on Python 3.11 with JAX 0.10, and on the newest of both
	@test -n "$(PYTHON_OLDEST)" || { \
	  echo "Found no working Python 3.11. Name one: make test-matrix PYTHON_OLDEST=path/to/python3.11"; exit 1; }
	@$(MAKE) --no-print-directory pytest PYTHON="$(PYTHON_OLDEST)" VENV=.venv-oldest
	@$(MAKE) --no-print-directory test-newest

test-newest: ## the test suite on the newest Python found, with the newest JAX
	@"$(PYTHON_NEWEST)" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "Found no working Python 3.12 or newer. Name one: make $@ PYTHON_NEWEST=path/to/python3.13"; exit 1; }
	@$(MAKE) --no-print-directory pytest PYTHON="$(PYTHON_NEWEST)" VENV=.venv-newest

pytest: $(VENV)/.group-test ## the test suite alone
	@echo "==> pytest: $(or $(TESTS),the suite and the examples of the documentation) in $(VENV)"
	@$(BIN)/python scripts/versions.py
	@$(PYTEST) $(TESTS)

lint: $(VENV)/.group-lint ## style, format and types
	@echo "==> lint: ruff check"
	@$(BIN)/ruff check .
	@echo "==> lint: ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> lint: basedpyright"
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: $(VENV)/.group-bench $(KFAC)/.kfac-jax ## run all benchmarks
	@set -e; for script in $(BENCHMARKS); do \
	  echo "==> bench: $$script"; $(BIN)/python $$script; \
	done

docs: $(VENV)/.group-docs ## build the documentation into site/
	@echo "==> docs: building site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site
	@echo "    open site/index.html"

constraints: ## pin the newest development versions, for both ends of the matrix
	@$(MAKE) --no-print-directory freeze JAX='0.10.*' CONSTRAINTS=$(OLDEST) \
	  PYTHON="$$("$(PYTHON)" scripts/find_python.py 3.11)"
	@$(MAKE) --no-print-directory freeze JAX='0.12.*' CONSTRAINTS=$(NEWEST) \
	  PYTHON="$$("$(PYTHON)" scripts/find_python.py 3.12)"

freeze:
	@echo "==> constraints: resolving JAX $(JAX) into $(CONSTRAINTS)"
	@rm -rf .venv-freeze
	@"$(PYTHON)" -m venv .venv-freeze
	@.venv-freeze/bin/python -m pip --disable-pip-version-check install --quiet --upgrade pip
	@.venv-freeze/bin/python -m pip install --quiet 'jax==$(JAX)' -e . \
	  $(addprefix --group ,examples test lint docs bench)
	@.venv-freeze/bin/python -m pip list --format=freeze --exclude-editable --exclude setuptools \
	  > $(CONSTRAINTS)
	@rm -rf .venv-freeze

clean: ## remove the environments, the caches and the built documentation
	@echo "==> clean"
	@rm -rf .venv .venv-* site build dist .pytest_cache .ruff_cache .hypothesis

# Set-up: one stamp file for the package, one for each dependency group of pyproject.toml.

# A different minor version of PYTHON recreates the environment, if this Makefile created it.
$(VENV)/.python-$(VERSION):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "curvax needs Python 3.11 or newer; '$(PYTHON)' is $(or $(VERSION),not a working interpreter)."; \
	  echo "Choose another: make PYTHON=path/to/python3.11 ..."; exit 1; }
	@test ! -e $(VENV) || ls $(VENV)/.python-* $(VENV)/.curvax >/dev/null 2>&1 || { \
	  echo "$(VENV) was not created by this Makefile: remove it, or choose another VENV."; exit 1; }
	@echo "==> set-up: creating $(VENV) with Python $(VERSION)"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.curvax: pyproject.toml $(CONSTRAINTS) $(VENV)/.python-$(VERSION)
	@echo "==> set-up: installing curvax into $(VENV)"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) pip
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[disk,plot,linear,optax]'
	@touch $@

.PRECIOUS: $(VENV)/.group-%
$(VENV)/.group-%: $(VENV)/.curvax
	@echo "==> set-up: installing the $* tools into $(VENV)"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --group $*
	@touch $@

# The peer in benchmarks/curvature.py; it needs an older JAX than curvax.
$(KFAC)/.kfac-jax:
	@echo "==> set-up: installing kfac-jax 0.0.8 and JAX 0.8.2 into $(KFAC)"
	@"$(PYTHON)" -m venv $(KFAC)
	@$(KFAC)/bin/python -m pip --disable-pip-version-check install --quiet \
	  'kfac-jax==0.0.8' 'jax==0.8.2' 'jaxlib==0.8.2'
	@touch $@
