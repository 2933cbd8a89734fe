# SPDX-License-Identifier: GPL-3.0-or-later
# `make help` lists what there is. Every step prints its name and how long it took.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# The tools of the lock come first; ansible.cfg of this checkout finds the collection by its full name.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
STEP := tests/step

##@ Setting up
.PHONY: setup lock clean
setup: ## Install what the demo and the tests need, once (as root also system packages)
	@$(STEP) setup tests/setup

lock: setup ## Resolve requirements-dev.in into requirements-dev.txt, with the newest versions
	@{ echo '# SPDX-License-Identifier: GPL-3.0-or-later'; \
	uv pip compile --quiet --universal --upgrade --python-version 3.11 --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command 'make lock' requirements-dev.in; } > requirements-dev.new
	@mv requirements-dev.new requirements-dev.txt

clean: ## Remove what builds and tests left in the checkout (the cache stays)
	rm -rf .ansible .mypy_cache .pytest_cache .ruff_cache .venv dist tests/output
	find . -name __pycache__ -prune -exec rm -rf {} +

##@ Checks
.PHONY: lint
lint: setup ## ansible-lint, yamllint, ruff, mypy, shellcheck
	@$(STEP) lint.ruff ruff check .
	@$(STEP) lint.format ruff format --check .
	@$(STEP) lint.yaml yamllint --strict .
	@$(STEP) lint.ansible ansible-lint
	@$(STEP) lint.shell tests/shell-lint
	@$(STEP) lint.types tests/type-check

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^##@/ { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
