"""Runs in the launcher's pod of an MPIJob: ``hvdtrain run``, as the MPI operator has prepared it.

    python -m hvdtrain.jobs.kubernetes.operated_launcher NAME -- run -np 8 --hostfile FILE -- ...

Keys, hostfile and the end of workers are the operator's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hvdtrain.jobs.kubernetes.records import hold_own
from hvdtrain.jobs.kubernetes.run_child import RunChild

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the job, and return its exit code."""
    child = RunChild()
    _held = hold_own(os.environ)
    return child.run(arguments[list(arguments).index("--") + 1 :], os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
