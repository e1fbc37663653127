"""A queue of jobs that needs nobody to run it: files that are locked while a process lives.

``waiting/`` has a file for each job that waits, named by when it came, which holds the names of its
hosts; ``slots/`` one for each slot of each host. The kernel frees the locks of a process that ends,
however it does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.cluster.hosts import Host, is_this_host
from hvdtrain.cluster.placement import available_cores
from hvdtrain.errors import JobError
from hvdtrain.jobs.files import lock_descriptor
from hvdtrain.jobs.state import host_identity

__all__ = ["SlotQueue", "await_slots", "gpu_variables", "slots_of"]

POLL_S = 0.25
QUEUE = ".queue"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class SlotQueue:
    """A place in the queue, then the slots of a job, until this process ends.

    Jobs that need slots of the same host are served in the order of their arrival, even if a later
    one would fit in first.

    Args:
        directory: Where the files of the queue are; the same for all jobs that share slots.
        name: The job's name.
        wanted: How many slots it needs on each host, by names that all jobs give to that host.
        slots: How many there are on each; a job that needs more takes all.

    Raises:
        JobError: The queue can't be used.
    """

    def __init__(
        self, directory: Path, name: str, *, wanted: Mapping[str, int], slots: Mapping[str, int]
    ) -> None:
        self._waiting = directory / "waiting"
        self._slots = directory / "slots"
        self._missing = {host: min(count, slots[host]) for host, count in wanted.items()}
        self._total = slots
        self._held: dict[Path, int] = {}
        try:
            for folder in (self._waiting, self._slots):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._place = self._queue_up(name)
        except OSError as error:
            raise JobError(f"the queue in {directory} can't be used: {error.strerror}") from None

    def try_acquire(self) -> bool:
        """Take this job's slots if it is its turn; return whether it has all. Call it repeatedly.

        Raises:
            JobError: The queue can't be used.
        """
        if self._place not in self._held:
            return True
        try:
            if self._first() != self._place:
                return False
            for host in self._missing:
                self._take(host)
        except OSError as error:
            raise JobError(
                f"the queue in {self._waiting.parent} can't be used: {error.strerror}"
            ) from None
        if any(self._missing.values()):
            return False
        self._place.unlink(missing_ok=True)
        os.close(self._held.pop(self._place))
        return True

    def held(self, host: str) -> list[int]:
        """The numbers of the slots of a host that are this job's, from 0."""
        names = (path.name for path in self._held if path.parent == self._slots)
        return sorted(int(n) for h, _, n in (name.rpartition("-") for name in names) if h == host)

    def release(self) -> None:
        """Give up the place or the slots."""
        self._place.unlink(missing_ok=True)
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _queue_up(self, name: str) -> Path:
        while True:
            place = self._waiting / f"{time.time_ns():020}-{name}"
            # Before it is locked another process may take it for one that a dead one left.
            if self._lock(place) and place.exists():
                os.write(self._held[place], "\n".join(self._missing).encode())
                # Other hosts would see it only once it is closed.
                os.fsync(self._held[place])
                return place

    def _first(self) -> Path | None:
        """The place of the first job that waits for the same hosts; dead processes' are removed."""
        for path in sorted(self._waiting.iterdir()):
            if path in self._held:
                return path
            with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
                if lock_descriptor(file.fileno()):
                    path.unlink(missing_ok=True)
                    continue
                hosts = file.read().decode().splitlines()
                # Nothing is written yet where it has just come.
                if not hosts or not self._missing.keys().isdisjoint(hosts):
                    return path
        return None

    def _take(self, host: str) -> None:
        for number in range(self._total[host]):
            if not self._missing[host]:
                return
            path = self._slots / f"{host}-{number}"
            if path not in self._held and self._lock(path):
                self._missing[host] -= 1

    def _lock(self, path: Path) -> bool:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if lock_descriptor(descriptor):
                self._held[path] = descriptor
                return True
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return False


def slots_of(hosts: Sequence[Host], gpus: int) -> dict[str, int]:
    """Return how many ranks may run at a time on each host.

    As many as were named; on this host one for each GPU, or where it has none each core.
    """
    here = gpus or available_cores()
    return {host.name: here if is_this_host(host.name) else host.slots for host in hosts}


def await_slots(
    job: Path, wanted: Mapping[str, int], slots: Mapping[str, int], received: Sequence[int]
) -> Mapping[str, Sequence[int]] | None:
    """Wait until the slots that a job needs are free, and take them until this process ends.

    Args:
        job: The job's folder; jobs beside it share the slots.
        wanted: How many ranks it has on each host.
        slots: How many may run there at a time.
        received: Signals as they arrive.

    Returns:
        The numbers of the slots that it has on each host; None where a signal came first.

    Raises:
        JobError: The queue can't be used.
    """
    keys = {host: _key(host) for host in wanted}
    in_all: Counter[str] = Counter()
    for host, count in wanted.items():
        in_all[keys[host]] += count
    queue = SlotQueue(
        job.parent / QUEUE,
        job.name,
        wanted=in_all,
        slots={keys[host]: slots[host] for host in wanted},
    )
    while not received and not queue.try_acquire():
        time.sleep(POLL_S)
    if received:
        queue.release()
        return None
    return {host: queue.held(keys[host]) for host in wanted}


def _key(host: str) -> str:
    """One name for a host, whatever it is called, that a file can have.

    Jobs of other machines that use the same folder call those "localhost" as well.
    """
    return host_identity() if is_this_host(host) else host.lower().replace("/", "_")


def gpu_variables(
    environ: Mapping[str, str], taken: Mapping[str, Sequence[int]], gpus: int
) -> dict[str, str]:
    """Return variables that show a job only the GPUs of its slots on this host; empty without such.

    On other hosts ranks see what their hosts give them.
    """
    slots = [number for host, numbers in taken.items() if is_this_host(host) for number in numbers]
    if not gpus or not slots:
        return {}
    named = [d for d in environ.get(_VISIBLE, "").split(",") if d not in ("", "-1")]
    devices = named or [str(number) for number in range(gpus)]
    return {_VISIBLE: ",".join(devices[number] for number in slots)}
