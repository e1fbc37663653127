"""What tests break on the hosts of a cluster, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.testbed.cluster import Cluster

__all__ = ["FILLER", "Disk", "bound", "disk", "empty_folder", "ssh_config"]

# The file that takes the room of a full disk.
FILLER = "filler"
_BLOCK_BYTES = 4096


@contextlib.contextmanager
def bound(cluster: Cluster, host: str, source: Path, target: str) -> Iterator[None]:
    """``source`` in the place of ``target``, on ``host`` alone."""

    with _mounted(cluster, host, ["--bind", str(source)], target):
        yield


class Disk:
    """A file system of its own on one host.

    Attributes:
        path: Its place, as this machine reaches it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, room_bytes: int = 0) -> None:
        """Take all of its room but ``room_bytes``, until ``free``."""
        with open(self.path / FILLER, "ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(_BLOCK_BYTES))
            file.truncate(max(0, file.tell() - room_bytes))

    def free(self) -> None:
        """Give back what ``fill`` took."""
        (self.path / FILLER).unlink(missing_ok=True)


@contextlib.contextmanager
def disk(cluster: Cluster, host: str, target: Path, size_bytes: int) -> Iterator[Disk]:
    """A small file system in memory, at ``target`` on ``host`` alone."""
    target.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "hvdtrain-test"]
    with _mounted(cluster, host, options, str(target)):
        yield Disk(cluster.root(host) / target.relative_to("/"))


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


@contextlib.contextmanager
def _mounted(cluster: Cluster, host: str, options: Sequence[str], target: str) -> Iterator[None]:
    def do(*argv: str) -> None:
        done = cluster.run(argv, host=host, timeout_s=20, cwd="/")
        assert done.returncode == 0, done

    do("mount", "--no-mtab", *options, target)
    try:
        yield
    finally:
        do("umount", "--no-mtab", "--lazy", target)


def empty_folder(cluster: Cluster) -> Path:
    """A folder that all hosts share, to be put in the place of another."""
    path = cluster.folder / "empty"
    path.mkdir(exist_ok=True)
    return path
