"""Watches a job's pods from the launcher's pod, and reports its hosts to ``hvdtrain run``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.cluster.managed_hosts import ManagedHost, format_managed_hosts
from hvdtrain.errors import JobError
from hvdtrain.pods.cluster_api import ClusterApi
from hvdtrain.pods.names import STOP, worker_addresses
from hvdtrain.pods.pod_states import ending_launchers, hosts_of

__all__ = ["WorkerWatch"]

INTERVAL_S = 1.0
# Longer than the requests of one look at a cluster that does not answer.
CLOSE_TIMEOUT_S = 90.0


class WorkerWatch:
    """Keeps the file that ``MANAGED_HOSTS`` names, on a thread; a context manager.

    Args:
        api: The cluster.
        name: The name of the job's objects.
        slots: The ranks of each worker.
        path: The file; it is written before this returns.
        on_stop: Called once with "now" or "save" when somebody asks the job to stop.

    Raises:
        JobError: The launcher's account may not see the job.
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
        self._written: tuple[ManagedHost, ...] = ()
        self._closing = threading.Event()
        self._stop_word = ""
        self._look()
        self._thread = threading.Thread(target=self._look_often, name="workers", daemon=True)

    def __enter__(self) -> WorkerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    @property
    def addresses(self) -> list[str]:
        """The hostnames of all workers that the job is to have."""
        return [host.name for host in self._written]

    @property
    def was_stopped(self) -> bool:
        """Whether somebody has asked the job to stop."""
        return bool(self._stop_word)

    def earlier_launchers(self) -> list[str]:
        """Return the pods of earlier launchers that have not ended yet.

        Raises:
            JobError: The cluster does not answer.
        """
        return ending_launchers(self._api.pods(self._name), time.time())

    def _look_often(self) -> None:
        said = ""
        while not self._closing.wait(INTERVAL_S):
            try:
                self._look()
                said = ""
            except JobError as error:
                # The control plane is busy or restarts; pods keep running.
                if str(error) != said:
                    said = str(error)
                    print(f"hvdtrain: {said}", file=sys.stderr, flush=True)

    def _look(self) -> None:
        addresses = worker_addresses(self._name, self._api.workers(self._name))
        hosts = hosts_of(self._api.pods(self._name), addresses, slots=self._slots)
        if hosts != self._written:
            draft = self._path.with_suffix(".new")
            draft.write_text(format_managed_hosts(hosts))
            draft.replace(self._path)
            self._written = hosts
        job = self._api.job(self._name)
        annotations = (job["metadata"].get("annotations") if job is not None else None) or {}
        if (word := annotations.get(STOP, "")) and not self._stop_word:
            self._stop_word = word
            self._on_stop(word)
