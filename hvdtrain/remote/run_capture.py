"""Asks a program that should answer at once: for its version, or what it offers."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import LaunchError

__all__ = ["CapturedOutput", "run_capture"]


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
