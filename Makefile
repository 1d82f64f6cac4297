# Two commands for a new machine: `make demo` and `make test`. Both install what is missing.

VENV   := .venv
PYTHON := $(VENV)/bin/python
RUN    := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PYTHON)
# The newest interpreter of the distribution: jobs of ordinary users run it, so it must not be
# in anybody's home.
BASE   := $(firstword $(wildcard /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11) python3)
# The tests need any torch that runs on CPUs. If pip's default comes with several GB of CUDA
# packages, choose another: make test TORCH='torch --index-url URL'
TORCH  ?= torch==2.13.0
# Most tests wait for Slurm, for processes or for a time limit, so each core gets two workers; more
# than a dozen workers would only load the same modules again.
WORKERS ?= $(shell n=$$((2 * $$(nproc))); echo $$((n < 12 ? n : 12)))
PYTEST := -m pytest -n $(WORKERS) --dist worksteal
# Each other Slurm release runs from its own root directory, about 350 MB.
RELEASES  := 24.11 26.05
LAB_ROOTS := /var/cache/slurm-health-lab
ROOT   := $(filter 0,$(shell id -u))
# pyslurm is not packaged for most releases of Slurm; this is the one for Debian 12's. In a venv of
# its own: with it all other tests would read Slurm otherwise than most installations do.
PYSLURM_SOURCE ?= https://github.com/PySlurm/pyslurm
PYSLURM_TAG    ?= v22.5.3
PYSLURM        ?= .venv-pyslurm

# PyTorch's CUDA build, for played GPUs: in a venv of its own and without NVIDIA's packages, so that
# no real GPU is ever reached. `===` because a local version, as 2.13.0+cpu, counts as newer.
PLAYED       ?= .venv-played
PLAYED_TORCH ?= torch===2.13.0
# Releases for CUDA 12, each in a venv of its own (1 GB to download): a recent one, and the first
# that aborts groups.
PLAYED_RELEASES ?= 2.9.1 2.6.0
# What a release may do otherwise: its calls, its libraries, its process groups, a check that passes.
PLAYED_CONTRACT := tests/test_device_calls.py tests/played_gpu/test_libraries.py \
	tests/played_gpu/test_devices.py tests/played_gpu/test_process_groups.py \
	tests/played_gpu/test_checks.py::test_nodes_that_are_well_pass

# To collect all tests of the tree takes each of the two processes a minute: only these files.
PLAYED_TESTS  = $(shell grep -rl 'mark\.played_gpu' tests --include='test_*.py')

.PHONY: help demo quick test test-heavy test-slow test-releases chaos storms fuzz lint fmt install lab-packages pyslurm clean
.PHONY: reference site packages release
.PHONY: bench bench-acting bench-diagnosis bench-hang-restarts bench-hangs bench-history
.PHONY: bench-hooks bench-localize bench-monitor bench-probes bench-replay bench-scale bench-year
.PHONY: bench-submissions gpu tools
.PHONY: played-gpu test-played-gpu test-played-gpu-releases test-pyslurm

