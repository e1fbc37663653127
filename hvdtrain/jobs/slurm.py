"""Jobs that Slurm runs: handed over by sbatch, asked about by squeue, ended by scancel."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hvdtrain.errors import JobError
from hvdtrain.jobs.backend import Answer
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder
from hvdtrain.jobs.local_queue import job_environment
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import GONE, NO_ANSWER

__all__ = ["SlurmQueue", "cancel", "sbatch_argv", "script_path", "slurm_states", "submit"]

# What a controller that is down takes to say so is its own affair.
TIMEOUT_S = 20.0
# Longer than any argv may be.
_MOST_IDS = 1000


class SlurmQueue:
    """The cluster that this is a login or compute node of."""

    def plan(
        self, folder: Path, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
    ) -> str:
        """The command that hands the job over; which hosts there will be only Slurm knows."""
        return f"{shlex.join(sbatch_argv(folder.name, folder, spec, ranks=ranks))}\n"

    def hand_over(
        self, job: JobFolder, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
    ) -> None:
        """Run sbatch, and note the number of the Slurm job; see ``JobBackend``."""
        argv = sbatch_argv(job.name, job.path, spec, ranks=ranks)
        own = {JOB_FOLDER: str(job.path), "PYTHON": spec.python}
        number = submit(argv, {**job_environment(spec, environ), **own}, spec.folder)
        job.write_spec(dataclasses.replace(spec, slurm_job=number))

    def ask(self, jobs: Mapping[str, JobSpec]) -> Mapping[str, Answer]:
        """What squeue says of them, asked once; see ``JobBackend``."""
        said = slurm_states(spec.slurm_job for spec in jobs.values())
        no_answer = (NO_ANSWER, "")
        return {
            name: Answer("Slurm", *(no_answer if said is None else said.get(number, (GONE, ""))))
            for name, number in ((name, spec.slurm_job) for name, spec in jobs.items())
        }

    def fetch(self, job: JobFolder, spec: JobSpec) -> None:
        """Nothing: the launcher writes into the job's folder itself."""

    def stop(self, job: JobFolder, spec: JobSpec, *, waits: bool, save: bool) -> bool:
        """Run scancel; see ``JobBackend``."""
        cancel(spec.slurm_job, save=save)
        return waits


def script_path() -> Path:
    """``slurm/train.sh``: in a wheel beside this module, in a checkout where it is.

    Raises:
        JobError: It is in neither place.
    """
    here = Path(__file__).resolve()
    for path in (here.with_name("train.sh"), here.parents[2] / "slurm" / "train.sh"):
        if path.exists():
            return path
    raise JobError(f"slurm/train.sh is not beside {here}; install hvdtrain again.")


def sbatch_argv(name: str, folder: Path, spec: JobSpec, *, ranks: int | None) -> list[str]:
    """The command that hands a job over; its own options of sbatch come last, and win.

    Args:
        name: The job's name.
        folder: Its folder.
        spec: What is asked for.
        ranks: How many tasks to ask Slurm for; None for as many as it gives.
    """
    return [
        "sbatch",
        "--parsable",
        f"--job-name={name}",
        f"--output={folder / 'slurm.txt'}",
        *([] if ranks is None else [f"--ntasks={ranks}"]),
        *spec.backend.options,
        str(script_path()),
        *spec.options,
        "--",
        *spec.program,
    ]


def submit(argv: Sequence[str], environ: Mapping[str, str], folder: str) -> str:
    """Run sbatch in a folder, where the job is to run; return the number of the Slurm job.

    Raises:
        JobError: It could not be handed over; the message has Slurm's reason.
    """
    said = _ask(argv, environ, folder)
    # With several clusters theirs stands behind a semicolon.
    number = said.strip().partition(";")[0]
    if not number.isdecimal():
        raise JobError(f"sbatch printed {said!r}, expected the number of a job.")
    return number


def slurm_states(numbers: Iterable[str]) -> dict[str, tuple[str, str]] | None:
    """The state of each Slurm job that is still known, and the reason for it; None for no answer.

    They are Slurm's words, such as PENDING and Priority. Of those that it has forgotten nothing is
    told.
    """
    asked = sorted(set(numbers))[-_MOST_IDS:]
    try:
        said = _ask(["squeue", "--noheader", "--format=%i %T %r", f"--jobs={','.join(asked)}"])
    except JobError as error:
        # Said where it has forgotten all of them.
        return {} if "Invalid job id" in str(error) else None
    found = re.findall(r"^\s*(\d+) (\w+) ?(.*?)\s*$", said, re.MULTILINE)
    return {number: (state, reason) for number, state, reason in found}


def cancel(number: str, *, save: bool) -> None:
    """Have Slurm end a job; with ``save`` its ranks are told to save what they have.

    Raises:
        JobError: It can't be told; the message has Slurm's reason.
    """
    _ask(["scancel", *(["--batch", "--signal=USR1"] if save else []), number])


def _ask(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, folder: str | None = None
) -> str:
    try:
        done = subprocess.run(
            list(argv),
            env=None if environ is None else dict(environ),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise JobError(
            f"{error.filename} is not there; {argv[0]} is on Slurm's login and compute nodes."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"{argv[0]} did not answer: {error}") from None
    if done.returncode != 0:
        raise JobError(f"{argv[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
