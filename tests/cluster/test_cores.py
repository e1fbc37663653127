"""Cores are those that this process may use."""

from __future__ import annotations

import os
import subprocess
import sys

from hvdtrain.cluster.cores import available_cores
from tests.harness.jobs import REPOSITORY


def test_only_those_that_are_allowed_count() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert available_cores() == len(allowed)
    code = (
        f"import os; os.sched_setaffinity(0, [{allowed[0]}])\n"
        "from hvdtrain.cluster.cores import available_cores; print(available_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=30, check=True
    )
    assert done.stdout == b"1\n"
