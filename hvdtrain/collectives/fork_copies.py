"""Gives a child that is forked the results that its parent holds, as memory of its own.

They lie where other ranks write, once the parent has dropped them. So the child copies them before
anything of its program runs, and the parent waits for that, and keeps them meanwhile.
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["ForkedCopies"]

# A child that is stopped must not stop its parent; copying takes a fraction of a second.
TIMEOUT_S = 30.0


class ForkedCopies:
    """Sees to the children that this process forks, as long as this object is held.

    Args:
        held: The buffers that somebody holds.
        own: In a child, replaces what lies at the addresses of a buffer by a copy.
    """

    def __init__(
        self, held: Callable[[], Sequence[np.ndarray]], own: Callable[[np.ndarray], None]
    ) -> None:
        self._held = held
        self._own = own
        self._buffers: Sequence[np.ndarray] = ()
        self._pipe = -1, -1
        # What is registered stays for good.
        os.register_at_fork(
            before=_weakly(self._before),
            after_in_parent=_weakly(self._in_parent),
            after_in_child=_weakly(self._in_child),
        )

    def _before(self) -> None:
        self._buffers = self._held()
        if self._buffers:
            self._pipe = os.pipe()

    def _in_parent(self) -> None:
        if self._buffers:
            reader, writer = self._pipe
            os.close(writer)
            # Readable with the child's byte, and if it died.
            select.select([reader], [], [], TIMEOUT_S)
            os.close(reader)
        self._buffers = ()

    def _in_child(self) -> None:
        if self._buffers:
            reader, writer = self._pipe
            os.close(reader)
            try:
                for buffer in self._buffers:
                    self._own(buffer)
            finally:
                os.write(writer, b"1")
                os.close(writer)
        self._buffers = ()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call
