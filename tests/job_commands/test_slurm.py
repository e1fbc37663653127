"""Jobs that Slurm runs, on the cluster with a real Slurm."""

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
    """The command on the head of the cluster, with jobs in a folder that all hosts share."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = Path(cluster.folder, f"jobs-{time.monotonic_ns()}")
        self._cache = Path(f"{self.folder}-cache")

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run ``hvdtrain`` to its end; what it printed."""
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

    def forget(self) -> None:
        """Have squeue asked again by the next command."""
        for path in self._cache.glob("hvdtrain/squeue-*.json"):
            path.unlink()

    def submit(self, *words: str, options: tuple[str, ...] = ()) -> str:
        """The name of a job of two ranks on two hosts."""
        argv = ["submit", "--on", "slurm", "--sbatch=--nodes=2", "--sbatch=--time=5", "-np", "2"]
        argv += options
        return self.run(*argv, "--", sys.executable, "-c", _PROGRAM, *words).strip()

    def show(self, name: str) -> Mapping[str, Any]:
        """What is known of a job."""
        return json.loads(self.run("show", name, "--json"))

    def until(self, name: str, status: str) -> Mapping[str, Any]:
        """Wait until a job is so."""
        deadline = time.monotonic() + 90
        while (seen := self.show(name))["status"] != status:
            assert time.monotonic() < deadline, (seen, self.cluster.last_words())
            time.sleep(0.3)
        return seen


@pytest.fixture
def commands(cluster: Cluster) -> Iterator[Commands]:
    yield Commands(cluster)
    cluster.run(["scancel", "--user=root"], timeout_s=20)


def test_a_job_of_slurms_is_submitted_seen_and_stopped(commands: Commands) -> None:
    go = commands.folder / "go"
    name = commands.submit(str(go), "$(id)", "a b")
    later = commands.submit(str(go), options=("--sbatch=--begin=now+1hour",))
    assert commands.show(later)["status"] == "queued"
    commands.forget()
    seen = commands.show(later)
    assert (seen["status"], seen["verdict"]) == ("queued", "it waits for Slurm: BeginTime")
    commands.until(name, "running")
    log = commands.run("logs", name)
    deadline = time.monotonic() + 30
    while log.count("rank ") < 2 and time.monotonic() < deadline:
        log = commands.run("logs", name)
    words = [str(go), "$(id)", "a b"]
    assert sorted(log.splitlines()) == [f"[{n}] rank {n} {words!r}" for n in range(2)]

    # Nobody knows of a job in the queue but a controller that is there.
    commands.forget()
    with commands.cluster.without_controller():
        rows = [json.loads(row) for row in commands.run("jobs", "--json").splitlines()]
    assert {row["name"]: row["status"] for row in rows} == {name: "running", later: "unknown"}

    commands.forget()
    assert commands.run("stop", later) == f"{later}: stopped\n"
    assert "before its turn" in commands.show(later)["verdict"]

    # Preempted, it is requeued, and stopped there.
    commands.run("stop", name, "--save", "--wait", "0", code=1)
    seen = commands.until(name, "queued")
    assert commands.run("logs", name).count("saved") == 2
    assert [event["kind"] for event in seen["events"]] == ["began", "ended"]
    commands.run("stop", name)
    assert commands.show(name)["status"] == "stopped"
    shown = commands.cluster.run(["squeue", "--noheader"], timeout_s=20).stdout
    assert shown.strip() == ""


def test_sbatchs_own_words_reach_who_submits(commands: Commands) -> None:
    said = commands.run(
        *("submit", "--on", "slurm", "--sbatch=--partition=none", "--", "python", "x.py"), code=1
    )
    assert "invalid partition" in said
    assert "no jobs in" in commands.run("jobs")
    plan = commands.run(
        *("submit", "--on", "slurm", "-np", "3", "--max-restarts", "2", "--dry-run"),
        *("--", "python", "a b.py"),
    )
    script = REPOSITORY / "slurm" / "train.sh"
    assert "--ntasks=3" in plan
    assert plan.endswith(f" {script} -np 3 --max-restarts 2 -- python 'a b.py'\n")