help:
	@echo 'make demo            a cluster with one bad node: a job finds and leaves it, root drains it, it comes back'
	@echo '                     GPUS=2: on nodes with played GPUs, of which one falls off its bus'
	@echo 'make quick T=PATH    the tests of a directory or a file, T=PATH::NAME one test: in seconds, without'
	@echo '                     root, torch and Slurm'
	@echo 'make test            each test that takes less than 2.5 seconds of processor time; lists'
	@echo '                     what it skipped (a dozen minutes on two cores)'
	@echo 'make test-heavy      the other ones: most are whole checks, requeues and restarts (as long again)'
	@echo 'make test-slow       the faults and time limits that take minutes each'
	@echo 'make played-gpu      PyTorch for CUDA on played GPUs, in .venv-played (0.5 GB to download)'
	@echo 'make test-played-gpu the tests on played GPUs: NCCL process groups, checks, faults (minutes)'
	@echo 'make test-played-gpu-releases  what releases of PyTorch for CUDA 12 do otherwise (GBs to download)'
	@echo 'make test-releases   the lab tests on Slurm 22.05, 24.11 and 26.05 (downloads the last two)'
	@echo 'make chaos           300 jobs with random bad nodes and kills, each on a Slurm of its own (hours)'
	@echo 'make storms          many nodes that break together, in eleven ways; STORM_ARGS=--nodes=100'
	@echo 'make fuzz            100,000 damaged inputs for everything that is read (hours)'
	@echo 'make lint            ruff, mypy --strict, shellcheck'
	@echo 'make fmt             format the code'
	@echo 'make reference       docs/reference/commands.md, from what each command says with --help'
	@echo 'make site            the documentation for a browser, in build/site'
	@echo 'make packages        the .deb and the .rpm, in dist, by dpkg-deb and rpmbuild where they are'
	@echo 'make release         wheel, packages, list of contents, checksums, in dist/release: SIGN=KEY'
	@echo 'make bench           how long a check takes, compared with its targets'
	@echo 'make bench-acting    how soon a job continues after its verdict'
	@echo 'make bench-diagnosis fifteen faults of a running training: are they named rightly (hours)'
	@echo 'make bench-localize  how often the localisation is right, compared with a published rule'
	@echo 'make bench-history   how fast journals are indexed, and their history answers'
	@echo 'make bench-hangs     five hangs of a training at random ranks and steps: are they located (half an hour)'
	@echo 'make bench-hang-restarts  ten hangs of trainings without a line of ours: do they go on on the spare (an hour)'
	@echo 'make bench-monitor   what the monitor beside a training costs on each node, and per step'
	@echo 'make bench-replay    what is said of recordings of real clusters: RECORDINGS=DIR'
	@echo 'make bench-year      a year of a real cluster, replayed: which policy keeps training going: RECORDINGS=DIR'
	@echo 'make bench-hooks     what the prolog and the health check cost on this node'
	@echo 'make bench-submissions  what jobs that are checked by default cost slurmctld when submitted'
	@echo 'make bench-probes    how much repeated runs of each probe differ on this machine'
	@echo 'make bench-scale     what a check of up to 16,384 simulated nodes costs; SCALE_ARGS=--nodes=512'
	@echo 'make gpu             everything that one GPU can show; with GPU_ARGS=--device=cpu without one'
	@echo 'make test-pyslurm    what is read through pyslurm and through scontrol, compared; builds pyslurm'
	@echo 'make clean           remove what these commands created here'

demo: install lab-packages $(if $(GPUS),played-gpu)
	@$(RUN) -m tests.demo $(if $(GPUS),--gpus=$(GPUS))

# What needs more is left out, and not skipped: its lines would hide the rest.
T ?= tests
OF_DIRECTORY = $(wildcard $(firstword $(T))/.)
quick: $(VENV)/.quick
	$(RUN) -m pytest -q -m 'not ($(if $(OF_DIRECTORY),heavy or )lab or played_gpu or root or slow or torch)' \
		$(T) $(if $(OF_DIRECTORY),-n $(WORKERS) --dist worksteal) $(PYTEST_ARGS)

test: install lab-packages
	$(RUN) $(PYTEST) -m 'not (slow or heavy or played_gpu)' $(PYTEST_ARGS)

test-heavy: install lab-packages
	$(RUN) $(PYTEST) -m 'heavy and not slow and not played_gpu' $(PYTEST_ARGS)

test-slow: install lab-packages recipe-packages
	$(RUN) $(PYTEST) -m slow $(PYTEST_ARGS)

test-releases: install lab-packages $(RELEASES:%=$(LAB_ROOTS)/%)
	$(RUN) $(PYTEST) -m lab $(PYTEST_ARGS)
	for release in $(RELEASES); do \
		LAB_RELEASE=$(LAB_ROOTS)/$$release $(RUN) $(PYTEST) -m lab $(PYTEST_ARGS) || exit; \
	done

# The build is made again by whichever test comes first after a change to it.
played-gpu: $(PLAYED)/.installed
	@$(BASE) -m tests.played_gpu.build $(PLAYED)

test-played-gpu: install played-gpu
	$(RUN) -m pytest -n 2 --dist worksteal -m 'played_gpu and not slow' $(PLAYED_TESTS) \
		$(PYTEST_ARGS)

test-played-gpu-releases: install
	for release in $(PLAYED_RELEASES); do \
		venv=$(PLAYED)-$$release; \
		$(MAKE) --no-print-directory played-gpu PLAYED=$$venv PLAYED_TORCH=torch===$$release && \
		PLAYED_VENV=$$venv $(RUN) -m pytest -n 2 --dist worksteal -m played_gpu $(PLAYED_CONTRACT) \
			$(PYTEST_ARGS) || exit; \
	done

