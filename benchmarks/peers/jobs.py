"""The jobs of a comparison: sizes, order and execution."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from common import REPOSITORY, Environ, shaped_cluster

from hvdtrain.launch.commands import find_mpirun
from peers.candidates import MEASURES, ON_CLUSTER, Way, command_on_cluster, command_on_host
from tests.environments import folder_of
from tests.harness.jobs import Completed, clean_environment, run_job
from tests.launch.jobs import OWN_DEFAULTS

RANKS = 2
HOSTS = 4
PROGRAM = str(REPOSITORY / "benchmarks" / "peer_ranks.py")
JOB_TIMEOUT_S = 400.0
LAST_LINES = 12
MODELS_OF_TORCH = ("lenet", "mlp")
# Steps before and after a rank dies.
DIES_AFTER = 20
STEPS_AFTER = 10
# One thread per rank, for all libraries.
THREADS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow",
}

# what, where, way, repetition, job_s, and found (results by figure) or error.
Entry = dict[str, Any]
# The cluster, and the environment for its programs.
Hosts = tuple[Any, Environ]


class Sizes(NamedTuple):
    """The amount of work of each measurement."""

    cases: Mapping[str, tuple[int, int]]  # bytes and number of arrays of each allreduce, by name
    runs: int  # runs of each case per job
    # samples per rank and step, and number of timed steps, by model
    models: Mapping[str, tuple[int, int]]
    cluster_models: Mapping[str, tuple[int, int]]  # the same on the cluster
    warmup_steps: int  # steps before timing starts


FULL = Sizes(
    cases={
        "4 B": (4, 1),
        "64 KiB": (64 << 10, 1),
        "1 MiB": (1 << 20, 1),
        "16 MiB": (16 << 20, 1),
        "16 MiB in 40 arrays": (16 << 20, 40),
    },
    runs=7,
    models={"lenet": (64, 60), "mlp": (64, 20), "resnet50": (4, 10)},
    cluster_models={"lenet": (64, 30)},
    warmup_steps=3,
)
# To test that each candidate works.
QUICK = Sizes(
    cases={"4 B": (4, 1), "1 MiB": (1 << 20, 1), "4 MiB in 40 arrays": (4 << 20, 40)},
    runs=2,
    models={"lenet": (64, 5), "mlp": (64, 3), "resnet50": (2, 2)},
    cluster_models={"lenet": (64, 3)},
    warmup_steps=2,
)


class Task(NamedTuple):
    """One job: its measure, place, candidate and repetition, and the parameters of its ranks."""

    what: str
    where: str
    name: str
    way: Way
    repetition: int
    ranks: int
    job: Mapping[str, Any]


def make_plan(
    whats: Sequence[str],
    wheres: Sequence[str],
    ways: Mapping[str, Way],
    repetitions: int,
    sizes: Sizes,
) -> list[Task]:
    """Return all jobs; candidates take turns, so that other load affects all of them equally.

    Training jobs also measure memory. The cluster compares allreduce and training of candidates
    that run on several hosts.
    """
    plan: list[Task] = []
    for what in dict.fromkeys("training" if what == "memory" else what for what in whats):
        for where in wheres:
            # Training jobs may run only to measure memory, on this host.
            if where == "cluster" and (what not in ON_CLUSTER or what not in whats):
                continue
            names = [name for name in MEASURES[what] if name in ways]
            if where == "cluster":
                names = [name for name in names if ways[name].launcher != "alone"]
            for turn, name in itertools.product(range(1, repetitions + 1), names):
                way = ways[name]
                ranks = HOSTS if where == "cluster" else 1 if way.launcher == "alone" else RANKS
                job = _job(what, where, way, whats, sizes)
                plan.append(Task(what, where, name, way, turn, ranks, job))
    return plan


def _job(what: str, where: str, way: Way, whats: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Return the parameters of a candidate's ranks, without ``environ`` and ``result``."""
    steps = DIES_AFTER + STEPS_AFTER
    job: dict[str, Any] = {"library": way.library}
    if what == "allreduce":
        return {**job, "cases": sizes.cases, "runs": sizes.runs}
    if what == "startup":
        return {**job, "models": {"small": (64, 1)}, "warmup_steps": 1}
    if what == "recovery":
        die = {"rank": 1, "after_step": DIES_AFTER}
        return {**job, "models": {"lenet": (64, steps)}, "warmup_steps": steps, "die": die}
    models = sizes.models if where == "host" else sizes.cluster_models
    if "training" not in whats:
        models = {"lenet": models["lenet"]}
    if "torch" in way.library:
        models = {name: models[name] for name in models if name in MODELS_OF_TORCH}
    # Two threads allow overlap of reduction and computation between hosts.
    job["inter_op_threads"] = 1 if where == "host" else 2
    return {**job, "models": models, "warmup_steps": sizes.warmup_steps}


