"""Jobs that this machine runs: each in a process of its own, which waits for its turn."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.agent.messages import ATTEMPT, JOB, OUTPUT_DIR
from hvdtrain.config import COLUMNS, LAUNCHER, REPORT_FD, Settings, variable_name
from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs.backend import JobRequest, QueueState
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import send_signal

__all__ = ["LocalQueue", "job_environment"]

_OF_RANKS = {ATTEMPT, COLUMNS, JOB, LAUNCHER, OUTPUT_DIR, REPORT_FD}
PLAN_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """A process that runs a job.

    Attributes:
        request: The job.
        argv: Its command.
        environ: Its variables.
    """

    request: JobRequest
    argv: Sequence[str]
    environ: Mapping[str, str]

    def preview(self) -> str:
        """Return the plan that ``hvdtrain run`` makes; see ``JobPlan``."""
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
            said = "\n".join(
                line.removeprefix("hvdtrain run: ") for line in done.stderr.strip().splitlines()
            )
            raise ConfigurationError(said or f"hvdtrain run --dry-run ended with {done.returncode}")
        return done.stdout


class LocalQueue:
    """This machine; it needs no daemon, as each job waits for free slots itself."""

    def plan(self, request: JobRequest) -> LocalPlan:
        """Return the process that runs a job; see ``JobBackend``."""
        spec = request.spec
        return LocalPlan(
            request=request,
            argv=[
                *(spec.python, "-P", "-m", "hvdtrain", "run", *spec.options, "--", *spec.program)
            ],
            environ=job_environment(spec, request.environ),
        )

    def submit(self, plan: LocalPlan) -> None:
        """Start the process in a session of its own; see ``JobBackend``."""
        job = plan.request.job
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with open(os.open(job.words, flags, 0o600), "wb") as words:
            process = subprocess.Popen(
                plan.argv,
                cwd=plan.request.spec.folder,
                env={**plan.environ, JOB_FOLDER: str(job.path)},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
        # A page lives on for long, and must not keep the process as a zombie.
        threading.Thread(target=process.wait, name="hvdtrain-reaper", daemon=True).start()

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return nothing: a job's process and folder have its state."""
        return {}

    def log_lines(self, job: JobFolder, spec: JobSpec, after: str) -> None:
        """Return None: the job's folder has its log."""

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Send the launcher a signal, or leave it a request; see ``JobBackend``."""
        state = job.state()
        number = signal.SIGUSR1 if save else signal.SIGTERM
        if state is None or not state.launcher or not send_signal(state.launcher, number):
            # It runs on another host, or is about to start.
            job.request_stop(number)


def job_environment(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a job's environment: the caller's variables, with settings of the job alone.

    A caller that is itself a rank of a job leaves nothing of that.
    """
    settings = {variable_name(entry.name) for entry in dataclasses.fields(Settings)}
    others = {name: value for name, value in environ.items() if name not in settings | _OF_RANKS}
    return {**others, **spec.variables}
