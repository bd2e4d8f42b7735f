# Needs only python3.11 or newer with pip and venv, and make.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests and builds share the cores with others: see bench/waiting_threads.py.
export GOMP_SPINCOUNT ?= 1000

.DEFAULT_GOAL := help
.PHONY: help venv browser demo test test-all lint format bench docs results clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/.ready ## make .venv with everything pinned in constraints.txt

# k-diffusion is an oracle in tests. It comes without its dependencies, because it asks for torchvision and
# training tools that its samplers do not need; what they do need is in the dev extra.
.venv/.ready: pyproject.toml constraints.txt
	@echo "make: installing torch and the other packages of constraints.txt into .venv: 2 GB or more, some minutes;"
	@echo "      pip says nothing until it is done"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,plot,docs]'
	$(BIN)/pip install -q --no-deps k-diffusion==0.1.1.post1
	@touch $@

browser: ## chromium for the studio's tests, from the system's packages; without it they are skipped
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		{ echo "make: installing chromium from the system's packages: about 100 MB, a minute or two"; apt-get update -qq && apt-get install -yqq chromium >/dev/null; } || echo "no chromium: browser tests are skipped"

demo: venv ## text to image with the model that Pellucid brings; writes demo.png
	$(BIN)/python -m pellucid.cli demo --overwrite

test: venv browser lint ## lint, then the fast tests
	$(BIN)/pytest -n 2

test-all: venv browser ## all tests that need no accelerator, the slow ones too
	$(BIN)/pytest -n 2 -m "not gpu"

lint: venv ## ruff, mypy, and the import rule of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## let ruff sort imports, fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## time the engine against its peers, as ratios
	$(BIN)/python bench/scheduler_overhead.py
	$(BIN)/python bench/network_cpu.py

docs: venv ## build the site into docs/_build/html: draws the handbook's figures, runs the labs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

results: venv ## measure again the pages of docs/results that docs/make.py writes
	$(BIN)/python docs/make.py

clean: ## remove .venv, caches and demo outputs
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist out demo.png
	find src tests bench docs labs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	rm -rf src/*.egg-info docs/_build docs/labs docs/handbook/made
