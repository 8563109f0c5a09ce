# make demo   the main job end to end on a machine without a GPU
# make test   the tests that need no GPU (on a machine with one, those under tests/kernels run as well)
# Both set up .venv first. Empty CONSTRAINTS takes the newest releases that pyproject.toml allows:
#     make test CONSTRAINTS=
PYTHON ?= python3
CONSTRAINTS ?= constraints-ci.txt
PYTEST_ARGS ?=
TP ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -qq -e '.[cuda,dev]'

.DEFAULT_GOAL := help
.PHONY: help venv demo test check compile evidence sanitize bench-tp docs format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## .venv with the tool, the product's requirements and the test tools

# The pinned CPU build of PyTorch is not on every package index, and its CUDA builds want a Triton of their own: where the pins
# have no answer, pip chooses the release of PyTorch that goes with the pinned Triton.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "Setting up $(VENV) (the first time downloads the compilers and PyTorch) ..."
	@$(PYTHON) -m venv $(VENV)
	@grep -v '^torch==' /dev/null $(CONSTRAINTS) -h > $(VENV)/without-torch.txt || true
	@$(INSTALL) $(CONSTRAINTS:%=-c %) || { echo "Trying the release of PyTorch that fits Triton ..."; $(INSTALL) -c $(VENV)/without-torch.txt; }
	@touch $@

demo: $(STAMP) ## spec -> plan -> kernels -> resource table -> draft tokens beside the reference
	@$(BIN)/python -m dsparkgen.demo

test: $(STAMP) ## all tests that this machine can run
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP) ## is the checked-in tree what the specs and templates give?
	@$(BIN)/dsparkgen check

compile: $(STAMP) ## the resource table of every kernel, for every arch
	@$(BIN)/dsparkgen compile

evidence: ## verify and bench of every model, recorded: needs a GPU and, as PYTHON, a Python with its PyTorch
	@PYTHON=$(PYTHON) scripts/evidence.sh

sanitize: ## compute-sanitizer over the kernels on a small shape: needs a GPU and, as PYTHON, a Python with its PyTorch
	@PYTHON=$(PYTHON) scripts/sanitize.sh

bench-tp: ## the chain over TP GPUs (TP=2): tests, verification, timings; needs the GPUs and, as PYTHON, a Python with their PyTorch
	@PYTHON=$(PYTHON) scripts/bench_tp.sh $(TP)

docs: $(STAMP) ## rewrite what the pages take from code and recorded runs, and draw these runs' pictures
	@$(BIN)/python -m dsparkgen.reference docs/spec-reference.md
	@$(BIN)/python -m dsparkgen.readme

format: $(STAMP) ## ruff format over the hand-written Python
	@$(BIN)/ruff format generator templates tests

clean: ## remove .venv and caches of this checkout
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
