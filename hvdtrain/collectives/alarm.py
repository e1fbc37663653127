"""How ranks learn that one of them can't go on, while they wait for something else.

Messages travel on a communicator of their own. A rank that waits in a collective looks for them
every few milliseconds; nothing is sent while all is well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.errors import CollectiveTimeoutError, PeerFailedError

__all__ = ["Alarm"]

FAILED, SEEN, LEFT, ASK, TELL = 1, 2, 3, 4, 5

FAREWELL_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 3.0
POLL_S = 0.002


class Alarm:
    """One rank's view of the others' troubles.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: A communicator of all ranks, used by nothing else.
        timeout_s: After that long ``leave`` says whom it waits for.
        operations: How many operations this rank has begun.
    """

    def __init__(
        self, mpi: ModuleType, comm: Any, timeout_s: float, operations: Callable[[], int]
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._timeout_s = timeout_s
        self._operations = operations
        self.rank: int = comm.Get_rank()
        self._others = [r for r in range(comm.Get_size()) if r != self.rank]
        self._failure: tuple[int, str] | None = None
        self._failed_myself = False
        self._seen: set[int] = set()
        # With how many operations each had taken part in: the last ones end at different times.
        self._left: dict[int, int] = {}
        self._told: dict[int, str] = {}
        self._silent: set[int] = set()
        self._pending: list[tuple[Any, np.ndarray]] = []

    @property
    def failed(self) -> bool:
        """Whether this rank or another has failed."""
        return self._failed_myself or self._failure is not None

    def check(self, waiting_in: str) -> None:
        """Look for messages; ``waiting_in`` says where this rank is.

        Raises:
            PeerFailedError: A rank has failed, or has left while this one needs it.
        """
        self._receive(waiting_in)
        if self._failure is not None:
            rank, reason = self._failure
            raise PeerFailedError(
                f"rank {rank} failed: {reason}. Rank {self.rank} was waiting for it in "
                f"{waiting_in} and stops too."
            )
        here = self._operations()
        gone = sorted(rank for rank, operations in self._left.items() if operations < here)
        if gone:
            ranks = ", ".join(str(rank) for rank in gone)
            raise PeerFailedError(
                f"rank {ranks} ended its program while rank {self.rank} waits for it in "
                f"{waiting_in}. Every rank must make the same calls; look for an early exit, or "
                "for a step that only some ranks take."
            )

    def time_out(self, waiting_in: str, timeout_s: float) -> None:
        """Ask where the other ranks are, and raise.

        Raises:
            CollectiveTimeoutError: Always; it names the ranks that did not arrive.
        """
        self._told.clear()
        self._send_all(ASK, "")
        deadline = time.monotonic() + ASK_TIMEOUT_S
        while len(self._told) < len(self._others) and time.monotonic() < deadline:
            self.check(waiting_in)
            time.sleep(POLL_S)
        missing = [rank for rank in self._others if rank not in self._told]
        self._silent = set(missing)
        told = [f"rank {rank} waits in {text}" for rank, text in sorted(self._told.items())]
        if missing:
            ranks = ", ".join(str(rank) for rank in missing)
            told.append(
                f"rank {ranks} waits in no collective: busy with something that the others are "
                "not doing, or hung"
            )
        raise CollectiveTimeoutError(
            f"rank {self.rank} waited {timeout_s:g} s in {waiting_in}: {'; '.join(told)}. If the "
            "work may take that long, raise HVDTRAIN_TIMEOUT_S."
        )

    def fail(self, reason: str) -> None:
        """Tell all ranks that this one failed, and wait a little until they have seen it."""
        if self._failed_myself:
            return
        self._failed_myself = True
        self._receive("")
        if self._failure is not None:
            # This failure only follows from the first one: let that rank know it was seen.
            self._send(self._failure[0], SEEN, "")
            return
        self._send_all(FAILED, reason)
        listening = set(self._others) - self._silent
        self._wait_for(lambda: self._seen | self._left.keys() >= listening, FAREWELL_TIMEOUT_S)

    def leave(self) -> bool:
        """Wait at the end of the program until all ranks are there, however long that takes.

        Ending before would end them: mpirun takes a rank that has not finalised MPI for a failed
        one. A rank that is gone for good ends the whole job anyway.

        Returns:
            Whether all ranks came to their end well, so that MPI may be finalised.
        """
        if self.failed:
            return False
        self._send_all(LEFT, str(self._operations()))
        everyone = set(self._others)

        def ended() -> bool:
            return self._left.keys() >= everyone or self._failure is not None

        while not self._wait_for(ended, self._timeout_s):
            ranks = ", ".join(str(rank) for rank in sorted(everyone - self._left.keys()))
            print(
                f"hvdtrain: rank {self.rank} has ended its program and waits for rank {ranks}",
                file=sys.stderr,
                flush=True,
            )
        if self._failure is not None:
            self._send(self._failure[0], SEEN, "")
        return self._left.keys() >= everyone and not self.failed

    def _wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Whether ``done`` came true within the time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._receive("the end of the program")
            if done():
                return True
            time.sleep(POLL_S)
        return False

    def _receive(self, waiting_in: str) -> None:
        status = self._mpi.Status()
        while True:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
            if message is None:
                return
            buffer = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            message.Recv([buffer, self._mpi.BYTE])
            # A text that was too long may end within a character.
            text = buffer.tobytes().decode(errors="replace")
            self._handle(status.Get_source(), status.Get_tag(), text, waiting_in)

    def _handle(self, source: int, tag: int, text: str, waiting_in: str) -> None:
        if tag == FAILED:
            self._failure = self._failure or (source, text)
            self._seen.add(source)  # who fails itself need not be told
        elif tag == SEEN:
            self._seen.add(source)
        elif tag == LEFT:
            self._left[source] = int(text)
        elif tag == ASK and waiting_in:
            self._send(source, TELL, waiting_in)
        elif tag == TELL:
            self._told[source] = text

    def _send_all(self, tag: int, text: str) -> None:
        for rank in self._others:
            self._send(rank, tag, text)

    def _send(self, rank: int, tag: int, text: str) -> None:
        # A message has to fit the eager protocol: nobody may be there to receive it.
        data = np.frombuffer(text.encode()[:2000] or b" ", np.uint8)
        self._pending = [entry for entry in self._pending if not entry[0].Test()]
        request = self._comm.Isend([data, self._mpi.BYTE], rank, tag)
        self._pending.append((request, data))
