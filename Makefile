# make install   the virtual environment with the pinned development versions (quick the second time)
# make train     the main example: a byte-level GPT on a 2 × 2 mesh; ARGS='--trainer.strategy.tp=4 …' goes to LightningCLI
# make test      everything: lint, types, doctests, the examples, the tests

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do command -v $$python && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := test
.PHONY: install train test lint format types doctest examples tests dist clean

install: $(STAMP)

# Compiled on every core, where pip would use one; some packages carry files that no compiler takes.
$(STAMP): requirements/dev.txt pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --no-compile --requirement requirements/dev.txt
	$(RUN) -m pip install --no-deps --no-build-isolation --editable .
	$(RUN) -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(STAMP)

train: install
	$(RUN) examples/pretrain_bytes.py fit $(ARGS)

test: lint types doctest examples tests

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: install
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: install
	$(RUN) -m mypy

# pytest's 5 is "no doctest found".
doctest: install
	$(RUN) -m pytest --doctest-modules -q src || test $$? -eq 5

# The main job with a handful of small steps, in a folder of its own.
examples: install
	rm -rf runs/smoke
	$(RUN) examples/pretrain_bytes.py fit --config examples/smoke.yaml

tests: install
	$(RUN) -m pytest $(PYTEST_ARGS)

dist: install
	rm -rf dist
	$(RUN) -m build --no-isolation

clean:
	rm -rf build dist runs .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
