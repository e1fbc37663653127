"""The folders of a directory of checkpoints: complete ones, and remains of killed writers.

::

    step-00000120                       the first checkpoint of step 120
    step-00000120-2                     the second one, if the step was saved again
    .writing-step-00000120-1a2b3c4d     not complete yet
    .removing-step-00000120-1a2b3c4d    being removed
    .replaced-step-00000120             the former one of a step, left by an earlier version

A folder is renamed once, when it is complete, to a name that no other has: nothing is replaced.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from hvdtrain.checkpoint.files import MANIFEST, sync

__all__ = [
    "PATIENCE_S",
    "CheckpointFolder",
    "find_complete",
    "folders_in",
    "free_name",
    "hidden_name",
    "keeps_changing",
    "remove",
    "sweep",
]

# How long to reread a directory that another process changes at the same time.
PATIENCE_S = 30.0

_STEP = re.compile(r"(\.replaced-)?step-(\d{8,})(?:-(\d+))?")
_REMAINS = re.compile(r"\.(?:writing|removing)-step-\d{8,}-[0-9a-f]{8}")


class CheckpointFolder(NamedTuple):
    """A folder named like a checkpoint; they sort by age.

    Attributes:
        number: Counts the checkpoints of the same step; 0 is from an earlier version.
        inode: Distinguishes it from another folder of the same name.
    """

    step: int
    number: int
    path: Path
    inode: int


def find_complete(directory: Path) -> list[CheckpointFolder]:
    """Return the folders with a manifest, the newest first, all as they were at one moment.

    Raises:
        OSError: The directory is there and can't be listed, or changes all the time.
    """
    give_up_s = time.monotonic() + PATIENCE_S
    listed = folders_in(directory)
    while time.monotonic() < give_up_s:
        complete = [folder for folder in listed if _has_manifest(folder)]
        # A folder that goes after the list was made may have been followed by one not in it.
        before, listed = listed, folders_in(directory)
        if listed == before:
            return complete
    raise keeps_changing()


def keeps_changing() -> OSError:
    """Return the error for a directory that changes faster than this process reads."""
    seconds = f"{PATIENCE_S:.0f} s"
    return TimeoutError(
        errno.ETIMEDOUT,
        f"for {seconds} another process has changed them faster than they can be read",
    )


def folders_in(directory: Path) -> list[CheckpointFolder]:
    """Return what is named like a checkpoint, the newest first; links aren't followed."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                match = _STEP.fullmatch(entry.name)
                if match is None or not entry.is_dir(follow_symlinks=False):
                    continue
                former, step = match[1] is not None, int(match[2])
                number = int(match[3] or 1)
                # step-000000120 and step-00000120-1 are not names of step 120.
                if entry.name == (match[1] or "") + _name(step, number):
                    path = directory / entry.name
                    number = 0 if former else number
                    found.append(CheckpointFolder(step, number, path, entry.inode()))
    except FileNotFoundError:
        return []
    return sorted(found, reverse=True)


def _name(step: int, number: int) -> str:
    return f"step-{step:08d}" if number == 1 else f"step-{step:08d}-{number}"


def hidden_name(what: str, step: int) -> str:
    """Return an unused name that no reader looks at, for "writing" or "removing"."""
    return f".{what}-{_name(step, 1)}-{secrets.token_hex(4)}"


def free_name(directory: Path, step: int) -> str:
    """Return the name for a checkpoint that is newer than all others of this step."""
    numbers = [folder.number for folder in folders_in(directory) if folder.step == step]
    number = max(numbers, default=0) + 1
    # A file or link may have it: perhaps to where the user has moved a checkpoint.
    while os.path.lexists(directory / _name(step, number)):
        number += 1
    return _name(step, number)


def _has_manifest(folder: CheckpointFolder) -> bool:
    try:
        (folder.path / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def remove(folder: CheckpointFolder) -> None:
    """Remove a checkpoint, so that no moment leaves a part of it under its name."""
    hidden = folder.path.with_name(hidden_name("removing", folder.step))
    folder.path.rename(hidden)
    sync(hidden.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove the remains of killed writers; those of an earlier version lack a manifest."""
    remains = [path for path in directory.iterdir() if _REMAINS.fullmatch(path.name)]
    remains += [folder.path for folder in folders_in(directory) if not _has_manifest(folder)]
    for path in remains:
        shutil.rmtree(path, ignore_errors=True)
