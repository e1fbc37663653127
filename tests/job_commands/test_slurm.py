"""The commands on jobs, with a real Slurm."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import ON_CLUSTER
from tests.testbed.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

_PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("saved", flush=True), sys.exit(75)))
print("rank", os.environ["SLURM_PROCID"], sys.argv[1:], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


class Commands:
    """Runs ``hvdtrain`` on the head of the cluster, with jobs in a folder shared by all hosts."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = Path(cluster.folder, f"jobs-{time.monotonic_ns()}")
        self._cache = Path(f"{self.folder}-cache")

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run ``hvdtrain`` to its end, and return its output, or its errors if it fails."""
        done = self.cluster.run(
            [sys.executable, "-m", "hvdtrain", *arguments],
            env={
                **ON_CLUSTER,
                "HVDTRAIN_JOBS_DIR": str(self.folder),
                "XDG_CACHE_HOME": str(self._cache),
            },
            timeout_s=60,
        )
        assert done.returncode == code, done
        return done.stdout if code == 0 else done.stderr

    def clear_cache(self) -> None:
        """Make the next command call squeue again."""
        for path in self._cache.glob("hvdtrain/squeue-*.json"):
            path.unlink()

    def submit(self, *words: str, options: tuple[str, ...] = ()) -> str:
        """Submit a job of two ranks on two hosts and return its name."""
        argv = ["submit", "--on", "slurm", "--sbatch=--nodes=2", "--sbatch=--time=5", "-np", "2"]
        argv += options
        return self.run(*argv, "--", sys.executable, "-c", _PROGRAM, *words).strip()

    def show(self, name: str) -> Mapping[str, Any]:
        return json.loads(self.run("show", name, "--json"))

    def wait_for(self, name: str, status: str) -> Mapping[str, Any]:
        """Wait until a job has a status."""
        deadline = time.monotonic() + 90
        while (shown := self.show(name))["status"] != status:
            assert time.monotonic() < deadline, (shown, self.cluster.daemon_logs())
            time.sleep(0.3)
        return shown


@pytest.fixture
def commands(cluster: Cluster) -> Iterator[Commands]:
    yield Commands(cluster)
    cluster.run(["scancel", "--user=root"], timeout_s=20)


def test_a_job_in_slurm_is_submitted_shown_and_stopped(commands: Commands) -> None:
    go = commands.folder / "go"
    name = commands.submit(str(go), "$(id)", "a b")
    later = commands.submit(str(go), options=("--sbatch=--begin=now+1hour",))
    assert commands.show(later)["status"] == "queued"
    commands.clear_cache()
    shown = commands.show(later)
    assert (shown["status"], shown["verdict"]) == ("queued", "waiting for Slurm: BeginTime")
    commands.wait_for(name, "running")
    log = commands.run("logs", name)
    deadline = time.monotonic() + 30
    while log.count("rank ") < 2 and time.monotonic() < deadline:
        log = commands.run("logs", name)
    words = [str(go), "$(id)", "a b"]
    assert sorted(log.splitlines()) == [f"[{n}] rank {n} {words!r}" for n in range(2)]

    # Without the controller the state of a queued job is unknown.
    commands.clear_cache()
    with commands.cluster.without_controller():
        rows = [json.loads(row) for row in commands.run("jobs", "--json").splitlines()]
    assert {row["name"]: row["status"] for row in rows} == {name: "running", later: "unknown"}

    commands.clear_cache()
    assert commands.run("stop", later) == f"{later}: stopped\n"
    assert "while it was queued" in commands.show(later)["verdict"]

    # The job is preempted, requeued, and stopped while it is in the queue.
    commands.run("stop", name, "--save", "--wait", "0", code=1)
    shown = commands.wait_for(name, "queued")
    assert commands.run("logs", name).count("saved") == 2
    assert [event["kind"] for event in shown["events"]] == ["began", "ended"]
    commands.run("stop", name)
    assert commands.show(name)["status"] == "stopped"
    output = commands.cluster.run(["squeue", "--noheader"], timeout_s=20).stdout
    assert output.strip() == ""


def test_errors_of_sbatch_are_printed(commands: Commands) -> None:
    error = commands.run(
        *("submit", "--on", "slurm", "--sbatch=--partition=none", "--", "python", "x.py"), code=1
    )
    assert "invalid partition" in error
    assert "no jobs in" in commands.run("jobs")
    plan = commands.run(
        *("submit", "--on", "slurm", "-np", "3", "--max-restarts", "2", "--dry-run"),
        *("--", "python", "a b.py"),
    )
    script = REPOSITORY / "slurm" / "train.sh"
    assert "--ntasks=3" in plan
    assert plan.endswith(f" {script} -np 3 --max-restarts 2 -- python 'a b.py'\n")
