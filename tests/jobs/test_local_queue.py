from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs.backend import JobRequest
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.local_queue import LocalQueue
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, ProcessIdentity


def _spec(tmp_path: Path, *options: str, **fields: str) -> JobSpec:
    known = {"folder": str(tmp_path), "python": sys.executable, **fields}
    return JobSpec(options=options, program=("true",), **known)  # type: ignore[arg-type]


def _plan(spec: JobSpec, environ: Mapping[str, str]) -> str:
    job = JobFolder(Path("/jobs/NAME"))
    request = JobRequest(job=job, spec=spec, environ=environ, ranks=None)
    return LocalQueue().plan(request).preview()


def test_a_job_has_its_own_settings_and_the_callers_other_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of this job is what hvdtrain run is started by."""
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nenv >{seen}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    spec = _spec(tmp_path, "-np", "1", python=str(python))
    spec = JobSpec(**{**vars(spec), "variables": {"HVDTRAIN_MODE": "allreduce", "ASKED": "1"}})
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HVDTRAIN_MODE": "sync-ps",
        "HVDTRAIN_TIMEOUT_S": "7",
        "HVDTRAIN_LAUNCHER": "10.0.0.1 4711",
        "HVDTRAIN_OTHER": "kept",
    }
    assert "np 1" in _plan(spec, environ)
    lines = seen.read_text().splitlines()
    assert {"HVDTRAIN_MODE=allreduce", "ASKED=1", "HVDTRAIN_OTHER=kept"} <= set(lines)
    assert not [line for line in lines if line.startswith(("HVDTRAIN_TIME", "HVDTRAIN_LAUNCH"))]


def test_what_can_not_be_planned_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="got 'x', expected a whole number"):
        _plan(_spec(tmp_path, "-np", "x"), {"PATH": "/usr/bin:/bin"})
    with pytest.raises(JobError, match="can't plan the job"):
        _plan(_spec(tmp_path, python="/nowhere/python"), {})
    with pytest.raises(JobError, match="can't plan the job"):
        _plan(_spec(tmp_path, folder="/nowhere"), {})


@pytest.mark.parametrize("launcher", [None, ProcessIdentity(host="elsewhere", pid=1)])
def test_who_can_not_be_sent_a_signal_finds_a_word_that_says_as_much(launcher, tmp_path) -> None:
    job = JobFolder(tmp_path)
    job.write_state(JobState(phase="running", launcher=launcher))
    for save, number in ((True, signal.SIGUSR1), (False, signal.SIGTERM)):
        LocalQueue().cancel(job, _spec(tmp_path), is_queued=False, save=save)
        assert job.take_stop() == number
