PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: demo test check slow

demo: .venv/installed
	$(BIN)/kvkeep generate --model smollm2-135m "What is photosynthesis?"

test: .venv/installed
	$(BIN)/pytest -q

slow: .venv/installed
	$(BIN)/pytest -q -m slow

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q README.md docs

# torch first and by its exact version: that build is for the CPU, and what is installed after it
# must not choose another.
.venv/installed: pyproject.toml constraints.txt $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@
