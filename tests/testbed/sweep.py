"""Taking a cluster down: ``python -m tests.testbed.sweep MARK FOLDER``.

The program waits until its standard input ends, which is when whoever built the cluster closes it
or dies, of SIGKILL too. Namespaces, mounts and links have no names: they go with their processes.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.testbed.processes import carrying, in_networks, kill_all, network_of

__all__ = ["sweep"]


def sweep(mark: str, folder: Path) -> None:
    """End all processes of the cluster ``mark`` on all its hosts and remove its folder.

    Some daemons overwrite their environment or start programs with a clean one: what is in a
    network namespace of the cluster belongs to it as well.
    """
    own = network_of(os.getpid())
    networks = {found for pid in carrying(mark) if (found := network_of(pid)) not in (own, None)}
    kill_all(lambda: carrying(mark) | in_networks(networks))
    if folder.exists():
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.stdin.read()
    sweep(sys.argv[1], Path(sys.argv[2]))
