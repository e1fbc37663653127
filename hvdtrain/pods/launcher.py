"""The program of the launcher's pod: waits for workers, runs ``hvdtrain run``, frees the workers.

    python -m hvdtrain.pods.launcher NAME -- run -np 8 --hostfile FILE -- program ...

If the pod is lost, Kubernetes starts another, and the job continues from its checkpoint. A failed
job is not started again.
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

from hvdtrain.cluster.hosts import parse_hostfile
from hvdtrain.config import MANAGED_HOSTS
from hvdtrain.errors import JobError
from hvdtrain.exit_codes import ExitCode
from hvdtrain.pods.cluster_api import ClusterApi, persist
from hvdtrain.pods.names import FOLDER, KEYS_FOLDER, SSH_FOLDER, SSH_PORT, launcher_host
from hvdtrain.pods.worker_watch import WorkerWatch

__all__ = ["RunChild", "await_own_name", "await_workers", "free_workers", "main"]

POLL_S = 0.5
# How often a waiting launcher repeats what it waits for.
SAY_EVERY_S = 60.0
_CONNECT_TIMEOUT_S = 2.0
# How long to ask a cluster that does not answer, at the start and at the end.
START_PATIENCE_S = 120.0
FREE_PATIENCE_S = 3600.0
_HOSTS = Path("/tmp/hvdtrain-hosts.json")


class RunChild:
    """The process of ``hvdtrain run``; for the main thread, except ``stop``.

    The first signal to end lets the ranks save a checkpoint, as the pod has its grace period left;
    the second ends them at once.
    """

    def __init__(self) -> None:
        self._ordered: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None
        # Reentrant, as a signal may arrive while the main thread holds it.
        self._lock = threading.RLock()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    @property
    def is_ordered(self) -> bool:
        """Whether the pod has received a signal to end."""
        return bool(self._ordered)

    def run(self, words: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run ``hvdtrain`` with these arguments, and return its exit code as a shell reports it."""
        argv = [sys.executable, "-P", "-m", "hvdtrain", *words]
        child = subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL)
        with self._lock:
            self._child = child
            if self._ordered:
                # The signal came before the process existed.
                self.stop(save=False)
        code = child.wait()
        return 128 - code if code < 0 else code

    def stop(self, *, save: bool) -> None:
        """End the process, or keep it from starting; may be called from any thread."""
        with self._lock:
            if self._child is None:
                self._ordered.append(signal.SIGTERM)
            else:
                self._child.send_signal(signal.SIGUSR1 if save else signal.SIGTERM)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        is_first = not self._ordered
        self._ordered.append(number)
        if self._child is not None:
            self.stop(save=is_first)


def main(arguments: Sequence[str]) -> int:
    """Run the job, free its workers if it has ended for good, and return its exit code."""
    name, words = arguments[0], arguments[list(arguments).index("--") + 1 :]
    child = RunChild()
    _take_keys()
    listed = Path(FOLDER, "hostfile")
    hosts = parse_hostfile(listed.read_text(), str(listed))
    watch = _watch(name, hosts[0].slots, child)
    workers = watch.addresses if watch is not None else [host.name for host in hosts]
    code = None
    # From here on a stop is noticed, even during the waits.
    with watch or contextlib.nullcontext():
        if (
            (watch is None or _await_earlier(watch, child))
            and await_workers(workers, lambda: child.is_ordered)
            and await_own_name(launcher_host(name), lambda: child.is_ordered)
        ):
            managed = {} if watch is None else {MANAGED_HOSTS: str(_HOSTS)}
            code = child.run(words, {**os.environ, **managed})
    was_stopped = watch is not None and watch.was_stopped
    # After other ends Kubernetes starts another launcher, which needs the workers.
    if was_stopped or code not in (None, ExitCode.PREEMPTED):
        free_workers(
            name, has_failed=code != 0, give_up=lambda: child.is_ordered and not was_stopped
        )
    return 128 + signal.SIGTERM if code is None else code


