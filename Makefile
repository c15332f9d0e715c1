# make demo    set everything up and train on the digits across 2 slices x 2 hosts x 2 devices
# make test    set everything up, then lint, type checks, layer checks and tests, against the built wheel
# make lint    the first three of these
# make test-matrix    tests that another jax or Python may break, on every version of slurm_pathways/supported.py
# make test-tpu-compile    programs compiled for TPU by libtpu (500 MB, in .venv-tpu), on any machine
# make test-gpu-compile    programs compiled for GPUs by XLA (1 GB, in .venv-gpu-compile), on any machine
# make test-libraries    large libraries, PyTorch among them, against plain JAX (docs/libraries.md); minutes, and gigabytes
# make bench   the benchmarks (quiet machine; BENCH_ARGS="ROW ROW" takes some: docs/benchmarks.md)
# make clean   remove what these made
#
# Nothing is done twice: .venv follows pyproject.toml, the wheel follows the sources, and each installation follows both.
# PYTHON=/path/of/python chooses the interpreter, VENV=folder another place.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
STAMPS := $(VENV)/.stamps
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
# By content, not by date: a checkout or a touch does not install everything again.
DEPENDENCIES := $(shell sha256sum pyproject.toml | cut -c 1-16)
SOURCES := $(shell find slurm_pathways runtime sbatch_templates -type f -not -path '*/__pycache__/*' -not -name '*.pyc')

.PHONY: help demo compiler packages test test-matrix test-libraries test-tpu-compile tpu-tests test-gpu-compile gpu-tests lint bench clean wheel always
# The compiler comes before the wheel.
.NOTPARALLEL:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(VENV)/bin/python:
	@python=$$(.ci/find-python); echo "making $(VENV) with $$python"; "$$python" -m venv $(VENV)

$(STAMPS)/build-tools-$(DEPENDENCIES): | $(VENV)/bin/python
	@mkdir -p $(STAMPS)
	$(PIP) install 'setuptools>=77' 'build>=1.2'
	@touch $@

# Whether programs can be compiled here: the wheel has a part in C, and goes without where they cannot.
$(STAMPS)/compiles: always
	@mkdir -p $(STAMPS)
	@compiles=$$(echo '#include <sys/socket.h>' | $(CC) -E - >/dev/null 2>&1 && echo yes || echo no); \
	    [ "$$(cat $@ 2>/dev/null)" = "$$compiles" ] || echo "$$compiles" > $@

# The sdist is built from the tree and the wheel from the sdist, so a file that either lacks is missed by the tests.
$(STAMPS)/wheel: pyproject.toml setup.cfg setup.py README.md LICENSE $(SOURCES) $(STAMPS)/compiles | $(STAMPS)/build-tools-$(DEPENDENCIES)
	@rm -rf $(VENV)/dist
	$(VENV)/bin/python -m build --no-isolation --outdir $(VENV)/dist . > $(VENV)/build.log 2>&1 \
	    || { tail -n 30 $(VENV)/build.log; exit 1; }
	@touch $@

# The extra (demo, test) with what it needs. pip takes a wheel of the same version for installed, hence the first line.
$(STAMPS)/installed-%-$(DEPENDENCIES): $(STAMPS)/wheel
	@$(PIP) uninstall --yes slurm-pathways 2>/dev/null
	$(PIP) install "$$(echo $(VENV)/dist/*.whl)[$*]"
	@touch $@

wheel: $(STAMPS)/wheel
	@ls $(VENV)/dist

demo: $(STAMPS)/installed-demo-$(DEPENDENCIES)
	$(VENV)/bin/slurm-pathways run --local --slices 2 --hosts-per-slice 2 --devices-per-host 2 -- \
	    $(VENV)/bin/python examples/digits/train.py

lint: $(STAMPS)/installed-test-$(DEPENDENCIES)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

compiler:
	@.ci/debian-packages gcc libc6-dev

# What the tests of the Slurm side need: the sandbox's daemons, and Slurm's headers for the plugin.
packages: $(STAMPS)/installed-test-$(DEPENDENCIES)
	@.ci/debian-packages $$($(VENV)/bin/slurm-pathways sandbox packages) libslurm-dev

# The last line is pytest's. Tests import the installed wheel: the tree is not on sys.path. All tests run in two halves side by
# side; what PYTEST_ARGS names, in one.
test: compiler lint packages
	if [ -z "$(strip $(PYTEST_ARGS))" ]; then \
	    $(VENV)/bin/python tools/run_tests.py --wheel=$(VENV)/dist; \
	else \
	    $(VENV)/bin/pytest --wheel=$(VENV)/dist $(PYTEST_ARGS); \
	fi

test-matrix: $(STAMPS)/wheel
	$(VENV)/bin/python tools/test_matrix.py --dist $(VENV)/dist --venvs $(VENV)/matrix $(MATRIX_ARGS)

# In virtual environments of their own, so that others do without these compilers.
test-tpu-compile:
	$(MAKE) VENV=$(VENV)-tpu tpu-tests

tpu-tests: $(STAMPS)/installed-test-tpu-$(DEPENDENCIES)
	$(VENV)/bin/pytest tests/tpu_compile $(PYTEST_ARGS)

test-gpu-compile:
	$(MAKE) VENV=$(VENV)-gpu-compile gpu-tests

gpu-tests: $(STAMPS)/installed-test-gpu-$(DEPENDENCIES)
	$(VENV)/bin/pytest tests/gpu_compile $(PYTEST_ARGS)

test-libraries: $(STAMPS)/installed-libraries-heavy-$(DEPENDENCIES)
	$(VENV)/bin/pytest -o "norecursedirs=.* dist" tests/libraries $(PYTEST_ARGS)

bench: $(STAMPS)/installed-test-$(DEPENDENCIES)
	$(VENV)/bin/python -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(VENV)-tpu $(VENV)-gpu-compile .venv-gpu build dist slurm_pathways.egg-info runtime/pathways_runtime/worker/_private_sockets.abi3.so
