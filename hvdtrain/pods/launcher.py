"""The program of the launcher's pod: waits for workers, then runs ``hvdtrain run``.

    python -m hvdtrain.pods.launcher NAME -- run -np 8 --hostfile FILE -- program ...

If the pod is lost, Kubernetes starts a new one, and the job continues from its checkpoint. A job
that fails is not started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

from hvdtrain.cluster.hosts import parse_hostfile
from hvdtrain.cluster.managed_hosts import ManagedHost, format_managed_hosts
from hvdtrain.config import MANAGED_HOSTS
from hvdtrain.errors import JobError
from hvdtrain.exit_codes import ExitCode
from hvdtrain.pods.cluster_api import ClusterApi, RefusedError
from hvdtrain.pods.names import (
    FOLDER,
    KEYS_FOLDER,
    SSH_FOLDER,
    SSH_PORT,
    STOP,
    launcher_host,
    worker_addresses,
)
from hvdtrain.pods.pod_states import ending_launchers, managed_hosts

__all__ = [
    "RunProcess",
    "WorkerWatch",
    "main",
    "release_workers",
    "wait_for_own_name",
    "wait_for_workers",
]

POLL_S = 0.5
WATCH_INTERVAL_S = 1.0
# How often a waiting launcher prints again what it waits for.
REPEAT_S = 60.0
_CONNECT_TIMEOUT_S = 2.0
# How long to retry requests to the cluster at the start and at the end.
START_PATIENCE_S = 120.0
RELEASE_PATIENCE_S = 3600.0
# The account may get its permissions shortly after the pod starts. After this long, a refusal is
# final.
REFUSED_S = 10.0
# Longer than all requests of one update take if the cluster does not answer.
CLOSE_TIMEOUT_S = 90.0
_HOSTS = Path("/tmp/hvdtrain-hosts.json")

_Result = TypeVar("_Result")


class RunProcess:
    """The process of ``hvdtrain run``. Only ``stop`` may be called outside the main thread.

    The first SIGTERM or SIGINT lets the ranks save a checkpoint within the pod's grace period. The
    second one ends them at once.
    """

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        # Reentrant because a signal may arrive while the main thread holds the lock.
        self._lock = threading.RLock()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)

    @property
    def is_stopped(self) -> bool:
        """Whether the pod has received a signal to end, or the job was stopped before it ran."""
        return bool(self._signals)

    def run(self, words: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run ``hvdtrain`` and return its exit code, as a shell does for signals."""
        argv = [sys.executable, "-P", "-m", "hvdtrain", *words]
        process = subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL)
        with self._lock:
            self._process = process
            if self._signals:
                # A signal arrived before the process existed.
                self.stop(save=False)
        code = process.wait()
        return 128 - code if code < 0 else code

    def stop(self, *, save: bool) -> None:
        """End the process or prevent its start. This may be called from any thread."""
        with self._lock:
            if self._process is None:
                self._signals.append(signal.SIGTERM)
            else:
                self._process.send_signal(signal.SIGUSR1 if save else signal.SIGTERM)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        is_first = not self._signals
        self._signals.append(number)
        if self._process is not None:
            self.stop(save=is_first)


