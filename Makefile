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

$(VENV)/.ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	@mkdir -p $(dir $(VENV)) && $(PYTHON) -m venv $(VENV) && $(VENV)/bin/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

.PHONY: help venv venv-path
help: ## Show these verbs
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.ready ## Create the development virtualenv (cached outside the checkout)
	@echo $(VENV)

venv-path:
	@echo $(VENV)
