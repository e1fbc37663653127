"""Running the jobs that benchmarks compare."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["run_job"]


def run_job(
    argv: Sequence[str | os.PathLike[str]],
    label: str,
    environ: Mapping[str, str],
    timeout_s: float,
) -> None:
    """Run a job without showing its output, unless it fails; that ends the benchmark.

    Args:
        argv: The command.
        label: What to call the job then.
        environ: Beside, or in the place of, this process's variables. TensorFlow says little
            unless one of them, or of this process's, says otherwise.
        timeout_s: For all of it.
    """
    done = subprocess.run(
        [os.fspath(word) for word in argv],
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{label} ended with {done.returncode}")
