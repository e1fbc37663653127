"""The lock of a checkpoint directory."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain import CheckpointError
from hvdtrain.checkpoint import Store, folders
from tests.checkpoint.samples import check, files, saved_steps, snapshot
from tests.harness.jobs import clean_environment

# Writes once and holds the directory until stdin is closed.
HOLDER = """
import os, sys, time
from hvdtrain.checkpoint import Store
from tests.checkpoint.samples import snapshot
store = Store(sys.argv[1])
store.write(snapshot(0, step=0))
child = 0
if "forks" in sys.argv:
    child = os.fork()
if child:
    print(child, flush=True)
elif "forks" not in sys.argv:
    print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    running: list[subprocess.Popen] = []

    def start(*arguments: str) -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, tmp_path, *arguments],
            env=clean_environment(None),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in running:
        process.kill()
        process.communicate(timeout=30)


def test_a_second_writer_gets_an_error_that_names_the_first(start, tmp_path: Path) -> None:
    holder, _ = start()
    store = Store(tmp_path, lock_timeout_s=0.2)
    with pytest.raises(CheckpointError) as raised:
        store.write(snapshot(1, step=1))
    text = str(raised.value)
    assert f"process {holder.pid} on host '{socket.gethostname()}'" in text
    assert str(tmp_path) in text
    assert "Choose a separate directory for each job" in text
    assert check(store.newest()) == 0
    assert files(tmp_path) == ["step-00000000"]
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(CheckpointError):
        store.write(snapshot(1, step=1))


def test_a_writer_waits_until_another_writer_has_ended(start, tmp_path: Path) -> None:
    holder, _ = start()
    notices: list[str] = []
    store = Store(tmp_path, lock_timeout_s=0.1, notice=notices.append)
    timer = threading.Timer(0.5, holder.kill)
    timer.start()
    store.lock(60)
    timer.join(30)
    (notice,) = notices
    assert f"Waiting up to 60 s: process {holder.pid} on host" in notice
    with (tmp_path / ".lock").open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_children_of_a_killed_writer_dont_hold_the_lock(start, tmp_path: Path) -> None:
    """Forked data loaders outlive a killed process for a while."""
    holder, child = start("forks")
    try:
        holder.kill()
        holder.wait(timeout=30)
        os.kill(int(child), 0)
        Store(tmp_path, lock_timeout_s=0.2).write(snapshot(1, step=1))
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_forked_child_cant_write_while_its_parent_holds_the_lock(
    tmp_path: Path, run_command
) -> None:
    program = """
import os, sys
from hvdtrain import CheckpointError
from hvdtrain.checkpoint import Store
from tests.checkpoint.samples import saved_steps, snapshot
store = Store(sys.argv[1], lock_timeout_s=0.2)
store.write(snapshot(0, step=0))
if os.fork() == 0:
    try:
        store.write(snapshot(1, step=1))
    except CheckpointError as error:
        print(f"process {os.getppid()} on host" in str(error), flush=True)
    os._exit(0)
os.wait()
store.write(snapshot(2, step=2))
print(saved_steps(sys.argv[1]))
"""
    done = run_command([sys.executable, "-c", program, tmp_path / "runs"])
    assert (done.returncode, done.stdout) == (0, "True\n[0, 2]\n"), done


def test_stores_of_one_process_share_the_lock(tmp_path: Path) -> None:
    first = Store(tmp_path)
    second = Store(tmp_path / ".." / tmp_path.name, lock_timeout_s=0.2)
    threads = [
        threading.Thread(target=store.write, args=(snapshot(number, step=number),))
        for number, store in enumerate([first, second] * 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert check(first.newest()) == 9


@pytest.mark.parametrize("pause_s", [0, 0.002])
@pytest.mark.slow
def test_a_concurrent_reader_always_finds_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """The reader is slow, so folders that it lists are removed before it reads them."""
    store = Store(tmp_path, keep=1)
    store.write(snapshot(0, step=0))
    published = reads = 0
    looks = itertools.count()
    reader = threading.current_thread()
    has_manifest = folders._has_manifest

    def after_a_pause(folder: folders.CheckpointFolder) -> bool:
        if threading.current_thread() is reader:
            time.sleep(pause_s * (next(looks) % 3))
        return has_manifest(folder)

    def write() -> None:
        nonlocal published
        while published < 150 or (reads < 20 and reader.is_alive()):
            store.write(snapshot(published + 1, step=(published + 1) // 30))
            published += 1

    monkeypatch.setattr(folders, "_has_manifest", after_a_pause)
    writer = threading.Thread(target=write)
    writer.start()
    notices: list[str] = []
    try:
        while writer.is_alive():
            before = published
            found = Store(tmp_path, notice=notices.append).newest()
            assert found is not None
            assert check(found) >= before
            reads += 1
    finally:
        reads = max(reads, 20)
        writer.join(30)
    assert not notices


def test_the_lock_is_released_with_the_last_store(start, tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    first.write(snapshot(0, step=0))
    second.write(snapshot(1, step=1))
    del first
    _check_held(tmp_path)
    del second
    _, line = start()
    assert line == "holds"


def _check_held(directory: Path) -> None:
    with (directory / ".lock").open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_removed_directory_is_created_and_locked_again(tmp_path: Path) -> None:
    directory = tmp_path / "runs"
    store = Store(directory)
    store.write(snapshot(0, step=0))
    subprocess.run(["rm", "-r", directory], check=True)
    store.write(snapshot(1, step=1))
    assert saved_steps(directory) == [1]
    _check_held(directory)


def test_only_the_holder_of_the_lock_removes_remains(start, tmp_path: Path) -> None:
    remains = [
        ".writing-step-00000001-0123abcd",
        ".removing-step-00000001-0123abcd",
        "step-00000009",
    ]
    for name in remains:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    assert Store(tmp_path).newest() is None
    assert saved_steps(tmp_path) == []
    holder, _ = start()
    assert files(tmp_path) == ["step-00000000"]
    (tmp_path / remains[0]).mkdir()
    with pytest.raises(CheckpointError):
        Store(tmp_path, lock_timeout_s=0.1).write(snapshot(1, step=1))
    assert remains[0] in files(tmp_path)
    holder.kill()
    Store(tmp_path).write(snapshot(1, step=1))
    assert files(tmp_path) == ["step-00000000", "step-00000001"]


def test_a_replaced_checkpoint_of_an_earlier_version_sorts_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    former = tmp_path / ".replaced-step-00000009"
    store.write(snapshot(1, step=9)).rename(former)
    (tmp_path / "step-00000009").mkdir()
    assert saved_steps(tmp_path) == [9]
    assert check(store.newest()) == 1
    store.write(snapshot(2, step=9)).rename(tmp_path / "other")
    assert files(tmp_path) == ["other"]
    store.write(snapshot(3, step=9)).rename(former)
    (tmp_path / "other").rename(tmp_path / "step-00000009")
    assert check(store.newest()) == 2
    store.write(snapshot(4, step=11))
    assert files(tmp_path) == ["step-00000009", "step-00000011"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(number: int, tmp_path: Path, monkeypatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    other = tmp_path / ".writing-step-00000007-0123abcd"
    other.mkdir()
    notices: list[str] = []
    store = Store(tmp_path, keep=1, notice=notices.append)
    for write in range(4):
        store.write(snapshot(write))
        assert check(store.newest()) == write
    assert files(tmp_path) == [other.name, "step-00000002"]
    (notice,) = notices
    assert "doesn't support locks" in notice