def run_plan(plan: Sequence[Task], count: int, *links: Any) -> list[Entry]:
    """Run all jobs, those on the cluster on ``count`` hosts, and return their results or errors."""
    entries: list[Entry] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        hosts: Hosts | None = None
        for number, task in enumerate(plan, start=1):
            if task.where == "cluster" and hosts is None:
                hosts = stack.enter_context(shaped_cluster(count, *links))
            say(
                f"[{number}/{len(plan)}] {task.what} on the {task.where}, {task.way.label}, "
                f"repetition {task.repetition}"
            )
            keys = ("what", "where", "repetition")
            entry = {key: getattr(task, key) for key in keys} | {"way": task.name}
            try:
                entry |= _run(task, folder, hosts if task.where == "cluster" else None)
            except (TimeoutError, ValueError) as error:
                entry["error"] = "\n".join(str(error).strip().splitlines()[-LAST_LINES:])
                say(f"  failed: {entry['error']}")
            entries.append(entry)
    return entries


def _run(task: Task, folder: Path, hosts: Hosts | None) -> Entry:
    """Run a job.

    Raises:
        TimeoutError: The job took too long on the cluster.
        ValueError: The job failed.
    """
    start_s = time.monotonic()
    result = (hosts[0].folder if hosts else folder) / f"{time.monotonic_ns()}.json"
    done = _start(task, result, hosts)
    job_s = time.monotonic() - start_s
    if done.returncode or not result.exists():
        reason = "timed out" if done.timed_out else f"exit code {done.returncode}"
        raise ValueError(f"{done.stdout}{done.stderr}\n{reason}")
    results = json.loads(result.read_text())
    versions = results.pop("versions", {})
    found = parse_results(results, start_s, task.ranks)
    return {"job_s": job_s, "versions": versions, "found": found}


def _start(task: Task, result: Path, hosts: Hosts | None) -> Completed:
    way, python = task.way, python_of(task.way)
    paths = {"result": str(result), "killed": str(result.with_suffix(".killed"))}
    program = [PROGRAM, json.dumps({**task.job, **paths, "environ": THREADS})]
    if hosts:
        cluster, environ = hosts
        ranks_per_host = task.ranks // len(cluster.hosts)
        argv, changes = command_on_cluster(way, cluster.hosts, ranks_per_host, program, python)
        # horovodrun --gloo looks for the common network interface on its own host.
        host = cluster.hosts[0] if "--gloo" in way.flags else None
        return cluster.run(argv, host=host, env={**environ, **changes}, timeout_s=JOB_TIMEOUT_S)
    if way.library == "bench":
        program = ["-m", "hvdtrain", "bench", "recovery", "-np", "2", "--json", str(result)]
        program += ["--between-steps", str(DIES_AFTER)]
    mpirun = find_mpirun(Path(sys.executable).parent, os.environ)
    argv, changes = command_on_host(way, task.ranks, program, python, mpirun)
    environment = clean_environment(
        {**OWN_DEFAULTS, "PYTHONPATH": None, "OPENBLAS_NUM_THREADS": "1", **THREADS, **changes}
    )
    return run_job(argv, folder=result.parent, timeout_s=JOB_TIMEOUT_S, environment=environment)


def parse_results(results: Mapping[str, Any], start_s: float, ranks: int) -> dict[str, float]:
    """Return figures by name, with durations since the command at ``start_s`` instead of times.

    The results are those of a rank or of ``hvdtrain bench recovery``.

    Raises:
        ValueError: The ranks did not find each other.
    """
    if "losses" in results:
        return {"kill_to_next_step_s": results["losses"][0]["next_step_s"]}
    figures = dict(results)
    if (size := figures.pop("ranks")) != ranks:
        raise ValueError(f"expected {ranks} ranks, got {size}")
    if "first_step_at_s" in figures:
        figures["first_step_s"] = figures.pop("first_step_at_s") - start_s
    if "kill_to_next_step_s" in figures:
        figures["times_start"] = figures["kill_to_next_step_s"] / figures["first_step_s"]
    return figures


def python_of(way: Way) -> Path:
    """Return the Python of a candidate's environment."""
    if way.environment:
        return folder_of(way.environment) / "bin" / "python"
    return Path(sys.executable)


def say(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)