def free_workers(name: str, *, has_failed: bool, give_up: Callable[[], bool]) -> None:
    """Release the workers' resources, and keep a failed job from starting again.

    Nothing else would release them, so this retries until the cluster answers.

    Args:
        name: The name of the job's objects.
        has_failed: Whether the job failed.
        give_up: Returns whether to stop retrying, because this pod has to end.
    """
    try:
        api = ClusterApi.of_pod()
        persist(lambda: api.scale_workers(name, 0), patience_s=FREE_PATIENCE_S, give_up=give_up)
        if has_failed:
            never_again = {"spec": {"backoffLimit": 0}}
            persist(
                lambda: api.patch_job(name, never_again),
                patience_s=FREE_PATIENCE_S,
                give_up=give_up,
            )
    except JobError as error:
        print(
            f"hvdtrain: the workers still take their resources: {error}. Free them by: "
            f"kubectl scale statefulset {name}-worker --replicas 0",
            file=sys.stderr,
            flush=True,
        )


def _watch(name: str, slots: int, child: RunChild) -> WorkerWatch | None:
    """Start to watch the workers; None if the launcher's account lacks the rights."""
    try:
        api = ClusterApi.of_pod()
        return persist(
            lambda: WorkerWatch(
                api,
                name,
                slots=slots,
                path=_HOSTS,
                on_stop=lambda word: child.stop(save=word == "save"),
            ),
            patience_s=START_PATIENCE_S,
            give_up=lambda: child.is_ordered,
        )
    except JobError as error:
        print(
            f"hvdtrain: workers that are lost or added won't be noticed: {error}",
            file=sys.stderr,
            flush=True,
        )
        return None


def await_workers(hosts: Sequence[str], is_ordered: Callable[[], bool]) -> bool:
    """Wait until all workers accept ssh connections; return False if the job has to stop before.

    Without a time-out: a job waits until the cluster has room for all its workers.
    """
    missing = dict.fromkeys(hosts, "")

    def whom() -> str:
        nonlocal missing
        missing = {host: why for host in missing if (why := _why_not(host))}
        first = "; ".join(f"{host}: {why}" for host, why in [*missing.items()][:3])
        return f"{len(missing)} of {len(hosts)} workers ({first})" if missing else ""

    return _await(whom, is_ordered)


def await_own_name(host: str, is_ordered: Callable[[], bool]) -> bool:
    """Wait until DNS has this pod's address alone; return False if the job has to stop before.

    Workers of MPICH and Intel MPI connect to the launcher by its name.

    Args:
        host: The hostname of this pod, which is also its subdomain.
        is_ordered: Returns whether the job has to stop.
    """
    if socket.gethostname() != host:
        # In the network of its node a pod has the hostname of the node.
        return not is_ordered()

    def whom() -> str:
        found = _addresses(f"{host}.{host}")
        return "" if found and found <= _addresses(host) else f"DNS to know its own name, {host}"

    return _await(whom, is_ordered)


def _addresses(host: str) -> set[str]:
    try:
        return {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except socket.gaierror:
        return set()


def _await_earlier(watch: WorkerWatch, child: RunChild) -> bool:
    """Wait until no earlier launcher has ranks; return False if the job has to stop before.

    Kubernetes starts a launcher while the ranks of the previous one still save their checkpoint.
    """

    def whom() -> str:
        try:
            return ", ".join(watch.earlier_launchers())
        except JobError as error:
            return f"word of earlier launchers: {error}"

    return _await(whom, lambda: child.is_ordered)


def _await(whom: Callable[[], str], is_ordered: Callable[[], bool]) -> bool:
    """Wait until ``whom`` returns nothing, and print what it returns now and then."""
    said, said_s = "", 0.0
    while text := whom():
        if text != said or time.monotonic() > said_s + SAY_EVERY_S:
            print(f"hvdtrain: waits for {text}", flush=True)
            said, said_s = text, time.monotonic()
        if is_ordered():
            return False
        time.sleep(POLL_S)
    return not is_ordered()


def _why_not(host: str) -> str:
    """Return why a worker can't be reached; empty if it can."""
    try:
        socket.create_connection((host, SSH_PORT), _CONNECT_TIMEOUT_S).close()
    except socket.gaierror:
        return "its name is not known yet"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _take_keys() -> None:
    """Copy the key to a file that only its owner may read, as ssh requires."""
    folder = Path(SSH_FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / "id_ed25519"
    key.unlink(missing_ok=True)
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT, 0o600)
    with open(descriptor, "wb") as file:
        file.write(Path(KEYS_FOLDER, key.name).read_bytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
