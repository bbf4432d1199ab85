PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format docs

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.extra-examples ## Train on real digits, asynchronously
	$(BIN)/python examples/digits.py --picture build/digits.png $(ARGS)

test: $(VENV)/.group-test ## Run the tests (ARGS="-k name", PYTHON=python3.12 VENV=.venv-3.12)
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.group-lint ## Check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.group-lint ## Fix style and format in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.group-docs ## Build the documentation
	$(BIN)/zensical build --clean --strict

# The pip that venv brings may be too old for dependency groups.
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.group-%: pyproject.toml $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --group $* -e .
	@touch $@

$(VENV)/.extra-%: pyproject.toml $(VENV)/.pip
	$(BIN)/python -m pip install --quiet -e '.[$*]'
	@touch $@
