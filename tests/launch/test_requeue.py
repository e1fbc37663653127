"""Preempted Slurm jobs, which save a checkpoint, are requeued once, and resume."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import ON_CLUSTER
from tests.testbed.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

RANKS = 3


class Job:
    """A program under ``slurm/train.sh``, one rank on each of three hosts.

    Args:
        cluster: The cluster.
        options: The options of sbatch.
        program: The arguments of the program after the folder.
        words: The program.
        first_on_path: A folder of executables.
    """

    def __init__(
        self,
        cluster: Cluster,
        *options: str,
        program: str = "",
        words: Sequence[str] = ("-m", "tests.launch.standin"),
        first_on_path: Path | None = None,
    ) -> None:
        self.cluster = cluster
        self.folder = Path(cluster.folder, f"requeue-{time.monotonic_ns()}")
        self.folder.mkdir()
        environ = {**ON_CLUSTER, "PYTHON": sys.executable, "HVDTRAIN_MAX_REQUEUES": "1"}
        if first_on_path is not None:
            environ["PATH"] = f"{first_on_path}{os.pathsep}{os.environ['PATH']}"
        limits = ["--nodes=3", f"--ntasks={RANKS}", "--time=5", f"--output={self.folder}/out"]
        script = str(REPOSITORY / "slurm" / "train.sh")
        argv = ["sbatch", "--parsable", *limits, *options, script]
        argv += [*words, str(self.folder), *program.split()]
        done = cluster.run(argv, env=environ, timeout_s=20)
        assert done.returncode == 0, done
        self.number = done.stdout.strip()

    def steps(self) -> list[tuple[int, int]]:
        """Return the job size and number of each step that rank 0 has completed."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[1]), int(line.split()[2])) for line in lines]

    def output(self) -> str:
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""

    def shown(self, field: str) -> str:
        """Return a field of ``scontrol show job``."""
        shown = self.cluster.run(["scontrol", "show", "job", self.number], timeout_s=20).stdout
        match = re.search(rf"\b{field}=(\S+)", shown)
        return match[1] if match else ""

    def until(self, true: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            state = self.shown("JobState")
            over = time.monotonic() > deadline or state in ("FAILED", "TIMEOUT", "CANCELLED")
            assert not over, f"{state}:\n{self.output()}\n{self.cluster.daemon_logs()}"
            time.sleep(0.2)

    def assert_resumed_once(self) -> None:
        """Check that the job was preempted once, and that its second run resumed."""
        self.until(lambda: self.shown("JobState") == "COMPLETED", 120)
        assert self.shown("Restarts") == "1", self.output()
        assert self.output().count("is requeued") == 1, self.output()
        (preempted,) = re.findall(
            r"hvdtrain run: (?:preempted|the job was stopped by \w+) at step (\d+), checkpoint",
            self.output(),
        )
        # No step was repeated or skipped.
        assert [step for _, step in self.steps()] == list(range(1, STEPS + 1)), preempted
        assert 0 < int(preempted) <= HELD_STEPS + 1

    def signal_agents(self, host: str) -> None:
        """Send SIGUSR1 to the agents of the ranks on a host."""
        agents = [
            process.pid
            for process in self.cluster.processes(f"SLURM_JOB_ID={self.number}")
            if process.host == host and "hvdtrain.agent.rank_agent" in process.argv
        ]
        assert agents
        for pid in agents:
            os.kill(pid, signal.SIGUSR1)

    def start_again(self, timeout_s: float) -> None:
        """Start the job's second run as soon as it is in the queue."""
        later = ("PENDING", "RUNNING", "COMPLETED")
        self.until(
            lambda: self.shown("Restarts") == "1" and self.shown("JobState") in later, timeout_s
        )
        # The second run must not reach its limit.
        changes = [f"JobId={self.number}", "TimeLimit=5"]
        if self.shown("JobState") == "PENDING":
            # Slurm would delay it by two minutes to clean up after the first run.
            stepd = f"slurmstepd: \\[{self.number}\\."
            running = ["pgrep", "-f", stepd]
            self.until(lambda: not self.cluster.run(running, timeout_s=20).stdout, 30)
            # Nodes refuse a credential from the second in which they revoked the first one.
            changes.append("StartTime=now+2")
        self.cluster.run(["scontrol", "update", *changes], timeout_s=20)


STEPS, HELD_STEPS = 30, 14
# The first run does not complete by itself.
HOLD = f"--steps {STEPS} --step-s 0.05 --hold {HELD_STEPS + 1}"
PROGRAM = f"{HOLD} --every 1000"


@pytest.fixture(scope="module", autouse=True)
def limited(cluster: Cluster) -> Job:
    """Start a job that reaches its time limit while other tests run."""
    # Slurm checks limits every 30 s, and signals 40 to 10 s before the limit.
    job = Job(cluster, "--time=1", "--signal=B:USR1@10", program=PROGRAM)
    # Jobs of other tests would delay its start.
    job.until(lambda: len(job.steps()) >= HELD_STEPS, 60)
    return job


# Like on a busy machine, it has not returned when Slurm kills the job's processes.
SLOW_SCONTROL = """#!/bin/sh
{scontrol} "$@"
code=$?
sleep 1
exit $code
"""


def test_a_signal_leads_to_one_requeue(cluster: Cluster) -> None:
    slow = Path(cluster.folder, "slow", "scontrol")
    slow.parent.mkdir()
    slow.write_text(SLOW_SCONTROL.format(scontrol=shutil.which("scontrol")))
    slow.chmod(0o755)
    jobs = {
        "all ranks": Job(cluster, program=PROGRAM),
        "the batch shell": Job(cluster, program=PROGRAM),
        "both": Job(cluster, program=PROGRAM),
        "one node": Job(cluster, program=PROGRAM, first_on_path=slow.parent),
    }
    options = {"all ranks": [], "the batch shell": ["--batch"], "both": ["--full"]}
    for way, job in jobs.items():
        job.until(lambda job=job: len(job.steps()) == HELD_STEPS, 60)
        if way == "one node":
            job.signal_agents("node2")
        else:
            argv = ["scancel", *options[way], "--signal=USR1", job.number]
            done = cluster.run(argv, timeout_s=20)
            assert done.returncode == 0, (way, done)
    for job in jobs.values():
        job.start_again(120)
    for job in jobs.values():
        job.assert_resumed_once()


def test_a_real_training_resumes_in_the_second_run(
    cluster: Cluster, forked_python: list[str]
) -> None:
    """One rank is signalled in the first epoch. Each sample must be used once."""
    program = str(REPOSITORY / "tests/trainer/saving/program.py")
    job = Job(cluster, program="--fault preempt", words=[*forked_python[1:], program])
    job.until(lambda: "is requeued" in job.output(), 120)
    job.start_again(180)
    job.until(lambda: job.shown("JobState") == "COMPLETED", 180)
    output = job.output()
    assert job.shown("Restarts") == "1", output
    assert output.count("received SIGUSR1; the checkpoint of step") == 1, output
    assert output.count("is requeued") == 1, output
    assert "resuming from the checkpoint of step" in output
    assert "least [1.0, 1.0, 1.0]" in output
    assert "most [1.0, 1.0, 1.0]" in output


def test_a_requeue_by_slurm_happens_once_and_a_cancelled_job_is_not_requeued(
    cluster: Cluster,
) -> None:
    """Slurm requeues jobs when it removes nodes."""
    job = Job(cluster, program=f"{HOLD} --every 5")
    cancelled = Job(cluster, program=PROGRAM)
    for one, argv in ((cancelled, ["scancel"]), (job, ["scontrol", "requeue"])):
        one.until(lambda one=one: len(one.steps()) == HELD_STEPS, 60)
        done = cluster.run([*argv, one.number], timeout_s=20)
        assert done.returncode == 0, done
    job.start_again(60)
    job.until(lambda: job.shown("JobState") == "COMPLETED", 120)
    assert job.shown("Restarts") == "1", job.output()
    assert "is requeued" not in job.output()
    steps = [step for _, step in job.steps()]
    assert set(steps) == set(range(1, STEPS + 1))
    assert len(steps) < STEPS + HELD_STEPS - 5, "it resumed from a checkpoint"
    # Several seconds after it ended.
    state = (cancelled.shown("JobState"), cancelled.shown("Restarts"))
    assert state == ("CANCELLED", "0"), cancelled.output()


def test_a_time_limit_leads_to_one_requeue(limited: Job) -> None:
    limited.start_again(150)
    limited.assert_resumed_once()
