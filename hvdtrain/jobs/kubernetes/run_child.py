"""``hvdtrain run`` in a launcher's pod, whose first process hands on to it what that is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

__all__ = ["RunChild"]


class RunChild:
    """One run of it; made and used on the main thread, but for ``stop``.

    A pod that is told to end has some time left: ranks save what they have then. Where it is told
    once more they end at once.
    """

    def __init__(self) -> None:
        self._ordered: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    @property
    def is_ordered(self) -> bool:
        """Whether the pod was told to end."""
        return bool(self._ordered)

    def run(self, words: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run ``hvdtrain`` with those arguments; returns its exit code as a shell has it."""
        argv = [sys.executable, "-P", "-m", "hvdtrain", *words]
        self._child = subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL)
        if self._ordered:
            # It came before there was anybody to hand it on to.
            self.stop(save=False)
        code = self._child.wait()
        return 128 - code if code < 0 else code

    def stop(self, *, save: bool) -> None:
        """Have it end; from any thread."""
        if self._child is None:
            self._ordered.append(signal.SIGTERM)
        else:
            self._child.send_signal(signal.SIGUSR1 if save else signal.SIGTERM)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        is_first = not self._ordered
        self._ordered.append(number)
        if self._child is not None:
            self.stop(save=is_first)
