"""The MPI library that mpi4py loads on this host."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hvdtrain.errors import LaunchError
from hvdtrain.remote.run_capture import run_capture

__all__ = ["TIMEOUT_S", "find_mpi_library"]

TIMEOUT_S = 15.0
_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


def find_mpi_library(environ: Mapping[str, str] | None = None) -> str:
    """Return the library's name and version in its own words, like ``Open MPI v5.0.11``.

    It is loaded in another process: an MPI library may end its process, or hang.

    Raises:
        LaunchError: mpi4py can't load one, or not in time.
    """
    argv = [sys.executable, "-P", "-c", _PROGRAM]
    try:
        reply = run_capture(argv, environ=environ, timeout_s=TIMEOUT_S)
    except LaunchError:
        raise LaunchError(f"loading it took longer than {TIMEOUT_S:g} s") from None
    lines = reply.stdout.strip("\0\n ").splitlines()
    if reply.code == 0 and lines:
        return lines[0].split(",")[0].strip()
    words = reply.stderr.strip().splitlines()
    raise LaunchError(words[-1] if words else f"exit code {reply.code}")
