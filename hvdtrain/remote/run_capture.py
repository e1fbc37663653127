"""Asks a program that should answer at once: for its version, or what it offers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import LaunchError

__all__ = ["MPI_TIMEOUT_S", "CapturedOutput", "find_mpi_library", "run_capture"]

MPI_TIMEOUT_S = 15.0
_MPI_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


@dataclass(frozen=True, kw_only=True)
class CapturedOutput:
    """The output of a program, and its exit code: negative where a signal ended it."""

    code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """All of it; older versions print to stderr what newer ones print to stdout."""
        return self.stdout + self.stderr


def run_capture(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    remedy: str = "",
) -> CapturedOutput:
    """Run a program to its end, without input; ``remedy`` ends the message of an error.

    Raises:
        LaunchError: It can't be started, or has not ended in time.
    """
    # A program of several lines behind python -c is not worth showing.
    shown = " ".join(argv) if "\n" not in "".join(argv) else argv[0]
    try:
        done = subprocess.run(
            argv,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"{shown} did not answer within {timeout_s:g} s"
    except OSError as error:
        problem = f"{argv[0]} can't be started: {error.strerror}"
    else:
        return CapturedOutput(
            code=done.returncode,
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
        )
    raise LaunchError(f"{problem}. {remedy}" if remedy else problem)


def find_mpi_library(environ: Mapping[str, str] | None = None) -> str:
    """Return the library's name and version in its own words, like ``Open MPI v5.0.11``.

    It is loaded in another process: an MPI library may end its process, or hang.

    Raises:
        LaunchError: mpi4py can't load one, or not in time.
    """
    argv = [sys.executable, "-P", "-c", _MPI_PROGRAM]
    try:
        reply = run_capture(argv, environ=environ, timeout_s=MPI_TIMEOUT_S)
    except LaunchError:
        raise LaunchError(f"loading it took longer than {MPI_TIMEOUT_S:g} s") from None
    lines = reply.stdout.strip("\0\n ").splitlines()
    if reply.code == 0 and lines:
        return lines[0].split(",")[0].strip()
    words = reply.stderr.strip().splitlines()
    raise LaunchError(words[-1] if words else f"exit code {reply.code}")
