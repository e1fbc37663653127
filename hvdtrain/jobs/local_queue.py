"""This machine's queue: each job is a process that waits for free slots."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.agent.messages import ATTEMPT, JOB, OUTPUT_DIR
from hvdtrain.config import COLUMNS, LAUNCHER, REPORT_FD
from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder, JobRequest
from hvdtrain.jobs.spec import JobSpec, job_variables
from hvdtrain.jobs.state import QueueState, send_signal

__all__ = ["LocalQueue", "job_environment"]

_RANK_VARIABLES = {ATTEMPT, COLUMNS, JOB, LAUNCHER, OUTPUT_DIR, REPORT_FD}
PLAN_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """The process of ``hvdtrain run`` that runs a job."""

    request: JobRequest
    argv: Sequence[str]
    environ: Mapping[str, str]

    def preview(self) -> str:
        """Return the plan that ``hvdtrain run --dry-run`` prints."""
        spec = self.request.spec
        at = len(self.argv) - len(spec.program) - 1
        try:
            done = subprocess.run(
                [*self.argv[:at], "--dry-run", *self.argv[at:]],
                cwd=spec.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PLAN_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise JobError(f"{spec.python} can't plan the job in {spec.folder}: {error}") from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            message = "\n".join(
                line.removeprefix("hvdtrain run: ").removeprefix("error: ") for line in lines
            )
            raise ConfigurationError(
                message or f"hvdtrain run --dry-run ended with exit code {done.returncode}"
            )
        return done.stdout


class LocalQueue:
    """This machine's job queue, which needs no daemon; see ``JobBackend`` for its methods."""

    def plan(self, request: JobRequest) -> LocalPlan:
        """Return the process that will run a job."""
        spec = request.spec
        argv = [spec.python, "-P", "-m", "hvdtrain", "run", *spec.options, "--", *spec.program]
        environ = job_environment(spec, request.environ)
        return LocalPlan(request=request, argv=argv, environ=environ)

    def submit(self, plan: LocalPlan) -> None:
        """Start the process in its own session."""
        job = plan.request.job
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with open(os.open(job.launcher_output, flags, 0o600), "wb") as output:
            process = subprocess.Popen(
                plan.argv,
                cwd=plan.request.spec.folder,
                env={**plan.environ, JOB_FOLDER: str(job.path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        # hvdtrain serve must not keep ended jobs as zombies.
        threading.Thread(target=process.wait, name="hvdtrain-reaper", daemon=True).start()

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return an empty mapping: the state of a job is known from its folder and its process."""
        return {}

    def log_lines(self, job: JobFolder, spec: JobSpec, after: str) -> None:
        """Return None, because the log is in the job's folder."""

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Send the launcher a signal. If that fails, leave a stop request in the job's folder."""
        state = job.read_state()
        number = signal.SIGUSR1 if save else signal.SIGTERM
        if state is None or not state.launcher or not send_signal(state.launcher, number):
            # The launcher runs on a different host or is about to start.
            job.request_stop(number)


def job_environment(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job: the caller's environment with the job's variables.

    If the caller is itself a rank of a different job, that job's variables are removed.
    """
    excluded = {*job_variables(), *_RANK_VARIABLES}
    return {
        **{name: value for name, value in environ.items() if name not in excluded},
        **spec.variables,
    }
