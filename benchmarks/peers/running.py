"""Execution of the jobs of a plan, one by one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cluster_jobs import REPOSITORY, shaped_cluster

from hvdtrain.launch.commands import find_mpirun
from peers.commands import command_on_cluster, command_on_host, python_of
from peers.plan import Task

sys.path.insert(0, str(REPOSITORY))
from tests.environments import folder_of
from tests.harness.jobs import Completed, clean_environment, run_job
from tests.launch.jobs import OWN_DEFAULTS

__all__ = ["JOB_TIMEOUT_S", "Entry", "run_plan"]

PROGRAM = REPOSITORY / "benchmarks" / "peer_rank.py"
JOB_TIMEOUT_S = 400.0
# One thread per rank, for all libraries.
THREADS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow",
}
LAST_LINES = 12

# what, where, way, repetition, job_s, and found (results by figure) or error.
Entry = dict[str, Any]
# The cluster, and the environment for its programs.
Shaped = tuple[Any, Mapping[str, str | None]]


def run_plan(
    plan: Sequence[Task],
    rate: str,
    queue_ms: int,
    hosts: int,
    say: Callable[[str], None],
) -> list[Entry]:
    """Run all jobs and return their results or errors.

    Args:
        plan: The jobs.
        rate: Speed of the cluster's links, as for tc.
        queue_ms: Queue of each link.
        hosts: Number of hosts of the cluster.
        say: Prints progress.
    """
    entries: list[Entry] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        cluster: Shaped | None = None
        for number, task in enumerate(plan, start=1):
            if task.where == "cluster" and cluster is None:
                cluster = stack.enter_context(shaped_cluster(hosts, rate, queue_ms))
            say(f"[{number}/{len(plan)}] {task.title}")
            entry = _run(task, folder, cluster)
            if "error" in entry:
                say(f"  failed: {entry['error']}")
            entries.append(entry)
    return entries


def _run(task: Task, folder: Path, cluster: Shaped | None) -> Entry:
    entry: Entry = {
        "what": task.what,
        "where": task.where,
        "way": task.way.name,
        "repetition": task.repetition,
    }
    start_s = time.monotonic()
    try:
        if task.where == "cluster":
            assert cluster is not None
            ranks = len(cluster[0].hosts)
            done, result = _on_cluster(task, *cluster)
        else:
            ranks = task.ranks
            done, result = _on_host(task, folder)
    except TimeoutError as error:
        # Raised on the cluster; on this host ``timed_out`` is set.
        return entry | {"error": _last_lines(str(error))}
    entry["job_s"] = time.monotonic() - start_s
    if done.returncode or not result.exists():
        reason = "timed out" if done.timed_out else f"exit code {done.returncode}"
        entry["error"] = f"{reason}\n{_last_lines(done.stdout + done.stderr)}"
    else:
        results = json.loads(result.read_text())
        result.unlink()
        entry["versions"] = results.pop("versions", {})
        try:
            entry["found"] = parse_results(results, start_s, ranks)
        except ValueError as error:
            entry["error"] = str(error)
    return entry


def parse_results(results: Mapping[str, Any], start_s: float, ranks: int) -> dict[str, float]:
    """Return figures by name, with durations since the command instead of times.

    Args:
        results: Results of a rank or of ``hvdtrain bench recovery``.
        start_s: Time of the command on the machine's monotonic clock.
        ranks: Number of started ranks.

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


def _on_host(task: Task, folder: Path) -> tuple[Completed, Path]:
    way, result = task.way, folder / f"{time.monotonic_ns()}.json"
    if way.library == "bench":
        program = ["-m", "hvdtrain", "bench", "recovery", "-np", "2", "--json", str(result)]
        program += ["--between-steps", str(task.job["steps"])]
    else:
        program = [str(PROGRAM), _job_text(task, result)]
    mpirun = find_mpirun(Path(sys.executable).parent, os.environ)
    python = python_of(way, Path(sys.executable), folder_of)
    argv, changes = command_on_host(way, task.ranks, program, python, mpirun)
    environment = clean_environment(
        {**OWN_DEFAULTS, "PYTHONPATH": None, "OPENBLAS_NUM_THREADS": "1", **THREADS, **changes}
    )
    done = run_job(argv, folder=folder, timeout_s=JOB_TIMEOUT_S, environment=environment)
    return done, result


def _on_cluster(
    task: Task, cluster: Any, environ: Mapping[str, str | None]
) -> tuple[Completed, Path]:
    result = cluster.folder / f"{time.monotonic_ns()}.json"
    program = [str(PROGRAM), _job_text(task, result)]
    python = python_of(task.way, Path(sys.executable), folder_of)
    argv, changes = command_on_cluster(task.way, cluster.hosts, program, python)
    # horovodrun --gloo looks for the common network interface on its own host.
    host = cluster.hosts[0] if "--gloo" in task.way.flags else None
    done = cluster.run(argv, host=host, env={**environ, **changes}, timeout_s=JOB_TIMEOUT_S)
    return done, result


def _job_text(task: Task, result: Path) -> str:
    job = {**task.job, "result": str(result), "environ": THREADS}
    if "die" in job:
        job["die"] = {**job["die"], "file": str(result.with_suffix(".killed"))}
    return json.dumps(job)


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])
