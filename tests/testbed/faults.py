"""Temporary faults on the hosts of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.testbed.cluster import Cluster

__all__ = ["FILLER", "Disk", "bound", "disk", "empty_folder", "ssh_config"]

# The file that fills a disk.
FILLER = "filler"
_BLOCK_BYTES = 4096


@contextlib.contextmanager
def bound(cluster: Cluster, host: str, source: Path, target: str) -> Iterator[None]:
    """Mount ``source`` over ``target`` on one host."""
    with _mounted(cluster, host, ["--bind", str(source)], target):
        yield


class Disk:
    """A file system on one host.

    Attributes:
        path: The path of the file system on this machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, room_bytes: int = 0) -> None:
        """Fill the file system up to ``room_bytes`` of free space."""
        with open(self.path / FILLER, "ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(_BLOCK_BYTES))
            file.truncate(max(0, file.tell() - room_bytes))

    def free(self) -> None:
        """Undo ``fill``."""
        (self.path / FILLER).unlink(missing_ok=True)


@contextlib.contextmanager
def disk(cluster: Cluster, host: str, target: Path, size_bytes: int) -> Iterator[Disk]:
    """Mount a small file system in memory at ``target`` on one host."""
    target.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "hvdtrain-test"]
    with _mounted(cluster, host, options, str(target)):
        yield Disk(cluster.root(host) / target.relative_to("/"))


@contextlib.contextmanager
def ssh_config(cluster: Cluster, text: str) -> Iterator[None]:
    """Prepend ``text`` to the cluster's ~/.ssh/config."""
    entry = cluster.run(["getent", "passwd", "root"], timeout_s=20).stdout
    path = Path(entry.split(":")[5], ".ssh", "config")
    original = path.read_text()
    path.write_text(f"{text}\nHost *\n{original}")
    try:
        yield
    finally:
        path.write_text(original)


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
    """Return an empty folder that all hosts share."""
    path = cluster.folder / "empty"
    path.mkdir(exist_ok=True)
    return path
