"""Interrupts processes that write checkpoints and checks the files that they leave behind.

``python -m tests.checkpoint.killed_writer DIRECTORY random KILLS`` kills processes that write
continuously, at random moments. With ``kill`` instead of ``random KILLS``, the first process is
killed before its first file operation, the second process before its second one, and so on. With
``fail`` these operations raise an error instead.

The writers are forked, because importing NumPy would take longer than a write.
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

# Small models are usually hit between two files, and large models during a write or a checksum.
SIZES = (1, 100, 10_000, 300_000)

# Exit codes: not interrupted, interrupted in an optional operation, failed.
_WRITTEN, _IGNORED, _REFUSED = 10, 11, 12


def kill_at_random(directory: Path, kills: int) -> None:
    rng = random.Random(20)
    remains: Counter[str] = Counter()
    last = -1
    write_s = 0.05
    published = 0  # by how many processes
    for _ in range(kills):
        floats, keep = rng.choice(SIZES), rng.randint(1, 3)
        reader, writer = os.pipe()
        child = _fork(_write_forever, directory, last + 1, floats, keep, writer)
        os.close(writer)
        time.sleep(rng.uniform(0, 2.5 * write_s))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert status == signal.SIGKILL, f"the writer ended early with status {status}"
        names = files(directory) if directory.exists() else []
        remains.update({name.split("-")[0] for name in names if name.startswith(".")})
        with os.fdopen(reader, "rb") as pipe:
            reports = [int(line) for line in pipe.read().splitlines()]
        if reports:
            last = reports[-1]
            published += 1
        last = _check_newest(directory, last)
        # Adapt to the speed of the disk, for about one write per process.
        write_s = min(1.0, write_s * (0.9 if len(reports) > 1 else 1.1))
    _check_next_write(directory, last)
    print(f"{kills} kills, {published} after a write; remains: {dict(remains)}")
    assert published > kills // 10, "the writers were killed too early"
    assert remains[".writing"] > kills // 10, "the writers were killed too late"


def interrupt_each_operation(directory: Path, interrupt: Callable[[], None]) -> None:
    """Interrupt each operation of two writes.

    The first one writes a new step, for which an old one is removed. The second one writes an
    existing step.
    """
    for write in (3, 4):  # both of step 2
        operation, outcome = 0, _IGNORED
        while outcome != _WRITTEN:
            operation += 1
            target = directory / f"{write}-{operation}"
            for earlier in range(write):
                Store(target, keep=2).write(snapshot(earlier))
            (target / ".writing-step-00000009-0123abcd").mkdir()
            (target / "step-00000009").mkdir()
            child = _fork(_write_until, target, write, operation, interrupt)
            outcome = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert outcome in (-signal.SIGKILL, _WRITTEN, _IGNORED, _REFUSED), outcome
            last = write if outcome in (_WRITTEN, _IGNORED) else write - 1
            _check_next_write(target, _check_newest(target, last))
            shutil.rmtree(target)
        assert operation > 30, "too few operations were observed"


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


def _write_forever(directory: Path, write: int, floats: int, keep: int, report: int) -> None:
    store = Store(directory, keep=keep)
    while True:
        store.write(snapshot(write, floats=floats))
        os.write(report, b"%d\n" % write)
        write += 1


def _write_until(
    directory: Path, write: int, operation: int, interrupt: Callable[[], None]
) -> None:
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event.startswith(("os.", "open", "fcntl.", "shutil.")):
            count += 1
            if count == operation:
                interrupt()

    new = snapshot(write)
    store = Store(directory, keep=2)
    sys.addaudithook(hook)
    try:
        store.write(new)
    except CheckpointError:
        os._exit(_REFUSED)
    os._exit(_IGNORED if count >= operation else _WRITTEN)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _check_newest(directory: Path, last: int) -> int:
    """Return the number of the newest write, which must be the last published one or the next."""
    for folder in find_complete(directory):
        check_contents(folder.path, read_manifest(folder.path, folder.step))
    notices: list[str] = []
    newest = Store(directory, notice=notices.append).newest()
    assert not notices, notices
    write = -1 if newest is None else check(newest)
    assert newest is None or newest.step == step_of(write)
    assert write in (last, last + 1), f"write {last} was published, but {write} is the newest"
    return write


def _check_next_write(directory: Path, last: int) -> None:
    """Check that the next writer removes all remains."""
    store = Store(directory, keep=1)
    store.write(snapshot(last + 1))
    (name,) = files(directory)
    assert name.startswith(f"step-{step_of(last + 1):08d}"), name
    assert check(store.newest()) == last + 1


if __name__ == "__main__":
    root, mode, *counts = sys.argv[1:]
    if mode == "random":
        kill_at_random(Path(root), int(counts[0]))
    else:
        interrupt_each_operation(Path(root), _die if mode == "kill" else _fail)
