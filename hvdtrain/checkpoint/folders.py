"""The folders in a checkpoint directory.

::

    step-00000120                       the first checkpoint of step 120
    step-00000120-2                     the second one, if the step was saved again
    .writing-step-00000120-1a2b3c4d     incomplete
    .removing-step-00000120-1a2b3c4d    being removed
    .replaced-step-00000120             an older checkpoint, left by an earlier version of hvdtrain

When a folder is complete, it is renamed to a name that is not in use, so no checkpoint is ever
replaced.
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
    "RETRY_S",
    "CheckpointFolder",
    "busy_directory_error",
    "find_complete",
    "free_name",
    "hidden_name",
    "remove",
    "remove_remains",
]

# Time limit in seconds for reading a directory that another process changes at the same time.
RETRY_S = 30.0

_STEP = re.compile(r"(\.replaced-)?step-(\d{8,})(?:-(\d+))?")
_REMAINS = re.compile(r"\.(?:writing|removing)-step-\d{8,}-[0-9a-f]{8}")


class CheckpointFolder(NamedTuple):
    """A folder that is named like a checkpoint. Sorting puts older checkpoints first."""

    step: int  # the step of the checkpoint
    # 1 for the first checkpoint of the step, 2 for the second, and so on. It is 0 for a
    # ``.replaced-`` folder, which an earlier version of hvdtrain left.
    number: int
    path: Path  # the path of the folder
    inode: int  # The inode number. A later folder with the same name has a different one.


def find_complete(directory: Path) -> list[CheckpointFolder]:
    """Return the folders that have a manifest, the newest first.

    The directory is listed again if it has changed meanwhile, so the list is consistent.

    Raises:
        OSError: If the directory can't be listed, or keeps changing.
    """
    deadline = time.monotonic() + RETRY_S
    listed = _list_folders(directory)
    while time.monotonic() < deadline:
        complete = [folder for folder in listed if _has_manifest(folder)]
        # If another process has removed a folder since, the first list may lack its successor.
        previous, listed = listed, _list_folders(directory)
        if listed == previous:
            return complete
    raise busy_directory_error()


def busy_directory_error() -> OSError:
    """Return the error for a directory that changes faster than it can be read."""
    return TimeoutError(errno.ETIMEDOUT, f"another process kept changing them for {RETRY_S:.0f} s")


def _list_folders(directory: Path) -> list[CheckpointFolder]:
    folders = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                match = _STEP.fullmatch(entry.name)
                if match is None or not entry.is_dir(follow_symlinks=False):
                    continue
                prefix, step, number = match[1] or "", int(match[2]), int(match[3] or 1)
                # step-000000120 and step-00000120-1 are not names of step 120.
                if entry.name == prefix + _name(step, number):
                    number = 0 if prefix else number
                    path = directory / entry.name
                    folders.append(CheckpointFolder(step, number, path, entry.inode()))
    except FileNotFoundError:
        return []
    return sorted(folders, reverse=True)


def _name(step: int, number: int) -> str:
    return f"step-{step:08d}" if number == 1 else f"step-{step:08d}-{number}"


def hidden_name(prefix: str, step: int) -> str:
    """Return a new name that readers ignore.

    The prefix is "writing" or "removing", for example ``.writing-step-00000120-1a2b3c4d``.
    """
    return f".{prefix}-{_name(step, 1)}-{secrets.token_hex(4)}"


def free_name(directory: Path, step: int) -> str:
    """Return a name for a new checkpoint of a step, which sorts after the older ones."""
    numbers = [folder.number for folder in _list_folders(directory) if folder.step == step]
    number = max(numbers, default=0) + 1
    # A file or a link may have this name, for example a link to a checkpoint that was moved.
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
    """Remove a checkpoint. It is renamed first, so that readers never see a part of it."""
    hidden = folder.path.with_name(hidden_name("removing", folder.step))
    folder.path.rename(hidden)
    sync(hidden.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_remains(directory: Path) -> None:
    """Remove the folders that killed writers left behind."""
    remains = [path for path in directory.iterdir() if _REMAINS.fullmatch(path.name)]
    # Earlier versions wrote to a folder with the final name. Their remains lack a manifest.
    remains += [folder.path for folder in _list_folders(directory) if not _has_manifest(folder)]
    for path in remains:
        shutil.rmtree(path, ignore_errors=True)
