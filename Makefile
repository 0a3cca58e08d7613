# Each target sets up all it needs in .venv, on a fresh clone too. Needs Python 3.11 or later as $(PYTHON).
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test slow check figures bench clean

demo: .venv/train
	@$(BIN)/python examples/demo.py

figures: .venv/core
	$(BIN)/python examples/figures.py docs/figures

test: .venv/test
	$(BIN)/python -m pytest

slow: .venv/test
	$(BIN)/python -m pytest -m slow

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: .venv/test
	$(BIN)/python benchmarks/simulate/run.py
	$(BIN)/python benchmarks/runtime/run.py --repeat 100
	$(BIN)/python benchmarks/runtime/four_ranks.py
	$(BIN)/python benchmarks/weights/cpu.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[draw]'
	@touch $@

.venv/train: .venv/core
	$(PIP) -e '.[draw,train]'
	@touch $@

.venv/test: .venv/train
	$(PIP) -e '.[test]'
	@touch $@

.venv/dev: .venv/test
	$(PIP) -e '.[dev]'
	@touch $@
