# `make demo` and `make test` do all the set-up they need in .venv; the second run of each starts in seconds.
PYTHON ?= python3
BIN := .venv/bin
# one process a core, each test file in one of them, the long ones first
TEST_FLAGS := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test setup lint format clean

demo: .venv/.ready
	@echo '$$ tail -n 4 examples/primes.py'
	@tail -n 4 examples/primes.py
	@echo '$$ ling complete --stats examples/primes.py'
	@$(BIN)/ling complete --stats examples/primes.py

test: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest $(TEST_FLAGS)

setup: .venv/.ready

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/.ready: pyproject.toml setup.sh
	@PYTHON='$(PYTHON)' sh setup.sh .
	@touch $@

.venv/.ready-dev: .venv/.ready
	@PYTHON='$(PYTHON)' sh setup.sh '.[dev]'
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist build
