"""Measure the launcher of jobs with thousands of ranks.

    python benchmarks/many_ranks.py
    python benchmarks/many_ranks.py --ranks 100 1000 10000 --seconds 10

The launcher is the real one, with its server, console (written to /dev/null), hang detection and
job folder. One process, whose time is not counted, simulates mpirun and the agents. Each rank
prints 20 lines at its start, reports its step and waits once a second, and prints a line and
reports its memory every five seconds. At the end the last rank fails, and the launcher stops the
others.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import make_parser, print_head, print_row

from hvdtrain.agent import messages
from hvdtrain.config import LAUNCHER
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.commands import Command
from hvdtrain.launch.console import Console
from hvdtrain.launch.supervisor import Supervisor, TimeLimits

SAMPLE_S = 0.1
RANKS_PER_HOST = 8
LINE_EVERY = 5
STARTS = [f"output of each rank at its start, line {number}" for number in range(20)]


class Agents:
    """The connections of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: list[socket.socket] = []
        self.left = set(range(ranks))
        self.stopped: dict[int, float] = {}

    def connect(self) -> None:
        addresses = messages.parse_addresses(os.environ[LAUNCHER])
        for rank in sorted(self.left):
            connection = messages.connect(addresses)
            host = f"node{rank // RANKS_PER_HOST}"
            self._connections.append(connection)
            self._selector.register(connection, selectors.EVENT_READ, (rank, messages.Decoder()))
            self.send(rank, "hello", job=os.environ[messages.JOB], rank=rank, host=host)
            for text in STARTS:
                self.send(rank, "line", stream="stderr", text=text)

    def send(self, sender: int, kind: str, **fields: object) -> None:
        self._connections[sender].sendall(messages.encode(kind, **fields))

    def report(self, step: int) -> None:
        """Send the reports of all ranks for one second."""
        for rank in sorted(self.left):
            fields = {"step": step, "epoch": 0, "phase": "training", "waited_s": 0.1 * step}
            fields |= {"input_s": 0.01 * step, "reduced_bytes": step << 27}
            self.send(rank, "report", pid=rank, **fields)
            if step % 5 == rank % 5:
                usage = {"rss_bytes": 1 << 30, "cpu": 0.9, "gpu": 80.0, "gpu_bytes": 30 << 30}
                self.send(rank, "usage", **usage)
            if step % LINE_EVERY == 0:
                text = f"step {step} of rank {rank}"
                self.send(rank, "line", stream="stdout", text=text)

    def handle(self, timeout_s: float) -> None:
        """Handle messages of the launcher for ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.left and time.monotonic() < deadline:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                rank, decoder = key.data
                received = messages.receive(self._connections[rank], decoder)
                for message in received or ():
                    if message["kind"] == "stop" and rank not in self.stopped:
                        self.stopped[rank] = time.monotonic()
                        self.send(rank, "end", code=128 + signal.SIGTERM, kills=None)
                    elif message["kind"] == "bye":
                        received = None
                if received is None:
                    self._selector.unregister(self._connections[rank])
                    self._connections[rank].close()
                    self.left.discard(rank)


def simulate_agents(ranks: int, seconds: int, path: Path) -> None:
    """Simulate mpirun and the agents of all ranks for a complete job.

    Writes times, in seconds of the monotonic clock, as JSON.
    """
    moments = {"start": time.monotonic()}
    agents = Agents(ranks)
    agents.connect()
    for step in range(seconds):
        began = time.monotonic()
        agents.report(step)
        agents.handle(began + 1.0 - time.monotonic())
    moments["failed"] = time.monotonic()
    agents.send(ranks - 1, "end", code=7, kills=None)
    agents.handle(60.0)
    moments["notified"] = max(agents.stopped.values(), default=moments["failed"])
    moments["ended"] = time.monotonic()
    path.write_text(json.dumps({**moments, "left": len(agents.left)}))


class Watch:
    """A thread that records time, processor time and connected agents of the launcher."""

    def __init__(self, server: AgentServer) -> None:
        self.samples = [(time.monotonic(), time.process_time(), 0)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=[server], daemon=True)
        self._thread.start()

    def _watch(self, server: AgentServer) -> None:
        while not self._over.wait(SAMPLE_S):
            self.samples.append((time.monotonic(), time.process_time(), server.connected))

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10 * SAMPLE_S)

    def between(self, start: float, end: float) -> float:
        """Return the core seconds used between two times."""
        used_s = [[s for moment, s, _ in self.samples if moment <= t][-1] for t in (start, end)]
        return used_s[1] - used_s[0]


def run(ranks: int, seconds: int) -> list[str]:
    """Run one job and return its row of the table."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        null = stack.enter_context(open(os.devnull, "w"))
        console = Console(null, null, ranks=ranks, with_host=True, chief_only=False, collapse=True)
        recorder = stack.enter_context(contextlib.closing(JobRecorder(JobFolder(folder))))
        server = stack.enter_context(
            contextlib.closing(AgentServer(ranks, console, local=True, on_line=recorder.line))
        )
        times = folder / "times.json"
        address = messages.format_addresses(["127.0.0.1"], server.port)
        environ = {**os.environ, LAUNCHER: address, messages.JOB: server.secret}
        argv = (sys.executable, __file__, "--agents", *map(str, (ranks, seconds, times)))
        supervisor = Supervisor(
            Command(argv=argv, environ=environ),
            server,
            console,
            hosts={rank: f"node{rank // RANKS_PER_HOST}" for rank in range(ranks)},
            time_limits=TimeLimits(hang_s=600.0),
            received=[],
            observer=recorder,
        )
        watch = Watch(server)
        outcome = supervisor.run()
        watch.stop()
        if outcome.code != 7:
            raise RuntimeError(f"expected exit code 7, got {outcome}")
        moments = json.loads(times.read_text())
    if moments["left"]:
        raise RuntimeError(f"{moments['left']} agents were not released")
    start, failed = moments["start"], moments["failed"]
    complete = next(moment for moment, _, connected in watch.samples if connected == ranks)
    return [
        str(ranks),
        f"{complete - start:.2f} s",
        f"{watch.between(start, complete):.2f} s",
        f"{watch.between(complete, failed) / (failed - complete):.1%}",
        f"{moments['notified'] - failed:.2f} s",
        f"{moments['ended'] - failed:.2f} s",
    ]


def main() -> None:
    if sys.argv[1:2] == ["--agents"]:
        ranks, seconds, path = sys.argv[2:]
        simulate_agents(int(ranks), int(seconds), Path(path))
        return
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1000], help="default 64 1000")
    parser.add_argument("--seconds", type=int, default=15, help="of training; default 15")
    arguments = parser.parse_args()
    print_head(
        *("ranks", "connected", "core time", "running, of a core", "failure known to all", "ended")
    )
    for ranks in arguments.ranks:
        print_row(*run(ranks, arguments.seconds))


if __name__ == "__main__":
    main()
