# Two commands set up everything: `make demo` and `make test`. Both install what is missing.

VENV    := .venv
PYTHON  := $(VENV)/bin/python
RUN     := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PYTHON)
# The newest interpreter of the distribution: ordinary users' jobs run it, so it must not lie in a home.
BASE    := $(firstword $(wildcard /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11) python3)
# If pip's default brings gigabytes of CUDA: make test TORCH='torch --index-url URL'
TORCH   ?= torch==2.13.0
# Most tests wait for Slurm or for processes: two workers a core, a dozen at most.
WORKERS ?= $(shell n=$$((2 * $$(nproc))); echo $$((n < 12 ? n : 12)))
PYTEST  := $(RUN) -m pytest -n $(WORKERS)
INSTALL := $(if $(filter 0,$(shell id -u)),apt-get install -yq --no-install-recommends,@echo 'as root: apt-get install')
# pyslurm must match Slurm's release: this tag is for Debian 12's.
PYSLURM  ?= .venv-pyslurm
PYSLURM_SOURCE ?= git+https://github.com/PySlurm/pyslurm@v22.5.3
# PyTorch's CUDA build for played GPUs, without NVIDIA's packages, so that no real GPU is reached.
# `===` because a local version, such as 2.13.0+cpu, counts as newer.
PLAYED   ?= .venv-played
PLAYED_TORCH ?= torch===2.13.0

.PHONY: help demo quick test test-ci test-all test-heavy test-slow test-played-gpu test-pyslurm lint fmt docs
.PHONY: bench figures gpu freeze mutants release install tools lab-packages played-gpu clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1: \2/p' $(MAKEFILE_LIST)

demo: lab-packages $(if $(GPUS),played-gpu) ## a real Slurm with one bad node; GPUS=2: with played GPUs
	@$(RUN) -m tests.demo $(if $(GPUS),--gpus=$(GPUS))

T ?= tests
WHOLE = $(wildcard $(firstword $(T))/.)
quick: $(VENV)/.quick ## the tests in T=PATH that need neither root, torch nor Slurm (seconds)
	$(RUN) -m pytest -q $(T) $(if $(WHOLE),-n $(WORKERS)) $(PYTEST_ARGS) \
		-m 'not ($(if $(WHOLE),heavy or )lab or played_gpu or root or slow or torch)'

test: install ## all that needs no Slurm (five minutes on two cores)
	$(PYTEST) -m 'not (slow or heavy or played_gpu or lab)' $(PYTEST_ARGS)

test-ci: lab-packages played-gpu ## every test but the slow ones, as .ci/run runs them
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-all: test-ci test-slow ## every test, as before a release (two hours)

test-heavy: lab-packages
	$(PYTEST) -m '(heavy or lab) and not (slow or played_gpu)' $(PYTEST_ARGS)

test-played-gpu: install played-gpu
	$(PYTEST) -n 2 -m 'played_gpu and not slow' $(PYTEST_ARGS)

test-slow: lab-packages played-gpu
	-$(INSTALL) openmpi-bin && $(PYTHON) -m pip install -q -e '.[recipes]'
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-pyslurm: lab-packages $(PYSLURM)/.installed
	$(PYSLURM)/bin/python -m pytest -q tests/system/slurm/test_reads.py $(PYTEST_ARGS)

lint: tools ## ruff, mypy --strict, import-linter, shellcheck
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	@command -v shellcheck >/dev/null || { echo 'shellcheck is not installed: shell scripts were not checked'; exit 0; } && \
		shellcheck .ci/run distribution/*.sh $(filter-out %.md,$(wildcard prolog/* epilog/*))

fmt: tools ## format the code
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

docs: install ## the page of all commands, and the documentation as a site in build/site
	$(RUN) -m tests.command_reference
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

figures: tools ## the figures of the pages, from committed JSON
	$(RUN) -m tests.figures

bench: lab-packages ## NAME=NAME measures one thing; without NAME, lists what there is
	@$(RUN) -m benchmarks $(NAME) $(ARGS)

gpu: ## everything that one GPU can show, with python3's torch if it has one; ARGS=--device=cpu without a GPU
	@if python3 -c 'import click, filelock, msgspec, numpy, tabulate, torch' 2>/dev/null; \
		then python3 -m benchmarks.gpu $(ARGS); \
		else $(MAKE) --no-print-directory tools && $(PYTHON) -m benchmarks.gpu $(ARGS); fi

freeze: install ## accept changed verdicts and decisions into tests/frozen
	$(RUN) -m tests.frozen

mutants: install ## which changes of the deciding code no test notices (hours)
	$(RUN) -m tests.mutants $(ARGS)

release: install ## reproducible wheel, .deb, .rpm and checksums in dist/release; SIGN=KEY
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RUN) -m distribution.release $(if $(SIGN),--sign '$(SIGN)')

install: $(VENV)/.installed
tools: $(VENV)/.tools
$(VENV)/.installed: $(VENV)/.tools
	@echo 'installing torch into $(VENV): gigabytes, and minutes'
	@$(PYTHON) -c 'import torch' 2>/dev/null || $(PYTHON) -m pip install -q $(TORCH)
	@touch $@

$(VENV)/.tools: $(VENV)/.quick
	@$(PYTHON) -m pip install -q -e '.[dev]' && touch $@

$(VENV)/.quick: pyproject.toml
	@$(BASE) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo '$(BASE) is older than 3.11'; exit 1; }
	@$(BASE) -c 'import ensurepip' 2>/dev/null || { apt-get update -q; $(INSTALL) python3-venv; }
	@test -x $(PYTHON) || $(BASE) -m venv $(VENV)
	@echo 'installing into $(VENV)'
	@$(PYTHON) -m pip install -q -e '.[test]' && touch $@

lab-packages: install
	@test "$$(id -u)" != 0 || $(PYTHON) -c 'import sys; from tests.lab import missing; sys.exit(bool(missing()))' || \
		$(PYTHON) -m tests.lab install

played-gpu: $(PLAYED)/.installed
	@$(BASE) -m tests.played_gpu.build $(PLAYED)

$(PLAYED)/.installed: pyproject.toml
	@echo 'installing PyTorch for CUDA into $(PLAYED): 0.5 GB'
	@test -x $(PLAYED)/bin/python || $(BASE) -m venv $(PLAYED)
	@PIP_FIND_LINKS= $(PLAYED)/bin/python -m pip install -q --no-deps '$(PLAYED_TORCH)'
	@PIP_FIND_LINKS= $(PLAYED)/bin/python -m pip install -q filelock fsspec jinja2 networkx numpy sympy typing_extensions
	@$(PLAYED)/bin/python -m pip install -q -e '.[gpu]' && touch $@

$(PYSLURM)/.installed: $(VENV)/.quick
	@$(INSTALL) git gcc libslurm-dev python3-dev
	@test -x $(PYSLURM)/bin/python || $(BASE) -m venv $(PYSLURM)
	@$(PYSLURM)/bin/python -m pip install -q -e '.[test]'
	CFLAGS=-O0 SLURM_INCLUDE_DIR=/usr/include SLURM_LIB_DIR=$$(dirname $$(ls /usr/lib*/*/libslurm.so | head -n 1)) \
		GIT_TERMINAL_PROMPT=0 timeout 600 $(PYSLURM)/bin/python -m pip install -q --no-deps '$(PYSLURM_SOURCE)'
	@touch $@

clean: ## remove what these commands created here
	rm -rf $(VENV) $(PLAYED) $(PLAYED)-* $(PYSLURM) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis gpu.json
