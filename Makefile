# Everything runs in an environment of the project's own, built from constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest

.PHONY: check check-lowest demo bench format train-pocket clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $(STAMP)

check: $(STAMP)  ## lint, types, import rules, tests with coverage
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered --cov-fail-under=90

$(LOWEST)/.installed: pyproject.toml constraints.txt scripts/lowest_bounds.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) scripts/lowest_bounds.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet -c $(LOWEST)/constraints.txt torch==2.13.0
	$(LOWEST)/bin/pip install --progress-bar off -c $(LOWEST)/constraints.txt -e '.[all,dev]'
	touch $@

check-lowest: $(LOWEST)/.installed  ## the tests again, with the oldest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest

demo: $(STAMP)  ## a guarded RAG chain on the embedded model
	$(BIN)/semgrad-guard demo --output output/demo

bench: $(STAMP)  ## scoring against plain generation and the official algorithm
	$(BIN)/python benchmarks/scoring.py --output output/scoring.json

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

train-pocket: $(STAMP)  ## the embedded model again, from scratch (nearly four hours of two cores)
	$(BIN)/python -m semgrad_guard.pocket.train --output output/pocket

clean:
	rm -rf $(VENV) $(LOWEST) output dist .coverage