class WorkerWatch:
    """Keeps the file of ``MANAGED_HOSTS`` up to date with the job's pods.

    A thread updates the file within the ``with`` block.

    Args:
        api: The cluster.
        name: The name of the job's objects.
        slots: The number of ranks on each worker.
        path: The file. The constructor writes it for the first time.
        on_stop: A function that is called once, with "now" or "save", when a user stops the job.

    Raises:
        JobError: If the launcher's account lacks the permission to read the job, or the cluster
            does not answer.
    """

    def __init__(
        self,
        api: ClusterApi,
        name: str,
        *,
        slots: int,
        path: Path,
        on_stop: Callable[[str], None],
    ) -> None:
        self._api, self._name, self._slots, self._path = api, name, slots, path
        self._on_stop = on_stop
        self._hosts: tuple[ManagedHost, ...] = ()
        self._closing = threading.Event()
        self.was_stopped = False
        self._update()
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)

    def __enter__(self) -> WorkerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    @property
    def addresses(self) -> list[str]:
        """The hostnames of all requested workers."""
        return [host.name for host in self._hosts]

    def ending_launchers(self) -> list[str]:
        """Return the pods of earlier launchers that have not ended yet.

        Raises:
            JobError: If the cluster does not answer.
        """
        return ending_launchers(self._api.pods(self._name), time.time())

    def _run(self) -> None:
        reported = ""
        while not self._closing.wait(WATCH_INTERVAL_S):
            try:
                self._update()
                reported = ""
            except JobError as error:
                # The control plane may be busy or restarting. Pods keep running.
                if str(error) != reported:
                    reported = str(error)
                    _report(reported)

    def _update(self) -> None:
        addresses = worker_addresses(self._name, self._api.workers(self._name))
        hosts = managed_hosts(self._api.pods(self._name), addresses, slots=self._slots)
        if hosts != self._hosts:
            draft = self._path.with_suffix(".new")
            draft.write_text(format_managed_hosts(hosts))
            draft.replace(self._path)
            self._hosts = hosts
        job = self._api.job(self._name)
        annotations = (job["metadata"].get("annotations") if job is not None else None) or {}
        if (how := annotations.get(STOP, "")) and not self.was_stopped:
            self.was_stopped = True
            self._on_stop(how)


def main(arguments: Sequence[str]) -> int:
    """Run the job, release its workers if the job has ended for good, and return its exit code."""
    name, words = arguments[0], arguments[list(arguments).index("--") + 1 :]
    process = RunProcess()
    _copy_key()
    hostfile = Path(FOLDER, "hostfile")
    hosts = parse_hostfile(hostfile.read_text(), str(hostfile))
    watch = _watch_workers(name, hosts[0].slots, process)
    workers = watch.addresses if watch is not None else [host.name for host in hosts]
    code = None

    def is_stopped() -> bool:
        return process.is_stopped

    # Within this block a stop is noticed even while the launcher waits.
    with watch or contextlib.nullcontext():
        if (
            (watch is None or _wait_for_ending_launchers(watch, is_stopped))
            and wait_for_workers(workers, is_stopped)
            and wait_for_own_name(launcher_host(name), is_stopped)
        ):
            managed = {} if watch is None else {MANAGED_HOSTS: str(_HOSTS)}
            code = process.run(words, {**os.environ, **managed})
    was_stopped = watch is not None and watch.was_stopped
    # In all other cases Kubernetes starts a new launcher, which needs the workers.
    if was_stopped or code not in (None, ExitCode.PREEMPTED):
        release_workers(
            name, has_failed=code != 0, give_up=lambda: is_stopped() and not was_stopped
        )
    return 128 + signal.SIGTERM if code is None else code


