# `make demo` and `make test` each do all the set-up they need, in .venv, and change nothing outside this folder.
# PYTHON chooses the interpreter that .venv is made from: make test PYTHON=python3.12
RIGHT_PYTHON := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for name in python3.11 python3.12 python3; do \
  $$name -c '$(RIGHT_PYTHON)' 2>/dev/null && command -v $$name && break; done)
BIN := .venv/bin
STAMP := .venv/.installed

# One thread for each process: tests start many, and sums in another order are other sums.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes; where a shell forbids bytecode, each would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo docs test test-slow gpu gpu-wheels test-slurm test-transformers4 slurm-packages browser-packages prove drill fuzz sweep lint check format bench bench-peers clean plan-table

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' && '$(PYTHON)' -c '$(RIGHT_PYTHON)' || \
	  { echo 'PYTHON=$(PYTHON) must be Python 3.11 or 3.12; try make PYTHON=/path/to/python3.12' >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m launcher.commands.demo

# The pages of docs/ as a site that opens from the disk and needs no network; a broken link is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/site
	@echo build/site/index.html

test: $(STAMP)
	$(AT_ONCE) tests -m 'not slow and not slurm'

# What waits for nothing but its own processes runs two at a time; WORKERS=0 runs one after another, and tells more.
WORKERS ?= 2
AT_ONCE = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# make prove BUDGET=25: no test is begun after 25 minutes, and it is said how many were not. So for test-slow, test-slurm.
BUDGETED := $(if $(BUDGET),--budget-minutes=$(BUDGET) --begin-at=$(shell git rev-parse HEAD 2>/dev/null))

# A real Slurm of four nodes on this machine, as root; where it cannot be had, each test is skipped with the reason.
test-slurm: $(STAMP)
	$(BIN)/python -m pytest tests/slurm $(BUDGETED)

# This target and the next alone change the machine outside this folder: Debian's or Ubuntu's packages, 13 MB. No
# daemon is started.
slurm-packages:
	apt-get update -q
	RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
	  slurmctld slurmd slurm-client munge iproute2

# Debian's browser, 160 MB, in which tests open the pages that we write; without it each is skipped with the reason.
browser-packages:
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium chromium-driver

# The rest of the layout matrix: what `make test` leaves out to fit in its time.
MATRIX := $(addprefix tests/multiprocess/,test_layouts.py test_prove.py test_prove_families.py test_prove_matrix.py)
prove: $(STAMP)
	$(AT_ONCE) $(MATRIX) -m slow $(BUDGETED)

# Everything else that takes minutes: each pair of layouts over a checkpoint, each rank's overflow, hangs, restarts.
test-slow: $(STAMP)
	$(BIN)/python -m pytest tests -m 'slow and not slurm' $(addprefix --ignore=,$(MATRIX)) $(BUDGETED)

# The newest transformers 4, beside .venv's own version, in a folder of its own: exports must load in both.
TRANSFORMERS4 := .transformers4/.installed
$(TRANSFORMERS4): requirements-transformers4.txt $(STAMP)
	rm -rf .transformers4
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .transformers4 \
	  --requirement requirements-transformers4.txt
	@touch $(TRANSFORMERS4)

test-transformers4: $(TRANSFORMERS4)
	$(BIN)/python -m pytest tests/parity/test_model_transformers4.py

# Broken inputs for each parser, for an hour or MINUTES; then one JSON line. A seed and a number name an input.
fuzz: $(STAMP)
	$(BIN)/python tests/support/fuzz.py --minutes $(or $(MINUTES),60)

# Some ten thousand bad values, paths and arguments through the command line; then one JSON line.
sweep: $(STAMP)
	$(BIN)/python tests/support/hostile_sweep.py

# 200 runs whose ranks, launchers and fork servers are killed at random moments; a line each, and a JSON summary.
drill: $(STAMP)
	$(BIN)/python tests/support/kill_drill.py --runs 200

# Checks and figures on a GPU, or with DRY=1 the very same code on the CPU. PART, OUT, MINUTES and CHECK narrow it.
# A .venv that is there is taken as it is: a machine with a GPU may have no network (build/gpu-wheels/install.py).
HOUR := $(BIN)/python benchmarks/gpu/hour.py
gpu: $(if $(wildcard $(STAMP)),,$(STAMP))
	@$(HOUR) $(if $(PART),--part '$(PART)') $(if $(DRY),--dry) $(if $(OUT),--out '$(OUT)') \
	  $(if $(MINUTES),--minutes '$(MINUTES)') $(if $(CHECK),--check '$(CHECK)')

# What such a machine still needs beside torch and transformers, as wheels: build/gpu-wheels, under 64 MiB. HAVE names
# large packages that are there, BESIDE versions that are: BESIDE='transformers==5.17.0 huggingface-hub==1.33.0'.
gpu-wheels: $(STAMP)
	$(BIN)/python benchmarks/gpu/gpu_wheels.py $(if $(HAVE),--have $(HAVE)) $(if $(BESIDE),--beside $(BESIDE))

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint
	$(AT_ONCE) tests/unit -m 'not slow' --quiet

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# docs/plan-table.md and the constants of `plan --rows`, fitted anew to benchmarks/published/rows.jsonl: a few seconds.
plan-table: $(STAMP)
	$(BIN)/python tests/support/plan_table.py

# The comparisons that take minutes, peers included: less than 20 minutes on two idle cores. The others are run by themselves.
bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_set.py

# Megatron-core and torchtitan as peers of `make bench`, which leaves out whichever is not there. 710 MB, most of it
# triton, which torchtitan imports and which runs nothing on a CPU.
bench-peers: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/peers --upgrade \
	  --requirement benchmarks/peers.txt

clean:
	rm -rf .venv .transformers4 build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
