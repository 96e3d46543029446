# Needs only make and Python 3.11 or newer; everything else is installed into .venv.
#
#   make setup         create .venv with the pinned requirements and the package itself
#   make run           set up, then train the default run
#   make test          set up, then lint, types, import rules and every test (what CI does)
#   make lint          set up, then the linters alone
#   make format        let ruff rewrite what it can
#   make requirements  compile requirements.txt anew from pyproject.toml
#   make clean         remove .venv, caches and build outputs; runs/ is kept

PYTHON ?= python3
# Test processes. One file's tests stay on one process and in order, so this changes no result.
WORKERS ?= 2
UV_VERSION := 0.13.8

BIN := .venv/bin
INSTALL := UV_FIND_LINKS="$${UV_FIND_LINKS-$$PIP_FIND_LINKS}" $(BIN)/uv pip
SOURCES := $(sort __init__.py $(shell find dataflow algorithms planner workers configs launch \
	-name '__pycache__' -prune -o -type f -print 2>/dev/null))

.DEFAULT_GOAL := setup
.PHONY: setup run test lint format requirements clean FORCE

setup: .venv/.package

# uv installs about seven times faster than pip; where it cannot reach what pip is set up to reach,
# pip does the same work. Both read the same exact pins.
.venv/.requirements: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
		"Give another one: make setup PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(INSTALL) install --quiet --python $(BIN)/python -r requirements.txt || \
		$(BIN)/python -m pip install -r requirements.txt
	@touch $@

# A strict editable install links each file by name, so it is renewed when a file comes or goes.
.venv/.files: .venv/.requirements FORCE
	@printf '%s\n' $(SOURCES) > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

.venv/.package: .venv/.files pyproject.toml
	@rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation \
		--config-settings editable_mode=strict -e .
	@touch $@

run: setup
	$(BIN)/penstock run

test: lint
	$(BIN)/pytest -n $(WORKERS) --dist loadfile

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Versions already pinned stay unless pyproject.toml rules them out; delete a line to let it move.
# torch is written without its build tag, so that each machine takes the build it has.
requirements: .venv/.requirements
	echo 'torch==2.13.0' > .venv/constraints.txt
	sed -e 's/^torch==.*/torch==2.13.0/' requirements.txt >> .venv/constraints.txt
	$(INSTALL) compile pyproject.toml --quiet --extra ray --extra dev --python $(BIN)/python \
		--constraint .venv/constraints.txt --no-header --no-annotate > .venv/compiled.txt
	{ grep '^#' requirements.txt; sed -E 's/^(torch==[^+ ]*)\+[a-z0-9]+/\1/' .venv/compiled.txt; } \
		> .venv/requirements.new
	mv .venv/requirements.new requirements.txt

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

FORCE:
