PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
EDGE ?= .venv-edge
RAY ?= .venv-ray
ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-ray conformance edge chaos resume soak lint format docs bench bench-quick reliability

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.extra-examples ## Train on real digits, asynchronously
	$(BIN)/python examples/digits.py --picture build/digits.png $(ARGS)

test: $(VENV)/.group-test ## Run the tests (ARGS="-k name", PYTHON=python3.12 VENV=.venv-3.12)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-ray: $(RAY)/.group-ray ## Run the tests on a Ray cluster, about 2 minutes
	$(RAY)/bin/python -m pytest -p no:xdist tests/engines/test_ray.py $(ARGS)

conformance: $(PEERS)/.group-peers ## Compare with torch, dataset by dataset
	$(PEERS)/bin/python -m pytest -n 2 --dist worksteal tests/conformance $(ARGS)

edge: $(EDGE)/.group-edge ## Test the examples that need datasets, jax, pyarrow, webdataset
	$(EDGE)/bin/python -m pytest -n 2 --dist worksteal tests/edge $(ARGS)

chaos: $(VENV)/.group-test ## Every fault under every start method and loop, about 10 minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m chaos tests/chaos $(ARGS)

resume: $(VENV)/.group-test ## Ten thousand interrupted runs, about 15 minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "resume or not resume" tests/resume $(ARGS)

soak: $(VENV)/.group-test ## Faults at random for 10 minutes (ARGS="--minutes 120")
	$(BIN)/python -m tests.chaos.soak $(ARGS)

lint: $(VENV)/.group-lint ## Check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.group-lint ## Fix style and format in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.group-docs ## Build the documentation
	$(BIN)/zensical build --clean --strict

bench: $(PEERS)/.group-peers ## Measure beside other loaders, about 25 minutes (ARGS="--only one-int")
	$(PEERS)/bin/python -m tests.benchmarks --json build/bench.json $(ARGS)
	$(PEERS)/bin/python -m tests.benchmarks.report --json build/bench.json

bench-quick: $(PEERS)/.group-peers ## A part of that in under 3 minutes; the page goes to build/
	$(PEERS)/bin/python -m tests.benchmarks --quick --json build/bench-quick.json $(ARGS)
	$(PEERS)/bin/python -m tests.benchmarks.report --json build/bench-quick.json --out build

reliability: $(PEERS)/.group-peers ## Do the same faults to other loaders, about 10 minutes
	$(PEERS)/bin/python -m tests.reliability

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

$(EDGE)/.group-edge $(RAY)/.group-ray: pyproject.toml
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --group $(@F:.group-%=%) -e .
	@touch $@

# The other loaders need Python 3.11. torch first and by name: pip then takes the CPU build at hand.
$(PEERS)/.group-peers: pyproject.toml
	test -d $(PEERS) || python3.11 -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(PEERS)/bin/python -m pip install --quiet torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet --group peers --group test -e .
	@touch $@
