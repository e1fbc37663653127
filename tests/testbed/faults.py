"""What tests break on the hosts of a cluster, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.testbed.cluster import Cluster

__all__ = ["bound", "empty_folder", "ssh_config"]


@contextlib.contextmanager
def bound(cluster: Cluster, host: str, source: Path, target: str) -> Iterator[None]:
    """``source`` in the place of ``target``, on ``host`` alone."""

    def do(*argv: str) -> None:
        done = cluster.run(argv, host=host, timeout_s=20, cwd="/")
        assert done.returncode == 0, done

    do("mount", "--no-mtab", "--bind", str(source), target)
    try:
        yield
    finally:
        do("umount", "--no-mtab", "--lazy", target)


@contextlib.contextmanager
def ssh_config(cluster: Cluster, text: str) -> Iterator[None]:
    """``text`` before what is in the cluster's ~/.ssh/config."""
    entry = cluster.run(["getent", "passwd", "root"], timeout_s=20).stdout
    path = Path(entry.split(":")[5], ".ssh", "config")
    before = path.read_text()
    path.write_text(f"{text}\nHost *\n{before}")
    try:
        yield
    finally:
        path.write_text(before)


def empty_folder(cluster: Cluster) -> Path:
    """A folder that all hosts share, to be put in the place of another."""
    path = cluster.folder / "empty"
    path.mkdir(exist_ok=True)
    return path