$(PLAYED)/.installed: pyproject.toml
	@echo 'installing PyTorch for CUDA into $(PLAYED): 0.5 GB'
	@test -x $(PLAYED)/bin/python || $(BASE) -m venv $(PLAYED)
	@PIP_FIND_LINKS= $(PLAYED)/bin/python -m pip install -q --no-deps '$(PLAYED_TORCH)'
	@PIP_FIND_LINKS= $(PLAYED)/bin/python -m pip install -q filelock fsspec jinja2 networkx numpy sympy \
		typing_extensions
	@$(PLAYED)/bin/python -m pip install -q -e '.[gpu]'
	@touch $@

storms: install lab-packages
	$(RUN) -m benchmarks.storms --results build/storms.jsonl $(STORM_ARGS)

chaos: install lab-packages
	$(RUN) -m tests.lab chaos --runs 300 --labs $$((($$(nproc) + 1) / 2)) $(CHAOS_ARGS)

# Most of what some readers take is the making and removing of directories, which memory does at once.
fuzz: install
	TMPDIR=$(or $(wildcard /dev/shm),/tmp) $(RUN) $(PYTEST) tests/test_fuzz.py tests/system/slurm/test_fuzz.py tests/training/monitor/test_fuzz.py --hypothesis-profile=fuzz -o timeout=7200 $(PYTEST_ARGS)

$(LAB_ROOTS)/%:
	@command -v debootstrap >/dev/null || apt-get install -yq --no-install-recommends debootstrap
	$(RUN) -m tests.lab make-root $* $@

