"""Requirements of the test cluster."""

from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["find_command", "missing_requirements"]

_PACKAGES = [
    line.partition("#")[0].strip()
    for line in Path(__file__).with_name("packages.txt").read_text().splitlines()
]
_NEEDS = f"needs root and the Debian packages {' '.join(filter(None, _PACKAGES))}"
_COMMANDS = (
    *("unshare", "nsenter", "mount", "hostname", "ip"),
    *("sshd", "ssh", "ssh-keygen"),
    *("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo"),
)
# Folders of daemons, which may not be on PATH.
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
# The path that Slurm's PMIx plugin opens.
_PMIX = "/usr/lib/*/pmix2/lib/libpmix.so"


def find_command(name: str) -> str:
    """Return the absolute path of a command."""
    path = _which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed; the test cluster {_NEEDS}")
    return path


@functools.cache
def missing_requirements() -> str | None:
    """Return why the cluster can't be created; None if it can."""
    if os.geteuid() != 0:
        return f"{_NEEDS}: this is user {os.geteuid()}"
    if absent := [name for name in _COMMANDS if _which(name) is None]:
        return f"{_NEEDS}: {', '.join(absent)} not found"
    if not glob.glob(_PMIX):
        return f"{_NEEDS}: {_PMIX} not found"
    # Root in a container may lack the permission to create namespaces or to mount.
    trial = [find_command("unshare"), "--net", "--uts", "--mount"]
    trial += [find_command("mount"), "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        return f"{_NEEDS}: private namespaces and mounts are not permitted ({done.stderr.strip()})"
    return None


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}")
