"""Fixtures for the launcher's tests."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator, Sequence

import pytest

from hvdtrain.jobs.spec import JobSpec
from hvdtrain.launch.plan import Job
from tests.launch.jobs import HVDTRAIN, StartedJob


@pytest.fixture
def hangups() -> Iterator[None]:
    """Restore the default action of SIGHUP in child processes, because nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, dict[str, str]]]:
    """Record the jobs that the command would run, each with its environment."""
    jobs: list[tuple[Job, dict[str, str]]] = []

    def record(job: Job, environ: dict[str, str], spec: JobSpec) -> int:
        jobs.append((job, environ))
        return 0

    monkeypatch.setattr("hvdtrain.job_commands.run.run_recorded", record)
    monkeypatch.delenv("HVDTRAIN_TIMEOUT_S", raising=False)
    return jobs


@pytest.fixture
def start_job() -> Iterator[Callable[..., StartedJob]]:
    """Return a function that starts ``hvdtrain run`` in the background until the test ends."""
    jobs: list[StartedJob] = []

    def start(
        *arguments: str,
        body: str,
        command: Sequence[str] = HVDTRAIN,
        python: Sequence[str] = ("python",),
    ) -> StartedJob:
        jobs.append(StartedJob(list(arguments), body, uuid.uuid4().hex, command, python))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
