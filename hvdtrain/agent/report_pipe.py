"""The agent's end of the pipe by which a rank's program tells how far it is, or why it failed."""

from __future__ import annotations

import os
from typing import Any

from hvdtrain.agent.messages import Decoder
from hvdtrain.agent.rank_report import FIELDS
from hvdtrain.config import REPORT_FD
from hvdtrain.errors import LaunchError

__all__ = ["ReportPipe"]

# More than a second's worth; who writes faster is heard the next time.
_READ_BYTES = 1 << 16


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
        """For selectors."""
        return self._reader

    def handed_over(self) -> None:
        """The program has been started, and has its end."""
        os.close(self._writer)

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None at the pipe's end, or after what is none."""
        try:
            data = os.read(self._reader, _READ_BYTES)
            messages = self._decoder.feed(data)
        except BlockingIOError:
            return []
        except (OSError, LaunchError):
            return None
        told = [
            {name: message[name] for name in ("kind", *FIELDS[message["kind"]]) if name in message}
            for message in messages
            if message["kind"] in FIELDS
        ]
        for message in told:
            if type(message.get("pid")) is int:
                self.pid = message["pid"]
        return told if data else None
