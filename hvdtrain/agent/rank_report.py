"""Reports about a rank: progress and failures from its program, resource usage from its agent."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeVar

from hvdtrain.agent.messages import Decoder
from hvdtrain.config import MAX_TEXT_LENGTH, REPORT_FD
from hvdtrain.errors import LaunchError

__all__ = [
    "FailureRecord",
    "OomKills",
    "RankReport",
    "ReportPipe",
    "Usage",
    "read_record",
]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The latest state of a rank, as ``hvdtrain.monitor.report`` sends it."""

    pid: int | None = None  # ID of the process that prints its stacks on SIGQUIT
    gpu_id: str = ""  # ID of the rank's first GPU, if it has one
    step: int | None = None  # number of completed optimizer steps; None before the first step
    epoch: int | None = None  # epoch of the last step
    total_steps: int | None = None  # step at which training will end, if known
    phase: str = ""  # Current phase of the program. Steps are reported only in ``"training"``.
    saved: int | None = None  # step of the newest checkpoint from this run of the program
    resumed: int | None = None  # step of the checkpoint at the start of this run
    # the collective in which the rank waits for others; empty if it doesn't wait
    waiting_in: str = ""
    waited_s: float | None = None  # total time in which the rank waited for others, if known
    input_s: float | None = None  # total time in which training waited for batches, if known
    reduced_bytes: int | None = None  # total bytes passed to allreduce, if known
    samples: int | None = None  # number of samples that all ranks have trained on in this run
    loss: float | None = None  # recent training loss, if known
    writing: bool = False  # whether the rank is writing a checkpoint
    # whether SIGTERM does nothing but make all ranks save a checkpoint together
    saves_on_signal: bool = False


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """How a rank's program failed. Modelled on torchelastic's error file."""

    # class name of the exception that ended the program, or of the collective error that caused it
    exception: str
    message: str = ""  # text of the exception
    traceback: str = ""  # Traceback of the exception. If it is long, its middle is left out.
    # time of the exception in seconds since 1970, by the clock of the rank's host
    time_s: float = 0.0

    @property
    def kind(self) -> Literal["exception", "follows", "hang", "interrupt"]:
        """Kind of the failure. It is ``"follows"`` if another rank had failed first."""
        if self.exception == "PeerFailedError":
            return "follows"
        if self.exception == "CollectiveTimeoutError":
            return "hang"
        is_end = self.exception in ("KeyboardInterrupt", "SystemExit")
        return "interrupt" if is_end else "exception"

    @property
    def is_own(self) -> bool:
        """Whether the rank failed by itself. False if another rank or a user stopped it."""
        return self.kind in ("exception", "hang")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resource usage of a rank's processes."""

    rss_bytes: int  # resident memory of all processes, including shared memory
    cpu: float  # average number of busy cores since the last measurement
    gpu: float | None = None  # recent utilization of the rank's GPUs in percent, if known
    gpu_bytes: int | None = None  # GPU memory in use, if known
    stopped: bool = False  # whether a signal or a debugger has stopped one of the processes


@dataclass(frozen=True, kw_only=True)
class OomKills:
    """Out-of-memory kills by the kernel while a program ran."""

    in_group: int | None = None  # number of kills in the program's control group, if known
    on_host: int | None = None  # number of kills on the host, if known
    limit_bytes: int | None = None  # memory limit of the control group, if any


# For each kind of message that programs send: the names of its fields.
_FIELDS = {
    kind: tuple(entry.name for entry in fields(record))
    for kind, record in (("report", RankReport), ("failure", FailureRecord))
}


class ReportPipe:
    """The pipe through which a program sends reports to its agent.

    The agent doesn't wait until the pipe is closed, because children of the program may keep it
    open.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_inheritable(self._writer, True)
        self._decoder = Decoder()
        # ID of the process that prints its stacks on SIGQUIT; None until the program has reported
        # the ID
        self.pid: int | None = None
        # ID of the program's first GPU; empty until the program has reported the ID
        self.gpu_id = ""
        self.latest: Mapping[str, Any] = {}  # The newest report. Its fields are unchecked.
        # environment variables that tell the program where to write its reports
        self.variables = {REPORT_FD: f"{self._writer}:{os.fstat(self._writer).st_ino}"}

    def fileno(self) -> int:
        """Return the file descriptor, for ``selectors``."""
        return self._reader

    def close_writer(self) -> None:
        """Close the writing end of the pipe in this process, once the program has inherited it."""
        os.close(self._writer)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the received messages, or None if the pipe is closed or a message is invalid."""
        try:
            # Programs write less than this per second. If there is more, it is read next time.
            data = os.read(self._reader, 1 << 16)
            messages = self._decoder.feed(data)
        except BlockingIOError:
            return []
        except (OSError, LaunchError):
            return None
        known = [
            {name: message[name] for name in ("kind", *_FIELDS[message["kind"]]) if name in message}
            for message in messages
            if message["kind"] in _FIELDS
        ]
        for message in known:
            if type(message.get("pid")) is int:
                self.pid = message["pid"]
            self.gpu_id = str(message.get("gpu_id", self.gpu_id))
            if message["kind"] == "report":
                self.latest = message
        return known if data else None


_Record = TypeVar("_Record", RankReport, FailureRecord, Usage)


def read_record(record: type[_Record], message: Mapping[str, Any]) -> _Record | None:
    """Return the record in a message; None if it is invalid, as a program may write anything."""
    values: dict[str, Any] = {}
    for entry in fields(record):
        if entry.name not in message:
            # A failure is reported with all of its fields.
            if record is FailureRecord or entry.default is MISSING:
                return None
            continue
        value = message[entry.name]
        allowed = str(entry.type).split(" | ")
        kind = "None" if value is None else type(value).__name__
        if kind not in allowed and not (kind == "int" and "float" in allowed):
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, str):
            lines = value.splitlines() if record is FailureRecord else [value[:MAX_TEXT_LENGTH]]
            value = "\n".join(map(_printable, lines))
        values[entry.name] = value
    return record(**values)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
