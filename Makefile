# The commands that a newcomer needs: make run, make test. `make help` lists all.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup run test check-fast check export lock lab site clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## make .venv with the locked packages, and set git up for notebooks

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else f"dispatch needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 setup")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check 'uv>=0.9'
	$(BIN)/uv pip install -q -p $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install -q -p $(BIN)/python --no-deps -e .
	@if test -d .git; then bash tools/git_setup.sh; fi
	@touch $@

run: $(READY)  ## set up, then re-execute the findings on this machine's best device
	dispatch run $(ARGS)

test: $(READY)  ## set up, then everything that CI runs
	bash tools/check.sh all

check-fast: $(READY)  ## the inner loop: lint, types, drift, layering, quick tests
	bash tools/check.sh fast

export: $(READY)  ## notebooks → dispatch/ and README.md, proto/ → dispatch/pb, notebooks cleaned
	bash tools/proto.sh
	nbdev_export
	nbdev_clean
	python tools/readme.py

lock: $(READY)  ## resolve requirements.lock anew from pyproject.toml
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra dev --extra lab -o requirements.lock pyproject.toml

lab: $(READY)  ## edit the notebooks in JupyterLab
	JUPYTER_CONFIG_DIR=$(CURDIR)/$(VENV)/home/.jupyter jupyter lab nbs

site: $(READY)  ## render the findings site to _docs (needs Quarto)
	@command -v quarto >/dev/null || { echo "make site needs Quarto: https://quarto.org/docs/get-started"; exit 1; }
	nbdev_docs

clean:  ## remove what the commands above made, .venv and out/ excepted
	rm -rf _proc _docs dist build *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
