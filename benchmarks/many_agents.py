"""Stands for mpirun and the agents of many ranks, in one process; ``many_ranks.py`` starts it.

    many_agents.py RANKS SECONDS TIMES

Each agent is a connection that says what a real one says: hello, a report a second and a line of
output every five, all ranks alike as they start and each with a number of its own later. After
SECONDS the last rank fails, and the others end as they are told. TIMES gets the moments, in
seconds of the machine's monotonic clock, as JSON.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

from hvdtrain.agent.messages import JOB, Decoder, connect, encode, parse_addresses, receive
from hvdtrain.config import LAUNCHER

RANKS_PER_HOST = 8
LINE_EVERY = 5
STARTS = [f"what each rank prints as it starts, line {number}" for number in range(20)]


class Agents:
    """The connections of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: list[socket.socket] = []
        self.left = set(range(ranks))
        self.told: dict[int, float] = {}

    def connect(self) -> None:
        """All of them, one after the other."""
        addresses = parse_addresses(os.environ[LAUNCHER])
        for rank in sorted(self.left):
            connection = connect(addresses)
            host = f"node{rank // RANKS_PER_HOST}"
            self._connections.append(connection)
            self._selector.register(connection, selectors.EVENT_READ, (rank, Decoder()))
            self.send(rank, "hello", job=os.environ[JOB], rank=rank, host=host)
            for text in STARTS:
                self.send(rank, "line", stream="stderr", text=text)

    def send(self, sender: int, kind: str, **fields: object) -> None:
        """One message of a rank."""
        self._connections[sender].sendall(encode(kind, **fields))

    def report(self, step: int) -> None:
        """What every rank tells once a second."""
        for rank in sorted(self.left):
            told = {"step": step, "epoch": 0, "phase": "training", "waited_s": 0.1 * step}
            told |= {"input_s": 0.01 * step, "reduced_bytes": step << 27}
            self.send(rank, "report", pid=rank, **told)
            if step % 5 == rank % 5:
                taken = {"rss_bytes": 1 << 30, "cpu": 0.9, "gpu": 80.0, "gpu_bytes": 30 << 30}
                self.send(rank, "usage", **taken)
            if step % LINE_EVERY == 0:
                text = f"step {step} of rank {rank}"
                self.send(rank, "line", stream="stdout", text=text)

    def take(self, timeout_s: float) -> None:
        """Do what the launcher says, for as long."""
        deadline = time.monotonic() + timeout_s
        while self.left and time.monotonic() < deadline:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                rank, decoder = key.data
                messages = receive(self._connections[rank], decoder)
                for message in messages or ():
                    if message["kind"] == "stop" and rank not in self.told:
                        self.told[rank] = time.monotonic()
                        self.send(rank, "end", code=128 + signal.SIGTERM, kills=None)
                    elif message["kind"] == "bye":
                        messages = None
                if messages is None:
                    self._selector.unregister(self._connections[rank])
                    self._connections[rank].close()
                    self.left.discard(rank)


def main() -> None:
    """A job from its start to its end."""
    ranks, seconds, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    moments = {"start": time.monotonic()}
    agents = Agents(ranks)
    agents.connect()
    for step in range(seconds):
        began = time.monotonic()
        agents.report(step)
        agents.take(began + 1.0 - time.monotonic())
    moments["failed"] = time.monotonic()
    agents.send(ranks - 1, "end", code=7, kills=None)
    agents.take(60.0)
    moments["told"] = max(agents.told.values(), default=moments["failed"])
    moments["ended"] = time.monotonic()
    path.write_text(json.dumps({**moments, "left": len(agents.left)}))


if __name__ == "__main__":
    main()
