"""Jobs that this machine runs: each in a process of its own, which waits for its turn."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.agent.messages import ATTEMPT, JOB, OUTPUT_DIR
from hvdtrain.config import COLUMNS, LAUNCHER, REPORT_FD, Settings, variable_name
from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs.backend import Answer
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder
from hvdtrain.jobs.process_identity import send_signal
from hvdtrain.jobs.spec import JobSpec

__all__ = ["LocalQueue", "job_environment"]

_OF_RANKS = {ATTEMPT, COLUMNS, JOB, LAUNCHER, OUTPUT_DIR, REPORT_FD}
PLAN_TIMEOUT_S = 60.0
START_TIMEOUT_S = 30.0


class LocalQueue:
    """This machine; without a daemon, as each job waits for free slots itself."""

    def plan(
        self, folder: Path, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
    ) -> str:
        """The plan that ``hvdtrain run`` makes of a job; see ``JobBackend``."""
        try:
            done = subprocess.run(
                _command(spec, "--dry-run"),
                cwd=spec.folder,
                env=job_environment(spec, environ),
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

    def hand_over(
        self, job: JobFolder, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
    ) -> None:
        """Start the process; see ``JobBackend``."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with open(os.open(job.words, flags, 0o600), "wb") as words:
            subprocess.run(
                [spec.python, "-P", "-m", "hvdtrain.jobs.detach", *_command(spec)],
                cwd=spec.folder,
                env={**job_environment(spec, environ), JOB_FOLDER: str(job.path)},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                timeout=START_TIMEOUT_S,
                check=True,
            )

    def ask(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, Answer]:
        """Nothing: a job's process or folder tells all."""
        return {}

    def log_lines(self, job: JobFolder, spec: JobSpec, after: str) -> None:
        """Nothing: the job's folder has its log."""

    def stop(self, job: JobFolder, spec: JobSpec, *, waits: bool, save: bool) -> bool:
        """Tell the launcher, which says so itself; see ``JobBackend``."""
        state = job.state()
        number = signal.SIGUSR1 if save else signal.SIGTERM
        if state is None or not state.launcher or not send_signal(state.launcher, number):
            # It runs on another host, or is about to start: it will find this.
            job.request_stop(number)
        return False


def _command(spec: JobSpec, *more: str) -> list[str]:
    """The command that runs a job; ``more`` are further options."""
    return [spec.python, "-P", "-m", "hvdtrain", "run", *spec.options, *more, "--", *spec.program]


def job_environment(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a job's environment: the caller's variables, with settings of the job alone.

    A caller that is itself a rank of a job leaves nothing of that.
    """
    settings = {variable_name(entry.name) for entry in dataclasses.fields(Settings)}
    others = {name: value for name, value in environ.items() if name not in settings | _OF_RANKS}
    return {**others, **spec.variables}