def _copy_key() -> None:
    """Copy the private key to a file that only its owner may read, as ssh requires."""
    folder = Path(SSH_FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / "id_ed25519"
    key.unlink(missing_ok=True)
    with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(Path(KEYS_FOLDER, key.name).read_bytes())


def _watch_workers(name: str, slots: int, process: RunProcess) -> WorkerWatch | None:
    """Start to watch the workers; return None if the cluster refuses or does not answer."""

    def watch() -> WorkerWatch:
        return WorkerWatch(
            api,
            name,
            slots=slots,
            path=_HOSTS,
            on_stop=lambda how: process.stop(save=how == "save"),
        )

    try:
        api = ClusterApi.of_pod()
        return _retry(watch, patience_s=START_PATIENCE_S, give_up=lambda: process.is_stopped)
    except JobError as error:
        _report(f"lost or added workers won't be noticed: {error}")
        return None


def release_workers(name: str, *, has_failed: bool, give_up: Callable[[], bool]) -> None:
    """Release the resources of the workers, and prevent a failed job from starting again.

    Nothing else would release the resources. Requests are therefore repeated until the cluster
    answers or ``give_up`` returns True, which means that this pod has to end.
    """
    never_again = {"spec": {"backoffLimit": 0}}
    try:
        api = ClusterApi.of_pod()
        requests = [lambda: api.scale_workers(name, 0)]
        requests += [lambda: api.patch_job(name, never_again)] if has_failed else []
        for request in requests:
            _retry(request, patience_s=RELEASE_PATIENCE_S, give_up=give_up)
    except JobError as error:
        _report(
            f"the workers still hold their resources: {error}. Release them with: "
            f"kubectl scale statefulset {name}-worker --replicas 0"
        )


def _retry(
    act: Callable[[], _Result], *, patience_s: float, give_up: Callable[[], bool]
) -> _Result:
    """Call a function until it succeeds, and return its result.

    Raises:
        JobError: If the function still fails after ``patience_s``, or if a permission is still
            missing after ``REFUSED_S``.
    """
    started, reported = time.monotonic(), ""
    while True:
        try:
            return act()
        except JobError as error:
            limit_s = min(patience_s, REFUSED_S) if isinstance(error, RefusedError) else patience_s
            if give_up() or time.monotonic() - started > limit_s:
                raise
            if str(error) != reported:
                reported = str(error)
                _report(f"{reported}; trying again")
        time.sleep(POLL_S)


def _report(message: str) -> None:
    print(f"hvdtrain: {message}", file=sys.stderr, flush=True)


def wait_for_workers(hosts: Sequence[str], is_stopped: Callable[[], bool]) -> bool:
    """Wait until all workers accept ssh connections; return False if the job is stopped first.

    The wait is unlimited because the cluster may not have room for all workers yet.
    """
    missing = dict.fromkeys(hosts, "")

    def pending() -> str:
        nonlocal missing
        missing = {host: problem for host in missing if (problem := _connection_problem(host))}
        first = "; ".join(f"{host}: {problem}" for host, problem in [*missing.items()][:3])
        return f"{len(missing)} of {len(hosts)} workers ({first})" if missing else ""

    return _wait(pending, is_stopped)


def wait_for_own_name(host: str, is_stopped: Callable[[], bool]) -> bool:
    """Wait until the launcher's hostname resolves to this pod only.

    Workers of MPICH and Intel MPI connect to the launcher by its hostname, ``host``. The pod's
    subdomain has the same name.

    Returns:
        False if the job is stopped first.
    """
    if socket.gethostname() != host:
        # A pod that uses its node's network has the node's hostname.
        return not is_stopped()

    def pending() -> str:
        addresses = _addresses(f"{host}.{host}")
        is_known = addresses and addresses <= _addresses(host)
        return "" if is_known else f"the name {host} in DNS"

    return _wait(pending, is_stopped)


def _addresses(host: str) -> set[str]:
    try:
        return {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except socket.gaierror:
        return set()


def _wait_for_ending_launchers(watch: WorkerWatch, is_stopped: Callable[[], bool]) -> bool:
    """Wait until no earlier launcher runs; return False if the job is stopped first.

    Kubernetes may start a launcher while the previous one's ranks are still saving a checkpoint.
    """

    def pending() -> str:
        try:
            names = ", ".join(watch.ending_launchers())
            return f"the end of {names}" if names else ""
        except JobError as error:
            return f"the state of earlier launchers: {error}"

    return _wait(pending, is_stopped)


def _wait(pending: Callable[[], str], is_stopped: Callable[[], bool]) -> bool:
    """Wait until ``pending`` returns an empty text; return False if the job is stopped.

    Print the text whenever it changes, and repeat it every ``REPEAT_S`` seconds.
    """
    printed, printed_s = "", 0.0
    while text := pending():
        if text != printed or time.monotonic() > printed_s + REPEAT_S:
            print(f"hvdtrain: waiting for {text}", flush=True)
            printed, printed_s = text, time.monotonic()
        if is_stopped():
            return False
        time.sleep(POLL_S)
    return not is_stopped()


def _connection_problem(host: str) -> str:
    """Return why a worker can't be reached; empty if it can."""
    try:
        socket.create_connection((host, SSH_PORT), _CONNECT_TIMEOUT_S).close()
    except socket.gaierror:
        return "its name is not in DNS yet"
    except OSError as error:
        return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
