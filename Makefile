# `make quickstart` and `make test` need Python >= 3.10 and pip only: they make the environment themselves.
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
ARGS ?=
STEPS ?=
SECONDS ?=

.DEFAULT_GOAL := help
.PHONY: help env quickstart test test-full lint format types contracts wheel clean

help:
	@echo 'make quickstart [STEPS=20] [SECONDS=600]  train, export and measure a head on this machine'
	@echo 'make test [ARGS=...]                      the tests; make test-full adds the slow ones'
	@echo 'make lint | format | types | contracts    ruff, ruff format, mypy, import-linter'
	@echo 'make wheel | clean | env                  dist/*.whl; remove what was built; the environment alone'
	@echo 'Variables: VENV=.venv, PYTHON=python3, EAGLE_TRAIN_TORCH=auto|cpu|cuda|npu|skip'

env: $(READY)

$(READY): pyproject.toml constraints.txt scripts/setup_env.sh
	@bash scripts/setup_env.sh $(VENV)
	@touch $@

quickstart: $(READY)
	$(PY) scripts/quickstart.py $(if $(STEPS),steps=$(STEPS)) $(if $(SECONDS),seconds=$(SECONDS)) $(ARGS)

test: $(READY)
	@PY=$(PY) bash scripts/test.sh $(ARGS)

test-full: $(READY)
	@PY=$(PY) bash scripts/test.sh --full $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(READY)
	$(PY) -m mypy

contracts: $(READY)
	$(VENV)/bin/lint-imports

wheel: $(READY)
	rm -rf dist
	$(PY) -m build --wheel --no-isolation

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -path ./.git -prune -o -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
