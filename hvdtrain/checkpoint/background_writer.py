"""Writes one snapshot at a time on a thread of its own, while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hvdtrain.checkpoint.snapshot import Snapshot
from hvdtrain.checkpoint.store import Store
from hvdtrain.errors import CheckpointError

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Hands snapshots to a store.

    Args:
        store: Where they go; used by the writing thread while ``busy``.
        tell: Called on that thread with the step of each checkpoint that is safely on disk.
    """

    def __init__(self, store: Store, tell: Callable[[int], None]) -> None:
        self._store = store
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.written_s: list[float] = []
        """The seconds that each successful write took."""

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written; its arrays must stay as they are."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write ``snapshot``; waits for the one before, if that is not on disk yet."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name="hvdtrain checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written, or the time is over."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def take_error(self) -> CheckpointError | None:
        """Return why the latest snapshot could not be written, once; None if it could."""
        error, self._error = self._error, None
        return error

    def _write(self, snapshot: Snapshot) -> None:
        start = time.monotonic()
        try:
            self._store.write(snapshot)
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            # A thread has nobody above it who would see this.
            self._error = CheckpointError(f"{type(error).__name__}: {error}")
        else:
            self.written_s.append(time.monotonic() - start)
            self._tell(snapshot.step)
