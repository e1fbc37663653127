"""Removes a cluster: ``python -m tests.testbed.sweep MARK FOLDER``.

The program waits until its standard input ends, because the creator of the cluster closes it or
dies. Namespaces, mounts and links have no names and end with their processes.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.testbed.processes import in_networks, kill_all, network_of, with_environment

__all__ = ["sweep"]


def sweep(mark: str, folder: Path) -> None:
    """End all processes of the cluster ``mark`` and remove its folder.

    Some daemons overwrite their environment or start programs with a clean one, so all processes in
    the cluster's network namespaces are ended too.
    """
    own = network_of(os.getpid())
    networks = {
        network for pid in with_environment(mark) if (network := network_of(pid)) not in (own, None)
    }
    kill_all(lambda: with_environment(mark) | in_networks(networks))
    if folder.exists():
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.stdin.read()
    sweep(sys.argv[1], Path(sys.argv[2]))
