"""Disk errors: their messages, and the files that are left after them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import CheckpointError
from hvdtrain.checkpoint import Store
from hvdtrain.checkpoint.folders import CheckpointFolder
from tests.checkpoint.disks import SMALL_BYTES, remount
from tests.checkpoint.samples import check, files, snapshot

TOO_LARGE = SMALL_BYTES // 8  # floats of 8 bytes


def _fill(ballast: Path, free_bytes: int) -> None:
    """Fill the disk up to ``free_bytes``."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, ballast.stat().st_size - free_bytes)


def _check_refused(store: Store, *texts: str, **content) -> None:
    with pytest.raises(CheckpointError) as raised:
        store.write(snapshot(9, step=9, **content))
    for text in ("Checkpoint of step 9 can't be written", *texts):
        assert text in str(raised.value), raised.value


def test_a_full_disk(small_disk: Path) -> None:
    store = Store(small_disk, keep=1)
    store.write(snapshot(1, step=1))
    store.write(snapshot(2, step=9))
    (small_disk / "ballast").write_bytes(bytes(SMALL_BYTES // 2))
    for floats in (TOO_LARGE // 2, TOO_LARGE, 2 * TOO_LARGE):
        _check_refused(
            store, str(small_disk), "No space left on device", "Free some space", floats=floats
        )
        assert files(small_disk) == ["ballast", "step-00000009"]
        assert check(Store(small_disk).newest()) == 2
    (small_disk / "ballast").unlink()
    store.write(snapshot(3, step=9, floats=TOO_LARGE // 2))
    assert check(store.newest()) == 3


def test_a_disk_that_fills_up_at_each_page(small_disk: Path) -> None:
    store = Store(small_disk, keep=1)
    store.write(snapshot(1, step=1))
    ballast = small_disk / "ballast"
    page = os.sysconf("SC_PAGE_SIZE")
    refused = 0
    for free in range(12):
        _fill(ballast, free * page)
        try:
            store.write(snapshot(2, step=1))
        except CheckpointError:
            refused += 1
            assert check(Store(small_disk).newest()) == 1
            assert files(small_disk) == ["ballast", "step-00000001"]
        else:
            break
    assert refused > 3
    assert check(Store(small_disk).newest()) == 2


def test_remains_of_a_killed_writer_are_removed_first(small_disk: Path) -> None:
    remains = small_disk / ".writing-step-00000003-0123abcd"
    remains.mkdir()
    (remains / "model.safetensors").write_bytes(bytes(SMALL_BYTES * 3 // 4))
    Store(small_disk).write(snapshot(1, floats=TOO_LARGE // 2))
    assert check(Store(small_disk).newest()) == 1


def test_a_read_only_disk(small_disk: Path) -> None:
    Store(small_disk / "old").write(snapshot(1))
    store = Store(small_disk / "new")
    remount(small_disk, "ro")
    try:
        assert check(Store(small_disk / "old").newest()) == 1
        for refused in (Store(small_disk / "old"), store):
            _check_refused(refused, "Read-only file system", "Choose a writable directory")
    finally:
        remount(small_disk, "rw")
    store.write(snapshot(2))


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_a_file_instead_of_the_directory(below: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    _check_refused(Store(path / below), str(path), "Choose a directory, not a file")
    with pytest.raises(CheckpointError, match=r"can't be read: Not a directory"):
        Store(path / below).newest()
    assert path.read_text() == "mine"


NOBODY = """
import os, sys
from hvdtrain import CheckpointError
from hvdtrain.checkpoint import Store
from tests.checkpoint.disks import SMALL_BYTES, remount
from tests.checkpoint.samples import snapshot
Store(sys.argv[2]).write(snapshot(1))
Store(sys.argv[2]).newest()  # imports everything: only root may be able to read the modules
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for act in (lambda store: store.write(snapshot(3)), Store.newest):
    try:
        print("done", act(Store(sys.argv[1])))
    except CheckpointError as error:
        print(error)
"""


def test_a_directory_without_permission(tmp_path: Path, run_command) -> None:
    def as_nobody() -> list[str]:
        done = run_command([sys.executable, "-c", NOBODY, directory, tmp_path / "other"])
        assert done.returncode == 0, done
        return [line for line in done.stdout.splitlines() if line.startswith(("done", "Check"))]

    # Not in tmp_path, which only its owner can enter.
    directory = Path("/tmp") / f"hvdtrain-test-{os.getpid()}-permission"
    try:
        Store(directory).write(snapshot(1))
        (directory / ".lock").chmod(0o444)
        directory.chmod(0o555)
        write, newest = as_nobody()
        assert "Permission denied" in write
        assert "Grant write permission" in write
        assert newest.startswith("done Snapshot(step=0")
        # An unreadable checkpoint may be intact, so using an older one would lose steps.
        (directory / "step-00000000" / "model.safetensors").chmod(0)
        assert "can't be read: Permission denied" in as_nobody()[1]
        directory.chmod(0)
        assert all("Permission denied" in line for line in as_nobody())
    finally:
        directory.chmod(0o755)
        subprocess.run(["rm", "-r", directory], check=True)


def test_a_failure_to_remove_old_checkpoints_is_a_notice(tmp_path: Path, monkeypatch) -> None:
    notices: list[str] = []
    store = Store(tmp_path, keep=1, notice=notices.append)
    store.write(snapshot(1, step=1))

    def refuse(folder: CheckpointFolder) -> None:
        raise PermissionError(1, "Operation not permitted", str(folder.path))

    monkeypatch.setattr("hvdtrain.checkpoint.store.remove", refuse)
    store.write(snapshot(2, step=2))
    assert check(store.newest()) == 2
    (notice,) = notices
    assert "can't be removed: Operation not permitted" in notice


def test_files_have_the_default_mode(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    folder = Store(tmp_path / "runs").write(snapshot(1))
    assert {path.stat().st_mode for path in folder.iterdir()} == {plain.stat().st_mode}
