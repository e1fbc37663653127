"""Temporary folders of a test process and its programs."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["Scratch"]

_SHARED_MEMORY = Path("/dev/shm")
# Open MPI's files in shared memory, which killed ranks leave behind.
_OPEN_MPIS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")


class Scratch:
    """Temporary folders, set in this process's environment for all programs.

    Attributes:
        folder: Folder of the harness, with a path that is short enough for sockets.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hvdtrain-test-", dir="/tmp"))
        self._folders = [self.folder]
        files = self.folder / "files"
        files.mkdir()
        changes = {"TMPDIR": str(files), "HVDTRAIN_JOBS_DIR": str(self.folder / "jobs")}
        if _SHARED_MEMORY.is_dir():
            shared = tempfile.mkdtemp(prefix="hvdtrain-test-", dir=_SHARED_MEMORY)
            self._folders.append(Path(shared))
            changes.update(dict.fromkeys(_OPEN_MPIS, shared))
        self._previous = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        tempfile.tempdir = None

    def close(self) -> None:
        """Remove the folders and restore the environment."""
        for name, value in self._previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
