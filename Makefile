# Everything runs in .venv. A stamp per set of dependencies remembers that it is installed, so that a second run does no pip work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Tests that run at a time.
WORKERS ?= 2

# XLA's thread pools on a CPU must outnumber the simulated devices, or a collective may wait for a thread forever.
export NPROC ?= 24

.DEFAULT_GOAL := help
.PHONY: help serve test lint clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16
	@echo '  ARGS="…" is passed on: make serve ARGS="MODEL --port 8001", make test ARGS="-k scheduler"'

serve: $(VENV)/installed ## serve a model (the embedded one when ARGS names none)
	$(BIN)/python server.py $(ARGS)

test: $(VENV)/installed-test ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(VENV)/installed-lint ## check format, style, types and who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache .test-cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "tpu-serve needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 …" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@
