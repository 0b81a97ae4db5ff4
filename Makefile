# Everything runs in .venv, made from pyproject.toml and constraints.txt the first time it is needed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests run on as many processes as there are cores, four at most: each has a thread of its own for torch.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4
PIP := $(BIN)/python -m pip install --quiet --progress-bar off --disable-pip-version-check --constraint constraints.txt

# Prefect: no telemetry, and time for the first start of its temporary server (a database migration).
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 180

.PHONY: help demo test lint typecheck test-slow environment clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  PYTHON=python3.12 chooses the interpreter of a new .venv; ARGS="..." is passed on to the demo or to pytest.'

demo: $(STAMP) ## compress the demo model by 30, 50 and 70 %; report in runs/demo/
	$(BIN)/python -m flows demo $(ARGS)

test: lint typecheck ## lint, type-check, and run every test that is not slow
	$(PYTEST) --dist worksteal -m 'not slow' $(ARGS)

test-slow: $(STAMP) ## run the tests marked slow
	@$(PYTEST) --dist loadfile -m slow $(ARGS) || { code=$$?; \
		[ $$code -eq 5 ] && echo 'make test-slow: no test is marked slow.' || exit $$code; }

lint: $(STAMP) ## ruff, its formatter in check mode, and the layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

typecheck: $(STAMP) ## mypy, strict, on lsp_core and storage
	$(BIN)/mypy

environment: $(STAMP) ## make .venv and do nothing else

# torch comes first and by its exact version; the build backends are installed, not fetched by pip into places that the
# constraints do not reach. The stamp is written last: an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'error: no $(PYTHON) here; name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; ok = sys.version_info >= (3, 11); ok or print("error: Python 3.11 or later is needed, " \
		"$(PYTHON) is", sys.version.split()[0] + "; name another: make PYTHON=/path/to/python3.11", file=sys.stderr); sys.exit(not ok)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo 'error: $(PYTHON) cannot make environments; on Debian: apt-get install python3-venv' >&2; exit 1; }
	@echo '[1/3] environment in $(VENV), by '"$$($(PYTHON) --version)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo '[2/3] torch and the build backends (a minute or two)'
	@$(PIP) "$$(grep '^torch==' constraints.txt)" hatchling setuptools
	@echo '[3/3] everything else, and this checkout (a minute or two)'
	@$(PIP) --no-build-isolation --editable '.[kernels,pipeline,s3,dask,ray,dev]'
	@touch $@
	@echo '      done'

clean: ## delete .venv and the tools' caches; runs/ and the store .lsp/ stay
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
