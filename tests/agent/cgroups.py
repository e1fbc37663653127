"""Control groups with little memory, in which the kernel really kills."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.agent.oom import group_of

__all__ = ["CGROUP", "ENTER", "FILL", "LIMIT_BYTES", "cgroup"]

LIMIT_BYTES = 64 << 20
# Where a process finds the folder of the group that it is to overfill.
CGROUP = "HVDTRAIN_TEST_CGROUP"
# Python for that. The pause lets the agent see the move; bytes are written, not only asked for.
ENTER = f"open(os.environ[{CGROUP!r}] + '/cgroup.procs', 'w').write('0'); time.sleep(0.5)"
FILL = f"b'x' * {4 * LIMIT_BYTES}"


@contextlib.contextmanager
def _little_memory() -> Iterator[Path]:
    """A group that may use ``LIMIT_BYTES``, swap included; whatever is in it ends with it.

    Skips the test where none can be made.
    """
    folder = _make()
    try:
        yield folder
    finally:
        _remove(folder)


def _make() -> Path:
    own = group_of(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    refused = ["no control group accounts for memory"]
    for place in own.upwards() if own else []:
        folder = place / f"hvdtrain-test-{uuid.uuid4().hex}"
        try:
            folder.mkdir()
        except OSError as error:
            refused.append(f"{place}: {error.strerror}")
            continue
        try:
            _limit(folder)
        except OSError as error:
            # Version 2: the group around it does not hand memory on.
            folder.rmdir()
            refused.append(f"{place}: {error.strerror}")
            continue
        return folder
    pytest.skip(f"no control group with a limit can be made here ({refused[-1]})")


def _limit(folder: Path) -> None:
    # Swap after memory: version 1 wants the sum of both never below the limit of memory.
    version_1 = (folder / "memory.limit_in_bytes").exists()
    names = ("limit_in_bytes", "memsw.limit_in_bytes") if version_1 else ("max", "swap.max")
    limit, swap = (folder / f"memory.{name}" for name in names)
    _write(limit, LIMIT_BYTES)
    if swap.exists():
        _write(swap, LIMIT_BYTES if version_1 else 0)


def _write(path: Path, number: int) -> None:
    # Not write_text: a file that is not there must not be asked to be made.
    with path.open("r+") as file:
        file.write(str(number))


def _remove(folder: Path, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A control group with little memory, which every process finds; see ``ENTER``."""
    with _little_memory() as folder:
        monkeypatch.setenv(CGROUP, str(folder))
        yield folder
