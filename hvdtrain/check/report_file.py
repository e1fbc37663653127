"""The file that ``hvdtrain check --report`` writes.

The file contains names and addresses. It is a text file, so that users can read it before they send
it to anybody.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.cluster.gpus import GpuState
from hvdtrain.errors import ConfigurationError
from hvdtrain.remote.remote_probe import Answer
from hvdtrain.text import plural

__all__ = ["format_report_file", "reserve", "write_report"]


@contextlib.contextmanager
def reserve(path: str) -> Iterator[None]:
    """Create the file unless it exists, and remove it after the block if it is still empty.

    Raises:
        ConfigurationError: If the file can't be written.
    """
    is_new = not os.path.lexists(path)
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--report can't write its file, got {path} ({error.strerror}); name a file in a "
            "directory that exists and that you can write to"
        ) from None
    try:
        yield
    finally:
        if is_new and os.path.getsize(path) == 0:
            os.unlink(path)


def write_report(path: str, shown: str, launcher: Answer, answers: Sequence[Answer]) -> None:
    """Write the report.

    Raises:
        ConfigurationError: If the file can't be written, for example because the disk is full.
    """
    text = format_report_file(shown, launcher, answers, command=shlex.join(sys.argv))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--report can't write its file, got {path} ({error.strerror}); name another file"
        ) from None


def format_report_file(
    shown: str, launcher: Answer, answers: Sequence[Answer], *, command: str
) -> str:
    """Format the report: what the check printed, then the details of each host."""
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(launcher.asked_s or None))
    head = f"Report of hvdtrain check, {created}\ncommand: {command}"
    parts = [head, f"== check ==\n{shown.strip()}"]
    for answer in _different_hosts(launcher, answers):
        host = answer.host or "launcher"
        parts += [f"== {host}: {title} ==\n{text}" for title, text in _sections(answer)]
    return "\n\n".join(parts) + "\n"


def _gpu_text(gpu: GpuState) -> str:
    lines = [f"GPU {gpu.number}: {gpu.model} {gpu.id}, driver {gpu.driver}"]
    lines.append(f"memory: {gpu.used_bytes >> 20} of {gpu.memory_bytes >> 20} MiB in use")
    lines += [f"process {pid}: {name}, {used >> 20} MiB" for pid, name, used in gpu.processes]
    lines += [f"fault: {fault}" for fault in gpu.faults]
    return "\n  ".join(lines)


def _different_hosts(launcher: Answer, answers: Sequence[Answer]) -> list[Answer]:
    """Return all answers. If the launcher is not one of the hosts, its answer comes first."""
    machines = {answer.facts.machine for answer in answers if answer.facts is not None}
    has_launcher = launcher.facts is None or launcher.facts.machine in machines
    return [*([] if has_launcher else [launcher]), *answers]


def _sections(answer: Answer) -> Iterator[tuple[str, str]]:
    if answer.facts is None:
        failure = answer.failure
        yield "no answer", f"{failure.kind}: {failure.message}" if failure else ""
        return
    facts = answer.facts
    yield "MPI", facts.mpi or facts.mpi_error
    sees = (
        "not imported"
        if facts.backend_gpus is None
        else f"sees {plural(facts.backend_gpus, 'GPU')}"
    )
    yield "Keras' backend", f"{facts.backend}: {facts.backend_error or sees}"
    gpus = [facts.gpu_error, *map(_gpu_text, facts.gpus)]
    yield "GPUs for ranks", "\n".join(filter(None, gpus)) or "none"
    yield from facts.details.items()
    if not facts.details:
        yield "details", facts.errors.get("details", "the host has a different hvdtrain")
