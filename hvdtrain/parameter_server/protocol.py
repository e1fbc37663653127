"""What workers and parameter servers say to each other.

A worker sends a request to every server, with what belongs to it, and each server answers when it
may go on. All are a few numbers of fixed size; weights, gradients and optimizer states follow as
flat buffers, whose layout both sides know from the shards.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import numpy as np

from hvdtrain.errors import CollectiveError, MismatchError, NonFiniteError

__all__ = ["DATA", "REFUSALS", "REPLY", "REPLY_DATA", "REQUEST", "Kind", "Reply", "Request"]

# Tags.
REQUEST = 1
DATA = 2
REPLY = 3
REPLY_DATA = 4

# What a request may be refused with.
REFUSALS: tuple[type[CollectiveError], ...] = (MismatchError, NonFiniteError)

# Small enough to arrive without anybody waiting for it.
REFUSAL_BYTES = 1000

REQUEST_FORMAT = "<qqq?dd?"
REPLY_FORMAT = f"<qq?dbh{REFUSAL_BYTES}s"


class Kind(enum.IntEnum):
    """What a worker wants.

    The first request of a job is the chief's LOAD; servers let all others wait for it.
    """

    LOAD = 1  # the chief gives weights and the optimizer's state
    PULL = 2  # the weights
    PUSH = 3  # a gradient, for which the weights come back
    DONE = 4  # nothing more; answered when all are done, the chief with the optimizer's state, too


class Request(NamedTuple):
    """A worker's words.

    Attributes:
        kind: What it wants.
        step: Of a gradient: the number that the server gave with the weights.
        version: Of the weights that a gradient was computed with.
        counts: Whether a gradient follows; there may be none in a step.
        weight: What it counts for beside those of other workers.
        learning_rate: The chief's, where it has one to tell; NaN otherwise.
        stop: Whether a worker that is done wants the others to end as well.
    """

    kind: Kind
    step: int = 0
    version: int = 0
    counts: bool = False
    weight: float = 0.0
    learning_rate: float = float("nan")
    stop: bool = False

    def pack(self) -> np.ndarray:
        """As bytes."""
        return _pack(REQUEST_FORMAT, self)

    @classmethod
    def unpack(cls, data: np.ndarray) -> Request:
        """From ``pack``'s bytes."""
        kind, *others = struct.unpack(REQUEST_FORMAT, data.tobytes())
        return cls(Kind(kind), *others)

    @classmethod
    def buffer(cls) -> np.ndarray:
        """Where one fits."""
        return np.empty(struct.calcsize(REQUEST_FORMAT), np.uint8)


class Reply(NamedTuple):
    """A server's answer; the weights come after it.

    Attributes:
        step: Number of the next step of this worker.
        version: How many updates went into the weights.
        stop: Whether training is to end.
        refusal: What was wrong with the request; empty where nothing was. Otherwise the weights
            are not to be used.
        learning_rate: Of the next update; NaN where workers don't need it.
        error: Which of ``REFUSALS`` a refusal is.
    """

    step: int
    version: int
    stop: bool = False
    refusal: str = ""
    learning_rate: float = float("nan")
    error: int = 0

    def pack(self) -> np.ndarray:
        """As bytes."""
        text = self.refusal.encode()[:REFUSAL_BYTES]
        numbers = (self.step, self.version, self.stop, self.learning_rate, self.error)
        return _pack(REPLY_FORMAT, (*numbers, len(text), text))

    @classmethod
    def unpack(cls, data: np.ndarray) -> Reply:
        """From ``pack``'s bytes."""
        step, version, stop, rate, error, length, text = struct.unpack(REPLY_FORMAT, data.tobytes())
        # A text that was too long may end within a character.
        return cls(step, version, stop, text[:length].decode(errors="replace"), rate, error)

    @classmethod
    def buffer(cls) -> np.ndarray:
        """Where one fits."""
        return np.empty(struct.calcsize(REPLY_FORMAT), np.uint8)


def _pack(form: str, values: tuple[object, ...]) -> np.ndarray:
    return np.frombuffer(struct.pack(form, *values), np.uint8)
