"""A test cluster on this machine: a head and hosts with ssh, Slurm and MPI.

::

    machine   runs the tests; only the cluster's processes and files are visible here
    head      10.77.0.254, slurmctld, munged; the machine's /tmp and /dev/shm
    node1-4   10.77.0.1-4, sshd, slurmd; own /tmp and /dev/shm

All share the machine's processes and files, except /run and the folders named. The repository,
the Python environment and ``Cluster.folder`` are the same everywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.harness.jobs import REPOSITORY, Completed, clean_environment
from tests.testbed import network, slurm, ssh
from tests.testbed.hosts import Host
from tests.testbed.processes import argv_of, end_session, listens, network_of, with_environment
from tests.testbed.sweep import sweep

__all__ = ["MARK", "Cluster", "Process"]

# Variable that identifies the cluster of a process.
MARK = "HVDTRAIN_TESTBED"

# Variables that name folders of the machine, or allow more ranks than cores, with which Open MPI 5
# would start all ranks on the first host of a hostfile.
_ABSENT = (
    *("TMPDIR", "XDG_RUNTIME_DIR"),
    *("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory"),
    *("OMPI_MCA_rmaps_base_oversubscribe", "PRTE_MCA_rmaps_default_mapping_policy"),
)

START_TIMEOUT_S = 30.0
_HEAD = "head"

PathLike = str | os.PathLike[str]
Changes = Mapping[str, str | None]


class Process(NamedTuple):
    """A process of the cluster. ``pid`` is valid on the machine."""

    host: str
    pid: int
    argv: tuple[str, ...]


class Cluster:
    """Hosts and a head, as a context manager.

    Args:
        shared: Additional folders that all hosts share.
        size: The number of hosts, at most 253.

    Attributes:
        hosts: The names of the hosts.
        folder: A temporary folder that all hosts share.
    """

    folder: Path

    def __init__(self, shared: Sequence[Path] = (), size: int = 4) -> None:
        self.hosts = tuple(f"node{number}" for number in range(1, size + 1))
        self._shared = shared
        self._name = uuid.uuid4().hex
        self._mark = f"{MARK}={self._name}"
        self._addresses = network.addresses(self.hosts)
        self._machines: dict[str, Host] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        self._state = Path(tempfile.mkdtemp(prefix="hvdtrain-testbed-", dir="/tmp"))
        self.folder = self._state / "shared"
        self._guard = self._start_guard()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def address(self, host: str) -> str:
        """Return the IPv4 address of a host or of ``head``."""
        return self._addresses[host]

    def run(
        self,
        argv: Sequence[PathLike],
        *,
        host: str | None = None,
        timeout_s: float,
        env: Changes | None = None,
        cwd: PathLike | None = None,
    ) -> Completed:
        """Run a program to its end, on the head or on ``host``.

        ssh and Slurm's commands find the cluster. ``env`` changes the environment; None removes a
        variable. ``cwd`` is ``folder`` by default.

        Raises:
            TimeoutError: If the program doesn't end within ``timeout_s``. Its session is ended.
        """
        started = time.monotonic()
        # Files, because leftover processes would keep a pipe open.
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = self.start(argv, host=host, env=env, cwd=cwd, stdout=stdout, stderr=stderr)
            code: int | None = None
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if code is None:
                    end_session(process.pid)
                    process.wait(10)
                self._started.remove(process)
            done = Completed(
                argv=tuple(os.fspath(part) for part in argv),
                returncode=124 if code is None else (128 - code if code < 0 else code),
                stdout=_text(stdout),
                stderr=_text(stderr),
                seconds=time.monotonic() - started,
                timed_out=code is None,
            )
        if done.timed_out:
            raise TimeoutError(f"{done!r}\n{self.daemon_logs()}")
        return done

    def start(
        self,
        argv: Sequence[PathLike],
        *,
        host: str | None = None,
        env: Changes | None = None,
        cwd: PathLike | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a program like ``run``, in its own session, which ends with the cluster."""
        machine = self._machines[host or _HEAD]
        command = [
            "env",
            f"--chdir={os.fspath(cwd or self.folder)}",
            *(os.fspath(part) for part in argv),
        ]
        process = subprocess.Popen(
            machine.entering(command),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env=self._environment(env),
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def processes(self, marker: str) -> list[Process]:
        """Return the processes whose environment contains ``marker``.

        Processes outside the hosts are listed as processes of ``head``.
        """
        networks = {network_of(host.keeper.pid): name for name, host in self._machines.items()}
        return [
            Process(networks.get(network_of(pid), _HEAD), pid, argv_of(pid))
            for pid in sorted(with_environment(marker))
        ]

    def root(self, host: str) -> Path:
        """Return a host's root folder on this machine. Don't follow absolute links in it."""
        return Path(f"/proc/{self._machines[host].keeper.pid}/root")

    def cut(self, host: str) -> None:
        """Cut the link of a host, which keeps running."""
        network.set_link(self._machines[_HEAD], host, "down")

    def restore(self, host: str) -> None:
        """Restore the link of a host."""
        network.set_link(self._machines[_HEAD], host, "up")
        # Slurm retries a lost host only after about 40 s; for other hosts this command fails.
        self.run(["scontrol", "update", f"NodeName={host}", "State=RESUME"], timeout_s=30)

    def shape(self, rate: str, queue_ms: int) -> None:
        """Limit all links to ``rate``, as for tc, with a queue of ``queue_ms``."""
        for host in self.hosts:
            network.shape_link(self._machines[_HEAD], self._machines[host], rate, queue_ms)

    def delay(self, ms: float) -> None:
        """Delay all packets of hosts by ``ms``. Call this before ``shape``."""
        head, *hosts = self._machines.values()
        keepers = [str(host.keeper.pid) for host in hosts]
        argv = [sys.executable, "-m", "tests.testbed.delay_line", str(ms), *keepers]
        self._start_daemon("delay_line", head, argv, cwd=REPOSITORY)
        log = self._log(f"delay_line.{_HEAD}")
        self._wait_for("delay line", lambda: "ready" in log.read_text())
        network.delay_links(head, hosts)

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """Stop Slurm's controller within the block."""
        group = self._daemons[f"slurmctld.{_HEAD}"].pid
        os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(group, signal.SIGCONT)

    def stop_sshd(self, host: str) -> None:
        """Refuse new connections to a host. Existing connections stay open."""
        daemon = self._daemons.pop(f"sshd.{host}")
        daemon.kill()
        daemon.wait(10)

    def start_sshd(self, host: str) -> None:
        """Accept connections to a host."""
        machine = self._machines[host]
        self._start_daemon("sshd", machine, ssh.sshd_argv(self._state / "sshd"))
        self._wait_for(
            f"sshd on {host}",
            lambda: listens(machine.keeper.pid, ssh.PORT),
        )

    def close(self) -> None:
        """End all processes and namespaces of the cluster, and remove its folder."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        if self._guard.wait(START_TIMEOUT_S) != 0:
            # The guard failed or was killed; an error is visible here.
            sweep(self._mark, self._state)
        keepers = [host.keeper for host in self._machines.values()]
        children: list[subprocess.Popen[Any]] = [*keepers, *self._daemons.values(), *self._started]
        for process in children:
            process.wait(10)

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """Start the process that removes the cluster on request or when this process dies."""
        argv = [sys.executable, "-m", "tests.testbed.sweep", self._mark, str(self._state)]
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            env=clean_environment(),
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def _build(self) -> None:
        files = self._write_files()
        for name in (_HEAD, *self.hosts):
            self._machines[name] = Host(name, self._environment())
            folders, shared = ["/run", "/tmp"], list(self._shared)
            if name == _HEAD:
                # The folder of tests' files.
                shared.append(Path(tempfile.gettempdir()))
            else:
                folders.append("/dev/shm")
            self._machines[name].set_up(folders, files, shared=shared, stage=self._state / "stage")
        head, *hosts = self._machines.values()
        network.connect(head, hosts)
        self._start_slurm(head, hosts)
        for host in self.hosts:
            self.start_sshd(host)
        self._wait_for("every host idle in Slurm", self._all_idle)

    def _write_files(self) -> dict[str, Path]:
        """Write the cluster's files, and return them by their paths on the hosts."""
        for name in ("shared", "home", "munge", "slurm", "sshd", "log", "stage"):
            (self._state / name).mkdir()
        hosts, passwd = self._state / "hosts", self._state / "passwd"
        hosts.write_text(network.hosts_text(self._addresses))
        ssh.write_passwd(passwd, self._state / "home")
        ssh.write_ssh(self._state / "home", self._state / "sshd")
        slurm.write_munge(self._state / "munge")
        slurm.write_slurm(self._state / "slurm", self._addresses)
        return {
            "/etc/hosts": hosts,
            "/etc/passwd": passwd,
            "/etc/slurm": self._state / "slurm",
            "/run/munge": self._state / "munge",
        }

    def _start_slurm(self, head: Host, hosts: Sequence[Host]) -> None:
        self._start_daemon("munged", head, slurm.munged_argv())
        socket = self._state / "munge" / slurm.MUNGE_SOCKET
        self._wait_for("munged", socket.exists)
        self._start_daemon("slurmctld", head, slurm.slurmctld_argv())
        self._wait_for("slurmctld", lambda: listens(head.keeper.pid, slurm.CONTROLLER_PORT))
        for host in hosts:
            self._start_daemon("slurmd", host, slurm.slurmd_argv())

    def _all_idle(self) -> bool:
        done = self.run(["sinfo", "--noheader", "--Node", "--format=%t"], timeout_s=10)
        return done.stdout.split() == ["idle"] * len(self.hosts)

    def _start_daemon(
        self, name: str, host: Host, argv: Sequence[str], cwd: PathLike = "/"
    ) -> None:
        with self._log(f"{name}.{host.name}").open("ab") as log:
            self._daemons[f"{name}.{host.name}"] = subprocess.Popen(
                host.entering(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=cwd,
                start_new_session=True,
            )

    def _wait_for(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``. On failure, raise an error with the logs of the daemons."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the test cluster failed to start {what}; ended: {ended}\n{self.daemon_logs()}"
                )
            time.sleep(0.02)

    def daemon_logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"--- {name}\n{self._log(name).read_text()[-2000:]}" for name in self._daemons
        )

    def _log(self, daemon: str) -> Path:
        return self._state / "log" / daemon

    def _environment(self, changes: Changes | None = None) -> dict[str, str]:
        own = {MARK: self._name, "HOME": str(self._state / "home")}
        return clean_environment({**dict.fromkeys(_ABSENT), **own, **(changes or {})})


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
