# Everything starts here; `make` alone prints this file's targets. Each target first makes .venv where it is missing,
# unfinished, moved or older than the lock. PYTHON=... picks the interpreter for that (default: the newest fitting one).
EXPERIMENT ?= default
LAUNCHER ?= basic
ARGS ?=
export PYTHON

python := .venv/bin/python
ready := .venv/ready
modules := $(subst /,.,$(basename $(filter-out %/__init__.py,$(wildcard keyformer/*.py))))

.DEFAULT_GOAL := help
.PHONY: help setup sweep head worker status stop ui report test test-hosts test-browser test-metal test-cluster lint docs lock moved

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s%s\n", $$1, $$2}' Makefile
	@echo "  options: EXPERIMENT=<file in conf/experiment>  LAUNCHER=basic|dask  ARGS=\"more overrides\"  PYTHON=/path/to/python"

setup: $(ready)  ## make the environment in .venv (every other target does it too)

sweep: $(ready)  ## run an experiment and put it into MLflow; the same command again resumes it
	@$(python) -m pipeline -m experiment=$(EXPERIMENT) hydra/launcher=$(LAUNCHER) $(ARGS)

head: $(ready)  ## serve a cluster from here: scheduler and MLflow (HOST=<address>; docs/cluster.md)
	@exec $(python) -m pipeline.cluster head $(if $(filter command,$(origin HOST)),--host $(HOST)) $(ARGS)

worker: $(ready)  ## run the cluster's jobs here, one at a time (HEAD=<address> where join.pem has another one)
	@exec $(python) -m pipeline.cluster worker $(if $(HEAD),--head $(HEAD)) $(ARGS)

status: $(ready)  ## the cluster's machines, what they run, and how far the sweeps are
	@$(python) -m pipeline.cluster status $(if $(HEAD),--head $(HEAD)) $(ARGS)

ui: $(ready)  ## start the local MLflow server, or find it running, and print its address
	@$(python) -m pipeline.tracking start

stop: $(ready)  ## stop the local MLflow server
	@$(python) -m pipeline.tracking stop

report: $(ready)  ## print the last sweep's table again (ARGS="--experiment NAME")
	@$(python) -m pipeline.report $(ARGS)

test: $(ready)  ## run the tests (ARGS="-k name")
	@$(python) -m pytest -q -n auto --maxprocesses 4 --dist worksteal -m "not browser and not metal and not cluster and not hosts" $(ARGS)

test-hosts: $(ready)  ## sweeps over several hosts that are processes of this machine, and what ends them
	@$(python) -m pytest -q -n auto --maxprocesses 4 --dist loadfile -m hosts tests/hydra_plugins tests/pipeline $(ARGS)

test-browser: $(ready)  ## look at the MLflow UI through a headless chromium
	@command -v chromium >/dev/null || \
		{ echo "test-browser: expected Debian's chromium, found none. Install it: apt-get install chromium" >&2; exit 2; }
	@$(python) -m pytest -q -m browser $(ARGS)

test-metal: $(ready)  ## run the Metal kernels' source on this CPU, against float64 (Linux)
	@command -v clang-19 >/dev/null || \
		{ echo "test-metal: expected clang-19, found none. Install it: apt-get install clang-19 libclang-rt-19-dev" >&2; exit 2; }
	@$(python) -m pytest -q -n auto --maxprocesses 4 --dist worksteal -m metal tests/metal $(ARGS)

test-cluster: $(ready)  ## break a sweep over several hosts in every way, three times each (root on Linux)
	@[ "$$(uname)" = Linux ] && [ "$$(id -u)" = 0 ] && command -v ip >/dev/null || \
		{ echo "test-cluster: expected root on Linux with iproute2, got another. Run it there: sudo make test-cluster" >&2; \
		exit 2; }
	@$(python) -m pytest -q -n 0 --times 3 tests/cluster $(ARGS)

lint: $(ready)  ## ruff (rules and format) and mypy
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m mypy

docs: $(ready)  ## the library's API from its docstrings, as pages in outputs/docs
	@$(python) -W error::UserWarning -m pdoc -d google -o outputs/docs keyformer $(modules)  # pdoc warns of what fails
	@echo outputs/docs/keyformer.html

lock: $(ready)  ## resolve pyproject.toml again into requirements.lock
	@.venv/bin/uv pip compile pyproject.toml --quiet --all-extras --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-header --output-file requirements.lock $(ARGS)

$(ready): requirements.lock $(wildcard environment/*.*)
	@bash environment/setup.sh

# The stamp holds the folder that the environment was made in; its scripts do not work from another one.
ifneq ($(shell cat $(ready) 2>/dev/null),$(CURDIR))
$(ready): moved
endif
