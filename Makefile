# Everything runs in .venv, made by `make setup`. `make` alone lists the targets.
# The tests start Python hundreds of times. Bytecode that is kept saves a fifth of their time.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
TORCHRUN_ARGS ?= --standalone --nproc-per-node 2
STORE ?= captures

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
EXCHANGE := .venv-exchange
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
GPU_PYTHON := $(BIN)/python
GPU_SETUP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
SOURCES := capd capd_client tests benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help setup demo docs cli-page pictures test test-all test-store test-exchange check check-static format lint type imports test-random test-fault test-gpu bench bench-gpu gpu-first-hour bench-store clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv and install capd with its development tools (fast when already done)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "capd needs Python 3.11 or newer; run: make setup PYTHON=python3.12")'
	@echo "A Python environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Most modules of the packages are never imported. The first import compiles those that are.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(DEMO)

# Its lines are the downloads: they take longest.
$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@echo "capd and what it needs to run, PyTorch first of all"
	@rm -f $@
	@{ $(BIN)/python -m pip install --no-compile --progress-bar off -c constraints.txt -e . && touch $@; } \
	    | sed -un 's/^ *Downloading \([^-]*-[^-]*\)-[^ ]*\.whl \((.*)\)$$/  \1 \2/p; s/^Installing collected packages.*/  installing/p'
	@test -e $@

demo: $(DEMO) ## Train a small GPT on two ranks, capture it, then compare number formats on what was captured
	@run=$(STORE)/demo-$$(date +%Y%m%d-%H%M%S).zarr; export PATH=$(CURDIR)/$(BIN):$$PATH OMP_NUM_THREADS=1; set -e; \
	echo "A small GPT trains on two ranks, and capd captures its first and its fourth step"; \
	capd run --store $(STORE) --run-id $$(basename $$run .zarr) --policy block -- \
	    torchrun $(TORCHRUN_ARGS) examples/train_text.py --steps 4 --capture-steps 0,3; \
	echo "The error of number formats on what was captured"; \
	capd compare $$run; \
	echo "next  capd report $$run -o report.html · capd ls $$run"

test: setup ## Run the default test tier: every promise and every command once
	$(PYTEST) -m "not slow and not fault and not gpu" $(SIDE_BY_SIDE) $(TEST_ARGS)

test-all: setup ## Run the default tier and all further rows of it
	$(PYTEST) -m "not fault and not gpu" $(SIDE_BY_SIDE) $(TEST_ARGS)
	@echo "Not run: kills and faults (make test-fault), and what needs a CUDA device (make test-gpu)"

test-store: ## Run the store's tests without torch, on any Python: make test-store PYTHON=python3.13
	@set -e; version=$$($(PYTHON) -c 'import sys; print("{}.{}".format(*sys.version_info))'); \
	venv=.venv-store-$$version; \
	if [ ! -e $$venv/.installed ] || [ constraints-store.txt -nt $$venv/.installed ]; then \
	    $(PYTHON) -m venv $$venv; \
	    $$venv/bin/python -m pip install --quiet --no-compile --no-deps -r constraints-store.txt; \
	    $$venv/bin/python -m pip install --quiet --no-compile --no-deps -e .; \
	    touch $$venv/.installed; \
	fi; \
	$$venv/bin/python -m pytest tests/unit/store -m "not slow and not fault" $(TEST_ARGS)

$(EXCHANGE)/.installed: constraints-exchange.txt constraints-exchange-8.txt | setup
	rm -rf $(EXCHANGE)
	$(PYTHON) -m venv $(EXCHANGE)
	$(EXCHANGE)/bin/python -m pip install --quiet --no-compile --no-deps -r constraints-exchange.txt
	$(EXCHANGE)/bin/python -m pip install --quiet --no-compile --no-deps --target $(EXCHANGE)/mindstudio-probe-8 -r constraints-exchange-8.txt
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'); \
	echo "import site; site.addsitedir('$$site')" > $$($(EXCHANGE)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torch_of_capd.pth
	touch $@

test-exchange: setup $(EXCHANGE)/.installed ## Open exports with the tools that they are for, and read what these write
	$(PYTEST) tests/integration/exchange $(TEST_ARGS)

check: check-static test ## Everything that must pass before a change lands

check-static: format lint type imports docs ## Formatting, lint, types, import directions and the documentation site, without tests

format: setup
	$(BIN)/ruff format --check $(SOURCES)

lint: setup ## Lint
	$(BIN)/ruff check $(SOURCES)

type: setup ## Check types
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports --no-cache

test-fault: setup ## Run the fault tier: kills, stops and faults
	$(PYTEST) -m fault -o faulthandler_timeout=0

test-random: setup ## Run the property tests on new random examples, and more of them
	$(PYTEST) -m "hypothesis and not gpu" --hypothesis-profile=random -o timeout=1200 -o faulthandler_timeout=0

test-gpu: $(GPU_SETUP) ## Run the tests that need a CUDA device; GPU_PYTHON=python3 runs them without .venv
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(GPU_PYTHON) -m pytest tests/gpu -m gpu $(TEST_ARGS)

bench: setup ## Run the benchmarks (twenty minutes, on a quiet machine)
	$(BIN)/python benchmarks/capture_call.py
	$(BIN)/python benchmarks/training_overhead.py
	$(BIN)/python benchmarks/training_overhead.py --client transformers
	$(BIN)/python benchmarks/training_overhead.py --live --rounds 24 --steps 8
	$(BIN)/python benchmarks/first_seconds.py
	$(BIN)/python benchmarks/products/check.py
	$(BIN)/python benchmarks/stalled_daemon.py
	$(BIN)/python benchmarks/scrapes.py
	$(BIN)/python benchmarks/live/top.py
	$(BIN)/python benchmarks/upload.py
	$(BIN)/python benchmarks/live/lab.py
	$(BIN)/python benchmarks/live/recorder.py
	$(BIN)/python benchmarks/many_ranks.py
	$(BIN)/python benchmarks/rank_statistics.py
	$(BIN)/python benchmarks/formats.py
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/products/replay.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/cluster/workers.py
	$(BIN)/python benchmarks/cluster/cluster_model.py
	$(BIN)/python benchmarks/emulation.py
	$(MAKE) bench-store

bench-gpu: $(GPU_SETUP) ## Run the benchmarks that need a CUDA device (a quarter of an hour at most)
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(GPU_PYTHON) benchmarks/gpu/gpu_capture.py

gpu-first-hour: $(GPU_SETUP) ## Facts, tests and figures of a CUDA device, on one page; goes on where it ended (GPU_ARGS=--help)
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(GPU_PYTHON) benchmarks/gpu/gpu_first_hour.py $(GPU_ARGS)

bench-store: setup ## Run the store's benchmarks in few rounds; each takes --rounds N for more
	$(BIN)/python benchmarks/store/store_codecs.py --rounds 2
	$(BIN)/python benchmarks/store_write.py --rounds 2
	$(BIN)/python benchmarks/store/store_read.py --rounds 3
	$(BIN)/python benchmarks/store_small.py --rounds 1
	$(BIN)/python benchmarks/store/store_seal.py --rounds 1 --series 1000
	$(BIN)/python benchmarks/pt_files.py --rounds 2

docs: setup ## Build the documentation site into site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

cli-page: setup ## Write docs/cli.md from the help of every command
	$(BIN)/python -m tests.repo.cli_page

pictures: setup ## Take the pictures of the documentation again, from a run of the demo's model in a real browser
	$(BIN)/python -m tests.docs.pictures

clean: ## Remove caches and build products, keep .venv and captured data
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
