# Every target sets up what it needs and can be repeated. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
# Also where the environment says otherwise, compiled modules are kept: compiling PyTorch and transformers again in every
# process of the tests takes longer than most of what the process is started for.
export PYTHONDONTWRITEBYTECODE :=
# The cluster's scripts need only the standard library: they start before .venv is there.
CLUSTER_SCRIPTS := python3 -m tests.cluster
PYTEST := $(PYTHON) -m pytest

# With CLUSTER=existing the tests take the current kubectl context (docs/contributors/testing.md).
ifeq ($(CLUSTER),existing)
cluster_for_tests := setup
else
cluster_for_tests := image
endif

.PHONY: help
help: ## Show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 16

##@ Environment

.PHONY: setup
setup: ## Make .venv at the pinned versions
	@.ci/setup

.PHONY: prepare
prepare:
	@$(CLUSTER_SCRIPTS) prepare

# The Go programs are built while Python packages are fetched and unpacked: one needs the processor, the other
# the network and the disk.
.PHONY: setup-and-prepare
setup-and-prepare:
	@$(MAKE) --no-print-directory --jobs=2 setup prepare

.PHONY: constraints
constraints: ## Pin the newest versions that pyproject.toml allows, and the hashes of what images hold
	$(COMPILE) --upgrade --extra operator --extra worker --extra dev pyproject.toml --output-file constraints.txt
	@$(MAKE) --no-print-directory requirements

COMPILE := uv pip compile --quiet --no-emit-index-url --universal --python-version 3.11 \
  --custom-compile-command 'make constraints'
# What an image installs, with its hashes: one of its extras at the versions of constraints.txt, and what builds the project.
HASHED := $(COMPILE) --constraint constraints.txt --generate-hashes --no-annotate pyproject.toml - <<< 'setuptools>=77'

.PHONY: requirements
requirements: ## Write the hashes of what images hold, at the versions of constraints.txt
	$(HASHED) --extra operator --output-file requirements/operator.txt
	$(HASHED) --extra worker --extra arrow --extra quantised --extra recurrent --output-file requirements/worker.txt

.PHONY: crds
crds: setup ## Write crds/ and the chart's schema from the models in operator/mlora_operator
	@$(PYTHON) -m mlora_operator.pod_shapes operator/mlora_operator/api/pod_shapes.json
	@$(PYTHON) -m mlora_operator.api.crd crds charts/mlora-operator/files/crds
	@$(PYTHON) -m mlora_operator.values_schema charts/mlora-operator/values.schema.json

##@ Checks

.PHONY: lint
lint: setup ## Style, types, and which way imports point
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy tests/cluster tests/fixtures examples bench
	.venv/bin/lint-imports
	@# All tests at once, as they are collected in the test commands: a broken import or fixture shows here.
	@found=$$(OMP_NUM_THREADS=1 $(PYTEST) --collect-only -qq tests) || { tail -n 20 <<<"$$found"; exit 1; }

.PHONY: audit
audit: ## Known vulnerabilities of the pinned packages, as PyPI tells them (needs uv and the network)
	uvx pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

# Two parts of the unit tests run at the same time: those that need PyTorch, which takes ten seconds to import with all that stands
# on it, and the others. Each is collected once; processes that are forked from there (tests/fixtures/forked_tests.py) take file
# after file. There is one more of them than of cores, since some tests wait for deadlines; each part has as many, since one
# of them is left alone in the end.
WITH_TORCH := tests/unit/worker tests/unit/bench tests/unit/examples $(addprefix tests/unit/,docs/test_sizing.py \
  operator/api/test_names_elsewhere.py operator/download/test_manifest.py)
CORES := $(shell getconf _NPROCESSORS_ONLN)
# Tensors of tests are tiny: a second thread costs more than it gives, a second process does not.
FORKED := OMP_NUM_THREADS=1 $(PYTEST) -p tests.fixtures.forked_tests --forks=$$(( $(CORES) + 1 ))

PARTS := unit-torch unit-rest
.PHONY: unit $(PARTS)
unit: setup ## Tests of pure code
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(PARTS)

unit-torch:
	$(FORKED) $(WITH_TORCH)
unit-rest:
	$(FORKED) --without=torch tests/unit $(addprefix --ignore=,$(WITH_TORCH))

# Those with a cluster mostly wait for it, so that what computes shares the two cores with them. Those with ranks have deadlines
# of their own, so that only two files are run at once. Nothing in tests/equivalence has a deadline: it takes what the others
# leave. All of them are run, also when one has failed.
WITH_CLUSTER := $(addprefix tests/integration/,operator page bench/test_fuzz.py) $(wildcard tests/integration/test_*.py)
WITH_RANKS := $(filter-out $(WITH_CLUSTER),$(wildcard tests/integration/[a-z]*))
INTEGRATION_PARTS := integration-cluster integration-ranks equivalence
.PHONY: integration $(INTEGRATION_PARTS)
integration: $(cluster_for_tests) model ## Tests with a real cluster, real S3 and several real ranks
	@$(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target $(INTEGRATION_PARTS)

integration-cluster:
	$(PYTEST) --durations=15 $(WITH_CLUSTER)
integration-ranks:
	$(FORKED) --forks=2 --durations=15 $(WITH_RANKS) --ignore=tests/integration/bench/test_fuzz.py
equivalence:
	nice -n 10 env $(FORKED) --durations=15 tests/equivalence

.PHONY: e2e
e2e: $(cluster_for_tests) model ## Tests of the whole path
	$(PYTEST) --durations=15 tests/e2e

.PHONY: test
test: ## unit, integration, e2e
	@MLORA_TEST_STORIES=all $(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory integration
	@$(MAKE) --no-print-directory e2e

# Not part of `make test`: it installs 5 GB more, and takes minutes.
.PHONY: consumers
consumers: setup model ## Tests of what serves adapters: the real vLLM, on a CPU
	@.ci/consumers
	$(PYTEST) --durations=5 tests/consumers

##@ Test cluster

.PHONY: cluster
cluster: setup-and-prepare ## Start the one-node test cluster, with S3 beside it
	@$(CLUSTER_SCRIPTS) up

.PHONY: cluster-env
cluster-env: ## Print what points kubectl and helm to it: eval "$(make -s cluster-env)"
	@$(CLUSTER_SCRIPTS) env

.PHONY: cluster-down
cluster-down: ## End it and remove all it left
	@$(CLUSTER_SCRIPTS) down

.PHONY: image
image: cluster ## Build the operator's and the worker's image into it
	@$(CLUSTER_SCRIPTS) image

.PHONY: model
model: setup ## Convert SmolLM2-135M-Instruct; prints its folder
	@$(PYTHON) -m examples.model.smollm2

##@ Quick start

.PHONY: demo
demo: image model ## Train three adapters in the test cluster and compare them with the base
	@$(PYTHON) -m examples.demo

.PHONY: demo-local
demo-local: setup model ## The same without a cluster
	@$(PYTHON) -m examples.demo_local

.PHONY: clean
clean: ## Remove all that was made in this checkout (the user's cache folder stays)
	@[ ! -d tests/cluster/.state ] || $(CLUSTER_SCRIPTS) down
	rm -rf .venv tests/cluster/.state build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
