"""Small, slow and read-only file systems, which only root can mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.required import skip_or_fail

__all__ = ["SLOW_BYTES_PER_S", "SMALL_BYTES", "remount"]

SMALL_BYTES = 1024 * 1024
SLOW_BYTES_PER_S = 2_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of ``SMALL_BYTES``."""
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "hvdtrain-test"]
    yield from _mounted(["mount", *options, str(path)], path)


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory that is written at ``SLOW_BYTES_PER_S``."""
    behind, path = tmp_path / "behind", tmp_path / "slow"
    behind.mkdir()
    path.mkdir()
    yield from _mounted(
        ["bindfs", f"--write-rate={SLOW_BYTES_PER_S}", str(behind), str(path)], path
    )


def remount(path: Path, option: str) -> None:
    """Change a mount option: ``ro``, ``rw`` or ``size=BYTES``."""
    subprocess.run(["mount", "-o", f"remount,{option}", path], check=True, timeout=30)


def _mounted(command: list[str], path: Path) -> Iterator[Path]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        reason = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError as error:
        reason = str(error)
    if reason:
        skip_or_fail("disks", f"mounting a disk needs root and {command[0]}: {reason}")
    try:
        yield path
    finally:
        # Unmount lazily, because a caught error may still refer to a store with an open lock file.
        subprocess.run(["umount", "--lazy", path], check=True, timeout=30)
