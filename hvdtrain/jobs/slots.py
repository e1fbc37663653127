"""A queue for slots that needs no daemon, because each job's process locks files.

``waiting/`` has a file for each waiting job. The file is named by the time at which the job arrived
and contains the names of the hosts that it needs. ``slots/`` has a file for each slot of each host.
When a process ends, the kernel releases its locks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.cluster.hosts import Host, is_this_host
from hvdtrain.cluster.placement import available_cores, visible_entries
from hvdtrain.errors import JobError
from hvdtrain.jobs.files import lock_descriptor
from hvdtrain.jobs.state import host_identity

__all__ = ["SlotQueue", "acquire_slots", "gpu_variables", "slots_by_host"]

POLL_S = 0.25
QUEUE = ".queue"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class SlotQueue:
    """A job's place in the queue, and later its slots. Both are held until this process ends.

    Jobs that need slots of the same host are served in order of arrival, even if a later job
    could start earlier.

    Args:
        directory: The queue's folder, the same for all jobs that share slots.
        name: The name of the job.
        wanted: The number of slots that the job needs on each host. All jobs must use the same
            name for a host.
        slots: The number of slots that each host has. A job that needs more slots than a host has
            takes all slots of the host.
    """

    def __init__(
        self, directory: Path, name: str, *, wanted: Mapping[str, int], slots: Mapping[str, int]
    ) -> None:
        self._waiting = directory / "waiting"
        self._slots = directory / "slots"
        self._missing = {host: min(count, slots[host]) for host, count in wanted.items()}
        self._total = slots
        self._locks: dict[Path, int] = {}
        with self._errors():
            for folder in (self._waiting, self._slots):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._place = self._enqueue(name)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JobError(
                f"the queue in {self._waiting.parent} can't be used: {error.strerror}"
            ) from None

    def try_acquire(self) -> bool:
        """Take free slots if it is this job's turn. Return whether it has all; else call again."""
        if self._place not in self._locks:
            return True
        with self._errors():
            if self._first() != self._place:
                return False
            for host in self._missing:
                self._take(host)
        if any(self._missing.values()):
            return False
        self._place.unlink(missing_ok=True)
        os.close(self._locks.pop(self._place))
        return True

    def held(self, host: str) -> list[int]:
        """Return the numbers of this job's slots on a host, counted from 0."""
        names = (path.name for path in self._locks if path.parent == self._slots)
        return sorted(int(n) for h, _, n in (name.rpartition("-") for name in names) if h == host)

    def release(self) -> None:
        """Give up the place in the queue, or the slots."""
        self._place.unlink(missing_ok=True)
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()

    def _enqueue(self, name: str) -> Path:
        while True:
            place = self._waiting / f"{time.time_ns():020}-{name}"
            # Before the file is locked, another process may take it for a leftover and remove it.
            if self._lock(place) and place.exists():
                os.write(self._locks[place], "\n".join(self._missing).encode())
                # Without this, other hosts would not see the text before the file is closed.
                os.fsync(self._locks[place])
                return place

    def _first(self) -> Path | None:
        """Return the file of the first job that waits for these hosts; remove ended jobs' files."""
        for path in sorted(self._waiting.iterdir()):
            if path in self._locks:
                return path
            with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
                if lock_descriptor(file.fileno()):
                    path.unlink(missing_ok=True)
                    continue
                hosts = file.read().decode().splitlines()
                # An empty file is new; the hosts of its job are not known yet.
                if not hosts or not self._missing.keys().isdisjoint(hosts):
                    return path
        return None

    def _take(self, host: str) -> None:
        for number in range(self._total[host]):
            if not self._missing[host]:
                return
            path = self._slots / f"{host}-{number}"
            if path not in self._locks and self._lock(path):
                self._missing[host] -= 1

    def _lock(self, path: Path) -> bool:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if lock_descriptor(descriptor):
                self._locks[path] = descriptor
                return True
            return False
        finally:
            if path not in self._locks:
                os.close(descriptor)


def slots_by_host(hosts: Sequence[Host], gpus: int) -> dict[str, int]:
    """Return how many ranks may run at a time on each host.

    This host has one slot per GPU, or one per core if it lacks GPUs. Other hosts have the numbers
    of slots that ``hosts`` lists.
    """
    here = gpus or available_cores()
    return {host.name: here if is_this_host(host.name) else host.slots for host in hosts}


def acquire_slots(
    job: Path, wanted: Mapping[str, int], slots: Mapping[str, int], received: Sequence[int]
) -> Mapping[str, Sequence[int]] | None:
    """Wait for the slots that a job needs, and hold them until this process ends.

    Args:
        job: The job's folder. All jobs in the same directory share the slots.
        wanted: The number of ranks that the job starts on each host.
        slots: The number of ranks that may run on each host at a time.
        received: A list to which a signal handler appends each signal that arrives.

    Returns:
        The numbers of the slots on each host; None if a signal arrived first.
    """
    keys = {host: _host_key(host) for host in wanted}
    total: Counter[str] = Counter()
    for host, count in wanted.items():
        total[keys[host]] += count
    by_key = {keys[host]: slots[host] for host in wanted}
    queue = SlotQueue(job.parent / QUEUE, job.name, wanted=total, slots=by_key)
    while not received and not queue.try_acquire():
        time.sleep(POLL_S)
    if received:
        queue.release()
        return None
    return {host: queue.held(keys[host]) for host in wanted}


def _host_key(host: str) -> str:
    """Return a unique name of a host that is valid as a file name, also for "localhost"."""
    return host_identity() if is_this_host(host) else host.lower().replace("/", "_")


def gpu_variables(
    environ: Mapping[str, str], taken: Mapping[str, Sequence[int]], gpus: int
) -> dict[str, str]:
    """Return environment variables that restrict a job to the GPUs of its slots on this host.

    The result is empty if this host lacks GPUs. It is also empty if all slots of the job are on
    other hosts, because those hosts restrict their ranks themselves.
    """
    slots = [number for host, numbers in taken.items() if is_this_host(host) for number in numbers]
    if not gpus or not slots:
        return {}
    devices = visible_entries(environ) or [str(number) for number in range(gpus)]
    return {_VISIBLE_GPUS: ",".join(devices[number] for number in slots)}
