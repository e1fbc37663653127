"""The folders of a directory of checkpoints: which count, and what killed writers left.

::

    step-00000120                       a checkpoint, once it has a manifest
    .replaced-step-00000120             the one before of the same step, until the new one counts
    .writing-step-00000120-1a2b3c4d     not yet a checkpoint
    .removing-step-00000120-1a2b3c4d    no checkpoint any more
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint.durable import sync
from hvdtrain.checkpoint.manifest import MANIFEST, DamagedError, read_manifest
from hvdtrain.errors import CheckpointError

__all__ = [
    "PATIENCE_S",
    "CheckpointFolder",
    "aside_name",
    "find_complete",
    "folder_name",
    "keeps_changing",
    "new_name",
    "remove_folder",
    "settle",
    "sweep",
]

# How long to look again and again at a directory that another process changes at the same time.
PATIENCE_S = 30.0

_STEP = re.compile(r"(\.replaced-)?step-(\d{8,})")
_REMAINS = re.compile(r"\.(?:writing|removing)-step-\d{8,}-[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """A folder with a manifest; ``identity`` tells it from another one under the same name."""

    step: int
    path: Path
    aside: bool
    identity: tuple[int, int]

    def is_there(self) -> bool:
        """Whether it still has its name."""
        return _identity(self.path) == self.identity


def folder_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def aside_name(step: int) -> str:
    """The name of a checkpoint's folder while another one of the same step takes its place."""
    return f".replaced-{folder_name(step)}"


def new_name(what: str, step: int) -> str:
    """A hidden name that nobody has used, for "writing" or "removing"."""
    return f".{what}-{folder_name(step)}-{secrets.token_hex(4)}"


def remove_folder(path: Path, step: int) -> None:
    """Remove a folder that counts, so that no moment leaves a part of it under its name."""
    hidden = path.with_name(new_name("removing", step))
    path.rename(hidden)
    sync(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def find_complete(directory: Path) -> list[CheckpointFolder]:
    """The folders with a manifest, the newest step first, all as they were at one moment.

    Raises:
        OSError: The directory is there and can't be listed, or changes all the time.
    """
    give_up_s = time.monotonic() + PATIENCE_S
    listed = _steps(directory)
    while time.monotonic() < give_up_s:
        found = []
        for step, path, aside, _ in listed:
            identity = _identity(path)
            if identity is not None:
                found.append(CheckpointFolder(step=step, path=path, aside=aside, identity=identity))
        # A folder that goes after the list was made may have been replaced by one not in it.
        before, listed = listed, _steps(directory)
        if listed == before:
            return sorted(found, key=lambda entry: (-entry.step, entry.aside))
    raise keeps_changing()


def keeps_changing() -> OSError:
    """Return the error for a directory that another process changes faster than this one reads."""
    seconds = f"{PATIENCE_S:.0f} s"
    return TimeoutError(
        errno.ETIMEDOUT, f"for {seconds} another process has replaced them faster than that"
    )


def settle(directory: Path, step: int) -> None:
    """End a replacement that was broken off: the newer one stays if it is complete.

    Raises:
        OSError: The file system refuses.
    """
    aside = directory / aside_name(step)
    if not aside.is_dir():
        return
    current = directory / folder_name(step)
    if _is_complete(current, step):
        remove_folder(aside, step)
        return
    if current.exists():
        remove_folder(current, step)
    aside.rename(current)
    sync(directory)


def sweep(directory: Path, *, alone: bool) -> None:
    """Remove what killed writers left; with ``alone`` false, nothing that may be another's.

    Raises:
        OSError: A replacement can't be ended.
    """
    for step, _, aside, _ in _steps(directory):
        if aside:
            settle(directory, step)
    if not alone:
        return
    for name, _ in _folders(directory):
        if _REMAINS.fullmatch(name):
            shutil.rmtree(directory / name, ignore_errors=True)
    for step, path, _, _ in _steps(directory):
        if not os.path.lexists(path / MANIFEST):
            remove_folder(path, step)


def _identity(path: Path) -> tuple[int, int] | None:
    """The folder's inode and, as inodes are used again, its manifest's time; None without one."""
    try:
        return path.lstat().st_ino, (path / MANIFEST).lstat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_complete(folder: Path, step: int) -> bool:
    try:
        read_manifest(folder, step)
    except CheckpointError:
        return True  # of a newer format
    except (DamagedError, FileNotFoundError):
        return False
    return True


def _steps(directory: Path) -> list[tuple[int, Path, bool, int]]:
    """Step, path, whether set aside, and inode of what is named like a checkpoint."""
    steps = []
    for name, inode in _folders(directory):
        match = _STEP.fullmatch(name)
        # step-000000120 is not the name of step 120.
        if match and folder_name(int(match[2])) == name.removeprefix(match[1] or ""):
            steps.append((int(match[2]), directory / name, match[1] is not None, inode))
    return sorted(steps)


def _folders(directory: Path) -> list[tuple[str, int]]:
    """Name and inode of the directory's folders, none if there is none; links aren't followed."""
    try:
        with os.scandir(directory) as entries:
            return [
                (entry.name, entry.inode())
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
