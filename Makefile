# Everything starts here: each target installs what it needs into .venv and then does its work.
#
#   make demo         stream text from the embedded model
#   make test         run the tests, but those of kernels for GPUs
#   make test-kernels run those of kernels on a CPU, and compile them for GPUs that are not there
#   make test-contracts  routers of other projects before engines, manifests, and names of metrics
#   make test-quick   run those that take less than a minute together
#   make test-plain   run those that the C kernels concern without them, as where there is no C compiler
#   make check        lint, formatting, import contracts, budgets of lines, words, and types
#   make bench        the benchmarks of the host's part, as ratios and microseconds

PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3.11 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
# bytecode is compiled at the first import: most modules are never imported
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
# the CPU build, pinned and installed first: a later resolution would otherwise bring several GB of CUDA libraries
TORCH := torch==2.13.0
# a process for each core, from 2 to 8, each of which takes over tests that others have not begun
PROCESSES := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 8 ? 8 : n)))
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal
# those of `make test`; others may be given
MARKS := not (kernels or contracts)

unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes, and each would compile the package again

# the files that have them: others need not be collected
KERNEL_TESTS = $(shell grep -rlE 'helpers.interpreter|mark\.(interpreter|compiler|kernels)' tests --include='test_*.py')
NATIVE_TESTS = $(shell grep -rlE '\bnative' tests/unit --include='test_*.py')

.PHONY: demo serve test test-kernels kernel-tests test-contracts test-quick test-plain check bench clean

demo: .venv/demo
	$(BIN)/fleetfoot generate --stream --prompt "Once upon a time, there was a"

serve: .venv/demo
	$(BIN)/fleetfoot serve

test: .venv/dev
	$(PYTEST) -m "$(MARKS)" $(PYTEST_ARGS)

test-kernels: .venv/dev
	$(PYTEST) -m kernels $(KERNEL_TESTS) $(PYTEST_ARGS)

test-contracts: .venv/contracts
	$(BIN)/python -m pytest -o cache_dir=.pytest_cache/contracts -m contracts tests/contracts $(PYTEST_ARGS)

kernel-tests:
	@echo $(KERNEL_TESTS)

test-quick: .venv/dev
	$(PYTEST) -m "not (slow or kernels or contracts)" tests/unit tests/engine/test_quick.py $(PYTEST_ARGS)

test-plain: .venv/dev
	FLEETFOOT_USE_NATIVE_KERNELS=0 $(BIN)/python -m pytest -o cache_dir=.pytest_cache/plain \
	  -m "not (slow or kernels or contracts)" tests/engine/test_quick.py $(NATIVE_TESTS) $(PYTEST_ARGS)

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/line_budgets.py
	$(BIN)/python tools/words.py
	$(BIN)/mypy

bench: .venv/dev
	$(BIN)/python benchmarks/scheduler_host_cost.py
	$(BIN)/python benchmarks/cpu_ops.py

.venv/python:
	@test -n "$(PYTHON)" || { echo "Fleetfoot needs Python 3.11 or newer; say which with make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)"
	@touch $@

.venv/demo: .venv/python pyproject.toml setup.py $(wildcard src/fleetfoot/native/*.[ch])
	$(PIP) --editable .
	@touch $@

.venv/dev: .venv/python pyproject.toml setup.py $(wildcard src/fleetfoot/native/*.[ch])
	$(PIP) --editable '.[dev]'
	@touch $@ .venv/demo

.venv/contracts: .venv/dev
	$(PIP) 'fleetfoot[contracts]'  # the package is there: nothing is compiled again
	@touch $@

clean:
	rm -rf .venv build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
