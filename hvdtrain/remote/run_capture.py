"""Runs programs that should answer immediately, such as ``mpirun --version``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from hvdtrain.errors import LaunchError

__all__ = ["MPI_TIMEOUT_S", "find_mpi_library", "run_capture"]

MPI_TIMEOUT_S = 15.0
_MPI_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


def run_capture(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    remedy: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program without input and return its output.

    ``remedy`` is a sentence to append to the error message.

    Raises:
        LaunchError: If the program can't be started or did not end in time.
    """
    # The message leaves out the code after python -c if it has several lines.
    command = " ".join(argv) if "\n" not in "".join(argv) else argv[0]
    try:
        return subprocess.run(
            argv,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"{command} did not answer within {timeout_s:g} s"
    except OSError as error:
        problem = f"{argv[0]} can't be started: {error.strerror}"
    raise LaunchError(f"{problem}. {remedy}" if remedy else problem)


def find_mpi_library(environ: Mapping[str, str] | None = None) -> str:
    """Return the name and version of the MPI library, such as ``Open MPI v5.0.11``.

    A child process loads the library, because that may hang or end the process.

    Raises:
        LaunchError: If mpi4py can't load a library, or if loading takes too long.
    """
    argv = [sys.executable, "-P", "-c", _MPI_PROGRAM]
    try:
        output = run_capture(argv, environ=environ, timeout_s=MPI_TIMEOUT_S)
    except LaunchError:
        raise LaunchError(f"loading took longer than {MPI_TIMEOUT_S:g} s") from None
    lines = output.stdout.strip("\0\n ").splitlines()
    if output.returncode == 0 and lines:
        return lines[0].split(",")[0].strip()
    errors = output.stderr.strip().splitlines()
    raise LaunchError(errors[-1] if errors else f"exit code {output.returncode}")
