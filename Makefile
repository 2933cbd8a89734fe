# SPDX-License-Identifier: GPL-3.0-or-later
# `make help` lists what there is. Each step prints its name, its result and its duration.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# The locked tools come first; this checkout's ansible.cfg finds the collection by its full name.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
# Where molecule remembers which hosts it has created; one place for all scenarios, which share them.
export MOLECULE_EPHEMERAL_DIRECTORY := $(CURDIR)/.ansible/molecule

STEP := tests/step
# Suites of plain pytest; tests/unit runs under ansible-test, molecule's own tests under molecule.
SUITES := tests/collection tests/gateway tests/simulator
# Most tests wait for something, so a few at once suit even two cores.
WORKERS := 4

##@ Setting up
.PHONY: setup lock clean
setup: ## Install what the demo and the tests need (as root, system packages too)
	@$(STEP) setup tests/setup

lock: setup ## Resolve requirements-dev.in anew into requirements-dev.txt
	{ echo '# SPDX-License-Identifier: GPL-3.0-or-later'; \
	  uv pip compile --quiet --universal --upgrade --python-version 3.11 --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command 'make lock' requirements-dev.in; } > requirements-dev.new
	mv requirements-dev.new requirements-dev.txt

clean: ## Remove what builds and tests left in the checkout (the cache stays)
	rm -rf .ansible .hypothesis .mypy_cache .pytest_cache .ruff_cache .venv dist tests/output
	find . -name __pycache__ -prune -exec rm -rf {} +

##@ Demonstration
# standin, or vllm-cpu: real vLLM on the processor with a tiny random model.
ENGINE ?= standin
PLAY := ansible-playbook -i inventories/simulation
ENGINE_VARS := $(if $(filter-out standin,$(ENGINE)), -e simulator_engine=$(ENGINE))
.PHONY: demo demo-down
demo: setup ## Two simulated Sparks and a gateway, serving; ENGINE=vllm-cpu takes real vLLM
	@$(STEP) docker-engine simulator/docker-engine
	@$(STEP) images simulator/images $(ENGINE)
	@$(STEP) hosts $(PLAY) simulator/create.yml
	@$(STEP) site $(PLAY) playbooks/site.yml$(ENGINE_VARS)
	@$(STEP) completions simulator/ask
	@$(STEP) status $(PLAY) playbooks/status.yml$(ENGINE_VARS)
	@printf '%s\n' '' \
	  'The endpoint is http://198.18.77.20:8080/v1, its API key simulation-key. Try:' \
	  '  . .venv/bin/activate' \
	  '  $(PLAY) playbooks/switch_mode.yml$(ENGINE_VARS) -e mode=tp' \
	  '  simulator/ask' \
	  '  $(PLAY) playbooks/status.yml$(ENGINE_VARS)' \
	  '  $(PLAY) playbooks/switch_mode.yml$(ENGINE_VARS) -e mode=replica' \
	  'make demo-down removes it all.'

demo-down: setup ## Remove the demonstration (what was built stays in the cache)
	@$(STEP) docker-engine simulator/docker-engine
	@$(STEP) remove $(PLAY) simulator/destroy.yml
	@[ -n "$$(docker ps --quiet)" ] || simulator/docker-engine stop

##@ Tests
.PHONY: test test-quick test-real lint docs-lint sanity units suites gateway-versions molecule leftovers build
test: setup ## Everything
	@$(MAKE) test-quick
	@$(MAKE) gateway-versions
	@$(MAKE) molecule

# Two at a time, since most use one core; each prints when it ends, and a failed one does not hide the others.
test-quick: setup ## All that needs no container
	@$(MAKE) --jobs=2 --output-sync=target --keep-going lint docs-lint sanity units suites build

lint: setup ## ruff, yamllint, ansible-lint, shellcheck, mypy
	@$(STEP) lint:ruff ruff check . $$(tests/scripts python)
	@$(STEP) lint:format ruff format --check . $$(tests/scripts python)
	@$(STEP) lint:yaml yamllint --strict .
	@$(STEP) lint:ansible ansible-lint
	@$(STEP) lint:shell shellcheck $$(tests/scripts shell)
	@$(STEP) lint:types tests/type-check

docs-lint: setup ## Documentation of plugins and roles, changelog fragments
	@$(STEP) docs antsibull-docs lint-collection-docs --plugin-docs --validate-collection-refs all .
	@$(STEP) changelog antsibull-changelog lint

sanity: setup ## ansible-test sanity
	@$(STEP) sanity tests/ansible-test sanity

units: setup ## ansible-test units: the pure parts, and what must agree with what
	@$(STEP) units tests/ansible-test units --num-workers $(WORKERS)

suites: setup ## The installed build, the stand-in engine and the gateway on this machine
	@$(STEP) suites pytest --numprocesses $(WORKERS) --dist loadfile $(SUITES)

gateway-versions: setup ## The gateway with the HAProxy of the newest Debian, whichever this machine has
	@$(STEP) docker-engine simulator/docker-engine
	@$(STEP) images simulator/images haproxy
	@HAPROXY=$(CURDIR)/tests/gateway/haproxy-trixie $(STEP) gateway:trixie \
	  pytest --numprocesses $(WORKERS) --dist loadfile tests/gateway

molecule: setup ## Simulated Sparks: one scenario per promise
	@$(STEP) docker-engine simulator/docker-engine
	@$(STEP) images simulator/images
	@$(STEP) leftovers $(MAKE) leftovers
	@$(STEP) molecule molecule test --all --exclude real_engine

test-real: setup ## Real vLLM without a GPU on simulated Sparks (installs 3 GB of packages once)
	@$(STEP) docker-engine simulator/docker-engine
	@$(STEP) images simulator/images vllm-cpu
	@$(STEP) parity pytest --numprocesses 2 --dist loadfile tests/parity
	@$(STEP) clients pytest tests/clients
	@$(STEP) leftovers $(MAKE) leftovers
	@$(STEP) real-engine molecule test --scenario-name real_engine

# What a killed run of molecule left behind: its hosts, and its belief that they are there.
leftovers:
	@rm -rf $(MOLECULE_EPHEMERAL_DIRECTORY)
	@ansible-playbook -i molecule/inventory simulator/destroy.yml

build: setup ## Build the collection into dist/
	@$(STEP) build ansible-galaxy collection build --force --output-path dist

##@ More
.PHONY: benchmark benchmark-switch help
benchmark: setup ## The gateway beside its peers, on this machine; FULL=1 takes about 25 minutes
	@$(STEP) benchmark benchmarks/gateway/run $(if $(FULL),,--quick) --json dist/gateway-benchmark.json

benchmark-switch: setup ## What clients see of a switch, beside nginx; 2 minutes, FULL=1 takes 9
	@$(STEP) benchmark-switch benchmarks/switch/run $(if $(FULL),,--quick) --json dist/switch-benchmark.json

help: ## This list
	@awk -F ':.*## ' '/^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
