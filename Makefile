# Commands of the repository. Everything installs what it needs; run again, it is quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SECONDS ?= 30

.PHONY: help demo test test-all test-cgroup2 test-rootless guest-packages check setup bench fuzz sync format clean system-packages

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

demo: setup  ## real SWE tasks, in sandboxes, to rewards: the fix gives 1, doing nothing gives 0
	$(BIN)/shoal rollouts --tasks pypi --limit 8 --agent oracle
	$(BIN)/shoal rollouts --tasks pypi --limit 8 --agent noop

test: setup  ## the tests, in under 15 minutes
	$(BIN)/python -m pytest -m "not slow"
	test "$$(id -u)" != 0 || scripts/test_as_user

test-rootless: setup  ## what every sandbox must do, as an ordinary user; root lends a throw-away one
	scripts/test_as_user

test-all: setup test-cgroup2  ## the slow suites too: soaks, kill loops, the guest with cgroup v2
	$(BIN)/python -m pytest

test-cgroup2: setup guest-packages  ## the tests of limits in a QEMU guest with pure cgroup v2
	$(BIN)/python scripts/cgroup2

check: setup  ## format, lint, types, import contract, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/generate_sync.py --check

setup: $(STAMP)  ## .venv with the project and its tests' needs, shoal-init built
	@$(BIN)/python build_init.py

$(STAMP): pyproject.toml build_init.py | system-packages
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

# What the build and the layers need of the system, where it is Debian and we may. Without musl the system's compiler
# does; without erofs-utils layers are directories.
system-packages:
	@PYTHON=$(PYTHON) scripts/install_system_packages

# QEMU and what the guest's images are made with. The guest's kernel is fetched but not installed.
guest-packages:
	@scripts/cgroup2/install_packages

bench: setup  ## the benchmark table, with what users would pick instead
	$(BIN)/shoal bench --peers

fuzz: setup  ## the frame codec and the request parser, for SECONDS
	$(MAKE) -C fuzz run SECONDS=$(SECONDS) PYTHON=$(abspath $(BIN)/python)

sync: setup  ## writes the blocking SDK from the async one
	$(BIN)/python scripts/generate_sync.py

format: setup  ## formats the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet .

clean:  ## removes what was built here; sandbox layers stay in the data folder
	rm -rf $(VENV) .cgroup2 src/shoal/_bin/init fuzz/build .mypy_cache .ruff_cache .hypothesis
