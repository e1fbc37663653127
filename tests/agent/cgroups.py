"""Control groups with little memory, in which the kernel kills processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.agent.oom import find_group

__all__ = ["CGROUP", "ENTER", "FILL", "LIMIT_BYTES", "cgroup"]

LIMIT_BYTES = 64 << 20
# Variable with the folder of the group.
CGROUP = "HVDTRAIN_TEST_CGROUP"
# Code that enters the group, with a pause for the agent to notice, and code that fills its memory.
ENTER = f"open(os.environ[{CGROUP!r}] + '/cgroup.procs', 'w').write('0'); time.sleep(0.5)"
FILL = f"b'x' * {4 * LIMIT_BYTES}"


@contextlib.contextmanager
def _little_memory() -> Iterator[Path]:
    """Provide a group limited to ``LIMIT_BYTES`` with swap, and kill its processes at the end.

    Skips the test if no group can be created.
    """
    folder = _make()
    try:
        yield folder
    finally:
        _remove(folder)


def _make() -> Path:
    own = find_group(
        Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    )
    failures = ["no control group accounts for memory"]
    for place in own.ancestors() if own else []:
        folder = place / f"hvdtrain-test-{uuid.uuid4().hex}"
        try:
            folder.mkdir()
        except OSError as error:
            failures.append(f"{place}: {error.strerror}")
            continue
        try:
            _limit(folder)
        except OSError as error:
            # In version 2 the parent may not delegate memory.
            folder.rmdir()
            failures.append(f"{place}: {error.strerror}")
            continue
        return folder
    pytest.skip(f"no control group with a limit can be created here ({failures[-1]})")


def _limit(folder: Path) -> None:
    # Swap after memory: in version 1 the sum of both must not be below the memory limit.
    version_1 = (folder / "memory.limit_in_bytes").exists()
    names = ("limit_in_bytes", "memsw.limit_in_bytes") if version_1 else ("max", "swap.max")
    limit, swap = (folder / f"memory.{name}" for name in names)
    _write(limit, LIMIT_BYTES)
    if swap.exists():
        _write(swap, LIMIT_BYTES if version_1 else 0)


def _write(path: Path, number: int) -> None:
    # Unlike write_text, this doesn't create a missing file.
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
    """A control group with little memory, which processes enter with ``ENTER``."""
    with _little_memory() as folder:
        monkeypatch.setenv(CGROUP, str(folder))
        yield folder
