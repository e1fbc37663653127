from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs.folder import JobFolder, JobRequest
from hvdtrain.jobs.local_queue import LocalQueue
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, ProcessIdentity


def _spec(tmp_path: Path, *options: str, **fields: Any) -> JobSpec:
    defaults = {"folder": str(tmp_path), "python": sys.executable}
    return JobSpec(options=options, program=("true",), **(defaults | fields))


def _preview(spec: JobSpec, environ: Mapping[str, str]) -> str:
    job = JobFolder(Path("/jobs/NAME"))
    request = JobRequest(job=job, spec=spec, environ=environ, ranks=None)
    return LocalQueue().plan(request).preview()


def test_a_job_gets_its_own_settings_and_other_variables_of_the_caller(tmp_path: Path) -> None:
    printed = tmp_path / "environment"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nenv >{printed}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    variables = {"HVDTRAIN_MODE": "allreduce", "EXPORTED": "1"}
    spec = _spec(tmp_path, "-np", "1", python=str(python), variables=variables)
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HVDTRAIN_MODE": "sync-ps",
        "HVDTRAIN_TIMEOUT_S": "7",
        "HVDTRAIN_LAUNCHER": "10.0.0.1 4711",
        "HVDTRAIN_OTHER": "kept",
        "KERAS_BACKEND": "torch",
    }
    assert "np 1" in _preview(spec, environ)
    lines = printed.read_text().splitlines()
    assert {"HVDTRAIN_MODE=allreduce", "EXPORTED=1", "HVDTRAIN_OTHER=kept"} <= set(lines)
    assert not [
        line for line in lines if line.startswith(("HVDTRAIN_TIME", "HVDTRAIN_L", "KERAS_"))
    ]


def test_planning_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="got 'x'"):
        _preview(_spec(tmp_path, "-np", "x"), {"PATH": "/usr/bin:/bin"})
    for missing in ({"python": "/nowhere/python"}, {"folder": "/nowhere"}):
        with pytest.raises(JobError, match="can't plan the job"):
            _preview(_spec(tmp_path, **missing), {})


@pytest.mark.parametrize("launcher", [None, ProcessIdentity(host="elsewhere", pid=1)])
def test_cancel_leaves_a_request_if_the_launcher_gets_no_signal(launcher, tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    job.write_state(JobState(phase="running", launcher=launcher))
    for save, number in ((True, signal.SIGUSR1), (False, signal.SIGTERM)):
        LocalQueue().cancel(job, _spec(tmp_path), is_queued=False, save=save)
        assert job.take_stop_request() == number
