# One verb for each thing a person does. Everything built or downloaded lives in $(CACHE), outside the checkout.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
export SGLANG_ROLLOUT_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sglang-rollout
CACHE := $(SGLANG_ROLLOUT_CACHE)
# Keyed by what is installed, not by tool settings.
VENV := $(CACHE)/venv/$(shell sed -n '1,/^\[tool/p' pyproject.toml | sha256sum | cut -c1-12)
PY := $(VENV)/bin/python
export PYTHONPATH := $(CURDIR)/operator:$(CURDIR)
# What the demo reads; make passes on what is given as `make demo CLUSTER=current`.
export CLUSTER IMAGE_PREFIX RESOURCE WEIGHTS_PATH

# In tests/, by what they need. The hypothesis plug-in marks property tests.
NO_CLUSTER := not apiserver and not cluster and not router and not sglang
PYTEST := $(PY) -m pytest
ARGS ?=

$(VENV)/.ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { apt-get -qq update && apt-get -qq install -y python3-venv; }
	@mkdir -p $(dir $(VENV)) && $(PYTHON) -m venv $(VENV) && $(VENV)/bin/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

.PHONY: help venv venv-path demo demo-down check test lint types unit property test-apiserver e2e chaos bench \
	bench-controller bench-barrier format crds images prepare cluster-up cluster-env cluster-down
help: ## Show these verbs
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready ## The main job on a real cluster, step by step (CLUSTER=current: on yours)
	@$(PY) -m e2e.demo
demo-down: $(VENV)/.ready ## Take away what the demo made
	@$(PY) -m e2e.demo down

# Two at a time, each one's output in one piece; what comes first is also told first.
check: $(VENV)/.ready ## All tests without a cluster, about three minutes: lint, types, unit, property
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint types unit property
test: ## All tests, in the order in which they are worth knowing: check, API server, engines and cluster
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory prepare
	@$(MAKE) --no-print-directory test-apiserver
	@$(MAKE) --no-print-directory e2e

lint: $(VENV)/.ready ## ruff: rules and format
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
types: $(VENV)/.ready ## mypy, strict
	@$(PY) -m mypy
unit: $(VENV)/.ready ## Unit tests
	@$(PYTEST) tests -m "$(NO_CLUSTER) and not hypothesis" $(ARGS)
property: $(VENV)/.ready ## Property tests
	@$(PYTEST) tests -m "$(NO_CLUSTER) and hypothesis" $(ARGS)
test-apiserver: $(VENV)/.ready ## Tests against a real API server, no nodes
	@$(PY) -m e2e.cluster tools --only apiserver >/dev/null && $(PY) -m e2e.cluster tools --only commands >/dev/null
	@$(PYTEST) tests -m apiserver $(ARGS)
e2e: prepare ## Tests with real engines and routers, alone and on a real cluster
	@$(PYTEST) e2e -m "(router or sglang or cluster) and not chaos" $(ARGS)
chaos: prepare ## The faults that e2e leaves out: every part killed at every step of a weight move; about an hour
	@$(PYTEST) e2e -m chaos $(ARGS)
bench: prepare ## Measure on a real cluster; prints a table and writes it into docs/performance.md (ARGS=--help)
	@$(PY) -m e2e.bench cluster $(ARGS)
bench-controller: $(VENV)/.ready ## The same of the operator alone: 64 fake agents and 300 fleets on a real API server
	@$(PY) -m e2e.bench controller $(ARGS)
bench-barrier: $(VENV)/.ready ## The barriers of a fleet of 1,000 engines, played by fake agents, on a real API server
	@$(PY) -m e2e.bench barrier $(ARGS)

format: $(VENV)/.ready ## Format the code
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix .
crds: $(VENV)/.ready ## Write the CRD, the chart's copy and docs/api.md from the models
	@$(PY) -m sglang_rollout.api.crd && $(PY) -m sglang_rollout.api.reference
images: $(VENV)/.ready ## Build the images; prints their references
	@$(PY) -m e2e.images build
prepare: $(VENV)/.ready ## Build and download once what cluster, engines and images need, side by side
	@$(PY) -m e2e.prepare
cluster-up: prepare ## Start the local cluster with our images in it, no operator
	@$(PY) -m e2e.deployment.site
cluster-env: $(VENV)/.ready ## Print shell exports: eval "$$(make -s cluster-env)" gives kubectl for the local cluster
	@$(PY) -m e2e.cluster env
cluster-down: $(VENV)/.ready ## Remove the local cluster; what was built stays cached
	@$(PY) -m e2e.cluster down

venv: $(VENV)/.ready ## Create the development virtualenv (cached outside the checkout)
	@echo $(VENV)
venv-path:
	@echo $(VENV)
