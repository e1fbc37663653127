"""Starts the jobs of claims, with a time limit, and reads their results."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.detect import Layout
from tests.gpu.programs import MARK
from tests.harness.jobs import REPOSITORY, Job

__all__ = ["Completed", "JobError", "Line", "launch", "run", "run_program", "scratch_folder"]

MAX_LINES = 12
# The command that runs a Python program on a rank.
PYTHON = [sys.executable]


class JobError(Exception):
    """A job that failed, with its last lines."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of output, and the seconds after the start of the job at which it arrived."""

    at_s: float
    text: str
    is_error: bool


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A job that ended. ``code`` is None if the time limit ended it."""

    code: int | None
    lines: Sequence[Line]

    def text(self, *, errors: bool) -> str:
        return "\n".join(line.text for line in self.lines if line.is_error == errors)

    def last_lines(self) -> str:
        """Return how the job ended, and its last lines of stderr, or of stdout if that is empty."""
        end = "time limit reached" if self.code is None else f"exit code {self.code}"
        text = self.text(errors=True).strip() or self.text(errors=False).strip()
        return "\n".join([end, *text.splitlines()[-MAX_LINES:]])


def run(argv: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> Completed:
    """Run a command in the repository, and end it with its children after ``limit_s``."""
    started = time.monotonic()
    lines: list[Line] = []
    readers, ends = [], []
    for is_error in (False, True):
        read_end, write_end = os.pipe()
        ends.append(os.fdopen(write_end, "wb"))
        readers.append(
            threading.Thread(target=_read, args=(read_end, lines, started, is_error), daemon=True)
        )
    job = Job(
        argv,
        stdout=ends[0],
        stderr=ends[1],
        environment={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        folder=REPOSITORY,
    )
    for end, reader in zip(ends, readers):
        end.close()
        reader.start()
    try:
        code = job.wait(limit_s)
    finally:
        job.end()
    for reader in readers:
        reader.join(5)
    return Completed(code=code, lines=lines)


def _read(read_end: int, lines: list[Line], started: float, is_error: bool) -> None:
    with os.fdopen(read_end, encoding="utf-8", errors="replace") as stream:
        for text in stream:
            at_s = time.monotonic() - started
            lines.append(Line(at_s=at_s, text=text.rstrip("\n"), is_error=is_error))


def run_program(
    layout: Layout,
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    limit_s: float,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> tuple[Any, Completed]:
    """Run a function of ``programs.py`` on all ranks, and return the chief's result.

    Raises:
        JobError: If the job fails or prints no result, or if a rank that should use a GPU computed
            on the CPU.
    """
    arguments = {"on_gpu": layout.gpus > 0, **(arguments or {})}
    program = [*PYTHON, "-m", "tests.gpu.programs", name, json.dumps(arguments)]
    done = run(launch(layout, program, options=options), limit_s=limit_s, env=env)
    result = None
    for line in done.lines:
        _, mark, text = line.text.partition(MARK)
        if mark and not line.is_error:
            result = json.loads(text)
    if done.code != 0 or result is None:
        raise JobError(done.last_lines())
    return result, done


def launch(layout: Layout, program: Sequence[str], *, options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a program on all ranks."""
    hvdtrain = [sys.executable, "-m", "hvdtrain"]
    return [*hvdtrain, "run", *layout.options, "--oversubscribe", *options, "--", *program]


def scratch_folder(folder: Path, name: str) -> Path:
    """Create an empty folder for a job, which all hosts see if they share ``folder``."""
    path = folder / f"{name}-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir(parents=True)
    return path
