"""What the test cluster needs of the machine."""

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
# Daemons live where the PATH of an ordinary user does not lead.
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
# What Slurm's plugin for PMIx opens, by this very path.
_PMIX = "/usr/lib/*/pmix2/lib/libpmix.so"


def find_command(name: str) -> str:
    """The absolute path of a command; sshd wants to be started by it."""
    path = _which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed; the test cluster {_NEEDS}")
    return path


@functools.cache
def missing_requirements() -> str | None:
    """Why the cluster can't be built here, or None where it can."""
    if os.geteuid() != 0:
        return f"{_NEEDS}: this is user {os.geteuid()}"
    if absent := [name for name in _COMMANDS if _which(name) is None]:
        return f"{_NEEDS}: {', '.join(absent)} not found"
    if not glob.glob(_PMIX):
        return f"{_NEEDS}: no {_PMIX}"
    # Root of a container may lack the right to make namespaces or to mount.
    trial = [find_command("unshare"), "--net", "--uts", "--mount"]
    trial += [find_command("mount"), "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        return f"{_NEEDS}: no private namespaces and mounts here ({done.stderr.strip()})"
    return None


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}")
