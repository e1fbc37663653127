"""The launcher's end of the connections to its agents."""

from __future__ import annotations

import hmac
import resource
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.agent.messages import (
    MAX_LINE_LENGTH,
    WINDOW_BYTES,
    Decoder,
    encode,
    keep_alive,
    receive,
)
from hvdtrain.agent.rank_report import (
    FailureRecord,
    OomKills,
    RankReport,
    Usage,
    read_record,
)
from hvdtrain.errors import LaunchError
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import RankExit
from hvdtrain.launch.progress import STARTING_MPI, JobProgress

__all__ = ["AgentServer"]

# Lines of stderr kept to describe a failure.
KEPT_LINES = 100
KEPT_CHARACTERS = 1 << 14
# JSON needs up to six bytes per character.
MOST_BYTES = 8 * MAX_LINE_LENGTH
RECEIVE_BUFFERS = 8
# Number of other open files: modules, pipes, and clients that have not sent their hello yet.
OTHER_FILES = 200


@dataclass(eq=False)
class _Rank:
    """One rank: the connection to its agent, its last lines of stderr, and how it ended."""

    number: int
    host: str
    connection: socket.socket
    decoder: Decoder
    confirmed: int = 0
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    record: FailureRecord | None = None
    recorded_at: float = 0.0
    was_signalled: bool = False
    end: RankExit | None = None


