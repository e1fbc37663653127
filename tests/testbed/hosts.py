"""A host: its own network, name and mounts; processes and all other files are the machine's.

A host lives in the namespaces of one sleeping process and is gone when the last process in them
ends.
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
    """A host; the network is still without a link.

    Args:
        name: the host's name.
        environment: of the process that keeps the namespaces; tells to whom the host belongs.
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
                raise RuntimeError(f"{' '.join(argv)} did not make the host {name}")
            time.sleep(0.002)

    def entering(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on this host; it becomes ``argv``, with the same pid.

        Not ``ip netns exec``: it hides /sys/fs/cgroup, without which slurmd refuses to start.
        """
        namespaces = ["--target", str(self.keeper.pid), "--net", "--uts", "--mount"]
        return [find_command("nsenter"), *namespaces, "--", *argv]

    def do(self, *argv: str, input: str = "") -> str:
        """Run one step of the set-up and return what it printed.

        Raises:
            RuntimeError: if it fails.
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

    def furnish(
        self,
        folders: Sequence[str],
        files: Mapping[str, Path],
        *,
        shared: Sequence[Path] = (),
        stage: Path,
    ) -> None:
        """Give the host its name, and file systems that differ from the machine's.

        Args:
            folders: are the host's own and empty, but for the project's folders below them.
            files: what is to be found, file or folder, at some paths.
            shared: more folders of the project.
            stage: an empty folder, to prepare a file system in.
        """
        self.do("hostname", self.name)
        for place in folders:
            self._mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(stage))
            for source in _project_folders(stage.parent, *shared):
                if source.is_relative_to(place):
                    self._bind(source, stage / source.relative_to(place))
            self._mount("--move", str(stage), place)
        self.do("mkdir", "/run/sshd", "/run/lock")
        for path, source in files.items():
            self._bind(source, Path(path))

    def _bind(self, source: Path, target: Path) -> None:
        if source.is_dir():
            self.do("mkdir", "--parents", str(target))
        self._mount("--bind", str(source), str(target))

    def _mount(self, *arguments: str) -> None:
        # /run/mount/utab is the machine's and has nothing to do with the host's mounts.
        self.do("mount", "--no-mtab", *arguments)


def _project_folders(*own: Path) -> list[Path]:
    """What all hosts share wherever it is: the cluster's folders, the repository, Python."""
    wanted = {*own, REPOSITORY, *(Path(path).resolve() for path in (sys.prefix, sys.base_prefix))}
    return sorted(path for path in wanted if not wanted.intersection(path.parents))