lint: install
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	@if command -v shellcheck >/dev/null; then shellcheck .ci/run distribution/*.sh $(filter-out %.md,$(wildcard prolog/* epilog/*)); else echo 'shellcheck is not installed: shell scripts were not checked'; fi

fmt: install
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

# docs/reference/commands.md, from what each command says with --help.
reference: install
	$(RUN) -m tests.command_reference

# The documentation as pages for a browser, in build/site.
site: install
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# A .deb and an .rpm for the distribution's Python of the version that makes them, in dist.
packages: install
	$(RUN) -m distribution.packages

# All files are of the time of the last commit, so that who builds it again gets the same.
release: install
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} \
		$(RUN) -m distribution.release $(if $(SIGN),--sign '$(SIGN)')

bench: install lab-packages
	$(RUN) -m benchmarks.check

bench-acting: install lab-packages
	$(RUN) -m benchmarks.acting

# These three go on where they were interrupted: what was judged is kept.
bench-diagnosis: install lab-packages
	$(RUN) -m benchmarks.diagnosis --results build/diagnosis.jsonl $(DIAGNOSIS_ARGS)

bench-localize: install
	$(RUN) -m benchmarks.localize --results build/localize.jsonl $(LOCALIZE_ARGS)

bench-history: install
	$(PYTHON) -m benchmarks.history

bench-hangs: install lab-packages
	$(RUN) -m benchmarks.hangs --results build/hangs.jsonl $(HANGS_ARGS)

bench-hang-restarts: install lab-packages
	$(RUN) -m benchmarks.hang_restarts --results build/hang-restarts.jsonl $(HANGS_ARGS)

bench-replay: install
	@test -n '$(RECORDINGS)' || \
		{ echo 'say where the recordings are: make bench-replay RECORDINGS=DIR (docs/explanation/recordings.md)'; exit 2; }
	@$(RUN) -m benchmarks.replay '$(RECORDINGS)' $(REPLAY_ARGS)

YEAR_ARGS ?= --page=docs/explanation/year.md

bench-year: install
	@test -n '$(RECORDINGS)' || \
		{ echo 'say where the recording is: make bench-year RECORDINGS=DIR (docs/explanation/year.md)'; exit 2; }
	@$(RUN) -m benchmarks.year '$(RECORDINGS)' $(YEAR_ARGS)

bench-monitor: install lab-packages
	$(RUN) -m benchmarks.monitor_cost

bench-hooks: install
	$(RUN) -m benchmarks.hooks

bench-probes: install
	$(RUN) -m benchmarks.probes

bench-submissions: install lab-packages
	$(RUN) -m benchmarks.submissions

bench-scale: install
	$(RUN) -m benchmarks.scale $(SCALE_ARGS)

# A torch that is there is used, because it is built for these GPUs: with python3 where it has the
# rest too, as where nothing can be installed, else from an environment that needs no torch of its own.
NEEDED := import click, filelock, msgspec, numpy, tabulate, torch
gpu:
	@if python3 -c '$(NEEDED)' 2>/dev/null; then python3 -m benchmarks.gpu $(GPU_ARGS); \
	else $(MAKE) --no-print-directory tools && $(PYTHON) -m benchmarks.gpu $(GPU_ARGS); fi

tools: $(VENV)/.tools

install: $(VENV)/.installed

$(VENV)/.installed: $(VENV)/.tools
	@echo 'installing torch into $(VENV): gigabytes, and minutes'
	@$(PYTHON) -c 'import torch' 2>/dev/null || $(PYTHON) -m pip install -q $(TORCH)
	@touch $@

$(VENV)/.tools: $(VENV)/.quick
	@$(PYTHON) -m pip install -q -e '.[dev]'
	@touch $@

$(VENV)/.quick: pyproject.toml
	@$(BASE) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed, $(BASE) is older'; exit 1; }
	@$(BASE) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory python-packages
	@test -x $(PYTHON) || $(BASE) -m venv $(VENV)
	@echo 'installing into $(VENV)'
	@$(PYTHON) -m pip install -q -e '.[test]'
	@touch $@

.PHONY: python-packages
python-packages:
ifneq ($(ROOT),)
	apt-get update -q && apt-get install -yq --no-install-recommends python3-venv
else
	@echo 'the venv module is missing; as root: apt-get install python3-venv'; exit 1
endif

# The lab is a real Slurm. Without root it cannot run, and the tests say so.
lab-packages: install
ifneq ($(ROOT),)
	@$(PYTHON) -c 'import sys; from tests.lab import missing; sys.exit(missing() is not None)' || \
		$(PYTHON) -m tests.lab install
endif

# What tests/recipes trains with: half a gigabyte that nothing else needs. A test whose package is
# missing is skipped and says so.
.PHONY: recipe-packages
recipe-packages: $(VENV)/.recipes
ifneq ($(ROOT),)
	@command -v mpirun >/dev/null || apt-get install -yq --no-install-recommends openmpi-bin || \
		echo 'Open MPI could not be installed: its recipes are skipped'
endif

$(VENV)/.recipes: $(VENV)/.installed
	@echo 'installing what the recipes train with into $(VENV)'
	@$(PYTHON) -m pip install -q -e '.[recipes]' && touch $@ || \
		echo 'not all could be installed: recipes whose package is missing are skipped'

# Takes minutes, and gigabytes of memory if it is optimised, which nothing here needs. pyslurm's tag
# must match Slurm's release.
pyslurm: $(PYSLURM)/.installed

$(PYSLURM)/.installed: $(VENV)/.quick
ifneq ($(ROOT),)
	@command -v git >/dev/null || { apt-get update -q && apt-get install -yq --no-install-recommends git; }
endif
	@GIT_TERMINAL_PROMPT=0 timeout 60 git ls-remote --exit-code '$(PYSLURM_SOURCE)' '$(PYSLURM_TAG)' >/dev/null || \
		{ echo 'pyslurm $(PYSLURM_TAG) cannot be had from $(PYSLURM_SOURCE)'; exit 1; }
ifneq ($(ROOT),)
	@test -e /usr/include/slurm/slurm.h || \
		{ apt-get update -q && apt-get install -yq --no-install-recommends gcc libslurm-dev python3-dev; }
endif
	@test -x $(PYSLURM)/bin/python || $(BASE) -m venv $(PYSLURM)
	@$(PYSLURM)/bin/python -m pip install -q -e '.[test]'
	CFLAGS=-O0 SLURM_INCLUDE_DIR=/usr/include \
	SLURM_LIB_DIR=$$(dirname "$$(ls /usr/lib/*/libslurm.so /usr/lib64/libslurm.so 2>/dev/null | head -n 1)") \
		$(PYSLURM)/bin/python -m pip install -q --no-deps 'git+$(PYSLURM_SOURCE)@$(PYSLURM_TAG)'
	@touch $@

test-pyslurm: lab-packages pyslurm
	PATH="$(CURDIR)/$(PYSLURM)/bin:$$PATH" $(PYSLURM)/bin/python -m pytest -q tests/system/slurm/test_reads.py $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(PLAYED) $(PLAYED)-* $(PYSLURM) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis gpu.json