class AgentServer:
    """Accepts agents, shows the output of their programs, and records how they end.

    Args:
        ranks: Number of ranks. Each rank has its own agent.
        console: Shows the output of the ranks.
        local: Accept connections from this host only.
        is_hidden: Returns whether a line of stderr is to be dropped.
        on_line: Receives the rank, stream and text of every line that is not dropped.
        holds_up: Returns whether ranks should pause before they write more.

    Raises:
        LaunchError: If the limit of open files is too low for a connection to each agent.
    """

    def __init__(
        self,
        ranks: int,
        console: Console,
        *,
        local: bool,
        is_hidden: Callable[[str], bool] = lambda text: False,
        on_line: Callable[[int, str, str], object] = lambda rank, stream, text: None,
        holds_up: Callable[[], bool] = lambda: False,
    ) -> None:
        # Every agent's hello must contain this secret.
        self.secret = secrets.token_hex(16)
        self.ranks = ranks
        # How ranks ended, in order of arrival. A lost rank that the others survive is moved to
        # ``dropped``.
        self.ends: list[RankExit] = []
        self.dropped: list[int] = []
        self.reports = JobProgress(time.monotonic())
        # For each rank that has answered ``probe``: whether its program is stopped.
        self.stopped: dict[int, bool] = {}
        self._console = console
        self._is_hidden = is_hidden
        self._on_line = on_line
        self._holds_up = holds_up
        self._stop_message: bytes | None = None
        self._connected: dict[int, _Rank] = {}
        self._unconfirmed: set[_Rank] = set()
        _raise_file_limit(ranks)
        self._listener = _listen(local)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def connected(self) -> int:
        """The number of ranks whose agents have connected."""
        return len(self._connected)

    @property
    def running(self) -> list[int]:
        """Ranks that have started and not ended."""
        return [rank.number for rank in self._running()]

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._connected.values() if rank.end is None]

    def hosts(self) -> dict[int, str]:
        """Return the host of each rank that has started."""
        return {number: rank.host for number, rank in self._connected.items()}

    def step(self, timeout_s: float) -> None:
        """Wait for events, at most ``timeout_s`` seconds, and process them."""
        for key, _ in self.selector.select(timeout_s):
            key.data(key.fileobj)
        if self._unconfirmed and not self._holds_up():
            for rank in self._unconfirmed:
                self._confirm(rank)
            self._unconfirmed.clear()
        self._console.review()

    def stop(self, number: int, grace_s: float, *, write_s: float = 0.0) -> None:
        """Send signal ``number`` to every rank's program, and SIGKILL after ``grace_s`` seconds.

        Ranks that connect later get the signal too.

        Args:
            number: The number of the signal.
            grace_s: Seconds from the signal to SIGKILL.
            write_s: If not 0, the attempt has failed. A rank that is writing a checkpoint then has
                this many seconds to finish. A rank on which the signal would only start a new
                checkpoint is killed at once.
        """
        self._stop_message = encode("stop", signal=number, grace_s=grace_s, write_s=write_s)
        for rank in self._running():
            self._signal(rank, self._stop_message)

    def probe(self) -> None:
        """Make every program print its stacks, and find out which programs are stopped.

        A stopped program (state T) can't print. The answers arrive in ``stopped``.
        """
        self.stopped.clear()
        for rank in self._running():
            self._send(rank, encode("look"))

    def kill(self, number: int) -> None:
        """Kill a rank's program. The launcher then treats the rank as lost, not as signalled."""
        rank = self._connected[number]
        if rank.end is None:
            self._send(rank, encode("kill"))

    def drop_lost(self, end: RankExit) -> None:
        """Move a lost rank from ``ends`` to ``dropped``, because the other ranks continue."""
        self.ends.remove(end)
        self.dropped.append(end.rank)

    def dismiss(self) -> None:
        """Tell the agents whose programs have ended to exit."""
        for rank in self._connected.values():
            if rank.end is not None:
                self._send(rank, encode("bye"))

    def close(self) -> None:
        """Close all connections."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.selector.close()

    def _confirm(self, rank: _Rank) -> None:
        """Confirm what a rank's agent has sent, so that the agent can send more."""
        if rank.connection.fileno() >= 0:
            size = rank.decoder.taken - rank.confirmed
            rank.confirmed += size
            self._send(rank, encode("taken", size=size))

    def _signal(self, rank: _Rank, message: bytes) -> None:
        rank.was_signalled = True
        self._send(rank, message)

    def _send(self, rank: _Rank, data: bytes) -> None:
        try:
            rank.connection.sendall(data)
        except OSError:
            self._disconnect(rank)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        keep_alive(connection)
        decoder = Decoder()
        self.selector.register(
            connection, selectors.EVENT_READ, lambda stranger: self._handshake(stranger, decoder)
        )

    def _handshake(self, connection: socket.socket, decoder: Decoder) -> None:
        messages = receive(connection, decoder)
        if messages is not None and not messages:
            return
        self.selector.unregister(connection)
        if messages is None or not self._is_valid_hello(messages[0]):
            connection.close()
            return
        hello = messages[0]
        decoder.max_bytes = MOST_BYTES
        rank = _Rank(int(hello["rank"]), str(hello["host"]), connection, decoder)
        self._connected[rank.number] = rank
        self.selector.register(connection, selectors.EVENT_READ, lambda _: self._read(rank))
        self._handle(rank, messages[1:])
        if self._stop_message is not None:
            self._signal(rank, self._stop_message)

    def _is_valid_hello(self, message: dict[str, Any]) -> bool:
        secret = str(message.get("job")).encode(errors="replace")
        return (
            message["kind"] == "hello"
            and hmac.compare_digest(secret, self.secret.encode())
            and message.get("rank") in range(self.ranks)
            and message["rank"] not in self._connected
        )

    def _read(self, rank: _Rank) -> None:
        messages = receive(rank.connection, rank.decoder)
        if messages is None:
            self._disconnect(rank)
            return
        self._handle(rank, messages)
        if rank.decoder.taken - rank.confirmed >= WINDOW_BYTES // 2:
            self._unconfirmed.add(rank)

    def _handle(self, rank: _Rank, messages: Sequence[dict[str, Any]]) -> None:
        for message in messages:
            kind = message["kind"]
            if kind == "line":
                self._show(rank, message["stream"], message["text"])
            elif kind == "status":
                self._console.status(rank.number, message["text"])
            elif kind == "report":
                if (report := read_record(RankReport, message)) is not None:
                    self.reports.add(rank.number, report, time.monotonic())
            elif kind == "usage":
                if (usage := read_record(Usage, message)) is not None:
                    self.reports.usage[rank.number] = usage
            elif kind == "failure":
                rank.record = read_record(FailureRecord, message)
                rank.recorded_at = time.monotonic()
            elif kind == "looked":
                self.stopped[rank.number] = bool(message.get("stopped"))
            elif kind == "told":
                rank.was_signalled = True
            elif kind == "end" and rank.end is None:
                kills = message.get("kills")
                self._note_end(rank, int(message["code"]), OomKills(**kills) if kills else None)

    def _show(self, rank: _Rank, stream: str, text: str) -> None:
        if stream == "stderr":
            if self._is_hidden(text):
                return
            rank.stderr.append(text[:KEPT_CHARACTERS])
        self._on_line(rank.number, stream, text)
        self._console.line(rank.number, rank.host, stream, text)

    def _note_end(self, rank: _Rank, code: int | None, kills: OomKills | None = None) -> None:
        failed_at, record = time.monotonic(), rank.record
        report = self.reports.latest.get(rank.number)
        if code == 1 and record is not None:
            # The rank failed when the exception was raised. Python may exit much later.
            failed_at = rank.recorded_at
        elif (
            code == 1
            and report is not None
            and report.phase == STARTING_MPI
            and any(line.startswith("Timeout (") for line in rank.stderr)
        ):
            # No Python code can record this time-out. Only faulthandler prints a line about it (see
            # hvdtrain.collectives.mpi_start). If that line is missing, MPI itself may have ended
            # the process with code 1.
            record = FailureRecord(exception="CollectiveTimeoutError")
        rank.end = RankExit(
            rank=rank.number,
            host=rank.host,
            code=code,
            stderr=tuple(rank.stderr),
            record=record,
            was_signalled=rank.was_signalled,
            kills=kills,
            failed_at=failed_at,
        )
        self.ends.append(rank.end)

    def _disconnect(self, rank: _Rank) -> None:
        if rank.connection.fileno() >= 0:
            self.selector.unregister(rank.connection)
            rank.connection.close()
        if rank.end is None:
            self._note_end(rank, None)
            self._console.status(rank.number, "")


def _raise_file_limit(ranks: int) -> None:
    """Raise the limit of open files, usually 1024, so that each rank can have a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ranks + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{ranks} ranks need {needed} open files in the launcher, but the hard limit is {hard} "
            "(ulimit -Hn). Raise the limit, for instance in /etc/security/limits.conf, or start "
            "fewer ranks."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _listen(local: bool) -> socket.socket:
    if local:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    else:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
    # Accepted connections inherit this size. In the buffer, small packets take several times their
    # size.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFERS * WINDOW_BYTES)
    return listener
