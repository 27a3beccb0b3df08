SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv demo test tests test-core reliability test-oldest oldest lint typecheck coverage bench bench-peers docs wheel clean

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev

PEERS := .venv-peers
# The oldest versions that are supported: constraints-oldest.txt, on Python 3.10 where there is one.
OLDEST := .venv-oldest
RELIABILITY ?= faults memory health cases hostile dependencies statistics compat
OLDEST_PYTHON ?= $(shell for each in python3.10 $(PYTHON); do if $$each -c '' 2>/dev/null; then echo $$each; break; fi; done)
OLDEST_PACKAGES ?= torch numpy safetensors lightning PyYAML rich torchmetrics scikit-learn pytest pytest-timeout pytest-xdist setuptools
OLDEST_TESTS ?= $(shell grep -rl --include='test_*.py' 'mark\.oldest' tests)
RESULTS := bench/results

# One torch thread per test worker: more only makes the workers wait for each other.
# worksteal keeps neighbouring tests, which share fixtures, in one worker.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# $(1): what to install. One dot per package; pip's own words go to a log, whose end is shown on failure.
# Python files are compiled on all cores, not on one as pip does it, without the tests of other packages and a third of
# all that nothing here imports, or little of; templates that do not parse are no fault.
UNUSED := /(tests?|transformers/models|pip|setuptools|mypyc?|fontTools|pygments/lexers|devtools|torch/testing)/
define install
	@echo "Installing $(1) into $(VENV) (minutes the first time; log: $(VENV)/pip.log)"
	@$(PYTHON) -m venv $(VENV)
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
		--no-compile -c constraints.txt -e '$(1)' 2>&1 | tee $(VENV)/pip.log | awk \
		'/^ *(Collecting|Processing) / { printf "."; fflush() } \
		/^Installing collected/ { printf " unpacking"; fflush() } \
		/^Successfully installed/ { printf " done" } \
		END { print "" }' || { tail -n 25 $(VENV)/pip.log; exit 1; }
	@$(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib >/dev/null 2>&1 || true
endef

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(DEV)  ## set up ./.venv for development

demo: $(BASE)  ## compare methods on embedded digits: a table and one page
	@$(BIN)/slimbayes compare

# Types beside the tests: mypy keeps one core busy for most of a minute, and the tests do not fill the first.
test: lint  ## lint, types, tests and doctests
	@$(MAKE) --no-print-directory typecheck >$(VENV)/types.log 2>&1 & types=$$!; \
		status=0; $(MAKE) --no-print-directory tests || status=$$?; \
		wait $$types || status=1; cat $(VENV)/types.log; exit $$status

tests: $(DEV)  ## tests and doctests alone
	$(PYTEST) $(PYTEST_ARGS)

test-core: $(DEV)  ## the core's own tests, with the fast paths hidden: a part of make test
	$(BIN)/python -m pytest tests/test_core_alone.py -s $(PYTEST_ARGS)

# The package itself is not installed there: the tests take it from src/, and its kernels for that Python are compiled
# where they are not there yet.
test-oldest: oldest  ## the tests marked "oldest", on the oldest torch that is supported
	@$(OLDEST)/bin/python -c 'import sysconfig, pathlib, sys; \
		sys.exit(not pathlib.Path("src/slimbayes/accelerate/cpu/_kernels" + sysconfig.get_config_var("EXT_SUFFIX")).exists())' \
		|| $(OLDEST)/bin/python setup.py -q build_ext --inplace >>$(OLDEST)/pip.log 2>&1
	@$(OLDEST)/bin/python -c 'import sys, torch; print("torch", torch.__version__, "on Python", sys.version.split()[0])'
	OMP_NUM_THREADS=1 PYTHONPATH=src $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m oldest \
		-o cache_dir=$(OLDEST)/.pytest_cache $(OLDEST_TESTS) $(PYTEST_ARGS)

oldest: $(OLDEST)/.installed  ## set up ./.venv-oldest for it: 5 GB, minutes the first time

lint: $(DEV)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(DEV)  ## mypy, strict
	$(BIN)/mypy

reliability: $(DEV)  ## measure again what docs/reliability.md says: hours; one part: python -m reliability.PART
	@for part in $(RELIABILITY); do \
		echo "$$part"; OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m reliability.$$part || exit 1; done
	PYTHONPATH=src:. $(BIN)/python -m reliability.fuzz all $$($(BIN)/python -c 'import atheris' 2>/dev/null || echo --plain)
	$(BIN)/python docs/generate.py

coverage: $(DEV)  ## tests with a coverage page in htmlcov/, and its threshold
	$(PYTEST) --cov --cov-report=term --cov-report=html $(PYTEST_ARGS)

bench: $(DEV)  ## what every method costs, against deterministic and (after bench-peers) against peers
	$(BIN)/slimbayes bench --device cpu --output $(RESULTS)/bench-cpu.json $(if $(wildcard $(PEERS)/bin/python),--peers $(PEERS)/bin/python) $(BENCH_ARGS)
	$(BIN)/python docs/generate.py

bench-peers: $(PEERS)/.installed  ## set up ./.venv-peers with the packages that bench compares with

docs: $(DEV)  ## the site, into site/; generated tables must be current, and a warning is an error
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: $(DEV)  ## build the wheel and try it in clean environments: WHEEL_ARGS=--every for all extras
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt build
	$(BIN)/python tools/wheel.py $(WHEEL_ARGS)

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) $(PEERS) $(OLDEST) slimbayes-compare slimbayes-run slimbayes-reproduce build dist site src/*.egg-info htmlcov .coverage .coverage.* \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The development install holds everything the base install does, so it marks both.
KERNELS := setup.py $(wildcard src/slimbayes/accelerate/cpu/*.[ch])

$(DEV): pyproject.toml constraints.txt $(KERNELS)
	$(call install,.[dev])
	@touch $(BASE) $(DEV)

$(BASE): pyproject.toml constraints.txt $(KERNELS)
	$(call install,.[cli])
	@touch $(BASE)

# Some peers ask for torchvision and Lightning, which their layers do not need: they come without dependencies.
$(PEERS)/.installed: bench/peers/requirements.txt bench/peers/packages.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -r bench/peers/requirements.txt
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r bench/peers/packages.txt
	@touch $@

# No byte code of 5 GB of packages, most of which no test imports.
$(OLDEST)/.installed: constraints-oldest.txt
	@echo "Installing $(OLDEST_PACKAGES) into $(OLDEST) (log: $(OLDEST)/pip.log)"
	@$(OLDEST_PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile --no-cache-dir \
		-c constraints-oldest.txt $(OLDEST_PACKAGES) >$(OLDEST)/pip.log 2>&1 || { tail -n 25 $(OLDEST)/pip.log; exit 1; }
	@touch $@
