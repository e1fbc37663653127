"""Output waits for a reader or disk that is slow, up to a limit; who writes it never waits."""

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


def gives_up(error: OSError) -> bool:
    return False


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read(descriptor: int, end: bytes) -> bytes:
    """Everything up to ``end``."""
    data = b""
    while not data.endswith(end):
        data += os.read(descriptor, 1 << 16)
    return data


def test_items_come_out_in_their_order_and_in_portions() -> None:
    backlog: Backlog[str] = Backlog()
    for word in ("a", "b", "c"):
        backlog.put(word, 1)
    assert backlog.take(ITEM_BYTES + 2) == (0, ["a", "b"])
    backlog.put_back(0, [("a", 1), ("b", 1)])
    assert backlog.take() == (0, ["a", "b", "c"])
    assert backlog.is_empty


def test_the_oldest_lines_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 3 * (ITEM_BYTES + 1))
    backlog: Backlog[str] = Backlog()
    backlog.put("status", 1, lines=0)
    for word in "abcde":
        backlog.put(word, 1)
    assert backlog.take() == (2, ["c", "d", "e"])
    assert backlog.take() == (0, [])


def test_one_item_is_kept_however_long_it_is() -> None:
    backlog: Backlog[str] = Backlog()
    backlog.put("a", 1)
    backlog.put("long", 2 * module.MOST_BYTES)
    assert backlog.take() == (1, ["long"])


def test_a_full_backlog_holds_ranks_up_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog: Backlog[str] = Backlog()
    backlog.put("a", module.HOLD_BYTES)
    assert backlog.holds_up
    now += module.HOLD_S
    backlog.put("b", 1)
    assert not backlog.holds_up, "nobody reads"
    backlog.take()
    backlog.put("c", module.HOLD_BYTES)
    assert backlog.holds_up, "somebody reads again"
    backlog.take()
    assert not backlog.holds_up


def test_writing_does_not_wait_for_the_reader(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 20)
    reader, descriptor = pipe
    writer = BackgroundWriter(descriptor, gap=gap, fails=gives_up)
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


def test_the_end_is_waited_for_as_long_as_somebody_reads(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    os.set_blocking(descriptor, False)
    writer = BackgroundWriter(descriptor, gap=gap, fails=gives_up)
    writer.write(b"x" * 300_000 + b"\n")
    writer.close(600.0, give_up=lambda: True)
    writer.close(0.2)
    data = os.read(reader, 1 << 20)
    assert len(data) < 300_001, "nobody read, and it gave up"
    # The thread goes on, and must be done before the pipe is closed.
    while not data.endswith(b"\n"):
        data += os.read(reader, 1 << 16)
    assert data == b"x" * 300_000 + b"\n"


def test_a_write_that_fails_is_tried_again(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk was full for a time, in the middle of a line."""
    reader, descriptor = pipe
    errors: list[OSError] = []
    really = os.write

    def write(to: int, data: bytes) -> int:
        if to != descriptor:
            return really(to, data)
        if len(errors) < 2 and data != b"first\n":
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(to, data[:4])

    def again(error: OSError) -> bool:
        errors.append(error)
        return True

    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(os, "write", write)
    writer = BackgroundWriter(descriptor, gap=gap, fails=again)
    writer.write(b"first\n")
    writer.write(b"second\n")
    writer.close(10.0)
    assert os.read(reader, 100) == b"first\nsecond\n"
    assert [error.errno for error in errors] == [errno.ENOSPC] * 2


def test_after_an_error_for_good_everything_is_discarded() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    writer = BackgroundWriter(full, gap=gap, fails=gives_up)
    writer.write(b"x" * module.HOLD_BYTES)
    until(lambda: not writer.holds_up)
    writer.write(b"more\n")
    writer.close(600.0)
    os.close(full)
