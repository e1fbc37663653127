from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator

import pytest

from hvdtrain.agent import backlog as module
from hvdtrain.agent.backlog import ITEM_BYTES, BackgroundWriter, Backlog


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        os.close(descriptor)


def gap(dropped: int) -> bytes:
    return f"{dropped} dropped\n".encode()


def never_retry(error: OSError) -> bool:
    return False


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read(descriptor: int, end: bytes) -> bytes:
    """Read everything up to ``end``."""
    data = b""
    while not data.endswith(end):
        data += os.read(descriptor, 1 << 16)
    return data


def test_items_keep_their_order() -> None:
    backlog: Backlog[str] = Backlog()
    for word in ("a", "b", "c"):
        backlog.put(word, 1)
    assert backlog.take(ITEM_BYTES + 2) == (0, ["a", "b"])
    backlog.put_back(0, [("a", 1), ("b", 1)])
    assert backlog.take() == (0, ["a", "b", "c"])
    assert backlog.is_empty


def test_the_oldest_lines_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 3 * (ITEM_BYTES + 1))
    backlog: Backlog[str] = Backlog()
    backlog.put("status", 1, lines=0)
    for word in "abcde":
        backlog.put(word, 1)
    assert backlog.take() == (2, ["c", "d", "e"])
    assert backlog.take() == (0, [])


def test_a_single_long_item_is_kept() -> None:
    backlog: Backlog[str] = Backlog()
    backlog.put("a", 1)
    backlog.put("long", 2 * module.MAX_BYTES)
    assert backlog.take() == (1, ["long"])


def test_ranks_pause_for_a_while_at_a_full_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog: Backlog[str] = Backlog()
    backlog.put("a", module.PAUSE_BYTES)
    assert backlog.should_pause
    now += module.PAUSE_S
    backlog.put("b", 1)
    assert not backlog.should_pause
    backlog.take()
    backlog.put("c", module.PAUSE_BYTES)
    assert backlog.should_pause
    backlog.take()
    assert not backlog.should_pause


def test_write_does_not_wait_for_the_reader(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    reader, descriptor = pipe
    writer = BackgroundWriter(descriptor, gap=gap, fails=never_retry)
    for number in range(3000):
        writer.write(b"%d " % number + b"x" * 1000 + b"\n")
    writer.write(b"status")
    writer.write(b"the end\n")
    lines = read(reader, b"the end\n").splitlines()
    writer.close(10.0)
    gaps = [line for line in lines if line.endswith(b"dropped")]
    numbers = [int(line.split()[0]) for line in lines[:-1] if line not in gaps]
    assert 0 < sum(int(line.split()[0]) for line in gaps) == 3000 - len(numbers)
    assert numbers[-800:] == list(range(2200, 3000)), "the newest lines are kept"
    assert lines[-1] == b"statusthe end"


def test_close_gives_up_without_progress(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    os.set_blocking(descriptor, False)
    writer = BackgroundWriter(descriptor, gap=gap, fails=never_retry)
    writer.write(b"x" * 300_000 + b"\n")
    writer.close(600.0, give_up=lambda: True)
    writer.close(0.2)
    data = os.read(reader, 1 << 20)
    assert len(data) < 300_001
    # The thread must finish before the pipe is closed.
    while not data.endswith(b"\n"):
        data += os.read(reader, 1 << 16)
    assert data == b"x" * 300_000 + b"\n"


def test_a_failed_write_is_retried(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, descriptor = pipe
    errors: list[OSError] = []
    os_write = os.write

    def write(to: int, data: bytes) -> int:
        if to != descriptor:
            return os_write(to, data)
        if len(errors) < 2 and data != b"first\n":
            raise OSError(errno.ENOSPC, "No space left on device")
        return os_write(to, data[:4])

    def retry(error: OSError) -> bool:
        errors.append(error)
        return True

    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(os, "write", write)
    writer = BackgroundWriter(descriptor, gap=gap, fails=retry)
    writer.write(b"first\n")
    writer.write(b"second\n")
    writer.close(10.0)
    assert os.read(reader, 100) == b"first\nsecond\n"
    assert [error.errno for error in errors] == [errno.ENOSPC] * 2


def test_output_after_a_permanent_error_is_discarded() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    writer = BackgroundWriter(full, gap=gap, fails=never_retry)
    writer.write(b"x" * module.PAUSE_BYTES)
    wait_until(lambda: not writer.should_pause)
    writer.write(b"more\n")
    writer.close(600.0)
    os.close(full)
