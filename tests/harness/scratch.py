"""Folders of one test process, for all that it starts; they go with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["Scratch"]

_SHARED_MEMORY = Path("/dev/shm")
# Open MPI keeps files there for as long as all ranks live, and whoever is killed removes none.
_OPEN_MPIS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")


class Scratch:
    """Puts into this process's environment where programs are to leave their files.

    Attributes:
        folder: For the harness itself; its path is short, as those of sockets must be.
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
        self._before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        tempfile.tempdir = None

    def close(self) -> None:
        """Remove all of it, and undo the rest."""
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
