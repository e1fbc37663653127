"""Kills processes that write checkpoints, and reads what they leave.

``python -m tests.checkpoint.killed_writer random DIRECTORY KILLS``
    One process after another writes snapshot after snapshot into the directory, and is killed at a
    random moment.

``python -m tests.checkpoint.killed_writer everywhere DIRECTORY``
    A process is killed before its first operation on files, the next before its second, and so on.

``python -m tests.checkpoint.killed_writer failing DIRECTORY``
    As above, but the operation fails.

A process of its own does this, as it forks: without NumPy's import, a writer starts at once.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain import CheckpointError
from hvdtrain.checkpoint import Store
from hvdtrain.checkpoint.files import check_contents, read_manifest
from hvdtrain.checkpoint.folders import find_complete
from tests.checkpoint.samples import check, files, snapshot, step_of

# Small ones spend their time in the short phases, large ones in writing and checksums.
SIZES = (1, 100, 10_000, 300_000)

# How a process ends whose write was not stopped, was stopped in what is of no account, or failed.
_WRITTEN, _STOPPED, _REFUSED = 10, 11, 12


def main(mode: str, directory: str, *arguments: str) -> None:
    path = Path(directory)
    if mode == "random":
        kill_at_random(path, int(arguments[0]))
    else:
        stop_everywhere(path, _die if mode == "everywhere" else _fail)


def kill_at_random(directory: Path, kills: int) -> None:
    rng = random.Random(20)
    left: Counter[str] = Counter()
    last = -1
    took_s = 0.05
    reported_any = 0
    for _ in range(kills):
        floats, keep = rng.choice(SIZES), rng.randint(1, 3)
        reader, writer = os.pipe()
        child = _fork(_write_on, directory, last + 1, floats, keep, writer)
        os.close(writer)
        time.sleep(rng.uniform(0, 2.5 * took_s))
        _kill(child)
        left.update(_phase(directory))
        with os.fdopen(reader, "rb") as pipe:
            reports = [int(line) for line in pipe.read().splitlines()]
        if reports:
            last = reports[-1]
            reported_any += 1
        last = _read(directory, last)
        # Aim at about one write a life, whatever the disk and the other load.
        took_s = min(1.0, took_s * (0.9 if len(reports) > 1 else 1.1))
    _finish(directory, last)
    print(f"kills {kills}, lives that published {reported_any}, writes {last + 1}")
    print("left behind:", dict(left))
    assert reported_any > kills // 10, "the writers were killed too early to tell anything"
    assert left["writing"] > kills // 10, "the writers were killed too late to tell anything"


def stop_everywhere(directory: Path, stop: Callable[[], None]) -> None:
    """One write each of a new step that prunes, and of a step that is there already."""
    for write in (3, 4):  # of steps 2 and 2
        operation, stopped = 0, True
        while stopped:
            operation += 1
            target = directory / f"{write}-{operation}"
            for before in range(write):
                Store(target, keep=2).write(snapshot(before))
            (target / ".writing-step-00000009-0123abcd").mkdir()
            (target / "step-00000009").mkdir()
            status = os.waitpid(_fork(_write_until, target, write, operation, stop), 0)[1]
            outcome = status if status == signal.SIGKILL else os.waitstatus_to_exitcode(status)
            assert outcome in (signal.SIGKILL, _WRITTEN, _STOPPED, _REFUSED), status
            stopped = outcome != _WRITTEN
            found = _read(target, write if outcome in (_WRITTEN, _STOPPED) else write - 1)
            _finish(target, found)
            shutil.rmtree(target)
        print(f"write {write}: stopped at each of {operation - 1} operations")
        assert operation > 30, "that can't be all"


def _fork(act: Callable[..., None], *arguments: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            act(*arguments)
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return child


def _kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status == signal.SIGKILL, f"the writer ended by itself, status {status}"


def _write_on(directory: Path, write: int, floats: int, keep: int, report: int) -> None:
    store = Store(directory, keep=keep)
    while True:
        store.write(snapshot(write, floats=floats))
        os.write(report, b"%d\n" % write)
        write += 1


def _write_until(directory: Path, write: int, operation: int, stop: Callable[[], None]) -> None:
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event.startswith(("os.", "open", "fcntl.", "shutil.")):
            count += 1
            if count == operation:
                stop()

    new = snapshot(write)
    store = Store(directory, keep=2)
    sys.addaudithook(hook)
    try:
        store.write(new)
    except CheckpointError:
        os._exit(_REFUSED)
    os._exit(_STOPPED if count >= operation else _WRITTEN)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _read(directory: Path, last: int) -> int:
    """The write that a new reader finds: the last one known to be published, or the one after."""
    for complete in find_complete(directory):
        check_contents(complete.path, read_manifest(complete.path, complete.step))
    notices: list[str] = []
    found = Store(directory, notice=notices.append).newest()
    assert not notices, notices
    if found is None:
        assert last == -1, f"write {last} was published, nothing is found"
        return -1
    write = check(found)
    assert found.step == step_of(write)
    assert last <= write <= last + 1, f"write {last} was published, {write} is found"
    return write


def _finish(directory: Path, last: int) -> None:
    """The next writer tidies up."""
    store = Store(directory, keep=1)
    store.write(snapshot(last + 1))
    (name,) = files(directory)
    assert name.startswith(f"step-{step_of(last + 1):08d}"), name
    assert check(store.newest()) == last + 1


def _phase(directory: Path) -> list[str]:
    """What the killed one was doing, from what it left."""
    names = files(directory) if directory.exists() else []
    phases = {name.split("-")[0][1:] for name in names if name.startswith(".")}
    return sorted(phases) or ["nothing"]


if __name__ == "__main__":
    main(*sys.argv[1:])
