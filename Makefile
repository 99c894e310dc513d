# `make demo` and `make test` need Python alone.
PYTHON ?= python3
BIN    := .venv/bin
export HF_HUB_DISABLE_TELEMETRY = 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit fuzz soak wheel-check bench tables docs docs-serve screenshots clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 13

# A stamp depends on what decides its content, so a second run installs nothing.
.venv/.base: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

.venv/.dev: .venv/.base
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

.venv/.docs: .venv/.base
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	@touch $@

demo: .venv/.base  ## Install, then ask: is it the coupling or the init?
	$(BIN)/qkflow compare --data speeches --baselines standard@fan_in --variants euler@fan_in,euler@modern --controls standard@modern --optimizer adamw --seeds 5 --tokens 150k --out runs/demo

test: .venv/.dev lint types unit  ## Install, lint, type-check, run every test

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

unit: .venv/.dev
	$(BIN)/python -m pytest -n auto --maxprocesses 8

fuzz: .venv/.dev  ## Run 20,000 fuzzed commands and damaged files; print how they ended
	PYTHONPATH=tests/helpers $(BIN)/python tests/fuzz/run_fuzz.py --cases 20000 --processes 2

soak: .venv/.dev  ## Train 10,000 steps, report 200 runs, kill and interrupt; print counts (minutes)
	$(BIN)/python tests/soak.py

wheel-check: .venv/.base  ## Build the wheel and install it, without constraints, into a clean environment
	$(BIN)/python tests/wheel_check.py

bench: .venv/.base  ## Print time, FLOPs and memory relative to standard attention
	$(BIN)/qkflow bench

tables: .venv/.dev  ## Rewrite the generated tables and figures of README.md and docs/
	$(BIN)/python docs/generate_tables.py
	$(BIN)/python docs/generate_figures.py
	$(BIN)/python docs/generate_licenses.py

docs: .venv/.docs  ## Build the documentation into site/
	$(BIN)/zensical build --clean --strict

docs-serve: .venv/.docs  ## Serve the documentation on localhost, rebuilt when a page changes
	$(BIN)/zensical serve

screenshots: .venv/.dev  ## Retake the screenshots of the documentation from real runs
	$(BIN)/python docs/screenshots.py

clean:  ## Remove the environment and build output
	rm -rf .venv build dist site src/*.egg-info .mypy_cache .ruff_cache
