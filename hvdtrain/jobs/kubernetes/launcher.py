"""Runs in the launcher's pod: waits for the workers, runs ``hvdtrain run``, and frees the workers.

    python -m hvdtrain.jobs.kubernetes.launcher NAME -- run -np 8 --hostfile FILE -- program ...

Kubernetes starts the pod again where it is lost, and the job goes on from its checkpoint then. A
job that has failed is not started again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from hvdtrain.agent.exit_codes import ExitCode
from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import JOB_FOLDER
from hvdtrain.jobs.kubernetes.cluster_api import ClusterApi
from hvdtrain.jobs.kubernetes.manifests import FOLDER, KEYS_FOLDER, SSH_FOLDER, SSH_PORT

__all__ = ["await_workers", "main"]

POLL_S = 0.5
# How often it is said for whom it waits, where that does not change.
SAY_EVERY_S = 60.0
_CONNECT_TIMEOUT_S = 2.0
_RECORDS = Path("/tmp/hvdtrain-jobs")


def main(arguments: Sequence[str]) -> int:
    """Run the job, and return its exit code."""
    name, at = arguments[0], list(arguments).index("--")
    command = [sys.executable, "-m", "hvdtrain", *arguments[at + 1 :]]
    ordered: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: ordered.append(got))
    _take_keys()
    hosts = [line.split()[0] for line in Path(FOLDER, "hostfile").read_text().splitlines()]
    if not await_workers(hosts, lambda: bool(ordered)):
        return 128 + signal.SIGTERM
    code = _run(command, ordered, name)
    if code != ExitCode.PREEMPTED:
        _free_workers(name, has_failed=code != 0)
    return code


def await_workers(hosts: Sequence[str], is_ordered: Callable[[], bool]) -> bool:
    """Wait until sshd of all workers takes connections; False where the job is to stop before.

    However long that takes: until there is room on the cluster, a job waits in its queue.
    """
    missing = dict.fromkeys(hosts, "")
    said, said_s = "", 0.0
    while missing:
        missing = {host: why for host in missing if (why := _why_not(host))}
        whom = "; ".join(f"{host}: {why}" for host, why in [*missing.items()][:3])
        text = f"waits for {len(missing)} of {len(hosts)} workers ({whom})" if missing else ""
        if text and (text != said or time.monotonic() > said_s + SAY_EVERY_S):
            print(f"hvdtrain: {text}", flush=True)
            said, said_s = text, time.monotonic()
        if is_ordered():
            return False
        if missing:
            time.sleep(POLL_S)
    return True


def _why_not(host: str) -> str:
    """Why a worker can't be reached; empty where it can."""
    try:
        socket.create_connection((host, SSH_PORT), _CONNECT_TIMEOUT_S).close()
    except socket.gaierror:
        return "its name is not known yet"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _take_keys() -> None:
    """Copy the key to where nobody else may read it: ssh uses no other."""
    folder = Path(SSH_FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / "id_ed25519"
    key.unlink(missing_ok=True)
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT, 0o600)
    with open(descriptor, "wb") as file:
        file.write(Path(KEYS_FOLDER, key.name).read_bytes())


def _run(command: Sequence[str], ordered: list[int], name: str) -> int:
    """Run hvdtrain run, and hand on that this pod is to end: ranks save what they have then."""
    environ = dict(os.environ)
    if JOB_FOLDER not in environ:
        folder = _RECORDS / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        environ[JOB_FOLDER] = str(folder)
    child = subprocess.Popen(list(command), env=environ, stdin=subprocess.DEVNULL)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # The first time there is still time to save.
        child.send_signal(signal.SIGTERM if ordered else signal.SIGUSR1)
        ordered.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    if ordered:
        child.send_signal(signal.SIGTERM)
    code = child.wait()
    return 128 - code if code < 0 else code


def _free_workers(name: str, *, has_failed: bool) -> None:
    """Give the workers' resources back, and see that a job that has failed stays so."""
    try:
        api = ClusterApi.of_pod()
        api.scale_workers(name, 0)
        if has_failed:
            api.give_up(name)
    except JobError as error:
        print(f"hvdtrain: the workers still take their resources: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
