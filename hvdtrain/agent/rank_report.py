"""Reports on a rank: its progress and failure from its program, resource usage from its agent."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from hvdtrain.agent.messages import Decoder
from hvdtrain.config import MAX_TEXT_LENGTH, REPORT_FD
from hvdtrain.errors import LaunchError

__all__ = [
    "FailureRecord",
    "OomKills",
    "RankReport",
    "ReportPipe",
    "Usage",
    "read_failure",
    "read_report",
    "read_usage",
]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The newest state of one rank, sent by ``hvdtrain.monitor.report``.

    Attributes:
        pid: The process that prints its stacks at SIGQUIT, if any.
        step: Optimizer steps that are complete; None before the first.
        epoch: The epoch of the last step.
        total_steps: The step with which training will end, if known.
        phase: The part of the program that runs; steps come in ``"training"`` alone.
        saved: Step of the newest checkpoint that this run of the program wrote.
        resumed: Step of the checkpoint that it began from.
        waiting_in: The operation in which it waits for other ranks, or "".
        waited_s: Total time that it has waited for other ranks, if known.
        input_s: Total time that its training has waited for batches, if known.
        reduced_bytes: Total bytes that it has passed to allreduce, if known.
        samples: Samples that all ranks have trained on, in this run of the program.
        loss: Their recent loss.
    """

    pid: int | None = None
    step: int | None = None
    epoch: int | None = None
    total_steps: int | None = None
    phase: str = ""
    saved: int | None = None
    resumed: int | None = None
    waiting_in: str = ""
    waited_s: float | None = None
    input_s: float | None = None
    reduced_bytes: int | None = None
    samples: int | None = None
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """The failure of one rank's program; the error file of torchelastic is the model.

    Attributes:
        exception: Name of the class of the exception that ended the program, or of the error
            between ranks behind it.
        message: The text of that exception.
        traceback: The text that Python prints of it, without the middle where it is long.
        time_s: When it was raised, in seconds since 1970 by the clock of the rank's host.
    """

    exception: str
    message: str = ""
    traceback: str = ""
    time_s: float = 0.0

    @property
    def kind(self) -> Literal["exception", "follows", "hang", "interrupt"]:
        """Whether the fault is the program's own, another rank's, or nobody's."""
        if self.exception == "PeerFailedError":
            return "follows"
        if self.exception == "CollectiveTimeoutError":
            return "hang"
        is_end = self.exception in ("KeyboardInterrupt", "SystemExit")
        return "interrupt" if is_end else "exception"

    @property
    def is_own(self) -> bool:
        """Whether the rank failed of itself: neither told to end nor because another had failed."""
        return self.kind in ("exception", "hang")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resource usage of the processes of a rank.

    Attributes:
        rss_bytes: Memory that is theirs, summed; what several of them share counts for each.
        cpu: Cores that they kept busy since the last time, such as 1.5.
        gpu: Recent utilization of their GPUs in percent, if known.
        gpu_bytes: GPU memory that they use, if known.
        stopped: Whether one of them is, as by SIGSTOP or a debugger, so that it does nothing.
    """

    rss_bytes: int
    cpu: float
    gpu: float | None = None
    gpu_bytes: int | None = None
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class OomKills:
    """Processes that the kernel killed out of memory while a program ran.

    Attributes:
        in_group: Kills in the program's control group, if known.
        on_host: Kills on the whole host, if known.
        limit_bytes: Memory that all processes of the group may use together, if limited.
    """

    in_group: int | None = None
    on_host: int | None = None
    limit_bytes: int | None = None


# Kinds of messages that programs write, and their fields.
_FIELDS = {
    kind: tuple(entry.name for entry in fields(content))
    for kind, content in (("report", RankReport), ("failure", FailureRecord))
}
_WHOLE = (
    *("pid", "step", "epoch", "total_steps", "saved", "resumed"),
    *("reduced_bytes", "samples"),
)


class ReportPipe:
    """A pipe; its other end is for the program, through ``variables``.

    Children of the program may hold that end open for as long as they like: the pipe's end says
    nothing, and is not waited for.

    Attributes:
        variables: By which the program finds the pipe.
        pid: The process that prints its stacks at SIGQUIT; None before it said so.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_inheritable(self._writer, True)
        self._decoder = Decoder()
        self.pid: int | None = None
        self.variables = {REPORT_FD: f"{self._writer}:{os.fstat(self._writer).st_ino}"}

    def fileno(self) -> int:
        """The pipe's end as ``selectors`` take it."""
        return self._reader

    def handed_over(self) -> None:
        """Close the program's end here; the program has been started, and has it."""
        os.close(self._writer)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the received messages; None at the pipe's end or after an invalid message."""
        try:
            # More than a second's worth; who writes faster is heard the next time.
            data = os.read(self._reader, 1 << 16)
            messages = self._decoder.feed(data)
        except BlockingIOError:
            return []
        except (OSError, LaunchError):
            return None
        told = [
            {name: message[name] for name in ("kind", *_FIELDS[message["kind"]]) if name in message}
            for message in messages
            if message["kind"] in _FIELDS
        ]
        for message in told:
            if type(message.get("pid")) is int:
                self.pid = message["pid"]
        return told if data else None


def read_report(message: Mapping[str, Any]) -> RankReport | None:
    """Return the report in a message, or None if it is invalid: a program may write anything."""
    numbers: dict[str, Any] = {name: message.get(name) for name in _WHOLE}
    measured: dict[str, Any] = {name: message.get(name) for name in ("waited_s", "input_s", "loss")}
    words = {name: message.get(name, "") for name in ("phase", "waiting_in")}
    if not all(value is None or type(value) is int for value in numbers.values()):
        return None
    if not all(value is None or _is_finite(value) for value in measured.values()):
        return None
    if not all(isinstance(word, str) for word in words.values()):
        return None
    shown: dict[str, Any] = {
        name: _printable(word)[:MAX_TEXT_LENGTH] for name, word in words.items()
    }
    return RankReport(**numbers, **measured, **shown)


def read_failure(message: Mapping[str, Any]) -> FailureRecord | None:
    """Return the failure in a message, or None if it is invalid."""
    words = {name: message.get(name) for name in ("exception", "message", "traceback")}
    time_s = message.get("time_s")
    if not all(isinstance(word, str) for word in words.values()) or type(time_s) is not float:
        return None
    shown: dict[str, Any] = {
        name: "\n".join(map(_printable, str(word).splitlines())) for name, word in words.items()
    }
    return FailureRecord(**shown, time_s=time_s)


def read_usage(message: dict[str, Any]) -> Usage | None:
    """Return the usage in a message, or None if it is invalid."""
    rss, cpu = message.get("rss_bytes"), message.get("cpu")
    if type(rss) is not int or not isinstance(cpu, (int, float)):
        return None
    gpu, gpu_bytes = message.get("gpu"), message.get("gpu_bytes")
    return Usage(
        rss_bytes=rss,
        cpu=float(cpu),
        gpu=float(gpu) if isinstance(gpu, (int, float)) else None,
        gpu_bytes=gpu_bytes if type(gpu_bytes) is int else None,
        stopped=message.get("stopped") is True,
    )


def _is_finite(value: object) -> bool:
    # JSON of Python's may hold NaN and Infinity.
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _printable(word: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in word)
