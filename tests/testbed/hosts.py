"""A host: namespaces for network, name and mounts on this machine.

The namespaces belong to a sleeping process and end with the last process in them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness.jobs import REPOSITORY
from tests.testbed.requirements import find_command

__all__ = ["Host"]

_STEP_TIMEOUT_S = 20.0


class Host:
    """A host, whose network has no link yet.

    Args:
        name: The name of the host.
        environment: The environment of the process that holds the namespaces.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        argv = [find_command("unshare"), "--net", "--uts", "--mount", "sleep", "infinity"]
        self.keeper = subprocess.Popen(
            argv, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
        )
        # The namespaces are complete once unshare has become sleep.
        comm = Path(f"/proc/{self.keeper.pid}/comm")
        deadline = time.monotonic() + _STEP_TIMEOUT_S
        while comm.read_text() != "sleep\n":
            if self.keeper.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(argv)} did not create the host {name}")
            time.sleep(0.002)

    def entering(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on this host with the same process id.

        ``ip netns exec`` would hide /sys/fs/cgroup, which slurmd needs.
        """
        namespaces = ["--target", str(self.keeper.pid), "--net", "--uts", "--mount"]
        return [find_command("nsenter"), *namespaces, "--", *argv]

    def do(self, *argv: str, input: str = "") -> str:
        """Run a command on the host and return its output.

        Raises:
            RuntimeError: If the command failed.
        """
        done = subprocess.run(
            self.entering([find_command(argv[0]), *argv[1:]]),
            input=input,
            capture_output=True,
            text=True,
            timeout=_STEP_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(argv)} on {self.name} exited with {done.returncode}: {done.stderr}"
            )
        return done.stdout

    def set_up(
        self,
        folders: Sequence[str],
        files: Mapping[str, Path],
        *,
        shared: Sequence[Path] = (),
        stage: Path,
    ) -> None:
        """Set the host's name and its own file systems.

        Args:
            folders: Folders that are empty on the host except for shared folders below them.
            files: Files and folders by their paths on the host.
            shared: Additional shared folders.
            stage: An empty folder for preparing a file system.
        """
        self.do("hostname", self.name)
        for folder in folders:
            self._mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(stage))
            for source in _project_folders(stage.parent, *shared):
                if source.is_relative_to(folder):
                    self._bind(source, stage / source.relative_to(folder))
            self._mount("--move", str(stage), folder)
        self.do("mkdir", "/run/sshd", "/run/lock")
        for path, source in files.items():
            self._bind(source, Path(path))

    def _bind(self, source: Path, target: Path) -> None:
        if source.is_dir():
            self.do("mkdir", "--parents", str(target))
        self._mount("--bind", str(source), str(target))

    def _mount(self, *arguments: str) -> None:
        # --no-mtab: /run/mount/utab belongs to the machine.
        self.do("mount", "--no-mtab", *arguments)


def _project_folders(*own: Path) -> list[Path]:
    """Return the folders that all hosts share: of the cluster, the repository and Python."""
    folders = {*own, REPOSITORY, *(Path(path).resolve() for path in (sys.prefix, sys.base_prefix))}
    return sorted(path for path in folders if not folders.intersection(path.parents))
