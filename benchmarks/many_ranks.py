"""What a job of a thousand ranks costs the launcher, and how quickly it learns and tells.

    python benchmarks/many_ranks.py
    python benchmarks/many_ranks.py --ranks 100 1000 10000 --seconds 10

The launcher is the real one, with its server, its screen (written to nowhere), its watch for
hangs, and the job's folder; mpirun and the agents are simulated by one process, whose time is not
counted. Each rank prints 20 lines as it starts, reports its step and its waits once a second, and
prints a line of its own and tells of its memory every five. At the end the last rank fails, and the
launcher ends the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from hvdtrain.agent.messages import (
    JOB,
    Decoder,
    connect,
    encode,
    format_addresses,
    parse_addresses,
    receive,
)
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


def simulate_agents(ranks: int, seconds: int, path: Path) -> None:
    """Stand for mpirun and the agents of all ranks, from the start of the job to its end.

    Writes the moments, in seconds of the machine's monotonic clock, as JSON.
    """
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


class Watch:
    """Processor time of this process, and when all agents have come; noted by a thread."""

    def __init__(self, server: AgentServer) -> None:
        self._server = server
        self.complete_at = 0.0
        self._samples = [self._now()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> tuple[float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_utime + used.ru_stime

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._samples.append(self._now())
            if not self.complete_at and self._server.connected == self._server.ranks:
                self.complete_at = self._samples[-1][0]

    def stop(self) -> None:
        """No more is noted."""
        self._over.set()
        self._thread.join(10 * SAMPLE_S)
        self._samples.append(self._now())

    def between(self, start: float, end: float) -> float:
        """Seconds of a core used from one moment to another."""
        before = [used for moment, used in self._samples if moment <= start] or [0.0]
        until = [used for moment, used in self._samples if moment <= end] or [0.0]
        return until[-1] - before[-1]


def run(ranks: int, seconds: int) -> dict[str, float]:
    """One job; what each part of it took."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        console = Console(
            nowhere, nowhere, ranks=ranks, with_host=True, chief_only=False, collapse=True
        )
        times = Path(folder, "times.json")
        with (
            contextlib.closing(JobRecorder(JobFolder(Path(folder)))) as recorder,
            contextlib.closing(
                AgentServer(ranks, console, local=True, heard=recorder.line)
            ) as server,
        ):
            words = {LAUNCHER: format_addresses(["127.0.0.1"], server.port), JOB: server.job}
            argv = (sys.executable, __file__, "--agents", *map(str, (ranks, seconds, times)))
            hosts = {rank: f"node{rank // RANKS_PER_HOST}" for rank in range(ranks)}
            supervisor = Supervisor(
                Command(argv=argv, environ={**os.environ, **words}),
                server,
                console,
                hosts=hosts,
                time_limits=TimeLimits(hang_s=600.0),
                received=[],
                observer=recorder,
            )
            watch = Watch(server)
            outcome = supervisor.run()
            watch.stop()
        if outcome.code != 7:
            raise RuntimeError(f"the job ended otherwise: {outcome}")
        found = json.loads(times.read_text())
    if found["left"]:
        raise RuntimeError(f"{found['left']} agents were not let go")
    start, failed = found["start"], found["failed"]
    complete = watch.complete_at
    return {
        "starting_s": complete - start,
        "starting_core_s": watch.between(start, complete),
        "running_core": watch.between(complete, failed) / (failed - complete),
        "to_tell_all_s": found["told"] - failed,
        "to_end_s": found["ended"] - failed,
    }


def main() -> None:
    """Run the jobs, and print a table."""
    if sys.argv[1:2] == ["--agents"]:
        ranks, seconds, path = sys.argv[2:]
        simulate_agents(int(ranks), int(seconds), Path(path))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1000], help="default 64 1000")
    parser.add_argument("--seconds", type=int, default=15, help="of training; default %(default)s")
    asked = parser.parse_args()
    print("| ranks | start | of a core | running, of a core | a failure is known to all | ended |")
    print("|---|---|---|---|---|---|")
    for ranks in asked.ranks:
        figures = run(ranks, asked.seconds)
        print(
            f"| {ranks} | {figures['starting_s']:.2f} s | {figures['starting_core_s']:.2f} s "
            f"| {figures['running_core']:.1%} | {figures['to_tell_all_s']:.2f} s "
            f"| {figures['to_end_s']:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
