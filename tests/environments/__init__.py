"""Python environments with another MPI than the project's own, and with Horovod, for tests.

``python -m tests.environments [NAME ...]`` makes them in ``.venvs``; ``plugin.py`` gives them to
tests. There is a file ``NAME.txt`` for each, with what pip installs; ``packages.txt`` has the
Debian packages that they use.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness.jobs import REPOSITORY

__all__ = ["HERE", "folder_of", "missing_environment", "requirements_of", "stamp_of"]

HERE = Path(__file__).parent
# Where mpirun is that no pip has installed.
_SYSTEM_MPIRUN = "/usr/bin/mpirun"


def folder_of(name: str) -> Path:
    """Where the environment is, or will be."""
    return REPOSITORY / ".venvs" / name


def requirements_of(name: str) -> list[str]:
    """What pip installs into it."""
    lines = (HERE / f"{name}.txt").read_text().splitlines()
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


def stamp_of(name: str) -> tuple[Path, str]:
    """A file that is in the environment once it is complete, and what it then holds."""
    made_of = repr((requirements_of(name), sys.prefix, sys.version))
    return folder_of(name) / ".complete", hashlib.sha256(made_of.encode()).hexdigest()


def missing_environment(name: str) -> str | None:
    """Why the environment can't be used, and how to get it; None where it can."""
    path, content = stamp_of(name)
    how = f"make it with: {sys.executable} -m tests.environments {name}"
    if not path.exists():
        return f"there is no {folder_of(name)}; {how}"
    if path.read_text() != content:
        return f"{folder_of(name)} is out of date; {how}"
    if name == "openmpi4":
        program = shutil.which(_SYSTEM_MPIRUN)
        text = "nothing" if program is None else _output([program, "--version"])
        if "(Open MPI) 4." not in text:
            return f"{_SYSTEM_MPIRUN} is {text!r}, not Open MPI 4; install Debian's openmpi-bin"
    return None


def _output(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout.strip()
