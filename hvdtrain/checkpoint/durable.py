"""Files and folders that are on the disk when a call returns, and why they are not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["make_folders", "reason", "sync", "write_file"]

_REMEDY = {
    errno.ENOSPC: "Free space there, or name a directory on another disk",
    errno.EDQUOT: "Free space within your quota, or name a directory elsewhere",
    errno.EROFS: "Name a directory that can be written to",
    errno.EACCES: "Allow writing there, or name a directory of your own",
    errno.EPERM: "Allow writing there, or name a directory of your own",
    errno.ENOTDIR: "Name a directory, not a file",
    errno.EEXIST: "Name a directory, not a file",
    errno.ETIMEDOUT: "Try again later",
    errno.EIO: "Have the disk checked, or name a directory on another one",
}


def reason(error: OSError) -> str:
    """The system's words and a remedy, as two sentences without the last full stop."""
    words = error.strerror or str(error)
    remedy = _REMEDY.get(error.errno or 0, "Remove the cause, or name another directory")
    where = f" ({os.fsdecode(error.filename)})" if error.filename is not None else ""
    return f"{words}{where}. {remedy}"


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of folders; their names are the server's care.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Make a file with this content."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folders(path: Path) -> None:
    """Make the folder, and those above it that aren't there."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        # Another process was quicker, or it is a file.
        if not path.is_dir():
            raise
    sync(path.parent)
