"""The command ``hvdtrain bench``: parses its arguments, and starts the ranks."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.bench.options import BENCHMARKS, add_options
from hvdtrain.cluster.topology import read_topology
from hvdtrain.config.fields import argument, positive_int
from hvdtrain.config.keras_backend import KERAS_BACKEND, configured_backend
from hvdtrain.errors import ConfigurationError

__all__ = ["add_arguments", "measure_here", "run"]

# For TensorFlow, PyTorch and JAX, which read these when they are imported.
ONE_THREAD = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "NPROC": "1",
}

_EPILOG = """\
Outside MPI the command starts its ranks on this host. Inside a job (mpirun, srun, hvdtrain run) it
uses the job's ranks:

  hvdtrain bench allreduce -np 4
  mpirun -np 16 --hostfile hosts hvdtrain bench allreduce
  hvdtrain run --elastic -np 4 -- hvdtrain bench recovery

Keras uses the backend that KERAS_BACKEND or keras.json selects. The last table compares the figures
with targets for an idle machine. The exit code is 0 even if a target is missed. docs/performance.md
explains the figures, and docs/scaling.md explains predict.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdtrain bench``."""
    parser.epilog = _EPILOG
    benchmarks = parser.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", title="benchmarks", required=True
    )
    for name, kind in BENCHMARKS.items():
        summary = kind.summary
        description = summary[0].upper() + summary[1:] + "."
        own = benchmarks.add_parser(name, help=summary, description=description, allow_abbrev=False)
        if kind.usual_ranks:
            own.add_argument(
                "-np",
                "--num-proc",
                type=argument(positive_int),
                metavar="N",
                help=f"number of ranks on this host; default {kind.usual_ranks}, or the ranks of "
                "the job",
            )
        add_options(own, kind)


def run(arguments: argparse.Namespace) -> int:
    """Run the selected benchmark and return the exit code.

    Raises:
        ConfigurationError: If an argument is invalid.
        LaunchError: If the ranks can't be started.
    """
    name: str = arguments.benchmark
    options = _options(arguments)
    usual_ranks = BENCHMARKS[name].usual_ranks
    backend = configured_backend(os.environ)
    if BENCHMARKS[name].needs_tensorflow and backend != "tensorflow":
        raise ConfigurationError(
            f"{name} needs Keras' TensorFlow backend, got {backend}; set "
            f"{KERAS_BACKEND}=tensorflow."
        )
    if not usual_ranks:
        measure_here(name, options)
        return 0
    topology = read_topology(os.environ)
    inside = topology.launcher != "none"
    ranks: int = topology.size if inside else arguments.num_proc or usual_ranks
    if arguments.num_proc not in (None, ranks):
        raise ConfigurationError(
            f"-np must equal the size of the job, {ranks}, got {arguments.num_proc}; leave it out, "
            "or start the command outside the job."
        )
    if name == "recovery" and ranks < 2:
        raise ConfigurationError(
            "recovery needs at least 2 ranks, because it kills all but one, got 1; use -np 2 or "
            "more."
        )
    if name == "startup":
        if inside:
            raise ConfigurationError(
                "startup can't run inside a job, because it starts jobs; run it outside mpirun and "
                "srun."
            )
        options["ranks"] = ranks
    if inside or name == "startup":
        measure_here(name, options)
        return 0
    from hvdtrain.config import Settings
    from hvdtrain.launch.attempts import run_job
    from hvdtrain.launch.plan import Job

    job = Job(
        program=(sys.executable, "-P", "-m", "hvdtrain.bench", name, json.dumps(options)),
        ranks=ranks,
        hosts=f"localhost:{ranks}",
        chief_only=True,
        settings=Settings(elastic=name == "recovery"),
    )
    # Keep TensorFlow's messages out of the tables.
    return run_job(job, {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ})


def measure_here(name: str, options: Mapping[str, Any]) -> None:
    """Run a benchmark in this process, on all ranks of its job."""
    if name == "training":
        # With more threads, a rank alone would use the cores of all ranks.
        os.environ.update(ONE_THREAD)
    module = importlib.import_module(f"hvdtrain.bench.measure_{name}")
    module.measure(BENCHMARKS[name](**options))


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the benchmark's options on the command line, with absolute paths."""
    fields = dataclasses.fields(BENCHMARKS[arguments.benchmark])
    values = vars(arguments)
    options = {field.name: values[field.name] for field in fields if field.name in values}
    for name in ("directory", "json"):
        if not options.get(name):
            continue
        path = Path(options[name]).absolute()
        folder = path if name == "directory" else path.parent
        if not folder.is_dir():
            raise ConfigurationError(
                f"--{name} {options[name]}: the folder {folder} does not exist; create it first."
            )
        options[name] = str(path)
    return options
